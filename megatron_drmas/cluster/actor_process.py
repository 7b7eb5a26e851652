"""An actor rank that can also send its weights to engines."""

from typing import Optional

import torch
from megatron.core import parallel_state

from checkpoints_conv.export import iter_hf_tensors
from megatron_drmas.actor.policy_actor import PolicyActor
from megatron_drmas.weight_sync.shm_sender import ShmSender

BUCKET_BYTES = 256 * 2**20


class ActorProcess(PolicyActor):
    """`PolicyActor` plus the sender's side of a weight update."""

    _sender: Optional[ShmSender] = None

    def begin_send(self, dtype: str, verify: bool) -> None:
        """Prepare to send every tensor once.

        Args:
            dtype: of the engines' weights, such as "float32".
            verify: digest what is sent, for `sent_digests`.
        """
        publish = parallel_state.get_tensor_model_parallel_rank() == 0
        tensors = iter_hf_tensors([self.model], self.spec) if parallel_state.get_data_parallel_rank() == 0 else []
        self._sender = ShmSender(tensors, BUCKET_BYTES, getattr(torch, dtype), publish, verify)

    def next_bucket(self) -> Optional[dict]:
        """The next bucket: its update info, {} on a rank that only takes part, None when all has been sent."""
        return self._sender.next_bucket()

    def end_send(self) -> dict[str, str]:
        """Free the shared memory; the digests of what this rank sent, by HF name."""
        self._sender.close()
        return self._sender.digests
