"""Blocks in another dtype."""

from collections.abc import Iterator

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.row_blocks import Block

CAST_BYTES = 2**26  # read at a time


def in_dtype(name: str, block: Block, dtype: Dtype | None) -> Iterator[Block]:
    """A block in a dtype, some rows at a time; itself where that is its own, or None.

    Args:
        name: of its tensor, for the error.

    Raises:
        OSError, ConversionError: see `Block.read`; a finite value is too large for the dtype.
    """
    if dtype in (None, block.dtype):
        yield block
        return
    # Where nothing is cast, nothing waits for torch to be imported.
    import torch

    from checkpoints_conv.formats.tensors import block_of, tensor_of, torch_dtype

    rows = max(1, CAST_BYTES // block.row_bytes)
    for first in range(0, block.shape[0], rows):
        tensor = tensor_of(block.rows(first, min(rows, block.shape[0] - first)))
        result = tensor.to(torch_dtype(dtype))
        if dtype is not Dtype.F32 and bool((result.isinf() & tensor.isfinite()).any()):
            largest = torch.finfo(result.dtype).max
            raise ConversionError(f"{name} holds values that {dtype} cannot; its largest is {largest:g}: use another --dtype")
        yield block_of(result)
