"""The states of an engine: it serves again only as a new process that has its policy's weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.rollout.engine_health import FAILURES, EngineHealth, EngineState

SILENCE_S = 10.0
EVENTS = ("progressed", "failed", "silent_for", "died", "restarting", "started", "updated", "retired")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 8))))
def test_no_order_of_events_brings_a_dead_engine_back_but_a_new_process_with_the_weights(events):
    clock = Clock()
    health = EngineHealth(SILENCE_S, clock)
    health.working(True)
    renewed = []  # since it died
    for event, seconds in events:
        clock.now += seconds
        before = health.state
        try:
            getattr(health, event)()
        except RuntimeError as refused:
            assert str(before) in str(refused) and health.state is before
            continue
        if health.serves and before not in (EngineState.HEALTHY, EngineState.SUSPECT):
            assert [*renewed, event][-3:] == ["restarting", "started", "updated"]
        renewed = [] if event == "died" else [*renewed, event]
        if event == "retired":
            assert not health.serves
            return


def test_only_what_it_finishes_counts_and_only_while_it_has_something_to_do():
    clock = Clock()
    health = EngineHealth(SILENCE_S, clock)
    clock.now = 100.0
    assert health.silent_for() == 0 and health.state is EngineState.HEALTHY
    health.working(True)
    clock.now += SILENCE_S / 2
    health.working(True)  # asked again: not heard of
    assert health.silent_for() == SILENCE_S / 2 and health.state is EngineState.SUSPECT and health.serves
    health.progressed()
    assert health.state is EngineState.HEALTHY
    clock.now += SILENCE_S
    assert health.silent_for() == SILENCE_S and health.state is EngineState.DEAD


def test_errors_in_a_row_kill_it_and_a_new_process_that_returns_them_too_is_not_to_blame():
    health = EngineHealth(SILENCE_S)
    for _ in range(3 * FAILURES):
        assert health.failed() and health.serves
        health.progressed()
    assert all(health.failed() for _ in range(FAILURES)) and health.state is EngineState.DEAD
    health.restarting()
    health.started()
    with pytest.raises(RuntimeError, match="stale returned an error"):
        health.failed()
    health.updated()
    assert not health.failed() and health.serves, "the caller gets the error"
    health.progressed()
    assert health.failed()
