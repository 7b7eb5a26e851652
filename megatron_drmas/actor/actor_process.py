"""What the driver calls in an actor's process: a rank of the policy's Megatron side that can also send its weights.

This module imports neither torch nor Megatron, so that a process can receive what to build before its variables are set.
"""

from typing import TYPE_CHECKING

from megatron_drmas.actor.settings import ActorSettings

if TYPE_CHECKING:
    from megatron_drmas.batch import TurnBatch
    from megatron_drmas.weight_sync.sender import BucketSender

BUCKET_BYTES = 256 * 2**20


class ActorProcess:
    """One rank's `PolicyActor` and its end of the policy's transport; the arguments are `PolicyActor`'s."""

    def __init__(self, settings: ActorSettings, rank: int, world_size: int, master_addr: str, master_port: int):
        from megatron_drmas.actor.policy_actor import PolicyActor
        from megatron_drmas.weight_sync.transport import TRANSPORTS

        self._actor = PolicyActor(settings, rank, world_size, master_addr, master_port)
        self._transport = TRANSPORTS[settings.transport]()
        self._sender: BucketSender | None = None

    def initialize(self, weights: str) -> dict:
        """`PolicyActor.initialize`."""
        return self._actor.initialize(weights)

    def hold(self, parameters: bool, rest: bool) -> int:
        """`Residency.hold`; the bytes that are on the device then."""
        self._actor.residency.hold(parameters, rest)
        return self._actor.residency.on_device

    def update(self, batch: "TurnBatch", step: int) -> dict:
        """`PolicyActor.update`."""
        self._actor.residency.require_whole("update")
        return self._actor.update(batch, step)

    def begin_save(self, path: str) -> None:
        """`PolicyActor.begin_save`."""
        self._actor.residency.require_whole("save")
        self._actor.begin_save(path)

    def checkpoint_written(self) -> bool:
        """`PolicyActor.checkpoint_written`."""
        return self._actor.checkpoint_written()

    def finish_save(self) -> None:
        """`PolicyActor.finish_save`."""
        self._actor.finish_save()

    def load(self, path: str) -> None:
        """`PolicyActor.load`."""
        self._actor.residency.require_whole("load")
        self._actor.load(path)

    def export_hf(self, path: str) -> None:
        """`PolicyActor.export_hf`."""
        self._actor.residency.require_parameters("export")
        self._actor.export_hf(path)

    def join_transfer_group(self, info: dict) -> None:
        """Join the engines' group, while they initialize their end of the transport; called on the rank that sends of a stage."""
        self._transport.join(info)

    def begin_send(self, dtype: str, verify: bool) -> None:
        """Prepare to send every tensor once.

        Args:
            dtype: of the engines' weights, such as "float32".
            verify: digest what is sent, for `end_send`.
        """
        import torch
        from megatron.core import parallel_state

        from checkpoints_conv.megatron.export import iter_hf_tensors

        self._actor.residency.require_parameters("a weight update")
        takes_part = self._transport.every_rank_publishes or parallel_state.get_data_parallel_rank() == 0
        publishes = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
        self._sender = self._transport.sender(
            iter_hf_tensors([self._actor.model], self._actor.spec) if takes_part else [],
            BUCKET_BYTES,
            getattr(torch, dtype),
            publish=publishes or self._transport.every_rank_publishes,
            verify=verify,
        )

    def next_bucket(self) -> dict | None:
        """The next bucket: its update info, {} on a rank that only takes part, None when all has been sent."""
        return self._sending().next_bucket()

    def end_send(self) -> dict[str, str]:
        """Free what carried the data; the digests of what this rank sent, by HF name."""
        sender = self._sending()
        sender.close()
        return sender.digests

    def _sending(self) -> "BucketSender":
        if self._sender is None:
            raise RuntimeError("begin_send has not been called")
        return self._sender
