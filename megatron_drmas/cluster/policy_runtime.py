"""One policy's processes: its Megatron actor ranks and its vLLM engines."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray

from megatron_drmas.actor.actor_process import ActorProcess
from megatron_drmas.actor.precision import environment
from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.batch import TurnBatch
from megatron_drmas.cluster.placement import Placement, Slot, gpus_of
from megatron_drmas.cluster.process import RemoteProcess
from megatron_drmas.cluster.schedule import Gpu, Resident, State
from megatron_drmas.concurrency import together
from megatron_drmas.config.plugins import plugin_environment
from megatron_drmas.config.schema import PrecisionConfig, RunConfig
from megatron_drmas.devices import DEVICES, Device
from megatron_drmas.rollout.engine import Engine
from megatron_drmas.rollout.engine_messages import EngineSettings, Request, Sample
from megatron_drmas.weight_sync.synchronize import EngineCalls, SenderCalls, SyncStats, synchronize
from megatron_drmas.weight_sync.transport import Route, choose_transport

SUBMIT_TIMEOUT_S = 60.0


class PolicyRuntime:
    """Starts, drives and ends a policy's processes.

    Args:
        name: of the policy.
        config: the run.
        stop_ids: token ids that end a response.
        device: cpu | cuda.
        placement: of every policy.
        bundles: placement group with a bundle per node; None on CPUs.
        logs: folder of the processes' log files.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        stop_ids: list[int],
        device: str,
        placement: Placement,
        bundles: Any | None,
        logs: Path,
    ):
        self.name = name
        self._config = config
        self._policy = config.policies[name]
        self._stop_ids = stop_ids
        self._device = device
        self._step_timeout_s = config.cluster.step_timeout_s
        self._slots = {"actor": placement.actors[name], "engines": placement.engines[name]}
        route = Route(device, placement.engines_on_actor(name), self._policy.parallel.pipeline, placement.nodes(name))
        self._transport = choose_transport(config.cluster.transport, route, name)
        own = {gpu for slots in self._slots.values() for gpu in gpus_of(slots)}
        self._takes_turns = bool(own & placement.crowded().keys())
        self._bytes: dict[str, list[dict[State, int]]] = {}  # role -> of each slot's devices

        def process(kind: type, role: str, index: int, slot: Slot, threads: int) -> RemoteProcess:
            return RemoteProcess(
                kind,
                f"{role} {index} of policy {name!r}",
                logs / f"{name}_{role}_{index}.log",
                _environment(role, DEVICES[device], slot, threads, config.precision) | plugin_environment(config.plugins),
                asynchronous=role == "engine",
                bundle=None if bundles is None else (bundles, slot.node),
            )

        threads = config.cluster.actor_threads or 1, config.cluster.engine_threads or 1  # `fit_to_machine` gives more
        self._actors: list[RemoteProcess[ActorProcess]] = [
            process(ActorProcess, "actor", *each, threads[0]) for each in enumerate(self._slots["actor"])
        ]
        self._engines: list[RemoteProcess[Engine]] = [
            process(Engine, "engine", *each, threads[1]) for each in enumerate(self._slots["engines"])
        ]

    @property
    def initial_state(self) -> State:
        """Of its residents when `start` has returned."""
        return State.AWAY if self._takes_turns else State.ON_DEVICE

    @property
    def has_actor(self) -> bool:
        return bool(self._actors)

    async def start(self) -> None:
        """Bring up every process; the actor with the model folder's weights.

        Where GPUs are shared, engines come first and fall asleep, so that each measures a device that it has for itself, and the
        actor goes to the host.
        """
        if self._takes_turns:
            await together(self._start_engine(engine) for engine in self._engines)
            await self.move_engines(State.ON_DEVICE, State.AWAY)
            if self._actors:
                await self._start_actor()
                await self.move_actor(State.ON_DEVICE, State.AWAY)
        else:
            await together([*(self._start_engine(engine) for engine in self._engines), self._start_actor()])
        if self._transport.joins and self._actors:
            timeout_s = self._config.cluster.start_timeout_s
            address = await self._actors[0].address(timeout_s)
            infos = self._transport.engine_init_infos(*address, len(self._engines), self._policy.engine.tensor)
            await together(
                [
                    self._actors[0].call(timeout_s, ActorProcess.join_transfer_group, infos[0]),
                    *(engine.call(timeout_s, Engine.init_transfer, info) for engine, info in zip(self._engines, infos)),
                ]
            )

    async def _start_engine(self, engine: RemoteProcess[Engine]) -> None:
        settings = EngineSettings(
            name=self.name,
            model=self._policy.model,
            stop_ids=self._stop_ids,
            engine=self._policy.engine,
            dtype=self._config.precision.rollout,
            seed=self._config.seed,
            deterministic=self._config.deterministic,
            device=self._device,
            threads=self._config.cluster.engine_threads or 1,
            transport=self._transport.name,
            sleep=self._takes_turns,
        )
        timeout_s = self._config.cluster.start_timeout_s
        await engine.build(timeout_s, settings)
        held = (await engine.call(timeout_s, Engine.start))["bytes"]
        states = {State.ON_DEVICE: held["weights"] + held["cache"], State.WEIGHTS: held["weights"], State.AWAY: 0}
        self._bytes.setdefault("engines", []).append(states)

    async def _start_actor(self) -> None:
        if not self._actors:
            return
        config, timeout_s = self._config, self._config.cluster.start_timeout_s
        settings = ActorSettings(
            name=self.name,
            policy=self._policy,
            precision=config.precision,
            loss=config.algorithm.loss,
            temperature=config.rollout.temperature,
            seed=config.seed,
            deterministic=config.deterministic,
            device=self._device,
            transport=self._transport.name,
            total_steps=config.steps,
            updates_per_batch=config.algorithm.updates_per_batch,
            minibatches_by=config.algorithm.minibatches_by,
        )
        host, port = await self._actors[0].address(timeout_s)
        await together(
            (actor.build(timeout_s, settings, rank, len(self._actors), host, port) for rank, actor in enumerate(self._actors))
        )
        facts = await self._on_all_ranks(timeout_s, ActorProcess.initialize, self._policy.model)
        self._bytes["actor"] = [
            {State.ON_DEVICE: held.total, State.WEIGHTS: held.parameters, State.AWAY: 0}
            for held in (each["bytes"] for each in facts)
        ]

    def residents(self) -> list[Resident]:
        """What the policy holds in each state, once it has started."""
        found = []
        for role, slots in self._slots.items():
            if slots:
                held: dict[State, dict[Gpu, int]] = {state: {} for state in State}
                for slot, states in zip(slots, self._bytes[role], strict=True):
                    for gpu in slot.gpus:
                        for state, size in states.items():
                            held[state][gpu] = held[state].get(gpu, 0) + size
                found.append(Resident(self.name, role, held))
        return found

    async def move_actor(self, before: State, state: State, keep: bool = True) -> int:
        """Bring the actor to a state; the bytes that its fullest rank has on its device then."""
        parameters, rest = state != State.AWAY, state == State.ON_DEVICE
        return max(await self._on_all_ranks(self._step_timeout_s, ActorProcess.hold, parameters, rest))

    async def move_engines(self, before: State, state: State, keep: bool = True) -> None:
        """Bring all engines to a state.

        Args:
            keep: engines that leave keep their weights on the host; otherwise `sync_weights` must follow.
        """
        if state == State.AWAY:
            await self._on_all_engines(Engine.sleep, keep)
            return
        if before == State.AWAY:
            await self._on_all_engines(Engine.wake_weights)
        if state == State.ON_DEVICE:
            await self._on_all_engines(Engine.wake_cache)

    async def update(self, batch: TurnBatch, step: int) -> dict:
        """Optimizer steps on the policy's rows; the metrics of `PolicyActor.update`."""
        return (await self._on_all_ranks(self._step_timeout_s, ActorProcess.update, ray.put(batch), step))[0]

    async def sync_weights(self, version: int, verify: bool) -> SyncStats:
        """Bring the engines to the actor's weights, and compare them tensor by tensor if asked.

        Raises:
            WeightSyncError: names the rank, the engine or the tensor at fault.
        """
        timeout_s = self._config.cluster.sync_timeout_s

        def remote(process: RemoteProcess, method: Callable, *first: Any) -> Callable[..., Awaitable[Any]]:
            return lambda *args: process.call(timeout_s, method, *first, *args)

        senders = [
            SenderCalls(
                actor.name,
                remote(actor, ActorProcess.begin_send, self._config.precision.rollout),
                remote(actor, ActorProcess.next_bucket),
                remote(actor, ActorProcess.end_send),
            )
            for actor in self._actors
        ]
        methods = (Engine.begin_update, Engine.load_bucket, Engine.finish_update, Engine.weight_digests)
        engines = [EngineCalls(engine.name, *(remote(engine, method) for method in methods)) for engine in self._engines]
        return await synchronize(senders, engines, version, timeout_s, verify)

    async def set_version(self, version: int) -> None:
        """Let samples report a version without an update: the engines have its weights already."""
        await self._on_all_engines(Engine.set_version, version)

    async def save(self, folder: Path) -> None:
        """Write the actor's checkpoint."""
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.save, str(folder.resolve()))

    async def load(self, folder: Path) -> None:
        """Restore the actor."""
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.load, str(folder.resolve()))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.export_hf, str(folder.resolve()))

    def engine_handles(self) -> list["EngineProxy"]:
        """What a `PolicyClient` talks to."""
        return [EngineProxy(engine) for engine in self._engines]

    async def stop(self) -> None:
        """End all processes."""
        for process in self._actors + self._engines:
            process.kill()

    async def _on_all_engines(self, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        await together(engine.call(self._config.cluster.sync_timeout_s, method, *args) for engine in self._engines)

    async def _on_all_ranks(self, timeout_s: float, method: Callable, *args: Any) -> list[Any]:
        return await together(actor.call(timeout_s, method, *args) for actor in self._actors)


class EngineProxy:
    """`EngineHandle` of an engine process."""

    def __init__(self, process: RemoteProcess[Engine]):
        self._process = process

    def submit(self, requests: list[Request]) -> Awaitable[None]:
        return self._process.call(SUBMIT_TIMEOUT_S, Engine.submit, requests)

    def poll(self, timeout_s: float) -> Awaitable[list[Sample]]:
        return self._process.call(timeout_s + SUBMIT_TIMEOUT_S, Engine.poll, timeout_s)


def _environment(kind: str, device: Device, slot: Slot, threads: int, precision: PrecisionConfig) -> dict[str, str]:
    """Variables of a process that must be set before torch, Megatron or vLLM are imported."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
        **device.environment(slot.devices, threads),
    }
    if not os.environ.get("RAY_ADDRESS"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if kind == "engine":
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        variables |= device.engine_environment(threads)
    if kind == "actor":
        variables |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment(precision)}
    return variables
