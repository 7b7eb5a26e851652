"""Rows of a tensor by index, where a row may be taken many times."""

from typing import Any

import torch
from torch import Tensor


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]`, whose gradient is summed in float32 or wider and in a fixed order.

    `index_select` sums the gradients of a row that is taken several times in the row's own type, and on GPUs in any order.

    Args:
        source: [r, …].
        index: int64 [n], in [0, r).
    """
    return _TakeRows.apply(source, index)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(source)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if gradient.device.type == "cpu":  # where index_add_ keeps the order
            sums = wide.new_zeros(ctx.rows, *wide.shape[1:]).index_add_(0, index, wide)
        else:
            sums = sorted_sum(wide, index, ctx.rows)
        return sums.to(gradient.dtype), None


def sorted_sum(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Sum of the `values` [n, …] of each index in [0, rows), added up in their order: [rows, …]; 0 for an index without any."""
    index, order = index.sort(stable=True)
    offsets = torch.searchsorted(index, torch.arange(rows + 1, device=index.device))
    return torch.segment_reduce(values[order], "sum", offsets=offsets, axis=0, initial=0)
