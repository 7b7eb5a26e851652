"""Operations on ragged columns: rows that share a cell, and rows that own a segment of tokens.

Nothing here loops over rows in Python.
"""

import torch
from torch import Tensor

SPARSE_FACTOR = 4  # slots per row that an index may have before it is worth compacting
BLOCK_ROWS = 65536  # rows whose temporaries stay in a CPU's cache


def dense_index(*columns: Tensor) -> tuple[Tensor, int]:
    """One index for rows that agree in every column.

    Args:
        columns: int64 [R] each, any values.

    Returns:
        index int64 [R] in [0, slots), and slots.  Some slots may have no row.

    Raises:
        ValueError: a column of another type or length.
    """
    rows = columns[0].numel()
    for column in columns:
        if column.dtype != torch.int64 or column.shape != (rows,):
            raise ValueError(f"a column is {column.dtype} {list(column.shape)}: needs int64 [{rows}]")
    if rows == 0:
        return torch.zeros_like(columns[0]), 0
    limit = SPARSE_FACTOR * rows + 1024
    index: Tensor | None = None
    slots = 1
    for column in columns:
        low, high = (int(edge) for edge in column.aminmax())
        span = high - low + 1
        if span > limit:
            values, column = column.unique(return_inverse=True)
            low, span = 0, values.numel()
        index = column - low if index is None else torch.add(column - low if low else column, index, alpha=span)
        slots *= span
        if slots > limit:
            values, index = index.unique(return_inverse=True)
            slots = values.numel()
    assert index is not None, "at least one column"
    return index, slots


def row_blocks(column: Tensor) -> list[slice]:
    """Slices that cover the rows of `column`: cache-sized ones on the CPU, one elsewhere."""
    rows = len(column)
    step = BLOCK_ROWS if column.device.type == "cpu" else max(rows, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def segment_sum(values: Tensor, index: Tensor, slots: int) -> Tensor:
    """Sum of `values` [R] over the rows of each slot, [slots]."""
    return values.new_zeros(slots).index_add_(0, index, values)


def segment_mean(values: Tensor, index: Tensor, slots: int) -> Tensor:
    """Mean of `values` [R] over the rows of each slot, float64 [slots]; 0 for a slot without rows.

    Equal float32 values have exactly that mean: their sum in float64 is exact.
    """
    count = torch.bincount(index, minlength=slots)
    return segment_sum(values.double(), index, slots).div_(count.clamp_(min=1))


def expand_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Each row's value on each of its tokens.

    Args:
        values: [R].
        lengths: int64 [R].

    Returns:
        [sum(lengths)], of the dtype of `values`.

    Raises:
        ValueError: not as many lengths as values.
    """
    if values.shape != lengths.shape:
        raise ValueError(f"values {list(values.shape)} and lengths {list(lengths.shape)}: need one length each")
    if values.device.type != "cpu":
        return torch.repeat_interleave(values, lengths)
    # numpy's repeat writes the output once; torch's first builds an int64 index as long as the output.
    return torch.from_numpy(values.numpy().repeat(lengths.numpy()))
