"""Operations on ragged columns: rows that share a cell, and rows that own a segment of tokens.

Nothing here loops over rows in Python.
"""

import torch
from torch import Tensor

SPARSE_FACTOR = 4  # slots per row that an index may have before it is worth compacting


def dense_index(*columns: Tensor) -> tuple[Tensor, int]:
    """One index for rows that agree in every column.

    Args:
        columns: int64 [R] each, any values.

    Returns:
        index int64 [R] in [0, slots), and slots.  Some slots may have no row.
    """
    rows = columns[0].numel()
    index, slots = torch.zeros_like(columns[0]), 1
    if rows == 0:
        return index, 0
    limit = SPARSE_FACTOR * rows + 1024
    for column in columns:
        low, high = (int(edge) for edge in column.aminmax())
        span = high - low + 1
        if span > limit:
            values, column = column.unique(return_inverse=True)
            low, span = 0, values.numel()
        index = index * span + (column - low)
        slots *= span
        if slots > limit:
            values, index = index.unique(return_inverse=True)
            slots = values.numel()
    return index, slots


def segment_sum(values: Tensor, index: Tensor, slots: int) -> Tensor:
    """Sum of `values` [R] over the rows of each slot, [slots]."""
    return values.new_zeros(slots).index_add_(0, index, values)


def segment_mean(values: Tensor, index: Tensor, slots: int) -> Tensor:
    """Mean of `values` [R] over the rows of each slot, [slots]; 0 for a slot without rows.

    Equal values have exactly that mean: what is summed is the distance to the slot's minimum.
    """
    low = values.new_zeros(slots).scatter_reduce_(0, index, values, "amin", include_self=False)
    count = torch.bincount(index, minlength=slots)
    return low + segment_sum(values - low[index], index, slots) / count.clamp(min=1)


def expand_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Each row's value on each of its tokens.

    Args:
        values: [R].
        lengths: int64 [R].

    Returns:
        [sum(lengths)], of the dtype of `values`.
    """
    if values.device.type != "cpu":
        return torch.repeat_interleave(values, lengths)
    # numpy's repeat writes the output once; torch's first builds an int64 index as long as the output.
    return torch.from_numpy(values.numpy().repeat(lengths.numpy()))
