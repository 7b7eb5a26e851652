"""Packed micro-batches hold every row exactly once, and attention stays within a row."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_drmas.actor.local_layers import PackedAttention, RMSNorm
from megatron_drmas.actor.packing import pack_rows, pack_sequences, response_column
from megatron_drmas.batch import gather_segments
from tests.actor.ranks import make_batch


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 8), st.integers(1, 8))
def test_predicted_tokens_are_the_rows_responses(seed, count, multiple):
    batch = make_batch(seed, rows=8)
    rows = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:count]
    micro = pack_rows(batch, rows, multiple)
    assert sorted(micro.rows.tolist()) == sorted(rows.tolist())
    assert micro.tokens.shape[1] % multiple == 0 and micro.tokens.shape[1] - int(batch.lengths[rows].sum()) <= multiple
    responses = torch.cat(
        [torch.zeros(0, dtype=torch.int64)]
        + [batch.tokens[batch.offsets[row] + batch.prompt_lengths[row] : batch.offsets[row + 1]] for row in micro.rows.tolist()]
    )
    assert torch.equal(micro.labels[micro.predict], responses)
    assert torch.equal(micro.lengths, batch.response_lengths[micro.rows])
    column = torch.arange(len(batch.engine_logprobs))
    assert torch.equal(response_column(batch, column, micro.rows), gather_segments(column, batch.response_offsets, micro.rows))


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_positions_and_groups_cover_every_sequence(lengths):
    lengths = sorted(lengths, reverse=True)
    packed = pack_sequences(lengths)
    assert packed.cu_seqlens_q.diff().tolist() == lengths
    assert sum(rows for rows, _ in packed.groups) == len(lengths)
    assert packed.padded_tokens == sum(rows * length for rows, length in packed.groups)
    slots = torch.arange(sum(lengths)) if packed.slots is None else packed.slots
    assert len(set(slots.tolist())) == len(slots) and int(slots.max()) < packed.padded_tokens


def test_a_row_without_a_prompt_is_refused():
    batch = make_batch(rows=3)
    batch.prompt_lengths[1] = 0
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        pack_rows(batch, torch.arange(3))


CONFIG = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "use_cpu_initialization": True}


@settings(max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 1000))
def test_packed_attention_is_attention_of_each_sequence(lengths, seed):
    """Forward and backward, in float64; any order of lengths."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(total, 4, 8), (total, 2, 8), (total, 2, 8)]
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    attention = PackedAttention(TransformerConfig(**CONFIG), 1, None, "self")
    output = attention(query, key, value, packed_seq_params=pack_sequences(lengths))
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
            )
            .transpose(0, 1)
            .flatten(1)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths))
        ]
    )
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(output, (query, key, value), gradient),
        torch.autograd.grad(expected, (query, key, value), gradient),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_norm_divides_by_the_root_mean_square():
    norm = RMSNorm(TransformerConfig(**CONFIG), 32, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 32)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm.weight.sequence_parallel is False
