"""Agent-wise advantages: statistics of scores per cell, their merge over ranks, and the normalization.

A *cell* is a set of samples that are compared with one another: the calls of one question ("group"), or
the calls of one agent on one question ("agent").  Source: Dr. MAS (arXiv 2602.08847), equations (2) and (5),
and its four variants (mean, std) in {group, agent} x {group, agent}; Dr. GRPO (arXiv 2503.20783) has no std.

Defined behavior where the formula has none:
- A cell of one sample has no contrast: its own score is its mean, so the advantage is 0.  (Falling back to
  mean 0 and std 1 would make the advantage the raw score, a gradient with no baseline that always reinforces an
  agent which happened to be called in a single successful trajectory.)
- A std that is zero (up to rounding, `ROUNDING`) or undefined (one sample) gives advantage 0, also where the mean comes from
  another cell and differs from the score.  Dividing by epsilon there would yield advantages of order 1 / epsilon.
- A mean over samples that are equal up to rounding leaves nothing but rounding: the advantage is 0, with and without a std.

A call is a sample here.  Under trajectory weighting the samples are trajectories, and every call gets its trajectory's
value in place of its own (`algorithm.estimators.sample_statistics`): the same statistics over other samples.

The torch functions here are the reference, the CPU path and the path of trajectory weighting.
On CUDA, step-weighted advantages go through the Triton kernel in `agent_advantage_triton`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_drmas.kernels.segments import dense_index, expand_rows, row_blocks

# Samples that differ by this share of their magnitude, or less, are equal.  A score is a float32 sum of at most six terms,
# each a rounded weight times a rounded reward: such a sum is off by 8 x 2^-24 of its magnitude at most, two of them by 2^-20.
ROUNDING = 2.0**-20
SCOPES = {"mean": ("group", "agent"), "std": ("group", "agent", "none")}


@dataclass
class CellStatistics:
    """Count, mean and sum of squared deviations of each cell's samples, float64 [cells] each; spread, bool [cells], where
    the samples differ by more than rounding."""

    count: Tensor
    mean: Tensor
    m2: Tensor
    spread: Tensor

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation [cells]; 0 for a cell of fewer than two samples, or of samples equal up to rounding."""
        return (self.m2 / (self.count - 1).clamp(min=1)).sqrt_().mul_(self.spread)


def cell_statistics(scores: Tensor, cell: Tensor, cells: int, magnitude: Tensor | None = None) -> CellStatistics:
    """Two-pass statistics in float64; equal float32 scores have a sum of squares of exactly 0.

    Args:
        scores: [R], any floating type, finite.
        cell: int64 [R] in [0, cells).
        magnitude: [R], not negative: the size of what a score was computed from, to which its rounding error is
            proportional.  None: the scores' own.
    """
    count = torch.bincount(cell, minlength=cells).double()
    total, m2 = torch.zeros_like(count), torch.zeros_like(count)
    for rows in row_blocks(cell):
        total.index_add_(0, cell[rows], scores[rows].double())
    mean = total.div_(count.clamp(min=1))
    for rows in row_blocks(cell):
        deviation = scores[rows].double() - mean.index_select(0, cell[rows])
        m2.index_add_(0, cell[rows], deviation.square_())
    return CellStatistics(count, mean, m2, _spread(scores, cell, count, m2, scores.abs() if magnitude is None else magnitude))


def _spread(scores: Tensor, cell: Tensor, count: Tensor, m2: Tensor, magnitude: Tensor) -> Tensor:
    """Cells whose samples' range exceeds `ROUNDING` times the largest magnitude among them, bool [cells]."""
    spread = m2 > 0
    if not spread.any():
        return spread
    # No deviation exceeds the range, so that only a small sum of squares leaves a doubt, which the samples settle.
    doubtful = spread & (m2 <= count * (ROUNDING * magnitude.max().double()).square())
    if not doubtful.any():
        return spread
    rows = doubtful[cell]
    scores, cell, magnitude = scores[rows].double(), cell[rows], magnitude[rows].double()
    low, high = (m2.new_zeros(len(m2)).scatter_reduce_(0, cell, scores, edge, include_self=False) for edge in ("amin", "amax"))
    size = m2.new_zeros(len(m2)).scatter_reduce_(0, cell, magnitude, "amax")
    return torch.where(doubtful, high - low > ROUNDING * size, spread)


def merge_statistics(parts: Sequence[CellStatistics]) -> CellStatistics:
    """Statistics of the union of disjoint sets of samples, cell by cell (Chan, Golub and LeVeque 1983).

    A cell has spread if one of its parts has, or if their means differ by more than rounding.
    """
    merged = parts[0]
    for part in parts[1:]:
        count = merged.count + part.count
        delta = part.mean - merged.mean
        share = part.count / count.clamp(min=1)
        mean = torch.where(merged.count > 0, merged.mean + delta * share, part.mean)
        m2 = merged.m2 + part.m2 + delta.square() * merged.count * share
        apart = delta.abs() > ROUNDING * torch.maximum(part.mean.abs(), merged.mean.abs())
        spread = merged.spread | part.spread | (apart & (merged.count > 0) & (part.count > 0))
        merged = CellStatistics(count, mean, m2, spread)
    return merged


