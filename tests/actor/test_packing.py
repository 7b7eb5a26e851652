"""Packed micro-batches hold every row exactly once, and attention stays within a row."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_drmas.actor.branches import SIMILAR, Branches
from megatron_drmas.actor.local_layers import PackedAttention, RMSNorm
from megatron_drmas.actor.packing import PackedSequences, pack_rows, response_column
from megatron_drmas.batch import gather_segments
from tests.actor.ranks import make_batch, make_tree_batch


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
    assert torch.equal(micro.labels, responses)
    assert torch.equal(micro.lengths, batch.response_lengths[micro.rows])
    column = torch.arange(len(batch.engine_logprobs))
    assert torch.equal(response_column(batch, column, micro.rows), gather_segments(column, batch.response_offsets, micro.rows))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 16), st.integers(1, 8), st.booleans())
def test_a_trie_holds_every_beginning_once_and_every_predicted_token(seed, count, multiple, some):
    batch = make_tree_batch(seed)
    rows = torch.randperm(16, generator=torch.Generator().manual_seed(seed))[:count]
    wanted = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(seed)) < 0.5 if some else None
    micro = pack_rows(batch, rows, multiple, wanted, share=True)
    packed = micro.packed
    texts = [batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tolist() for row in micro.rows.tolist()]
    beginnings = {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}
    assert micro.tokens.shape[1] == max(multiple, -(-len(beginnings) // multiple) * multiple)
    # The path to each predicted token spells its row up to there.
    at = {}  # packed token -> what its path spells
    for i, own in enumerate(packed.branches.query_offsets.diff().tolist()):
        path = packed.branches.path[packed.branches.path_offsets[i] : packed.branches.path_offsets[i + 1]].tolist()
        for place in range(len(path) - own, len(path)):
            assert path[place] not in at and int(packed.positions[path[place]]) == place
            at[path[place]] = tuple(micro.tokens[0, path[: place + 1]].tolist())
    predicted = [
        (tuple(text[:place]), text[place])
        for row, text in zip(micro.rows.tolist(), texts)
        for place in range(1, len(text))
        if (place >= int(batch.prompt_lengths[row]) if wanted is None else bool(wanted[int(batch.offsets[row]) + place]))
    ]
    parents = packed.chosen[packed.sources][packed.edges].tolist()
    assert [(at[parent], label) for parent, label in zip(parents, micro.labels[packed.edges].tolist())] == predicted
    assert batch.tokens[micro.places].tolist() == [label for _, label in predicted]
    assert len(micro.labels) == len(set(predicted)) and int(micro.lengths.sum()) == len(predicted) == len(micro.sequence)
    assert micro.predict[0].nonzero().flatten().tolist() == packed.chosen.tolist()


def test_a_row_without_a_prompt_is_refused():
    batch = make_batch(rows=3)
    batch.prompt_lengths[1] = 0
    with pytest.raises(ValueError, match=r"sample 1, call 0 \(agent second\) has an empty prompt"):
        pack_rows(batch, torch.arange(3))


CONFIG = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "use_cpu_initialization": True}


@st.composite
def tries(draw) -> tuple[list[int], list[np.ndarray]]:
    """Branches of a random trie: each owns tokens behind a beginning of an earlier branch's path."""
    queries, paths, total = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8)), [], 0
    for own in queries:
        before = draw(st.sampled_from(paths)) if paths else np.zeros(0, dtype=np.int64)
        shared = draw(st.integers(0, len(before)))
        paths.append(np.concatenate([before[:shared], np.arange(total, total + own)]))
        total += own
    return queries, paths


@settings(max_examples=50, deadline=None)
@given(tries(), st.integers(0, 1000))
def test_packed_attention_is_attention_along_each_path(trie, seed):
    """Forward and backward, in float64; by the buckets and, as a kernel of ragged sequences would, by the offsets."""
    queries, paths = trie
    branches = Branches.of(queries, paths)
    generator = torch.Generator().manual_seed(seed)
    total = sum(queries)
    shapes = [(total, 4, 8), (total, 2, 8), (total, 2, 8)]
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    attention = PackedAttention(TransformerConfig(**CONFIG), 1, None, "self")
    output = attention(query, key, value, packed_seq_params=PackedSequences(branches=branches))
    expected = []
    for i, path in enumerate(paths):
        begin, end = branches.path_offsets[i : i + 2].tolist()
        assert branches.path[begin:end].tolist() == path.tolist()
        own = slice(*branches.query_offsets[i : i + 2].tolist())
        q, k, v = (x.transpose(0, 1) for x in (query[own], key[branches.path[begin:end]], value[branches.path[begin:end]]))
        mask = torch.ones(queries[i], len(path), dtype=torch.bool).tril(len(path) - queries[i])
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        expected.append(F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).flatten(1))
    expected = torch.cat(expected)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(output, (query, key, value), gradient),
        torch.autograd.grad(expected, (query, key, value), gradient),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(tries())
def test_buckets_pad_little_and_hold_every_branch(trie):
    queries, paths = trie
    branches = Branches.of(queries, paths)
    assert sum(bucket.rows for bucket in branches.buckets) == len(paths)
    assert torch.equal(branches.query_slots[branches.outputs], torch.arange(sum(queries)))
    keys = sum(bucket.rows * bucket.keys for bucket in branches.buckets)
    assert len(branches.key_slots) == keys and SIMILAR * keys <= sum(map(len, paths))
    assert len(branches.query_slots) < 2 * sum(queries)
    assert all((bucket.mask is None) or bucket.mask.any(-1).all() for bucket in branches.buckets), "no query attends to nothing"


def test_norm_divides_by_the_root_mean_square():
    norm = RMSNorm(TransformerConfig(**CONFIG), 32, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 32)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm.weight.sequence_parallel is False
