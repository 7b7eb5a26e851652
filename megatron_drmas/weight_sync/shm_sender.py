"""Actor's side of the `shm` back end: buckets in POSIX shared memory, two in turn.  Knows nothing of vLLM."""

import shutil
from multiprocessing.shared_memory import SharedMemory
from typing import Iterable, Optional

import torch
from torch import Tensor

from megatron_drmas.weight_sync.bucket import NamedTensors, buckets, header, padded_bytes
from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.verify import digest

FOLDER = "/dev/shm"


class ShmSender:
    """Sends one update, bucket by bucket; a bucket stays readable until the second `next_bucket` after it.

    The segments belong to this process and vanish with it, however it ends.

    Args:
        tensors: (HF name, whole tensor), as `checkpoints_conv.export.iter_hf_tensors` yields them.
        bucket_bytes: size of a bucket; a larger tensor gets a segment of its size.
        dtype: the engine's; tensors are cast to it.
        publish: write what is read.  Ranks that iterate only because `tensors` is collective pass False.
        verify: digest every tensor that is sent.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: Optional[torch.dtype] = None, publish: bool = True,
        verify: bool = False,
    ):
        self.digests: dict[str, str] = {}
        self._buckets = buckets(tensors, bucket_bytes, dtype)
        self._dtype = dtype
        self._publish = publish
        self._verify = verify
        self._slots: list[Optional[SharedMemory]] = [None, None]
        self._turn = 0

    def next_bucket(self) -> Optional[dict]:
        """Write the next bucket.

        Returns:
            The back end's update info: names, dtype_names, shapes, offsets (bytes), segment; {} on a rank that does not
            publish; None when all tensors have been sent.

        Raises:
            WeightSyncError: /dev/shm is too small.
        """
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        if not self._publish:
            return {}
        segment = self._segment(sum(padded_bytes(tensor, self._dtype) for _, tensor in bucket))
        offsets = self._write(bucket, torch.frombuffer(segment.buf, dtype=torch.uint8))
        return {**header(bucket, self._dtype), "offsets": offsets, "segment": segment.name}

    def close(self) -> None:
        """Free the segments; after the last bucket has been loaded, or when the update is given up."""
        for segment in filter(None, self._slots):
            segment.close()
            segment.unlink()
        self._slots = [None, None]

    def _write(self, bucket: NamedTensors, memory: Tensor) -> list[int]:
        offsets, offset = [], 0
        for name, tensor in bucket:
            dtype = self._dtype or tensor.dtype
            target = memory[offset : offset + tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)
            target.copy_(tensor.detach())
            if self._verify:
                self.digests[name] = digest(target)
            offsets.append(offset)
            offset += padded_bytes(tensor, dtype)
        return offsets

    def _segment(self, size: int) -> SharedMemory:
        turn, self._turn = self._turn, 1 - self._turn
        segment = self._slots[turn]
        if segment is not None and segment.size >= size:
            return segment
        if segment is not None:
            segment.close()
            segment.unlink()
            self._slots[turn] = None
        free = shutil.disk_usage(FOLDER).free
        if free < size:
            raise WeightSyncError(
                f"{FOLDER} has {free} bytes free and a bucket takes {size}: enlarge it (docker run --shm-size), or send smaller buckets"
            )
        self._slots[turn] = SharedMemory(create=True, size=size)
        return self._slots[turn]
