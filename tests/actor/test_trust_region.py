"""An actor under TeamTR's trust region, and with a KL to the policy that the run began with."""

import pytest
import torch

from megatron_drmas.config.algorithm import LossConfig, TrustRegionConfig
from tests.actor.ranks import make_batch, make_settings, save


def falling_batch():
    """All advantages are negative, so that log-probs fall and the KL's estimate rises."""
    batch = make_batch()
    batch.advantages = torch.full_like(batch.advantages, -1.0)
    return batch


def train_save_train_load_train(actor, folder):
    batch = falling_batch()
    first = actor.update(batch, 1)
    save(actor, folder)
    second = actor.update(batch, 2)
    actor.load(folder)
    return first, second, actor.update(batch, 2)


@pytest.fixture(scope="module")
def run(ranks, models, tmp_path_factory):
    def train(loss: LossConfig, layout: str = "tp1"):
        settings = make_settings(models["llama"], layout, loss=loss, updates_per_batch=4)
        return ranks.run(settings, train_save_train_load_train, str(tmp_path_factory.mktemp("trust") / "checkpoint"))

    return train


def region(delta: float) -> LossConfig:
    return LossConfig("teamtr", aggregation="sequence_mean", trust_region=TrustRegionConfig(delta, beta=0.1))


def test_the_update_ends_at_delta(run):
    first, second, again = run(region(1e-6))[0]
    assert first["optimizer_steps"] == 1 and first["trust_region"]["message_kl"] >= 1e-6
    assert first["trust_region"]["beta"] == 0.2 and second["trust_region"]["beta"] == 0.4, "doubled when far outside"
    assert second == again


def test_a_wide_region_lets_every_step_be_made(run):
    first, second, again = run(region(1e6))[0]
    assert first["optimizer_steps"] == 4 and 0 < first["trust_region"]["message_kl"] < 1e6
    assert first["trust_region"]["beta"] == 0.1 / 16 and second["trust_region"]["beta"] == 0.1 / 256, "halved after every step"
    assert second == again, "beta is part of the checkpoint"


def two_agents_in_turn(actor, folder):
    batch = falling_batch()
    own = [batch.select(batch.agent == agent) for agent in (0, 1)]
    results = [actor.update(own[0], 1), actor.update(own[1], 1), actor.update(own[0], 2)]
    save(actor, folder)
    betas = actor.trust_regions.state_dict()
    actor.trust_regions.load_state_dict({})
    actor.load(folder)
    return results, betas, actor.trust_regions.state_dict()


def test_agents_that_share_a_policy_have_regions_of_their_own(ranks, models, tmp_path):
    settings = make_settings(models["llama"], "tp1", loss=region(1e-6), updates_per_batch=4)
    (results, betas, restored), *_ = ranks.run(settings, two_agents_in_turn, str(tmp_path / "checkpoint"))
    assert [result["trust_region"]["beta"] for result in results] == [0.2, 0.2, 0.4]
    assert len(betas) == 2 and betas == restored


@pytest.mark.parametrize("layout", ["tp1", "dp2"])
def test_the_reference_is_where_the_run_began(run, layout):
    """The KL to it grows over two updates, and is the same on every rank."""
    results = run(LossConfig(kl_coef=0.1, kl_estimator="k2"), layout)
    first, second, again = results[0]
    assert 0 < first["kl_reference"] < second["kl_reference"]
    assert second == again and all(result == results[0] for result in results)


def test_without_a_reference_nothing_is_reported(run):
    assert "kl_reference" not in run(LossConfig())[0][0]
