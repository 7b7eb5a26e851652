"""An update is a plain autograd step, whatever the layout and the micro-batches."""

import math

import psutil
import pytest
import torch

from megatron_drmas.algorithm.minibatch import plan_microbatches, plan_shared_microbatches
from megatron_drmas.config.algorithm import LossConfig
from tests.actor.ranks import LAYOUTS, WIDE_LAYOUTS, Ranks, make_batch, make_settings, make_tree_batch
from tests.actor.reference import Reference

RELATIVE = 1e-5


def update_with_budgets(actor, batch, budgets):
    reports = []
    for budget in budgets:
        actor.settings.policy.micro_batch_tokens = budget
        reports.append(actor.update(batch, 0))
    return reports


def update_on(actor, seeds):
    reports = [actor.update(make_batch(seed), seed) for seed in seeds]
    return reports, actor.token_logprobs(make_batch(99))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("packing", ["none", "trie"])
def test_loss_and_gradient_norm_are_those_of_transformers_in_any_micro_batches(ranks, models, packing, family, layout):
    batch = make_batch() if packing == "none" else make_tree_batch()
    loss, norm = Reference(models[family]).update(batch)
    data = LAYOUTS[layout].data
    if packing == "none":
        budgets = [math.ceil(1.1 * len(batch.tokens) / count / data) for count in (1, 2, 4)]
        assert [len(plan_microbatches(batch, budget, data)[0]) for budget in budgets] == [1, 2, 4]
    else:
        budgets = [1000, 60, 40]
        assert len({len(plan_shared_microbatches(batch, budget, data)[0]) for budget in budgets}) == 3
    settings = make_settings(models[family], layout, optimizer={"lr": 0.0}, packing=packing)
    by_rank = ranks.run(settings, update_with_budgets, batch, budgets)
    for report in by_rank[0]:
        assert report["loss"] == pytest.approx(loss, rel=RELATIVE)
        assert report["grad_norm"] == pytest.approx(norm, rel=RELATIVE)
    assert (by_rank[0][0]["shared_tokens"] > 0.3) == (packing == "trie")
    assert all(reports == by_rank[0] for reports in by_rank), "ranks report different things"


@pytest.mark.parametrize("layout", ["tp1", "tp2_sp", "pp2", "dp2"])  # Megatron trains no experts with tp2 alone
@pytest.mark.parametrize("packing", ["none", "trie"])
def test_experts_and_routers_are_trained_as_by_transformers(ranks, models, packing, layout):
    batch = make_tree_batch()
    reference = Reference(models["qwen3_moe"])
    loss, norm = reference.update(batch)
    settings = make_settings(models["qwen3_moe"], layout, micro_batch_tokens=200, packing=packing)
    report, logprobs = ranks.run(settings, update_and_look, batch, make_batch(99))[0]
    assert report["loss"] == pytest.approx(loss, rel=RELATIVE) and report["grad_norm"] == pytest.approx(norm, rel=RELATIVE)
    with torch.no_grad():
        torch.testing.assert_close(logprobs, reference.token_logprobs(make_batch(99)), rtol=0, atol=1e-3)


def update_and_look(actor, batch, other):
    return actor.update(batch, 0), actor.token_logprobs(other)


@pytest.mark.slow
@pytest.mark.parametrize("layout", WIDE_LAYOUTS)
@pytest.mark.parametrize("packing", ["none", "trie"])
def test_four_ranks_are_one(models, packing, layout):
    """Tensor, pipeline, data and sequence parallelism two at a time."""
    pool = Ranks(4)
    try:
        batch, settings = make_tree_batch(), make_settings(models["llama"], optimizer={"lr": 0.0}, packing=packing)
        loss, norm = Reference(models["llama"]).update(batch)
        settings.policy.parallel = WIDE_LAYOUTS[layout]
        for report in pool.run(settings, update_on_batch, batch):
            assert report["loss"] == pytest.approx(loss, rel=RELATIVE)
            assert report["grad_norm"] == pytest.approx(norm, rel=RELATIVE)
    finally:
        pool.close()


