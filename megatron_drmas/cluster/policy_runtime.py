"""One policy's processes: its Megatron actor ranks and its vLLM engines."""

import asyncio
from pathlib import Path
from typing import Any, Awaitable, Optional

import ray

from megatron_drmas.cluster.placement import Slot
from megatron_drmas.cluster.process import RemoteProcess
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.rollout.batch import TurnBatch
from megatron_drmas.rollout.requests import EngineSettings, Request, Sample
from megatron_drmas.weight_sync.verify import compare

SUBMIT_TIMEOUT_S = 60.0


class PolicyRuntime:
    """Starts, drives and ends a policy's processes.

    Args:
        name: of the policy.
        config: the run.
        device: cpu | cuda.
        actors: a slot per actor rank; none for a frozen policy.
        engines: a slot per engine.
        bundles: placement group with a bundle per node; None on CPUs.
        logs: folder of the processes' log files.
    """

    def __init__(self, name: str, config: RunConfig, device: str, actors: list[Slot], engines: list[Slot], bundles: Optional[Any], logs: Path):
        self.name = name
        self._config = config
        self._policy = config.policies[name]
        self._device = device
        self._step_timeout_s = config.cluster.step_timeout_s

        def process(kind: str, index: int, slot: Slot, threads: int) -> RemoteProcess:
            return RemoteProcess(
                f"{kind} {index} of policy {name!r}", logs / f"{name}_{kind}_{index}.log", _environment(kind, slot, threads),
                asynchronous=kind == "engine", bundle=None if bundles is None else (bundles, slot.node),
            )

        self._actors = [process("actor", rank, slot, config.cluster.actor_threads) for rank, slot in enumerate(actors)]
        self._engines = [process("engine", index, slot, config.cluster.engine_threads) for index, slot in enumerate(engines)]

    @property
    def has_actor(self) -> bool:
        return bool(self._actors)

    async def start(self) -> None:
        """Bring up every process; the actor with the model folder's weights."""
        await _all(*(self._start_engine(engine) for engine in self._engines), self._start_actor())

    async def _start_engine(self, engine: RemoteProcess) -> None:
        settings = EngineSettings(
            name=self.name, model=self._policy.model, engine=self._policy.engine, dtype=self._config.precision.rollout,
            seed=self._config.seed, deterministic=self._config.deterministic, device=self._device,
            threads=self._config.cluster.engine_threads,
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
        await _all(*(
            actor.build("megatron_drmas.cluster.actor_process:ActorProcess", settings, rank, len(self._actors), host, port, timeout_s=timeout_s)
            for rank, actor in enumerate(self._actors)
        ))
        await self._on_all_ranks("initialize", self._policy.model, timeout_s=timeout_s)

    async def update(self, batch: TurnBatch, step: int) -> dict:
        """Optimizer steps on the policy's rows; the metrics of `PolicyActor.update`."""
        return (await self._on_all_ranks("update", ray.put(batch), step, timeout_s=self._step_timeout_s))[0]

    async def sync_weights(self, version: int, verify: bool) -> None:
        """Bring the engines to the actor's weights, and compare them tensor by tensor if asked.

        Raises:
            WeightSyncError: an engine computes with something else than what was sent.
            ProcessFailure: a sender or a receiver died or did not answer in time.
        """
        timeout_s = self._config.cluster.sync_timeout_s
        await self._on_all_ranks("begin_send", self._config.precision.rollout, verify, timeout_s=timeout_s)
        await self._on_all_engines("begin_update", timeout_s=timeout_s)
        while True:
            buckets = await self._on_all_ranks("next_bucket", timeout_s=timeout_s)
            if all(bucket is None for bucket in buckets):
                break
            for bucket in filter(None, buckets):
                await self._on_all_engines("load_bucket", bucket, timeout_s=timeout_s)
        await self._on_all_engines("finish_update", version, timeout_s=timeout_s)
        digests = await self._on_all_ranks("end_send", timeout_s=timeout_s)
        if verify:
            sent = {name: digest for of_rank in digests for name, digest in of_rank.items()}
            for engine, loaded in zip(self._engines, await self._on_all_engines("weight_digests", timeout_s=timeout_s)):
                compare(sent, loaded, engine.name)

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

    async def _on_all_engines(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return await _all(*(engine.call(method, *args, timeout_s=timeout_s) for engine in self._engines))

    async def _on_all_ranks(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return await _all(*(actor.call(method, *args, timeout_s=timeout_s) for actor in self._actors))


class EngineProxy:
    """`EngineHandle` of an engine process."""

    def __init__(self, process: RemoteProcess):
        self._process = process

    def submit(self, requests: list[Request]) -> Awaitable[None]:
        return self._process.call("submit", requests, timeout_s=SUBMIT_TIMEOUT_S)

    def poll(self, timeout_s: float) -> Awaitable[list[Sample]]:
        return self._process.call("poll", timeout_s, timeout_s=timeout_s + SUBMIT_TIMEOUT_S)


async def _all(*awaitables: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables)


def _environment(kind: str, slot: Slot, threads: int) -> dict[str, str]:
    """Variables of a process that must be set before torch, Megatron or vLLM are imported."""
    variables = {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if slot.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slot.devices))
    else:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if kind == "engine" and not slot.devices:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if kind == "actor":
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables
