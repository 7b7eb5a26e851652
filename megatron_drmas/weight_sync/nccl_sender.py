"""Actor's side of vLLM's built-in `nccl` back end: broadcast to engines on GPUs of their own.  Untested here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_drmas.weight_sync.sender import BucketSender, NamedTensors
from megatron_drmas.weight_sync.transport import Route, Transport, register_transport
from megatron_drmas.weight_sync.verify import digest


class NcclSender(BucketSender):
    """Enqueues a broadcast per tensor and returns; the GPU waits for the engines' side, the host does not.

    The group has one sender, so the actor must have pipeline 1; its other tensor-parallel ranks pass publish=False.
    Follows vLLM 0.32's unpacked format; untested here.

    Args:
        communicator: of `NcclTransport.join`; None on ranks that do not publish.
    """

    def __init__(
        self,
        communicator: Any,
        tensors: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        publish: bool = True,
        verify: bool = False,
    ):
        super().__init__(tensors, bucket_bytes, dtype, publish, verify)
        self._communicator = communicator
        self._alive: tuple[list[Tensor], list[Tensor]] = ([], [])  # what the last two buckets' broadcasts read

    def _send(self, bucket: NamedTensors) -> dict:
        tensors = [tensor.detach().to(self._dtype or tensor.dtype).contiguous() for _, tensor in bucket]
        if self._verify:
            self.digests |= {name: digest(tensor) for (name, _), tensor in zip(bucket, tensors)}
        for tensor in tensors:
            self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        self._alive = (self._alive[1], tensors)
        return {}

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._alive = ([], [])


@register_transport("nccl")
class NcclTransport(Transport):
    """NCCL, to engines on GPUs of their own, on any node: one sender and every engine's workers make a group.  Untested here."""

    joins = True

    def __init__(self) -> None:
        self._communicator: Any = None

    @classmethod
    def objection(cls, route: Route) -> str | None:
        if route.device != "cuda" or route.shared:
            return "NCCL has no two ranks on one GPU" if route.device == "cuda" else "NCCL needs GPUs"
        return "its group has one sender, and every pipeline stage would be one" if route.pipeline > 1 else None

    @classmethod
    def engine_init_infos(cls, address: str, port: int, engines: int, tensor: int) -> list[dict]:
        shared = {"master_address": address, "master_port": port, "world_size": 1 + engines * tensor, "packed": False}
        return [{**shared, "rank_offset": 1 + index * tensor} for index in range(engines)]

    def join(self, info: dict) -> None:
        """Join the group with any of `engine_init_infos`; once per run."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._communicator = trainer_init(info)

    def sender(
        self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None, publish: bool, verify: bool
    ) -> NcclSender:
        return NcclSender(self._communicator, tensors, bucket_bytes, dtype, publish, verify)