@pytest.mark.parametrize("layout", ["tp1", "tp2_sp", "pp2"])
def test_recomputing_layers_changes_nothing(ranks, models, layout):
    batch = make_tree_batch()
    kept, again = (
        ranks.run(make_settings(models["qwen2"], layout, optimizer={"lr": 0.0}, recompute=recompute), update_on_batch, batch)[0]
        for recompute in (False, True)
    )
    assert again["loss"] == pytest.approx(kept["loss"], rel=RELATIVE)
    assert again["grad_norm"] == pytest.approx(kept["grad_norm"], rel=RELATIVE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_follow_transformers_over_steps(ranks, models, layout):
    reference = Reference(models["llama"])
    expected = [reference.update(make_batch(seed)) for seed in range(3)]
    reports, logprobs = ranks.run(make_settings(models["llama"], layout), update_on, range(3))[0]
    for report, (loss, norm) in zip(reports, expected, strict=True):
        assert report["loss"] == pytest.approx(loss, rel=1e-4)
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(logprobs, reference.token_logprobs(make_batch(99)), rtol=0, atol=2e-3)


def update_on_batch(actor, batch):
    return actor.update(batch, 0)


@pytest.mark.parametrize("rows, micro_batches", [(1, 1), (3, 2), (5, 3)])
def test_ranks_with_empty_micro_batches_take_part(ranks, models, rows, micro_batches):
    """An odd number of rows of which only one fits a micro-batch."""
    batch = make_batch(7, rows, prompt=(60, 70), response=(1, 5))
    plan = plan_shared_microbatches(batch, 80, 2)
    assert [len(rank) for rank in plan] == [micro_batches] * 2 and any(len(chosen) == 0 for rank in plan for chosen in rank)
    loss, norm = Reference(models["llama"]).update(batch)
    for report in ranks.run(make_settings(models["llama"], "dp2", micro_batch_tokens=80), update_on_batch, batch):
        assert report["loss"] == pytest.approx(loss, rel=RELATIVE)
        assert report["grad_norm"] == pytest.approx(norm, rel=RELATIVE)


def test_metrics_of_agents_add_up(ranks, models):
    batch = make_batch()
    reference = Reference(models["llama"])
    with torch.no_grad():
        gaps = (reference.token_logprobs(batch) - batch.engine_logprobs).abs()
    report = ranks.run(make_settings(models["llama"], "pp2"), update_on_batch, batch)[0]
    agents = report["agents"]
    assert set(agents) == {0, 1}
    assert sum(agent["tokens"] for agent in agents.values()) == report["tokens"] == len(gaps)
    assert sum(agent["loss"] for agent in agents.values()) == pytest.approx(report["loss"])
    assert report["logprob_diff_max"] == pytest.approx(float(gaps.max()), rel=1e-4)
    assert report["logprob_diff_mean"] == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert report["prob_ratio"] == pytest.approx(float(gaps.exp().mean()), rel=1e-4)


@pytest.mark.parametrize("layout", ["tp1", "tp2_sp", "pp2", "dp2"])
def test_sharing_beginnings_changes_no_metric_of_any_agent(ranks, models, layout):
    """Also over several steps, whose ratios, clipping and KL are to log-probs of a pass of their own."""
    overrides = {"updates_per_batch": 3, "minibatches_by": "question", "loss": LossConfig(kl_coef=0.1)}
    for seed in range(3):
        batch = make_tree_batch(seed)
        batch.group = torch.arange(len(batch)) % 5
        shared, apart = (
            ranks.run(make_settings(models["llama"], layout, packing=packing, **overrides), log_probs_and_update, batch)[0]
            for packing in ("trie", "none")
        )
        torch.testing.assert_close(shared[0], apart[0], rtol=0, atol=1e-5)
        assert shared[1].pop("shared_tokens") > 0.2 and apart[1].pop("shared_tokens") == 0
        for got, wanted in [
            (shared[1], apart[1]),
            *((shared[1]["agents"][agent], apart[1]["agents"][agent]) for agent in (0, 1)),
        ]:
            figures = {name: value for name, value in wanted.items() if isinstance(value, float)}
            assert {name: got[name] for name in figures} == pytest.approx(figures, rel=1e-3, abs=1e-5)


def test_mini_batches_clip_against_the_policy_before_the_first(ranks, models):
    batch = make_batch(rows=16)
    one = ranks.run(make_settings(models["llama"], optimizer={"lr": 0.0}), update_on_batch, batch)[0]
    settings = make_settings(models["llama"], "tp2", optimizer={"lr": 0.05, "grad_clip": 0.0}, updates_per_batch=4)
    four = ranks.run(settings, update_on_batch, batch)[0]
    assert one["optimizer_steps"] == 1 and four["optimizer_steps"] == 4
    assert one["clip_fraction"] == 0 and one["ratio"] == 1
    assert four["clip_fraction"] > 0.1, "later mini-batches see a policy that has moved"
    assert four["prob_ratio"] == pytest.approx(one["prob_ratio"], rel=1e-4), "the engine is compared with the policy that sampled"


def listening(actor):
    """Addresses on which this process accepts connections."""
    return {found.laddr.ip for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN}


def test_ranks_listen_on_loopback_only(ranks, models):
    by_rank = ranks.run(make_settings(models["llama"], "tp2"), listening)
    assert by_rank[0], "rank 0 serves the store"
    assert set.union(*by_rank) <= {"127.0.0.1", "::1"}


def log_probs_and_update(actor, batch):
    return actor.token_logprobs(batch), actor.update(batch, 0)


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2"])
def test_batches_without_response_tokens(ranks, models, layout):
    """No rows make no step; rows with empty responses make one with a zero gradient."""
    none = make_batch().select(torch.zeros(0, dtype=torch.int64))
    logprobs, report = ranks.run(make_settings(models["llama"], layout), log_probs_and_update, none)[0]
    assert len(logprobs) == 0 and report["optimizer_steps"] == 0 and report["tokens"] == 0
    logprobs, report = ranks.run(make_settings(models["llama"], layout), log_probs_and_update, make_batch(response=(0, 1)))[0]
    assert len(logprobs) == 0 and report["grad_norm"] == 0 and report["loss"] == 0 and report["skipped"] == 0
