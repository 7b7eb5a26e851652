"""An actor's state as a Megatron sharded checkpoint: model, optimizer, schedule and random states."""

import os
import queue
import random
import shutil
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_drmas.actor.optimizer import configure_again, separate_steps
from megatron_drmas.config.schema import ParallelConfig


def save_checkpoint(
    path: str,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    parallel: ParallelConfig,
    trust_region_betas: dict[str, float],
) -> None:
    """Write a checkpoint folder beside `path`, then rename it; an existing checkpoint there is replaced.

    Collective.  The folder must be on storage that all ranks share.
    """
    target = Path(path)
    temp_path = target.with_name(target.name + ".incomplete")
    if dist.get_rank() == 0:
        shutil.rmtree(temp_path, ignore_errors=True)
        temp_path.mkdir(parents=True)
    dist.barrier()
    state = _state(model, optimizer, schedule, loading=False)
    state["layout"] = _layout(parallel)
    state["trust_region_betas"] = trust_region_betas
    state["random"] = _random_object(_random_states())
    # A synchronous save's results stay in this process; Megatron's own queue lives in a process that outlives a killed rank.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(temp_path))
    dist.barrier()
    if dist.get_rank() == 0:
        if target.exists():
            shutil.rmtree(target)
        os.replace(temp_path, target)
    dist.barrier()


def load_checkpoint(
    path: str,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    parallel: ParallelConfig,
) -> dict:
    """Restore what `save_checkpoint` wrote, and return its `trust_region_betas`; collective.

    In the layout that saved it training continues bit for bit.  Another layout gets the same model, optimizer and
    schedule, and keeps its own random states, which belong to ranks.  The settings of optimizer and schedule are those of
    the configuration; the checkpoint brings moments and the count of steps.

    Raises:
        FileNotFoundError: `path` holds no complete checkpoint.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise FileNotFoundError(f"{path} holds no complete actor checkpoint (metadata.json is missing)")
    common = dist_checkpointing.load_common_state_dict(path)
    same_layout = common["layout"] == _layout(parallel)
    state = _state(model, optimizer, schedule, loading=True)
    if same_layout:
        state["random"] = _random_object(None)
    state = dist_checkpointing.load(state, path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    separate_steps(optimizer)
    configure_again(optimizer)
    schedule.num_steps = 0  # its load adds the saved count to its own
    schedule.load_state_dict(state["schedule"])
    if same_layout:
        _set_random_states(state["random"])
    return common["trust_region_betas"]


def _state(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler, loading: bool
) -> dict:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded_model = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": sharded_model,
        "optimizer": optimizer.sharded_state_dict(sharded_model, is_loading=loading, metadata=metadata),
        "schedule": schedule.state_dict(),
    }


def _layout(parallel: ParallelConfig) -> list[int]:
    return [parallel.tensor, parallel.pipeline, parallel.data]


def _random_object(states: "dict | None") -> ShardedObject:
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _random_states() -> dict:
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    states["tracker"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
