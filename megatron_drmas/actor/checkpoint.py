"""An actor's state as a Megatron sharded checkpoint: model, optimizer, schedule and random states."""

import os
import queue
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.storage import WriteResult

from megatron_drmas.actor.optimizer import configure_again, separate_steps
from megatron_drmas.config.schema import ParallelConfig


class BackgroundSave:
    """A checkpoint that a thread of this process writes while training goes on; constructed on every rank at once.

    The constructor copies to the host what this rank writes, as large as this rank's share of the files; the copy is freed
    when it is on the disk.  The files are in a folder beside `path` until `finish` renames it; an existing checkpoint there
    is replaced.  The folder must be on storage that all ranks share.

    The plan, the files and their metadata are Megatron-Core's.  Its own callers of an `AsyncRequest` are not used: they fork,
    or spawn, processes that outlive a killed rank and wait forever for one that the machine has ended.
    """

    def __init__(
        self,
        path: str,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        parallel: ParallelConfig,
        trust_region_betas: dict[str, float],
    ):
        self._target = Path(path)
        self._partial = self._target.with_name(self._target.name + ".incomplete")
        if dist.get_rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        dist.barrier()
        state = _state(model, optimizer, schedule, loading=False)
        state["layout"] = _layout(parallel)
        state["trust_region_betas"] = trust_region_betas
        state["random"] = _random_object(_random_states())
        self._results: queue.Queue = queue.Queue()
        filesystem_async._results_queue = self._results  # or else it starts a process for one
        request = dist_checkpointing.save(state, str(self._partial), async_sharded_save=True)
        del state
        self._finish = request.finalize_fns
        self._error: BaseException | None = None
        files, transforms = [], None
        if request.async_fn is not None:  # this rank has something to write
            files, transforms = [_copy(bucket) for bucket in request.async_fn_args[1]], request.async_fn.args[0]
        self._thread = threading.Thread(target=self._write, args=(files, transforms), name="checkpoint", daemon=True)
        self._thread.start()

    def written(self) -> bool:
        """Whether this rank's files are on the disk.

        Raises:
            OSError: they could not be written.
        """
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Wait for the files, write the metadata and rename the folder; collective.

        Raises:
            OSError: this rank's files could not be written.  Ask `written` of every rank first: the others then wait for it.
        """
        self._thread.join()
        self.written()
        for finish in self._finish:
            finish()
        if dist.get_rank() == 0:
            if self._target.exists():
                shutil.rmtree(self._target)
            os.replace(self._partial, self._target)
        dist.barrier()

    def _write(self, files: list[WriteBucket], transforms: Any) -> None:
        try:
            results: dict[int, list[WriteResult]] = {}
            while files:
                results[len(results)] = _write_file(files.pop(0), transforms)  # its copy ends with the call
            if results:
                self._results.put(results)
        except BaseException as error:  # `written` raises it
            files.clear()
            self._error = error.with_traceback(None)


def _copy(bucket: WriteBucket) -> WriteBucket:
    """A file's content with tensors of its own in the host's memory; those of `bucket` are let go one by one."""
    path, key, (objects, tensors) = bucket
    copies = []
    while tensors:
        item, tensor = tensors.pop(0)
        copies.append((item, tensor.detach().to("cpu", copy=True)))
    return path, key, (objects, copies)


def _write_file(bucket: WriteBucket, transforms: Any) -> list[WriteResult]:
    """Write a file and bring it to the disk.

    Raises:
        OSError: names the file and what is free on its disk.
    """
    answers: queue.Queue = queue.Queue()
    pending: queue.Queue = queue.Queue()
    pending.put(0)
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, answers, pending, use_fsync=True)
    _, result = answers.get_nowait()
    if isinstance(result, Exception):
        free = shutil.disk_usage(Path(bucket[0]).parent).free / 2**30
        raise OSError(f"{bucket[0]} could not be written, {free:.2f} GiB are free there: {result}")
    return result


def load_checkpoint(
    path: str,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    parallel: ParallelConfig,
) -> dict:
    """Restore what a `BackgroundSave` wrote, and return its `trust_region_betas`; collective.

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
