"""An actor's weights to its engines; importing this package registers the transports, in the order in which `auto` tries them."""

import megatron_drmas.weight_sync.ipc_sender
import megatron_drmas.weight_sync.nccl_sender
import megatron_drmas.weight_sync.shm_sender  # noqa: F401  registers
