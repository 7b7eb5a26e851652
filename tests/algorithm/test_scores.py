"""Row scores: what they are made of, and what each recipe of configs/algorithm asks for."""

from dataclasses import replace

import pytest
import torch

from megatron_drmas.algorithm.scores import overlong_penalty, row_scores, score_magnitudes, verdict_credit
from megatron_drmas.algorithm.validation import check_algorithm_config
from megatron_drmas.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    LossConfig,
    OverlongConfig,
    RewardConfig,
    TrustRegionConfig,
)
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import CONFIG_DIR, compose_config

RECIPES = sorted(path.stem for path in (CONFIG_DIR / "algorithm").glob("*.yaml"))


def test_declared_weights(make_batch):
    batch = make_batch(
        [0, 1], [0, 0], [0, 0], [1, 1], role_reward=torch.tensor([0.5, -1.0]), turn_reward=torch.tensor([0.0, 2.0])
    )
    config = AlgorithmConfig(reward=RewardConfig(trajectory=2.0, role=10.0, turn=100.0))
    assert row_scores(batch, config).tolist() == [7.0, 192.0]


def test_pass_rates_by_turn(make_batch):
    """UnityMAS-O: pass rates 0.25, then 0.75, and the first coder's format error."""
    planner, coder, reflection = 0, 1, 2
    batch = make_batch(
        [planner, coder, reflection, planner, coder],
        [0] * 5,
        [0] * 5,
        [0] * 5,
        valid=[True, False, True, True, True],
        turn_reward=torch.tensor([0.25, 0.25, 0.5, 0.5, 0.5]),
    )
    config = AlgorithmConfig(reward=RewardConfig(trajectory=0.0, turn=1.0), invalid_penalty=1.0)
    assert row_scores(batch, config).tolist() == [0.25, -0.75, 0.5, 0.5, 0.5]


def test_math_accuracy_with_a_format_error(make_batch):
    """Accuracy 1, verifier's format error: 1, 0, 1, 1 (UnityMAS-O)."""
    batch = make_batch([0, 1, 0, 1], [0] * 4, [0] * 4, [1] * 4, valid=[True, False, True, True])
    assert row_scores(batch, AlgorithmConfig(invalid_penalty=1.0)).tolist() == [1, 0, 1, 1]


def test_verifier_is_paid_for_being_right(make_batch):
    verdict, success = torch.tensor([1, 1, 0, 0, -1]), torch.tensor([True, False, True, False, True])
    assert verdict_credit(verdict, success).tolist() == [1, -1, -1, 1, 0]
    batch = make_batch([1, 1, 0], [0] * 3, [0, 1, 1], [1, 0, 0], verdict=torch.tensor([1, 1, -1]))
    assert row_scores(batch, AlgorithmConfig(reward=RewardConfig(verdict=0.25))).tolist() == [1.25, -0.25, 0]


def test_magnitudes_are_of_what_a_score_adds_up(make_batch):
    batch = make_batch(
        [0, 1],
        [0, 0],
        [0, 0],
        [-1, -1],
        valid=[False, True],
        turn_reward=torch.tensor([1.0, -0.5]),
        verdict=torch.tensor([-1, 1]),
    )
    config = AlgorithmConfig(reward=RewardConfig(turn=2.0, verdict=0.25), invalid_penalty=0.5)
    assert row_scores(batch, config).tolist() == [0.5, -2.25]
    assert score_magnitudes(batch, config).tolist() == [3.5, 2.25]


def test_soft_overlong_punishment():
    """DAPO's numbers: 20480 with a cache of 4096."""
    lengths = torch.tensor([1, 16384, 18432, 20480, 30000])
    assert overlong_penalty(lengths, torch.tensor([20480] * 5), OverlongConfig(1.0, 0.2)).tolist() == [0, 0, 0.5, 1, 1]
    assert overlong_penalty(torch.tensor([9, 10, 10]), torch.tensor([10, 10, 100]), OverlongConfig(2.0, 0.0)).tolist() == [
        0,
        2,
        0,
    ]


def test_overlong_is_measured_against_each_calls_own_limit(make_batch):
    batch = make_batch([0, 1], [0, 0], [0, 0], [1, 1], response_limits=torch.tensor([1, 100]))
    config = AlgorithmConfig(reward=RewardConfig(overlong=OverlongConfig(0.5)))
    assert row_scores(batch, config).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("weight,column", [("role", "role_reward"), ("turn", "turn_reward"), ("verdict", "verdict")])
def test_missing_column_is_named(weight, column, make_batch):
    batch = replace(make_batch([0], [0], [0], [1]), **{column: None})
    with pytest.raises(ValueError, match=f"algorithm.reward.{weight}.*{column}"):
        row_scores(batch, AlgorithmConfig(reward=replace(RewardConfig(), **{weight: 1.0})))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid(recipe):
    config = compose_config("search_hetero", [f"algorithm={recipe}"])
    check_algorithm_config(config.algorithm)


def test_dr_mas_is_the_default():
    assert compose_config("search_hetero", ["algorithm=dr_mas", "algorithm.invalid_penalty=0.01"]).algorithm == AlgorithmConfig()


@pytest.mark.parametrize(
    "config,key",
    [
        (AlgorithmConfig(reward=RewardConfig(overlong=OverlongConfig(1.0, 1.0))), "reward.overlong.cache"),
        (AlgorithmConfig(loss=LossConfig(trust_region=TrustRegionConfig(delta=0))), "loss.trust_region.delta"),
        (AlgorithmConfig(loss=LossConfig(trust_region=TrustRegionConfig(beta=0))), "loss.trust_region.beta"),
        (AlgorithmConfig(loss=LossConfig(kl_coef=-1)), "loss.kl_coef"),
        (AlgorithmConfig(advantage=AdvantageConfig(gigpo_discount=1.5)), "advantage.gigpo_discount"),
        (AlgorithmConfig(advantage=AdvantageConfig(gigpo_weight=1e39)), "advantage.gigpo_weight"),
        (AlgorithmConfig(advantage=AdvantageConfig(epsilon=1e308)), "advantage.epsilon"),
        (AlgorithmConfig(advantage=AdvantageConfig(epsilon=0)), "advantage.epsilon"),
        (AlgorithmConfig(reward=RewardConfig(trajectory=1e39)), "reward.trajectory"),
        (AlgorithmConfig(reward=RewardConfig(trajectory=0)), "reward.trajectory"),
        (AlgorithmConfig(invalid_penalty=float("nan")), "invalid_penalty"),
        (AlgorithmConfig(sequential=True), "sequential"),
        (AlgorithmConfig(dynamic_sampling_draws=0), "dynamic_sampling_draws"),
    ],
)
def test_bad_settings_are_named(config, key):
    with pytest.raises(ConfigError, match=f"algorithm.{key}"):
        check_algorithm_config(config)
