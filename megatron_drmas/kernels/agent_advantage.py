"""Agent-wise advantages: statistics of scores per cell, their merge over ranks, and the normalisation.

A *cell* is a set of samples that are compared with one another: the calls of one question ("group"), or
the calls of one agent on one question ("agent").  Source: Dr. MAS (arXiv 2602.08847), equations (2) and (5),
and its four variants (mean, std) in {group, agent} x {group, agent}; Dr. GRPO (arXiv 2503.20783) has no std.

Defined behaviour where the formula has none:
- A cell of one sample has no contrast: its own score is its mean, so the advantage is 0.  (Falling back to
  mean 0 and std 1 would make the advantage the raw score, a gradient with no baseline that always reinforces an
  agent which happened to be called in a single successful trajectory.)
- A std that is zero (up to rounding, `ROUNDING`) or undefined (one sample) gives advantage 0, also where the mean comes from another cell and
  is apart from the score.  Dividing by epsilon there would yield advantages of order 1 / epsilon.

The torch functions here are the reference, the CPU path and the path of trajectory weighting.
On CUDA, step-weighted advantages go through the Triton kernel in `agent_advantage_triton`.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_drmas.kernels.segments import dense_index, expand_rows, row_blocks

# A spread below this share of the mean is what rounding leaves of equal samples: scores are float32 sums of rewards and
# penalties, and four units in the last place are more than the order of such a sum can move.
ROUNDING = 2.0**-21


@dataclass
class CellStatistics:
    """Count, mean and sum of squared deviations of each cell's samples, float64 [cells] each."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation [cells]; 0 for a cell of fewer than two samples, or of samples equal up to rounding."""
        std = (self.m2 / (self.count - 1).clamp(min=1)).sqrt_()
        return std * (std > ROUNDING * self.mean.abs())


def cell_statistics(scores: Tensor, cell: Tensor, cells: int) -> CellStatistics:
    """Two-pass statistics in float64; equal float32 scores have a sum of squares of exactly 0.

    Args:
        scores: [R], any floating type.
        cell: int64 [R] in [0, cells).
    """
    count = torch.bincount(cell, minlength=cells).double()
    total, m2 = torch.zeros_like(count), torch.zeros_like(count)
    for rows in row_blocks(cell):
        total.index_add_(0, cell[rows], scores[rows].double())
    mean = total.div_(count.clamp(min=1))
    for rows in row_blocks(cell):
        deviation = scores[rows].double() - mean.index_select(0, cell[rows])
        m2.index_add_(0, cell[rows], deviation.square_())
    return CellStatistics(count, mean, m2)


def merge_statistics(parts: Sequence[CellStatistics]) -> CellStatistics:
    """Statistics of the union of disjoint sets of samples, cell by cell (Chan, Golub and LeVeque 1983)."""
    merged = parts[0]
    for part in parts[1:]:
        count = merged.count + part.count
        delta = part.mean - merged.mean
        share = part.count / count.clamp(min=1)
        mean = torch.where(merged.count > 0, merged.mean + delta * share, part.mean)
        m2 = merged.m2 + part.m2 + delta.square() * merged.count * share
        merged = CellStatistics(count, mean, m2)
    return merged


def merge_over_ranks(statistics: CellStatistics, process_group: Optional[dist.ProcessGroup] = None) -> CellStatistics:
    """The same statistics on every rank as if one rank had held all samples.

    Cells must have the same numbers on every rank.  Parts are merged in rank order, so every rank gets the same bits.
    """
    mine = torch.stack([statistics.count, statistics.mean, statistics.m2])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, mine, group=process_group)
    return merge_statistics([CellStatistics(*part) for part in parts])


def normalise(
    scores: Tensor,
    mean_cell: Tensor,
    mean: CellStatistics,
    std_cell: Optional[Tensor],
    std: Optional[CellStatistics],
    epsilon: float,
) -> Tensor:
    """Row advantages (s - mean) / (std + epsilon), float32 [R]; without `std`, s - mean.

    Args:
        scores: [R].
        mean_cell, std_cell: int64 [R], each row's cell in `mean` and in `std`.
    """
    advantages = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    if std is not None:
        spread = std.std
        scale = (spread + epsilon).reciprocal_() * (spread > 0)
    for rows in row_blocks(scores):
        centred = scores[rows].double() - mean.mean.index_select(0, mean_cell[rows])
        advantages[rows] = centred if std is None else centred.mul_(scale.index_select(0, std_cell[rows]))
    return advantages


def agent_advantages(
    scores: Tensor,
    group: Tensor,
    agent: Tensor,
    offsets: Tensor,
    mean: str = "agent",
    std: str = "agent",
    epsilon: float = 1e-6,
) -> Tensor:
    """Token-level advantages, every call being one sample (step weighting).

    Args:
        scores: [R], any floating type.
        group, agent: int64 [R], any values.
        offsets: int64 [R + 1], the rows' segments in the token column.
        mean: group | agent.
        std: group | agent | none.

    Returns:
        float32 [offsets[-1]], the row's advantage on each of its tokens.
    """
    if scores.is_cuda:
        from megatron_drmas.kernels.agent_advantage_triton import agent_advantages_triton

        return agent_advantages_triton(scores, group, agent, offsets, mean, std, epsilon)
    cells = {"group": dense_index(group)}
    if "agent" in (mean, std):
        cells["agent"] = dense_index(group, agent)
    statistics = {name: cell_statistics(scores, *cells[name]) for name in {mean, std} - {"none"}}
    rows = normalise(
        scores,
        cells[mean][0],
        statistics[mean],
        cells[std][0] if std != "none" else None,
        statistics.get(std),
        epsilon,
    )
    return expand_rows(rows, offsets.diff())
