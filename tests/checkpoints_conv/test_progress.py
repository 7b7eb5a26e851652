"""Work on two threads: all of it, its bytes counted, and none begun after an error."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints_conv.progress import run_parallel


@given(st.lists(st.lists(st.integers(0, 9))))
def test_every_step_of_every_item_is_done_and_counted(items):
    counts = []
    run_parallel(iter, items, counts.append)
    assert sorted(counts) == sorted(count for item in items for count in item)


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_stops_the_others_at_their_next_step(fault):
    """A file takes seconds, and whoever pressed Ctrl-C waits for its end."""
    running, begun = threading.Event(), []

    def work(item):
        begun.append(item)
        if item == "fails":
            running.wait()
            raise fault
        if item == "endless":
            while True:
                running.set()
                yield 1

    with pytest.raises(type(fault)):
        run_parallel(work, ["fails", "endless", "late", "later"], int)
    assert sorted(begun) == ["endless", "fails"]
