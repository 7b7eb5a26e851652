"""The process groups of one policy: torch.distributed and Megatron's parallel state, which is global to a process."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.devices import DEVICES

TIMEOUT = timedelta(minutes=10)


def initialize_groups(settings: ActorSettings, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    """Join the policy's process group and divide it; ranks run tensor first, then data, then pipeline.

    Raises:
        ValueError: `world_size` is not what the policy's layout asks for.
    """
    parallel = settings.policy.parallel
    if world_size != parallel.world_size:
        raise ValueError(
            f"policies.{settings.name}.parallel asks for tensor {parallel.tensor} x pipeline {parallel.pipeline} x "
            f"data {parallel.data} = {parallel.world_size} processes, but {world_size} were started"
        )
    device = DEVICES[settings.device]
    device.activate(rank)
    dist.init_process_group(
        device.collectives,
        store=_store(rank, world_size, master_addr, master_port),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor, pipeline_model_parallel_size=parallel.pipeline
    )
    seed = settings.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _store(rank: int, world_size: int, address: str, port: int) -> dist.TCPStore:
    """The group's store; rank 0 serves it on `address` only, whereas torch's own listener takes every interface."""
    listener = None
    if rank == 0:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    return dist.TCPStore(
        address, port, world_size, rank == 0, timeout=TIMEOUT, master_listen_fd=None if listener is None else listener.detach()
    )


def destroy_groups() -> None:
    """Leave all groups; the process can join others afterwards."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def owns_results() -> bool:
    """Whether this rank holds the step's token results: the last pipeline stage's first tensor-parallel rank."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def sum_over_ranks(values: torch.Tensor, device: str) -> torch.Tensor:
    """The sum of every rank's float64 vector, on every rank."""
    values = values.to(device)
    dist.all_reduce(values)
    return values.cpu()
