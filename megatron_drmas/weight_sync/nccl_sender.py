"""Actor's side of NCCL: broadcasts to engines on GPUs of their own, by one group for each pipeline stage.  Untested here."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_drmas.weight_sync.sender import BucketSender, NamedTensors
from megatron_drmas.weight_sync.transport import Route, Transport, register_transport
from megatron_drmas.weight_sync.verify import digest


class NcclSender(BucketSender):
    """Enqueues a broadcast per tensor and returns; the GPU waits for the engines' side, the host does not.

    A stage's group has one sender; its other tensor-parallel ranks pass publish=False.  Follows vLLM 0.32's unpacked format;
    untested here.

    Args:
        communicator: of `NcclTransport.join`; None on ranks that do not publish.
        place: further fields of every update info.
    """

    def __init__(
        self,
        communicator: Any,
        place: dict,
        tensors: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        publish: bool = True,
        verify: bool = False,
    ):
        super().__init__(tensors, bucket_bytes, dtype, publish, verify)
        self._communicator, self._place = communicator, place
        self._alive: tuple[list[Tensor], list[Tensor]] = ([], [])  # what the last two buckets' broadcasts read

    def _send(self, bucket: NamedTensors) -> dict:
        tensors = [tensor.detach().to(self._dtype or tensor.dtype).contiguous() for _, tensor in bucket]
        if self._verify:
            self.digests |= {name: digest(tensor) for (name, _), tensor in zip(bucket, tensors)}
        for tensor in tensors:
            self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        self._alive = (self._alive[1], tensors)
        return self._place

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._alive = ([], [])


@register_transport("nccl")
class NcclTransport(Transport):
    """vLLM's built-in back end, on any node: one sender and every engine's workers make a group.  Untested here."""

    joins = True

    def __init__(self) -> None:
        self._communicator: Any = None
        self._place: dict = {}

    @classmethod
    def objection(cls, route: Route) -> str | None:
        return _objection(route) or ("its group has one sender, and there are several stages" if route.pipeline > 1 else None)

    @classmethod
    def engine_init_infos(cls, addresses: Sequence[tuple[str, int]], engines: int, tensor: int) -> list[dict]:
        (address,) = addresses
        return _groups(address, engines, tensor)

    @classmethod
    def sender_init_infos(cls, addresses: Sequence[tuple[str, int]], engines: int, tensor: int) -> list[dict]:
        return [_groups(address, engines, tensor)[0] for address in addresses]

    def join(self, info: dict) -> None:
        """Join the group of one of `sender_init_infos`; once per run."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._communicator = trainer_init(info)

    def sender(
        self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None, publish: bool, verify: bool
    ) -> NcclSender:
        return NcclSender(self._communicator, self._place, tensors, bucket_bytes, dtype, publish, verify)


@register_transport("nccl_stages")
class NcclStagesTransport(NcclTransport):
    """As `nccl`, with a group for each pipeline stage of the actor, which sends what it has.  Untested here."""

    @classmethod
    def objection(cls, route: Route) -> str | None:
        return _objection(route) or ("nccl does it" if route.pipeline == 1 else None)

    @classmethod
    def engine_class(cls) -> type:
        from megatron_drmas.weight_sync.nccl_stages import NcclStagesEngine

        return NcclStagesEngine

    @classmethod
    def engine_init_infos(cls, addresses: Sequence[tuple[str, int]], engines: int, tensor: int) -> list[dict]:
        of_stages = [_groups(address, engines, tensor) for address in addresses]
        return [{"stages": list(of_engine)} for of_engine in zip(*of_stages)]

    @classmethod
    def sender_init_infos(cls, addresses: Sequence[tuple[str, int]], engines: int, tensor: int) -> list[dict]:
        infos = super().sender_init_infos(addresses, engines, tensor)
        return [{**info, "stage": stage} for stage, info in enumerate(infos)]

    def join(self, info: dict) -> None:
        super().join(info)
        self._place = {"stage": info["stage"]}


def _objection(route: Route) -> str | None:
    if route.device != "cuda":
        return "NCCL needs GPUs"
    return "NCCL has no two ranks on one GPU, and an engine is on a sender's" if route.meets else None


def _groups(address: tuple[str, int], engines: int, tensor: int) -> list[dict]:
    """What each engine joins a sender's group with, the sender being rank 0 of it."""
    host, port = address
    shared = {"master_address": host, "master_port": port, "world_size": 1 + engines * tensor, "packed": False}
    return [{**shared, "rank_offset": 1 + index * tensor} for index in range(engines)]
