"""One policy's processes: its Megatron actor ranks and its vLLM engines."""

import os
from functools import partial
from pathlib import Path
from typing import Any, Awaitable, Callable, Optional

import ray

from megatron_drmas.actor.precision import environment
from megatron_drmas.cluster.placement import Slot
from megatron_drmas.cluster.process import RemoteProcess
from megatron_drmas.concurrency import together
from megatron_drmas.config.schema import PrecisionConfig, RunConfig
from megatron_drmas.rollout.batch import TurnBatch
from megatron_drmas.rollout.requests import EngineSettings, Request, Sample
from megatron_drmas.weight_sync.nccl_sender import engine_init_infos
from megatron_drmas.weight_sync.synchronise import EngineCalls, SenderCalls, SyncStats, synchronise

SUBMIT_TIMEOUT_S = 60.0


class PolicyRuntime:
    """Starts, drives and ends a policy's processes.

    Args:
        name: of the policy.
        config: the run.
        stop_ids: token ids that end a response.
        device: cpu | cuda.
        actors: a slot per actor rank; none for a frozen policy.
        engines: a slot per engine.
        bundles: placement group with a bundle per node; None on CPUs.
        logs: folder of the processes' log files.
    """

    def __init__(
        self, name: str, config: RunConfig, stop_ids: list[int], device: str, actors: list[Slot], engines: list[Slot],
        bundles: Optional[Any], logs: Path,
    ):
        self.name = name
        self._config = config
        self._policy = config.policies[name]
        self._stop_ids = stop_ids
        self._device = device
        self._step_timeout_s = config.cluster.step_timeout_s
        self._transfer = transfer(config, name, device)
        self._takes_turns = device == "cuda" and config.cluster.colocate and bool(actors)
        self._asleep = False

        def process(kind: str, index: int, slot: Slot, threads: int) -> RemoteProcess:
            return RemoteProcess(
                f"{kind} {index} of policy {name!r}", logs / f"{name}_{kind}_{index}.log", _environment(kind, slot, threads, config.precision),
                asynchronous=kind == "engine", bundle=None if bundles is None else (bundles, slot.node),
            )

        self._actors = [process("actor", rank, slot, config.cluster.actor_threads) for rank, slot in enumerate(actors)]
        self._engines = [process("engine", index, slot, config.cluster.engine_threads) for index, slot in enumerate(engines)]

    @property
    def has_actor(self) -> bool:
        return bool(self._actors)

    async def start(self) -> None:
        """Bring up every process; the actor with the model folder's weights."""
        await together([*(self._start_engine(engine) for engine in self._engines), self._start_actor()])
        if self._transfer == "nccl" and self._actors:
            timeout_s = self._config.cluster.start_timeout_s
            infos = engine_init_infos(*await self._actors[0].address(timeout_s), len(self._engines), self._policy.engine.tensor)
            await together([
                self._actors[0].call("join_engines", infos[0], timeout_s=timeout_s),
                *(engine.call("init_transfer", info, timeout_s=timeout_s) for engine, info in zip(self._engines, infos)),
            ])

    async def _start_engine(self, engine: RemoteProcess) -> None:
        settings = EngineSettings(
            name=self.name, model=self._policy.model, stop_ids=self._stop_ids, engine=self._policy.engine,
            dtype=self._config.precision.rollout, seed=self._config.seed, deterministic=self._config.deterministic, device=self._device,
            threads=self._config.cluster.engine_threads, transfer=self._transfer, sleep=self._takes_turns,
        )
        timeout_s = self._config.cluster.start_timeout_s
        await engine.build("megatron_drmas.rollout.engine:Engine", settings, timeout_s=timeout_s)
        await engine.call("start", timeout_s=timeout_s)

    async def _start_actor(self) -> None:
        if not self._actors:
            return
        from megatron_drmas.actor.settings import ActorSettings

        config, timeout_s = self._config, self._config.cluster.start_timeout_s
        settings = ActorSettings(
            name=self.name, policy=self._policy, precision=config.precision, loss=config.algorithm.loss,
            temperature=config.rollout.temperature, seed=config.seed, deterministic=config.deterministic, device=self._device,
            total_steps=config.steps, updates_per_batch=config.algorithm.updates_per_batch,
        )
        host, port = await self._actors[0].address(timeout_s)
        await together((
            actor.build("megatron_drmas.cluster.actor_process:ActorProcess", settings, rank, len(self._actors), host, port, timeout_s=timeout_s)
            for rank, actor in enumerate(self._actors)
        ))
        await self._on_all_ranks("initialize", self._policy.model, timeout_s=timeout_s)

    async def update(self, batch: TurnBatch, step: int) -> dict:
        """Optimizer steps on the policy's rows; the metrics of `PolicyActor.update`.

        Engines on the actor's GPUs sleep from here until the next `sync_weights`.
        """
        if self._takes_turns and not self._asleep:
            await self._on_all_engines("sleep")
            self._asleep = True
        return (await self._on_all_ranks("update", ray.put(batch), step, timeout_s=self._step_timeout_s))[0]

    async def sync_weights(self, version: int, verify: bool) -> SyncStats:
        """Bring the engines to the actor's weights, and compare them tensor by tensor if asked.

        Raises:
            WeightSyncError: names the rank, the engine or the tensor at fault.
        """
        timeout_s = self._config.cluster.sync_timeout_s

        def remote(process: RemoteProcess, method: str) -> Callable[..., Awaitable[Any]]:
            return lambda *args: process.call(method, *args, timeout_s=timeout_s)

        senders = [
            SenderCalls(
                actor.name, partial(remote(actor, "begin_send"), self._transfer, self._config.precision.rollout),
                remote(actor, "next_bucket"), remote(actor, "end_send"),
            )
            for actor in self._actors
        ]
        engines = [
            EngineCalls(engine.name, *(remote(engine, method) for method in ("begin_update", "load_bucket", "finish_update", "weight_digests")))
            for engine in self._engines
        ]
        if self._asleep:
            await self._on_all_engines("wake_up", "weights")
        stats = await synchronise(senders, engines, version, timeout_s, verify)
        if self._asleep:
            await self._on_all_engines("wake_up", "kv_cache")
            self._asleep = False
        return stats

    async def save(self, folder: Path) -> None:
        """Write the actor's checkpoint."""
        await self._on_all_ranks("save", str(folder.resolve()), timeout_s=self._step_timeout_s)

    async def load(self, folder: Path) -> None:
        """Restore the actor."""
        await self._on_all_ranks("load", str(folder.resolve()), timeout_s=self._step_timeout_s)

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._on_all_ranks("export_hf", str(folder.resolve()), timeout_s=self._step_timeout_s)

    def engine_handles(self) -> list["EngineProxy"]:
        """What a `PolicyClient` talks to."""
        return [EngineProxy(engine) for engine in self._engines]

    async def stop(self) -> None:
        """End all processes."""
        for process in self._actors + self._engines:
            process.kill()

    async def _on_all_engines(self, method: str, *args: Any) -> None:
        await together(engine.call(method, *args, timeout_s=self._config.cluster.sync_timeout_s) for engine in self._engines)

    async def _on_all_ranks(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return await together((actor.call(method, *args, timeout_s=timeout_s) for actor in self._actors))


class EngineProxy:
    """`EngineHandle` of an engine process."""

    def __init__(self, process: RemoteProcess):
        self._process = process

    def submit(self, requests: list[Request]) -> Awaitable[None]:
        return self._process.call("submit", requests, timeout_s=SUBMIT_TIMEOUT_S)

    def poll(self, timeout_s: float) -> Awaitable[list[Sample]]:
        return self._process.call("poll", timeout_s, timeout_s=timeout_s + SUBMIT_TIMEOUT_S)


def transfer(config: RunConfig, policy: str, device: str) -> str:
    """The back end of vLLM's weight-transfer API for a policy: shm on CPUs, and for an actor that is cut into pipeline
    stages, which the GPU back ends cannot serve; on GPUs ipc where engines share the actor's, nccl otherwise."""
    if device == "cpu" or config.policies[policy].parallel.pipeline > 1:
        return "shm"
    return "ipc" if config.cluster.colocate else "nccl"


def _environment(kind: str, slot: Slot, threads: int, precision: PrecisionConfig) -> dict[str, str]:
    """Variables of a process that must be set before torch, Megatron or vLLM are imported."""
    variables = {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    }
    if slot.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slot.devices))
    else:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if not os.environ.get("RAY_ADDRESS"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if kind == "engine":
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        variables |= {} if slot.devices else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if kind == "actor":
        variables |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment(precision)}
    return variables
