"""Actor's side of the `shm` back end: buckets in POSIX shared memory, two in turn.  Knows nothing of vLLM."""

import shutil
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.sender import BucketSender, NamedTensors, padded_bytes
from megatron_drmas.weight_sync.transport import Route, Transport, register_transport
from megatron_drmas.weight_sync.verify import digest

FOLDER = "/dev/shm"


class ShmSender(BucketSender):
    """Copies buckets into segments that belong to this process and vanish with it, however it ends.

    `next_bucket` raises `WeightSyncError` when /dev/shm is too small.
    """

    _slots: tuple[SharedMemory | None, SharedMemory | None] = (None, None)  # the next bucket goes to the first

    def _send(self, bucket: NamedTensors) -> dict:
        segment = self._segment(sum(padded_bytes(tensor, self._dtype) for _, tensor in bucket))
        memory = torch.frombuffer(segment.buf, dtype=torch.uint8)
        offsets, offset = [], 0
        for name, tensor in bucket:
            dtype = self._dtype or tensor.dtype
            target = memory[offset : offset + tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)
            target.copy_(tensor.detach())
            if self._verify:
                self.digests[name] = digest(target)
            offsets.append(offset)
            offset += padded_bytes(tensor, dtype)
        return {"offsets": offsets, "segment": segment.name}

    def close(self) -> None:
        for segment in self._slots:
            _free(segment)
        self._slots = (None, None)

    def _segment(self, size: int) -> SharedMemory:
        segment, other = self._slots
        if segment is None or segment.size < size:
            _free(segment)
            self._slots = (None, other)
            available = shutil.disk_usage(FOLDER).free
            if available < size:
                raise WeightSyncError(
                    f"{FOLDER} has {available} bytes free and a bucket takes {size}: enlarge it (docker run --shm-size), "
                    "or send smaller buckets"
                )
            segment = SharedMemory(create=True, size=size)
        self._slots = (other, segment)
        return segment


@register_transport("shm")
class ShmTransport(Transport):
    """Shared memory of one machine, for CPUs and for actors that are cut into pipeline stages."""

    @classmethod
    def objection(cls, route: Route) -> str | None:
        return "actor and engines are on several nodes, which share no memory" if route.nodes > 1 else None

    @classmethod
    def engine_class(cls) -> type:
        from megatron_drmas.weight_sync.shm import ShmWeightTransferEngine

        return ShmWeightTransferEngine

    def sender(
        self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None, publish: bool, verify: bool
    ) -> ShmSender:
        return ShmSender(tensors, bucket_bytes, dtype, publish, verify)


def _free(segment: SharedMemory | None) -> None:
    if segment is not None:
        segment.close()
        segment.unlink()
