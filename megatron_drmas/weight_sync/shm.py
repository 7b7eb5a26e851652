"""Engine's side of the `shm` back end of vLLM's weight-transfer API."""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.shm_sender import FOLDER


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """A bucket: where each tensor starts in which segment."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    segment: str


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads buckets from shared memory into the model's own parameters, in place; `extension` keeps vLLM from packing them."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._mapped: dict[str, mmap.mmap] = {}

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to agree on: every bucket names its segment."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: buckets are loaded as they come."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        memory = torch.frombuffer(self._map(update_info.segment), dtype=torch.uint8)
        weights: list[tuple[str, torch.Tensor]] = []
        for name, dtype_name, shape, offset in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, update_info.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            weights.append((name, memory[offset : offset + size].view(dtype).view(shape)))
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        while self._mapped:
            self._mapped.popitem()[1].close()

    def _map(self, segment: str) -> mmap.mmap:
        if segment not in self._mapped:
            try:
                descriptor = os.open(os.path.join(FOLDER, segment), os.O_RDWR)
            except FileNotFoundError as error:
                raise WeightSyncError(
                    f"shared-memory segment {segment!r} is gone: its sender ended or aborted the update"
                ) from error
            try:
                self._mapped[segment] = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        return self._mapped[segment]
