"""avg@k, pass@k and their errors, whatever is masked and whatever the rewards."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.data.questions import Question
from megatron_drmas.evaluate import summarize
from megatron_drmas.observability.records import SAMPLED, plain
from megatron_drmas.rollout.collector import FLOAT32_MAX, Sampling
from megatron_drmas.team.trajectory import Trajectory

SAMPLING = Sampling(0.6, 0.9, "evaluation")


def trajectory(group, sample, reward, failure=None):
    question = Question(f"q{group}", "what?", ("x",), f"source {group % 2}")
    return Trajectory(question, group, sample, reward=reward, success=reward > 0, failure=failure)


def record(questions, samples):
    """The record of questions with rewards; None is a masked trajectory."""
    made = [
        trajectory(group, sample, reward or 0.0, "retrieval" if reward is None else None)
        for group, rewards in enumerate(questions)
        for sample, reward in enumerate(rewards)
    ]
    return summarize(made, 3, SAMPLED, samples, SAMPLING)


def test_pass_at_k_is_over_the_questions_that_have_all_k():
    found = record([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, None, 1], [None, None, None, None]], samples=4)
    assert (found.pass_at_k, found.pass_questions, found.questions, found.asked, found.samples_min) == (0.5, 2, 3, 4, 3)
    assert found.success == pytest.approx((0.25 + 0 + 1) / 3) and found.masked == {"retrieval": 5}


def test_without_a_whole_question_there_is_no_pass_at_k_and_without_any_answer_no_mean():
    found = record([[1, None], [None, 0]], samples=2)
    assert found.pass_at_k is None and found.pass_questions == 0 and found.success == 0.5
    found = plain(record([[None, None]], samples=2))
    assert (
        found["success"],
        found["reward"],
        found["success_stderr"],
        found["pass_at_k"],
        found["questions"],
        found["asked"],
    ) == (None, None, None, None, 0, 1)


def test_rewards_below_zero_have_errors_too():
    """Exact match minus a tenth for every fifty words."""
    found = record([[-0.3, 0.9], [-0.1, -0.1], [0.8, -0.4]], samples=2)
    means = [0.3, -0.1, 0.2]
    assert found.reward == pytest.approx(statistics.mean(means)) and found.reward_stderr == pytest.approx(
        statistics.stdev(means) / math.sqrt(3)
    )
    assert found.success == pytest.approx((0.5 + 0 + 0.5) / 3) and found.success_stderr == pytest.approx(
        statistics.stdev([0.5, 0, 0.5]) / math.sqrt(3)
    )
    assert found.by_source["source 1"].questions == 1 and found.by_source["source 1"].reward_stderr is None


@given(st.lists(st.lists(st.none() | st.floats(-FLOAT32_MAX, FLOAT32_MAX), min_size=3, max_size=3), min_size=1, max_size=6))
def test_every_finite_reward_has_a_record(questions):
    found = record(questions, samples=3)
    counted = [[reward for reward in rewards if reward is not None] for rewards in questions]
    counted = [rewards for rewards in counted if rewards]
    assert (
        found.questions == len(counted)
        and found.asked == len(questions)
        and sum(found.masked.values()) == sum(row.count(None) for row in questions)
    )
    if counted:
        means = [sum(rewards) / len(rewards) for rewards in counted]
        assert found.reward == pytest.approx(sum(means) / len(means), rel=1e-12)
        assert 0 <= found.success <= 1 and sum(share.questions for share in found.by_source.values()) == found.questions
    for error in (found.reward_stderr, found.success_stderr):
        assert error is None if len(counted) < 2 else math.isfinite(error) and error >= 0
    plain(found)