def merge_over_ranks(statistics: CellStatistics, process_group: dist.ProcessGroup | None = None) -> CellStatistics:
    """The same statistics on every rank as if one rank had held all samples.

    Cells must have the same numbers on every rank.  Parts are merged in rank order, so every rank gets the same bits.
    """
    mine = torch.stack([statistics.count, statistics.mean, statistics.m2, statistics.spread.double()])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, mine, group=process_group)
    return merge_statistics([CellStatistics(count, mean, m2, spread > 0) for count, mean, m2, spread in parts])


def normalize(
    scores: Tensor, mean_cell: Tensor, mean: CellStatistics, std_cell: Tensor | None, std: CellStatistics | None, epsilon: float
) -> Tensor:
    """Row advantages (s - mean) / (std + epsilon), float32 [R]; without `std`, s - mean.  0 where a cell has no spread.

    Args:
        scores: [R], what represents each row in its mean cell.
        mean_cell, std_cell: int64 [R], each row's cell in `mean` and in `std`.
    """
    advantages = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    factors = [(mean_cell, mean.spread.double())]
    if std is not None and std_cell is not None:
        scale = (std.std + epsilon).reciprocal_().mul_(std.spread)
        factors = [(std_cell, scale)] if std is mean else [*factors, (std_cell, scale)]
    for rows in row_blocks(scores):
        centred = scores[rows].double() - mean.mean.index_select(0, mean_cell[rows])
        for cell, factor in factors:
            centred.mul_(factor.index_select(0, cell[rows]))
        advantages[rows] = centred
    return advantages


def agent_advantages(
    scores: Tensor,
    group: Tensor,
    agent: Tensor,
    offsets: Tensor,
    mean: str = "agent",
    std: str = "agent",
    epsilon: float = 1e-6,
    magnitude: Tensor | None = None,
) -> Tensor:
    """Token-level advantages, every call being one sample (step weighting).

    Tensors may be strided views; all are on one device.

    Args:
        scores: [R], any floating type, finite.
        group, agent: int64 [R], any values.
        offsets: int64 [R + 1], the rows' segments in the token column, from 0 on.
        mean: group | agent.
        std: group | agent | none.
        magnitude: see `cell_statistics`.

    Returns:
        float32 [offsets[-1]], the row's advantage on each of its tokens.

    Raises:
        ValueError: an argument of another type, shape or device, or an unknown scope.
    """
    if scores.is_cuda:
        from megatron_drmas.kernels.agent_advantage_triton import agent_advantages_triton

        return agent_advantages_triton(scores, group, agent, offsets, mean, std, epsilon, magnitude)
    check_arguments(scores, group, agent, offsets, mean, std, magnitude)
    cells = {"group": dense_index(group)}
    if "agent" in (mean, std):
        cells["agent"] = dense_index(group, agent)
    statistics = {name: cell_statistics(scores, *cells[name], magnitude) for name in {mean, std} - {"none"}}
    rows = normalize(
        scores, cells[mean][0], statistics[mean], cells[std][0] if std != "none" else None, statistics.get(std), epsilon
    )
    return expand_rows(rows, offsets.diff())


def check_arguments(
    scores: Tensor, group: Tensor, agent: Tensor, offsets: Tensor, mean: str, std: str, magnitude: Tensor | None
) -> int:
    """Refuse what `agent_advantages` and its Triton kernel cannot take as it is meant; returns the number of tokens.

    Raises:
        ValueError: names the argument.
    """
    for name, value in (("mean", mean), ("std", std)):
        if value not in SCOPES[name]:
            raise ValueError(f"{name} = {value!r}: choose one of {', '.join(SCOPES[name])}")
    rows = scores.shape[0] if scores.dim() == 1 else -1
    columns = {"scores": (scores, rows), "group": (group, rows), "agent": (agent, rows), "offsets": (offsets, rows + 1)}
    if magnitude is not None:
        columns["magnitude"] = (magnitude, rows)
    for name, (column, length) in columns.items():
        wanted = column.is_floating_point() if name in ("scores", "magnitude") else column.dtype == torch.int64
        if not wanted or column.shape != (length,) or column.device != scores.device:
            kind = "floating-point" if name in ("scores", "magnitude") else "int64"
            raise ValueError(
                f"{name} is {column.dtype} {list(column.shape)} on {column.device}: "
                f"needs a {kind} column of {max(length, 0)} values on {scores.device}"
            )
    shortest = offsets.diff().amin() if rows else offsets[0]
    first, tokens, shortest = torch.stack([offsets[0], offsets[-1], shortest]).tolist()  # one wait for the device
    if first != 0 or shortest < 0:
        raise ValueError(f"offsets from {first} to {tokens}: must begin at 0 and never decrease")
    return tokens
