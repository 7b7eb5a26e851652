"""Plans: every row exactly once, within the budget, the same number of micro-batches on every rank."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.algorithm.minibatch import PATHS, plan_microbatches, plan_minibatches, plan_shared_microbatches
from megatron_drmas.batch import TokenBatch, offsets_of
from megatron_drmas.kernels.prefixes import sort_by_tokens


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), extra=st.integers(0, 200), ranks=st.integers(1, 4))
def test_microbatches_partition_the_rows(lengths, extra, ranks):
    budget = max(lengths, default=1) + extra
    plan = plan_microbatches(of_lengths(lengths), budget, ranks)
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    rows = sorted(int(row) for rank in plan for part in rank for row in part)
    assert rows == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in part) <= budget for rank in plan for part in rank)


ROWS = st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=12), max_size=30)


def batch_of(rows: list[list[int]]) -> TokenBatch:
    """Rows whose last third is response."""
    return replace(of_lengths([len(row) for row in rows]), tokens=torch.tensor([token for row in rows for token in row]))


def of_lengths(lengths) -> TokenBatch:
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return TokenBatch(torch.zeros(int(lengths.sum()), dtype=torch.int64), offsets_of(lengths), lengths - 1 - lengths // 3)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(0, 60), st.integers(1, 3))
def test_shared_microbatches_partition_the_rows_within_every_budget(rows, extra, ranks):
    batch, budget = batch_of(rows), max(map(len, rows), default=1) + extra
    plan = plan_shared_microbatches(batch, budget, ranks)
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    assert sorted(int(row) for rank in plan for part in rank for row in part) == list(range(len(rows)))
    for part in (part for rank in plan for part in rank):
        tokens = int(batch.lengths[part].sum())
        assert tokens - int(sort_by_tokens(batch, part)[1].sum()) <= budget and tokens <= PATHS * budget
        assert len(part) == 1 or int(batch.response_lengths[part].sum()) <= budget


def test_rows_that_begin_alike_stay_together():
    """Eight questions of 50 tokens, four answers each: as many micro-batches as questions."""
    questions = torch.randint(1, 1000, (8, 50), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[*question, answer, 7] for answer in range(4) for question in questions]
    plan = plan_shared_microbatches(replace(batch_of(rows), prompt_lengths=torch.full((32,), 50)), 60)
    assert sorted(tuple(part.tolist()) for part in plan[0]) == [(q, q + 8, q + 16, q + 24) for q in range(8)]


def test_ranks_get_similar_token_counts():
    lengths = torch.randint(10, 1000, (500,), generator=torch.Generator().manual_seed(0))
    plan = plan_microbatches(of_lengths(lengths), 8000, 4)
    totals = [sum(int(lengths[part].sum()) for part in rank) for rank in plan]
    assert max(totals) - min(totals) < 0.01 * sum(totals)
    fullest = [int(lengths[part].sum()) for rank in plan for part in rank]
    assert min(fullest) > 0.9 * max(fullest)


def test_skewed_lengths_leave_an_empty_microbatch_not_a_missing_one():
    plan = plan_microbatches(of_lengths([10]), 10, 2)
    assert [[len(part) for part in rank] for rank in plan] == [[1], [0]]


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match="row 1 has 11 tokens, micro_batch_tokens = 10"):
        plan_microbatches(of_lengths([3, 11]), 10)
    with pytest.raises(ValueError, match="row 1 has 11 tokens, micro_batch_tokens = 10"):
        plan_shared_microbatches(batch_of([[1] * 3, [1] * 11]), 10)


@pytest.mark.parametrize("updates", [1, 2, 3, 7, 50])
def test_minibatches_partition_the_rows(updates, random_batch):
    batch = random_batch(0)
    parts = plan_minibatches(batch, updates, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert len(parts) == min(updates, len(batch))


@pytest.mark.parametrize("updates", [2, 3, 50])
def test_minibatches_by_question_leave_questions_whole(updates, random_batch):
    batch = random_batch(0)
    parts = plan_minibatches(batch, updates, torch.Generator().manual_seed(0), "question")
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    questions = [set(batch.group[part].tolist()) for part in parts]
    assert sum(map(len, questions)) == len(set.union(*questions)) and len(parts) == min(updates, len(set.union(*questions)))
    assert max(map(len, questions)) - min(map(len, questions)) <= 1


def test_minibatches_follow_the_generator(random_batch):
    batch = random_batch(0)
    first, again, other = (plan_minibatches(batch, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


def test_no_rows_no_minibatch(make_batch):
    assert plan_minibatches(make_batch([], [], [], []), 4) == []
