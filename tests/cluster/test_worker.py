"""What a process of the run is started with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.cluster.worker import visible_devices


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True), st.data())
def test_positions_count_among_the_gpus_that_are_allowed(allowed, data):
    positions = data.draw(st.lists(st.sampled_from(range(len(allowed))), min_size=1, unique=True))
    found = visible_devices(",".join(map(str, positions)), ",".join(map(str, allowed)))
    assert found == ",".join(str(allowed[position]) for position in positions)


def test_without_a_limit_positions_are_devices():
    assert visible_devices("2,3", None) == "2,3"


@pytest.mark.parametrize("allowed", ["", "4", "GPU-1a,"])
def test_too_few_gpus_are_an_error_that_says_so(allowed):
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES.*cluster.gpus_per_node counts on 2 or more"):
        visible_devices("0,1", allowed)
