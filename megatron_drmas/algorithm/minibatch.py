"""Which rows share an optimizer step, and which share a forward pass."""

import heapq

import torch
from torch import Tensor

from megatron_drmas.batch import TurnBatch


def plan_minibatches(batch: TurnBatch, updates: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Rows of each of the batch's optimizer steps: every row exactly once, row counts that differ by at most one.

    One update keeps the rows' order; more deal them out at random from `generator`.  A batch with fewer rows than
    `updates` gives one mini-batch per row.

    Returns:
        int64 row indices per mini-batch; none for an empty batch.
    """
    if updates < 1:
        raise ValueError(f"updates = {updates}: must be at least 1")
    rows = len(batch)
    order = torch.arange(rows) if updates == 1 else torch.randperm(rows, generator=generator)
    return list(order.tensor_split(min(updates, rows))) if rows else []


def plan_microbatches(lengths: Tensor, budget_tokens: int, dp_size: int = 1) -> list[list[Tensor]]:
    """Pack rows into micro-batches of at most `budget_tokens`, as evenly as longest-first dealing gets.

    Every rank gets the same number of micro-batches, so that collectives in the forward pass meet; some may be empty.
    The plan is a function of its arguments.

    Args:
        lengths: int64 [R], tokens of each row of the mini-batch.

    Returns:
        plan[rank][i] int64 indices into the R rows, ascending.

    Raises:
        ValueError: a row alone exceeds the budget.
    """
    sizes = lengths.tolist()
    if sizes and max(sizes) > budget_tokens:
        row = sizes.index(max(sizes))
        raise ValueError(
            f"row {row} has {sizes[row]} tokens, micro_batch_tokens = {budget_tokens}: "
            "raise micro_batch_tokens or lower the prompt and response limits"
        )
    longest_first = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    per_rank = max(1, -(-sum(sizes) // (budget_tokens * dp_size)))
    while (bins := _deal(sizes, longest_first, per_rank * dp_size, budget_tokens)) is None:
        per_rank += 1
    bins.sort(key=lambda members: -sum(sizes[row] for row in members))
    plan: list[list[Tensor]] = [[] for _ in range(dp_size)]
    for position, members in enumerate(bins):
        round_, rank = divmod(position, dp_size)
        plan[rank if round_ % 2 == 0 else dp_size - 1 - rank].append(torch.tensor(sorted(members), dtype=torch.int64))
    return plan


def _deal(sizes: list[int], order: list[int], bins: int, budget: int) -> list[list[int]] | None:
    """Each row to the bin with the fewest tokens; None if that overflows."""
    members: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, index) for index in range(bins)]
    for row in order:
        tokens, index = heap[0]
        if tokens + sizes[row] > budget:
            return None
        members[index].append(row)
        heapq.heapreplace(heap, (tokens + sizes[row], index))
    return members
