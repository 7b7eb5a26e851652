"""Dynamic sampling: new questions, never the same again, and a full step at the end."""

import asyncio

import pytest

from megatron_drmas.data.questions import Question
from megatron_drmas.rollout.collector import Sampling
from megatron_drmas.rollout.dynamic_sampling import NO_SIGNAL, collect_with_signal
from megatron_drmas.team.trajectory import Trajectory

SAMPLING = Sampling(1.0, 1.0, "training/1")


def run(returns, questions, draws):
    """`returns[i]`: the returns of question i's trajectories, None for a failed one."""
    asked, streams, cursor = [], [], iter(range(len(returns)))

    async def collect(drawn, sampling):
        asked.append([int(question.id) for question in drawn])
        streams.append(sampling.stream)
        trajectories = []
        for group, question in enumerate(drawn):
            for sample, reward in enumerate(returns[int(question.id)]):
                failed = reward is None
                trajectories.append(
                    Trajectory(question, group, sample, reward=reward or 0.0, failure="engine" if failed else None)
                )
        return trajectories

    def draw(count):
        return [Question(str(next(cursor)), "q", ("a",)) for _ in range(count)]

    return asyncio.run(collect_with_signal(collect, draw, questions, draws, SAMPLING)), asked, streams


def test_replaces_only_what_has_no_signal_by_new_questions():
    trajectories, asked, streams = run([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1], [0, 1]], questions=3, draws=5)
    assert asked == [[0, 1, 2], [3, 4], [5]]
    assert len(set(streams)) == 3 and streams[0] == SAMPLING.stream
    kept = {trajectory.question.id for trajectory in trajectories if trajectory.failure is None}
    assert kept == {"0", "3", "5"}
    assert sum(trajectory.failure == NO_SIGNAL for trajectory in trajectories) == 6
    group_of = {trajectory.question.id: trajectory.group for trajectory in trajectories}
    assert sorted(group_of.values()) == list(range(6))


def test_the_last_draw_stays():
    trajectories, asked, _ = run([[1, 1]] * 4, questions=2, draws=2)
    assert asked == [[0, 1], [2, 3]]
    assert [trajectory.failure for trajectory in trajectories] == [NO_SIGNAL] * 4 + [None] * 4


@pytest.mark.parametrize("draws", [1, 4])
def test_one_draw_is_off(draws):
    trajectories, asked, _ = run([[0, 1], [0, 1], [1, 1]], questions=2, draws=draws)
    assert asked == [[0, 1]] and all(trajectory.failure is None for trajectory in trajectories)


def test_failures_are_no_signal_and_keep_their_cause():
    trajectories, asked, _ = run([[1, None], [0, 1]], questions=1, draws=2)
    assert asked == [[0], [1]]
    assert [trajectory.failure for trajectory in trajectories] == [NO_SIGNAL, "engine", None, None]
