"""An actor rank that can also send its weights to engines."""

from typing import Any, Optional

import torch
from megatron.core import parallel_state

from checkpoints_conv.megatron.export import iter_hf_tensors
from megatron_drmas.actor.policy_actor import PolicyActor
from megatron_drmas.weight_sync.sender import BucketSender

BUCKET_BYTES = 256 * 2**20


class ActorProcess(PolicyActor):
    """`PolicyActor` plus the sender's side of a weight update.  Only the transfer `shm` has run here; the others need GPUs."""

    _communicator: Any = None
    _sender: Optional[BucketSender] = None

    def join_engines(self, info: dict) -> None:
        """Meet the engines, for the transfer `nccl`; called on rank 0 while the engines run `init_transfer`."""
        from megatron_drmas.weight_sync.nccl_sender import join

        self._communicator = join(info)

    def begin_send(self, transfer: str, dtype: str, verify: bool) -> None:
        """Prepare to send every tensor once.

        Args:
            transfer: shm | ipc | nccl.
            dtype: of the engines' weights, such as "float32".
            verify: digest what is sent, for `end_send`.
        """
        first_replica = parallel_state.get_data_parallel_rank() == 0
        leads = first_replica and parallel_state.get_tensor_model_parallel_rank() == 0
        tensors = iter_hf_tensors([self.model], self.spec) if first_replica or transfer == "ipc" else []
        arguments = (tensors, BUCKET_BYTES, getattr(torch, dtype))
        if transfer == "shm":
            from megatron_drmas.weight_sync.shm_sender import ShmSender

            self._sender = ShmSender(*arguments, publish=leads, verify=verify)
        elif transfer == "ipc":
            from megatron_drmas.weight_sync.ipc_sender import IpcSender

            self._sender = IpcSender(*arguments, publish=True, verify=verify)
        else:
            from megatron_drmas.weight_sync.nccl_sender import NcclSender

            self._sender = NcclSender(self._communicator, *arguments, publish=leads, verify=verify)

    def next_bucket(self) -> Optional[dict]:
        """The next bucket: its update info, {} on a rank that only takes part, None when all has been sent."""
        return self._sender.next_bucket()

    def end_send(self) -> dict[str, str]:
        """Free what carried the data; the digests of what this rank sent, by HF name."""
        self._sender.close()
        return self._sender.digests
