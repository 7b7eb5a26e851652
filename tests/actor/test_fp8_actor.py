"""An actor whose linear layers round as FP8 does: it trains, stays near fp32, and resumes bit for bit."""

from dataclasses import replace

import pytest
import torch

from megatron_drmas.config.schema import Fp8Config, PrecisionConfig
from tests.actor.ranks import make_batch, make_settings, make_tree_batch, save


def train_save_train_load_train(actor, folder):
    batch = make_batch()
    logprobs = actor.token_logprobs(batch)
    first = actor.update(batch, 1)
    save(actor, folder)
    second, after = actor.update(batch, 2), actor.token_logprobs(batch)
    actor.load(folder)
    return logprobs, first, second, actor.update(batch, 2), torch.equal(after, actor.token_logprobs(batch))


@pytest.fixture(scope="module")
def run(ranks, models, tmp_path_factory):
    def train(precision: PrecisionConfig):
        settings = replace(make_settings(models["llama"], "tp2_sp"), precision=precision)
        return ranks.run(settings, train_save_train_load_train, str(tmp_path_factory.mktemp("fp8") / "checkpoint"))[0]

    return train


@pytest.fixture(scope="module")
def exact(run):
    return run(PrecisionConfig("fp32"))


@pytest.mark.parametrize("fp8", [Fp8Config("delayed", amax_history_len=3), Fp8Config("blockwise")], ids=lambda fp8: fp8.recipe)
def test_trains_near_fp32_and_resumes(fp8, run, exact):
    """Delayed scaling's history is part of the checkpoint."""
    logprobs, first, second, again, same = run(PrecisionConfig("fp8_emulated", fp8=fp8))
    assert 1e-4 < (logprobs - exact[0]).abs().mean() < 0.5
    assert first["optimizer_steps"] == 1
    assert first["grad_norm"] != exact[1]["grad_norm"] and first["grad_norm"] == pytest.approx(exact[1]["grad_norm"], rel=0.5)
    assert second == again and same


def test_layers_kept_in_high_precision_do_not_round(run, exact):
    fp8 = Fp8Config("tensorwise", bf16_first_layers=1, bf16_last_layers=1)
    assert torch.equal(run(PrecisionConfig("fp8_emulated", fp8=fp8))[0], exact[0])


def log_probs_and_update(actor, batch):
    return actor.token_logprobs(batch), actor.update(batch, 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_sharing_beginnings_costs_little(recipe, ranks, models):
    """Gradients that meet in a shared token are scaled together, so they round a little differently than apart."""
    settings = replace(make_settings(models["llama"], "tp2_sp"), precision=PrecisionConfig("fp8_emulated", fp8=Fp8Config(recipe)))
    batch, results = make_tree_batch(), []
    for packing in ("trie", "none"):
        settings.policy.packing = packing
        results.append(ranks.run(settings, log_probs_and_update, batch)[0])
    (logprobs, shared), (logprobs_apart, apart) = results
    torch.testing.assert_close(logprobs, logprobs_apart, rtol=0, atol=1e-4)
    assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=0.01)
