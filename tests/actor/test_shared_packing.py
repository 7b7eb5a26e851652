"""Rows packed as a trie give what they give by themselves: every log-prob, entropy, metric and parameter's gradient."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.actor.forward_backward import PolicyHead, run_micro_batches
from megatron_drmas.algorithm.losses import token_weights
from megatron_drmas.batch import TurnBatch, gather_segments, offsets_of
from megatron_drmas.config.algorithm import LossConfig, MismatchConfig
from tests.actor.ranks import make_batch, make_settings

LOSSES = [
    LossConfig(dual_clip=3.0, entropy_coef=0.1, kl_coef=0.1),
    LossConfig(per_agent=True, mismatch=MismatchConfig("truncate")),
    LossConfig("gspo", aggregation="sequence_mean"),
    LossConfig("teamtr", aggregation="sequence_mean"),
]


@st.composite
def batches(draw) -> TurnBatch:
    """Rows that go on from a beginning, or all, of an earlier row; what is prompt in one may be response in another."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        before = draw(st.sampled_from(rows)) if rows else []
        kept = before[: draw(st.integers(0, len(before)))]
        rows.append((kept + draw(st.lists(st.integers(3, 6), max_size=12)) or [3])[:30])
    prompts = [draw(st.integers(1, len(row))) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    total = int(lengths.sum()) - sum(prompts)
    near_uniform, others = (-5.4 + 0.3 * torch.randn(total, generator=generator) for _ in range(2))
    return replace(
        make_batch(rows=len(rows)),
        tokens=torch.tensor([token for row in rows for token in row]),
        offsets=offsets_of(lengths),
        prompt_lengths=torch.tensor(prompts),
        engine_logprobs=near_uniform,
        reference_logprobs=others,
        advantages=torch.randn(total, generator=generator),
    )


def one_pass(actor, batch, loss, share):
    """Log-probs and entropies in the batch's order, the sums and maxima of each agent, and all gradients."""
    actor.shares_beginnings = share
    actor._zero_gradients()
    old = batch.engine_logprobs.flip(0)
    head = PolicyHead(batch, token_weights(batch, loss), old, loss, beta=0.1 * (loss.name == "teamtr"))
    tokens = torch.zeros(len(old), 2)
    places = torch.arange(len(old))

    def kept(logprobs, entropy, micro):
        tokens[gather_segments(places, batch.response_offsets, micro.rows)] = torch.stack([logprobs, entropy], 1).detach()
        return head(logprobs, entropy, micro)

    outputs = run_micro_batches(actor.model, actor._micro_batches(batch), kept, "cpu")
    sums = {name: torch.stack([output.sums[name] for output in outputs]).sum(0) for name in outputs[0].sums}
    maxima = {name: torch.stack([output.maxima[name] for output in outputs]).amax(0) for name in outputs[0].maxima}
    return tokens, {**sums, **maxima}, {name: p.main_grad.clone() for name, p in actor.model.named_parameters()}


def compare_many(actor):
    @settings(max_examples=60, deadline=None, database=None)
    @given(batches(), st.sampled_from(LOSSES), st.integers(30, 400))
    def law(batch, loss, budget):
        actor.settings.policy.micro_batch_tokens = budget
        (tokens, metrics, gradients), (*apart, gradients_apart) = (one_pass(actor, batch, loss, share) for share in (True, False))
        torch.testing.assert_close(tokens, apart[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(metrics, apart[1], rtol=1e-4, atol=1e-4)
        largest = max(float(gradient.abs().max()) for gradient in gradients_apart.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, gradients_apart[name], rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
            )

    law()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_random_tries(ranks, models, family):
    ranks.run(make_settings(models[family], optimizer={"lr": 0.0}), compare_many)
