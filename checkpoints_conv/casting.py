"""Blocks in another dtype."""

from typing import Optional

from checkpoints_conv.blocks import Block, FileMaps
from checkpoints_conv.dtypes import Dtype
from checkpoints_conv.errors import ConversionError


def in_dtype(name: str, block: Block, dtype: Optional[Dtype], maps: FileMaps) -> Block:
    """A block in a dtype; itself where that is its own, or None.

    Args:
        name: of its tensor, for the error.

    Raises:
        ConversionError: a finite value is too large for it.
    """
    if dtype in (None, block.dtype):
        return block
    # Where nothing is cast, nothing waits for torch to be imported.
    import torch

    from checkpoints_conv.tensors import block_of, torch_dtype, view

    tensor = view(block, maps)
    result = tensor.to(torch_dtype(dtype))
    if dtype is Dtype.F16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise ConversionError(f"{name} holds values that float16 cannot; its largest is {torch.finfo(result.dtype).max:g}: use another --dtype")
    return block_of(result)
