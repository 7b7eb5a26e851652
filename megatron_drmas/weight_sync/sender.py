"""The actor's side of a weight update, whatever carries the bytes: buckets that every rank cuts alike."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

NamedTensors = list[tuple[str, Tensor]]
ALIGNMENT = 64  # bytes; of every tensor's start in a bucket


class BucketSender(ABC):
    """Sends one update, bucket by bucket; a bucket stays readable until the second `next_bucket` after it.

    Args:
        tensors: (HF name, whole tensor), as `checkpoints_conv.megatron.export.iter_hf_tensors` yields them.
        bucket_bytes: size of a bucket; a larger tensor is a bucket of its own.
        dtype: the engine's; tensors are cast to it.
        publish: send what is read.  Ranks that iterate only because `tensors` is collective pass False.
        verify: digest every tensor that is sent.

    Attributes:
        digests: by HF name, of what has been sent so far; empty unless `verify`.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        publish: bool = True,
        verify: bool = False,
    ):
        self.digests: dict[str, str] = {}
        self._buckets = buckets(tensors, bucket_bytes, dtype)
        self._dtype = dtype
        self._publish = publish
        self._verify = verify

    def next_bucket(self) -> dict | None:
        """Make the next bucket readable.

        Returns:
            The back end's update info: names, dtype_names, shapes, and where the data is; {} on a rank that does not
            publish; None when all tensors have been sent.
        """
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        if not self._publish:
            return {}
        place = self._send(bucket)
        return {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(self._dtype or tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            **place,
        }

    @abstractmethod
    def _send(self, bucket: NamedTensors) -> dict:
        """Place a bucket's data; returns the back end's own fields of the update info."""

    @abstractmethod
    def close(self) -> None:
        """Free what carries the data; after the last bucket has been loaded, or when the update is aborted."""


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[NamedTensors]:
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


def padded_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Room that a tensor takes in a bucket."""
    size = tensor.numel() * (dtype or tensor.dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
