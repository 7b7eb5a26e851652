"""Cuts a stream of tensors into buckets; the same cut on every rank that sees the same stream."""

from typing import Iterable, Iterator, Optional

import torch
from torch import Tensor

NamedTensors = list[tuple[str, Tensor]]
ALIGNMENT = 64  # bytes; of every tensor's start in a bucket


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: Optional[torch.dtype]) -> Iterator[NamedTensors]:
    """Consecutive tensors of at most `bucket_bytes` together; a larger tensor is a bucket of its own.

    Args:
        tensors: (HF name, tensor); consumed no further than the bucket that is asked for, and one tensor.
        bucket_bytes: counted in `dtype`.
        dtype: what the receiver holds; None: as they come.
    """
    bucket: NamedTensors = []
    filled = 0
    for name, tensor in tensors:
        size = padded_bytes(tensor, dtype)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += size
    if bucket:
        yield bucket


def padded_bytes(tensor: Tensor, dtype: Optional[torch.dtype]) -> int:
    """Room that a tensor takes in a bucket."""
    size = tensor.numel() * (dtype or tensor.dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def header(bucket: NamedTensors, dtype: Optional[torch.dtype]) -> dict:
    """What every back end's update info says of its tensors: names, dtype_names, shapes."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(dtype or tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
