"""Rows in the order of their tokens are the paths of a trie, depth first."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.batch import TokenBatch, offsets_of
from megatron_drmas.kernels.prefixes import sort_by_tokens

ROWS = st.lists(st.lists(st.sampled_from([1, 2, 300, 70_000, 2**40]), min_size=1, max_size=6), max_size=12)


def batch_of(rows: list[list[int]]) -> TokenBatch:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return TokenBatch(
        torch.tensor([token for row in rows for token in row], dtype=torch.int64), offsets_of(lengths), torch.ones_like(lengths)
    )


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_what_rows_own_are_the_distinct_beginnings(rows):
    order, common = sort_by_tokens(batch_of(rows))
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert [rows[row] for row in order] == sorted(rows)
    beginnings = {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}
    assert sum(len(rows[row]) for row in order) - int(common.sum()) == len(beginnings)
    for before, row, shared in zip(order[:-1].tolist(), order[1:].tolist(), common[1:].tolist()):
        assert rows[before][:shared] == rows[row][:shared]
        assert shared == min(len(rows[before]), len(rows[row])) or rows[before][shared] != rows[row][shared]


@settings(max_examples=50, deadline=None)
@given(ROWS, st.data())
def test_some_rows_are_sorted_as_a_batch_of_their_own(rows, data):
    some = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True)) if rows else []
    order, common = sort_by_tokens(batch_of(rows), torch.tensor(some, dtype=torch.int64))
    assert [rows[row] for row in order] == sorted(rows[row] for row in some)
    assert torch.equal(common, sort_by_tokens(batch_of([rows[row] for row in sorted(some)]))[1])
