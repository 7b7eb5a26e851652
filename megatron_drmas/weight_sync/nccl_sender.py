"""Actor's side of vLLM's built-in `nccl` back end: broadcast to engines on GPUs of their own.  Untested here."""

from typing import Any, Iterable, Optional

import torch
from torch import Tensor

from megatron_drmas.weight_sync.sender import BucketSender, NamedTensors
from megatron_drmas.weight_sync.verify import digest


def engine_init_infos(master_address: str, master_port: int, engines: int, tensor: int) -> list[dict]:
    """What `Engine.init_transfer` needs, per engine of `tensor` workers: all of them and one sender make a group.

    The engines' calls and the sender's `join` must run at the same time.
    """
    shared = {"master_address": master_address, "master_port": master_port, "world_size": 1 + engines * tensor, "packed": False}
    return [{**shared, "rank_offset": 1 + index * tensor} for index in range(engines)]


def join(info: dict) -> Any:
    """The sender's end of the group; once per run, on the rank that publishes.

    Args:
        info: any of `engine_init_infos`.

    Returns:
        vLLM's communicator, for `NcclSender`.
    """
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init(info)


class NcclSender(BucketSender):
    """Enqueues a broadcast per tensor and returns; the GPU waits for the engines' side, the host does not.

    The group has one sender, so the actor must have pipeline 1; its other tensor-parallel ranks pass publish=False.
    Follows vLLM 0.32's unpacked format; untested here.

    Args:
        communicator: of `join`; None on ranks that do not publish.
    """

    def __init__(
        self, communicator: Any, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: Optional[torch.dtype] = None,
        publish: bool = True, verify: bool = False,
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
