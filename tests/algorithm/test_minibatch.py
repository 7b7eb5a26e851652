"""Plans: every row exactly once, within the budget, the same number of micro-batches on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.algorithm.minibatch import plan_microbatches, plan_minibatches


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), extra=st.integers(0, 200), ranks=st.integers(1, 4))
def test_microbatches_partition_the_rows(lengths, extra, ranks):
    budget = max(lengths, default=1) + extra
    plan = plan_microbatches(torch.tensor(lengths, dtype=torch.int64), budget, ranks)
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    rows = sorted(int(row) for rank in plan for part in rank for row in part)
    assert rows == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in part) <= budget for rank in plan for part in rank)


def test_ranks_get_similar_token_counts():
    lengths = torch.randint(10, 1000, (500,), generator=torch.Generator().manual_seed(0))
    plan = plan_microbatches(lengths, 8000, 4)
    totals = [sum(int(lengths[part].sum()) for part in rank) for rank in plan]
    assert max(totals) - min(totals) < 0.01 * sum(totals)
    fullest = [int(lengths[part].sum()) for rank in plan for part in rank]
    assert min(fullest) > 0.9 * max(fullest)


def test_skewed_lengths_leave_an_empty_microbatch_not_a_missing_one():
    plan = plan_microbatches(torch.tensor([10]), 10, 2)
    assert [[len(part) for part in rank] for rank in plan] == [[1], [0]]


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match="row 1 has 11 tokens, micro_batch_tokens = 10"):
        plan_microbatches(torch.tensor([3, 11]), 10)


@pytest.mark.parametrize("updates", [1, 2, 3, 7, 50])
def test_minibatches_partition_the_rows(updates, random_batch):
    batch = random_batch(0)
    parts = plan_minibatches(batch, updates, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert len(parts) == min(updates, len(batch))


def test_minibatches_follow_the_generator(random_batch):
    batch = random_batch(0)
    first, again, other = (plan_minibatches(batch, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


def test_no_rows_no_minibatch(make_batch):
    assert plan_minibatches(make_batch([], [], [], []), 4) == []
