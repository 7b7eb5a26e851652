"""The statistics that the lemma watches."""

import pytest
import torch

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.agent_statistics import agent_statistics
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig


def test_agent_called_only_on_the_one_success_of_eight(make_batch):
    """R = (1, 0, ..., 0), agent 1 active on the success only: the factor is exactly N - 1 = 7."""
    batch = make_batch([0] * 8 + [1], [0] * 9, [*range(8), 0], [1] + [0] * 7 + [1])
    everyone, rare, absent = agent_statistics(batch)
    assert rare["baseline_inflation"] == pytest.approx(7) and rare["baseline_inflation_max"] == pytest.approx(7)
    assert rare["single_calls"] == 1 and rare["calls"] == 1 and everyone["single_calls"] == 0
    assert everyone["baseline_inflation"] == pytest.approx(1)
    assert absent == {"calls": 0}


def test_equal_call_counts_have_factor_one(make_batch):
    reward = [r for r in (0, 1, 1, 0, 1) for _ in range(3)]
    batch = make_batch([0, 1, 2] * 5, [0] * 15, [i // 3 for i in range(15)], reward)
    assert [values["baseline_inflation"] for values in agent_statistics(batch)] == pytest.approx([1] * 3)


@pytest.mark.parametrize("seed", range(4))
def test_factor_is_the_lemmas(seed, random_batch):
    """Against the formula, question by question."""
    batch = random_batch(seed, groups=3, samples=6)
    for index, values in enumerate(agent_statistics(batch)):
        factors, weights = [], []
        for group in batch.group.unique():
            of_group = batch.group == group
            returns = torch.stack(
                [batch.reward[of_group & (batch.trajectory == t)][0] for t in batch.trajectory[of_group].unique()]
            ).double()
            own = batch.reward[of_group & (batch.agent == index)].double()
            if len(own) and returns.max() > returns.min():
                sigma2 = returns.var(correction=0)
                factors.append(float((own.var(correction=0) + (own.mean() - returns.mean()) ** 2) / sigma2))
                weights.append(len(own))
                assert factors[-1] <= len(returns) - 1 + 1e-9
        assert values["baseline_inflation"] == pytest.approx(sum(f * w for f, w in zip(factors, weights)) / sum(weights))
        assert values["baseline_inflation_max"] == pytest.approx(max(factors))


def test_no_spread_leaves_the_factor_out(make_batch):
    assert "baseline_inflation" not in agent_statistics(make_batch([0, 0], [0, 0], [0, 1], [1, 1]))[0]


def test_no_rows(make_batch):
    assert agent_statistics(make_batch([], [], [], [], agents=2)) == [{"calls": 0}] * 2


def test_inflation_is_the_mean_square_of_group_advantages(make_batch):
    """With the same 1/N statistics, E[A^2] of the group baseline over the agent's rows is the factor."""
    batch = make_batch([0] * 6 + [1, 1], [0] * 8, [0, 1, 2, 3, 4, 5, 0, 1], [1, 1, 0, 0, 0, 0, 1, 1])
    config = AdvantageConfig(mean="group", std="group", weighting="trajectory")
    advantages = compute_advantages(batch, AlgorithmConfig(advantage=config))[batch.response_offsets[:-1]]
    square = advantages[batch.agent == 1].square().mean().item() * 6 / 5  # unbiased to 1/N variance
    assert agent_statistics(batch)[1]["baseline_inflation"] == pytest.approx(square, rel=1e-5)
