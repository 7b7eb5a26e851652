"""Actor's side of vLLM's built-in `ipc` back end: engines on the same GPUs read the actor's memory.  Untested here."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megatron_drmas.weight_sync.sender import BucketSender, NamedTensors
from megatron_drmas.weight_sync.transport import Route, Transport, register_transport
from megatron_drmas.weight_sync.verify import digest


class IpcSender(BucketSender):
    """Publishes CUDA IPC handles; nothing is copied unless a tensor must be cast or made contiguous.

    An engine's worker opens the handle of its own GPU, so every rank publishes, of all data-parallel replicas, and
    `synchronize` puts the handles of one bucket together.  A worker's GPU must hold a rank of every pipeline stage:
    this back end serves actors with pipeline 1.  Follows vLLM 0.32's unpacked format (`init_info` {}); untested here.
    """

    _alive: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # what the last two buckets' handles point to

    def _send(self, bucket: NamedTensors) -> dict:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        tensors = [tensor.detach().to(self._dtype or tensor.dtype).contiguous() for _, tensor in bucket]
        if self._verify:
            self.digests |= {name: digest(tensor) for (name, _), tensor in zip(bucket, tensors)}
        handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors]
        torch.cuda.current_stream().synchronize()
        self._alive = (self._alive[1], tensors)
        return {"ipc_handles": handles}

    def close(self) -> None:
        self._alive = ([], [])
        torch.cuda.ipc_collect()


@register_transport("ipc")
class IpcTransport(Transport):
    """CUDA IPC, where engines share the actor's GPUs.  Untested here."""

    every_rank_publishes = True

    @classmethod
    def objection(cls, route: Route) -> str | None:
        if route.device != "cuda" or not route.shared:
            return "the engines are not on the actor's GPUs"
        return "a GPU has the parameters of one pipeline stage only" if route.pipeline > 1 else None

    def sender(
        self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None, publish: bool, verify: bool
    ) -> IpcSender:
        return IpcSender(tensors, bucket_bytes, dtype, publish=True, verify=verify)
