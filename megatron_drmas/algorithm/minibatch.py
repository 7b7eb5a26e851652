"""Which rows share an optimizer step, and which share a forward pass."""

import heapq

import torch
from torch import Tensor

from megatron_drmas.batch import TokenBatch, TurnBatch
from megatron_drmas.kernels.prefixes import sort_by_tokens

PATHS = 4  # row tokens that attention may gather in a micro-batch that shares beginnings, per token of its budget


def plan_minibatches(batch: TurnBatch, updates: int, generator: torch.Generator | None = None, by: str = "turn") -> list[Tensor]:
    """Rows of each of the batch's optimizer steps: every row exactly once.

    One update keeps the rows' order; more deal turns, or whole questions, out at random from `generator`.  Turns give row
    counts that differ by at most one, questions question counts that do; a question's rows share most of their tokens.  A
    batch with fewer of them than `updates` gives one mini-batch for each.

    Args:
        by: "turn" | "question".

    Returns:
        int64 row indices per mini-batch; none for an empty batch.
    """
    if updates < 1:
        raise ValueError(f"updates = {updates}: must be at least 1")
    if not len(batch):
        return []
    if updates == 1:
        return [torch.arange(len(batch))]
    if by == "turn":
        return list(torch.randperm(len(batch), generator=generator).tensor_split(min(updates, len(batch))))
    questions, question = batch.group.unique(return_inverse=True)
    dealt = torch.randperm(len(questions), generator=generator).tensor_split(min(updates, len(questions)))
    return [torch.isin(question, part).nonzero().flatten() for part in dealt]


def plan_microbatches(batch: TokenBatch, budget_tokens: int, dp_size: int = 1) -> list[list[Tensor]]:
    """Pack rows into micro-batches of at most `budget_tokens`, as evenly as longest-first dealing gets.

    Every rank gets the same number of micro-batches, so that collectives in the forward pass meet; some may be empty.
    The plan is a function of its arguments.

    Args:
        batch: the mini-batch.

    Returns:
        plan[rank][i] int64 indices into its R rows, ascending.

    Raises:
        ValueError: a row alone exceeds the budget.
    """
    sizes = batch.lengths.tolist()
    _check_sizes(batch, sizes, budget_tokens)
    longest_first = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    per_rank = max(1, -(-sum(sizes) // (budget_tokens * dp_size)))
    while (bins := _deal(sizes, longest_first, per_rank * dp_size, budget_tokens)) is None:
        per_rank += 1
    return _over_ranks(
        [torch.tensor(sorted(rows), dtype=torch.int64) for rows in bins], [sum(sizes[r] for r in b) for b in bins], dp_size
    )


def plan_shared_microbatches(batch: TokenBatch, budget_tokens: int, dp_size: int = 1) -> list[list[Tensor]]:
    """`plan_microbatches` for rows that are packed with what they begin with once: rows that begin alike stay together.

    The rows, in the order of their tokens, are cut into runs of at most `budget_tokens` packed tokens, as evenly as that
    order allows.  A run has at most `PATHS` times as many row tokens, for attention gathers keys by row, and at most
    `budget_tokens` response tokens.

    Raises:
        ValueError: a row alone exceeds the budget.
    """
    _check_sizes(batch, batch.lengths.tolist(), budget_tokens)
    order, common = sort_by_tokens(batch)
    lengths, responses = batch.lengths[order].tolist(), batch.response_lengths[order].tolist()
    own = [length - shared for length, shared in zip(lengths, common.tolist(), strict=True)]

    def runs(limit: int) -> list[list[int]]:
        """Cut wherever a run would have more than `limit` packed tokens, or too much of the rest."""
        cuts, packed, paths, predicted = [0], 0, 0, 0
        for place, length in enumerate(lengths):
            packed, paths, predicted = packed + own[place], paths + length, predicted + responses[place]
            if place > cuts[-1] and (packed > limit or paths > PATHS * budget_tokens or predicted > budget_tokens):
                cuts.append(place)
                packed, paths, predicted = length, length, responses[place]
        return [list(range(*span)) for span in zip(cuts, [*cuts[1:], len(lengths)])]

    count = -(-len(runs(budget_tokens)) // dp_size) * dp_size
    low, high = max(lengths, default=1), budget_tokens
    while low < high:  # the smallest limit that takes no more micro-batches
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs(middle)) <= count else (middle + 1, high)
    parts = runs(high) if lengths else []
    sizes = [lengths[part[0]] + sum(own[place] for place in part[1:]) for part in parts]
    empty = count - len(parts) if parts else dp_size
    rows = [order[part].sort().values for part in parts] + [torch.zeros(0, dtype=torch.int64)] * empty
    return _over_ranks(rows, sizes + [0] * empty, dp_size)


def _check_sizes(batch: TokenBatch, sizes: list[int], budget_tokens: int) -> None:
    if sizes and max(sizes) > budget_tokens:
        row = sizes.index(max(sizes))
        raise ValueError(
            f"{batch.row_name(row)} has {sizes[row]} tokens, micro_batch_tokens = {budget_tokens}: "
            "raise micro_batch_tokens or lower the prompt and response limits"
        )


def _over_ranks(parts: list[Tensor], sizes: list[int], dp_size: int) -> list[list[Tensor]]:
    """As many micro-batches to each rank, the largest to the first, back and forth."""
    plan: list[list[Tensor]] = [[] for _ in range(dp_size)]
    for position, part in enumerate(sorted(range(len(parts)), key=lambda part: -sizes[part])):
        round_, rank = divmod(position, dp_size)
        plan[rank if round_ % 2 == 0 else dp_size - 1 - rank].append(parts[part])
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
