"""One policy's processes: its Megatron actor ranks and its vLLM engines."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import ray

from megatron_drmas.actor.actor_process import ActorProcess
from megatron_drmas.actor.settings import ActorSettings
from megatron_drmas.batch import TurnBatch
from megatron_drmas.cluster.placement import Placement, Slot, gpus_of, sending_ranks
from megatron_drmas.cluster.process import ProcessFailure, RemoteProcess, TeamLost
from megatron_drmas.cluster.process_environment import process_environment
from megatron_drmas.cluster.schedule import Gpu, Resident, State
from megatron_drmas.cluster.supervision import on_all_ranks
from megatron_drmas.concurrency import together
from megatron_drmas.config.plugins import plugin_environment
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.rollout.engine import Engine
from megatron_drmas.rollout.engine_messages import EngineSettings
from megatron_drmas.rollout.engine_stream import TOKEN_BYTES, EngineStream
from megatron_drmas.weight_sync.synchronize import EngineCalls, SenderCalls, synchronize
from megatron_drmas.weight_sync.transport import choose_transport

SAVE_POLL_S = 0.1  # between two questions whether an actor's files are written; it answers between its calls
LOST_TIMEOUT_S = 10.0  # to learn what happened to an engine


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
        py_executable: what Ray is to start the processes of a role with, as soon as that can be said.
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
        py_executable: Callable[[str], Awaitable[str | None]],
    ):
        self.name = name
        self._config = config
        self._policy = config.policies[name]
        self._stop_ids = stop_ids
        self._device = device
        self._step_timeout_s = config.cluster.step_timeout_s
        self._py_executable = py_executable
        self._slots = {"actor": placement.actors[name], "engines": placement.engines[name]}
        route = placement.route(name, self._policy, device)
        self._transport = choose_transport(config.cluster.transport, route, name)
        own = {gpu for slots in self._slots.values() for gpu in gpus_of(slots)}
        self._takes_turns = bool(own & placement.crowded().keys())
        self._bytes: dict[str, list[dict[State, int]]] = {}  # role -> of each slot's devices
        self._streams: dict[RemoteProcess[Engine], EngineStream] = {}
        self._down: set[RemoteProcess[Engine]] = set()  # engines that are not to be used: they have failed, or are being replaced
        self._version = 0  # of the weights that engines have
        self._unpublished = False  # whether the actor has others
        self.draining = False  # whether what engines have is to be finished before the actor's weights are published
        self._exclusive = asyncio.Lock()  # of what needs the actor's weights to stay as they are

        def process(kind: type, role: str, index: int, slot: Slot) -> RemoteProcess:
            return RemoteProcess(
                kind,
                f"{role} {index} of policy {name!r}",
                logs / f"{name}_{role}_{index}.log",
                process_environment(role, config, device, slot.devices) | plugin_environment(config.plugins),
                asynchronous=role == "engine",
                bundle=None if bundles is None else (bundles, slot.node),
            )

        self._actors: list[RemoteProcess[ActorProcess]] = [
            process(ActorProcess, "actor", *each) for each in enumerate(self._slots["actor"])
        ]
        self._engines: list[RemoteProcess[Engine]] = [
            process(Engine, "engine", *each) for each in enumerate(self._slots["engines"])
        ]

    @property
    def initial_state(self) -> State:
        """Of its residents when `start` has returned."""
        return State.AWAY if self._takes_turns else State.ON_DEVICE

    @property
    def has_actor(self) -> bool:
        return bool(self._actors)

    @property
    def takes_turns(self) -> bool:
        """Whether its processes share devices, and so come and go."""
        return self._takes_turns

    @property
    def version(self) -> int:
        """Of the weights that engines have."""
        return self._version

    @property
    def joined(self) -> bool:
        """Whether its processes have formed groups that none of them can leave or enter alone."""
        return self._transport.joins and self.has_actor

    async def start(self) -> None:
        """Bring up every process; the actor with the model folder's weights.

        Where GPUs are shared, engines come first and fall asleep, so that each measures a device that it has for itself, and the
        actor goes to the host.
        """
        if self._takes_turns:
            await self._start_all_engines()
            await self.move_engines(State.ON_DEVICE, State.AWAY)
            if self._actors:
                await self._start_actor()
                await self.move_actor(State.ON_DEVICE, State.AWAY)
        else:
            await together([self._start_all_engines(), self._start_actor()])
        if self._transport.joins and self._actors:
            timeout_s = self._config.cluster.start_timeout_s
            senders = [self._actors[rank] for rank in sending_ranks(self._policy.parallel)]
            addresses = await together(sender.address(timeout_s) for sender in senders)
            groups = addresses, len(self._engines), self._policy.engine.tensor
            of_senders, of_engines = self._transport.sender_init_infos(*groups), self._transport.engine_init_infos(*groups)
            await together(
                [
                    *(each.call(timeout_s, ActorProcess.join_transfer_group, info) for each, info in zip(senders, of_senders)),
                    *(each.call(timeout_s, Engine.init_transfer, info) for each, info in zip(self._engines, of_engines)),
                ]
            )

    async def _start_engines(self, engines: list[RemoteProcess[Engine]]) -> list[dict]:
        """Bring up engines; what `Engine.start` says of each."""
        await self._launch("engine", engines)
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
        await together(engine.build(timeout_s, settings) for engine in engines)
        started = await together(engine.call(timeout_s, Engine.start) for engine in engines)
        await together(self._connect(engine) for engine in engines)
        return started

    async def _start_all_engines(self) -> None:
        self._bytes["engines"] = [
            {State.ON_DEVICE: held["weights"] + held["cache"], State.WEIGHTS: held["weights"], State.AWAY: 0}
            for held in (each["bytes"] for each in await self._start_engines(self._engines))
        ]

    async def _connect(self, engine: RemoteProcess[Engine]) -> None:
        timeout_s = self._config.cluster.start_timeout_s
        host, _ = await engine.address(timeout_s)
        if host == ray.util.get_node_ip_address():
            host = "127.0.0.1"
        token = secrets.token_bytes(TOKEN_BYTES)
        port = await engine.call(timeout_s, Engine.listen, host, token)

        async def lost() -> NoReturn:
            await engine.call(LOST_TIMEOUT_S, Engine.submit, [])  # raises what happened, unless only the connection ended
            raise ProcessFailure(f"{engine.name}: its connection ended; log: {engine.log}")

        try:
            stream = await asyncio.wait_for(EngineStream.connect(host, port, token, lost), timeout_s)
        except OSError as error:
            raise ProcessFailure(f"{engine.name}: does not answer at {host}:{port}: {error}; log: {engine.log}") from error
        self._streams[engine] = stream

    async def _start_actor(self) -> None:
        if not self._actors:
            return
        await self._launch("actor", self._actors)
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
            {State.ON_DEVICE: held["total"], State.WEIGHTS: held["parameters"], State.AWAY: 0}
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

    async def _launch(self, role: str, processes: list) -> None:
        py_executable = await self._py_executable(role)
        for process in processes:
            process.launch(py_executable)

    async def update(self, batch: TurnBatch, step: int) -> dict:
        """Optimizer steps on the policy's rows; the metrics of `PolicyActor.update`."""
        async with self._exclusive:
            self._unpublished = True
            return (await self._on_all_ranks(self._step_timeout_s, ActorProcess.update, ray.put(batch), step))[0]

    async def sync_weights(self, version: int, verify: bool) -> None:
        """Bring the engines to the actor's weights, and compare them tensor by tensor if asked.

        Raises:
            WeightSyncError: names the rank, the engine or the tensor at fault.
        """
        async with self._exclusive:
            await self._send_weights(self._up, version, verify)
            self._version, self._unpublished = version, False

    async def _send_weights(self, targets: list[RemoteProcess[Engine]], version: int, verify: bool) -> None:
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
        engines = [EngineCalls(engine.name, *(remote(engine, method) for method in methods)) for engine in targets]
        if engines:
            await synchronize(senders, engines, version, timeout_s, verify)

    async def set_version(self, version: int) -> None:
        """Let samples report a version without an update: the engines have its weights already."""
        self._version = version
        await self._on_all_engines(Engine.set_version, version)

    async def begin_save(self, folder: Path) -> None:
        """Copy what the actor's checkpoint holds; it is written while the actor works on."""
        self._save_deadline = asyncio.get_running_loop().time() + self._step_timeout_s
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.begin_save, str(folder.resolve()))

    async def finish_save(self) -> None:
        """Wait until every rank has written its files, and put the checkpoint in its place.

        Raises:
            ProcessFailure: a rank could not write them, or not in `cluster.step_timeout_s`.
        """
        while not all(await self._on_all_ranks(self._step_timeout_s, ActorProcess.checkpoint_written)):
            if asyncio.get_running_loop().time() > self._save_deadline:
                raise ProcessFailure(
                    f"the actor of policy {self.name!r} has not written its checkpoint in {self._step_timeout_s:g} s; "
                    f"cluster.step_timeout_s allows no more"
                )
            await asyncio.sleep(SAVE_POLL_S)
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.finish_save)

    async def load(self, folder: Path) -> None:
        """Restore the actor."""
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.load, str(folder.resolve()))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._on_all_ranks(self._step_timeout_s, ActorProcess.export_hf, str(folder.resolve()))

    def engine_handles(self) -> list[EngineStream]:
        """What a `PolicyClient` talks to."""
        return [self._streams[engine] for engine in self._engines]

    def engine_name(self, index: int) -> str:
        return self._engines[index].name

    def take_down(self, index: int) -> None:
        """Use an engine no more: it has failed."""
        self._down.add(self._engines[index])

    async def replace_engine(self, index: int) -> EngineStream:
        """Kill an engine and bring up another in its place, with the model folder's weights; it is asleep where GPUs are shared.

        Raises:
            ProcessFailure: it did not start.
        """
        engine = self._engines[index]
        self._down.add(engine)
        if engine in self._streams:
            self._streams.pop(engine).close()
        await engine.end()
        await self._start_engines([engine])
        if self._takes_turns:
            await engine.call(self._config.cluster.sync_timeout_s, Engine.sleep, True)
            self._down.discard(engine)  # it moves with the others, and gets its weights with them
        return self._streams[engine]

    async def refresh_engine(self, index: int) -> None:
        """Give an engine that was replaced the weights that the others have, and compare them tensor by tensor.

        Raises:
            WeightSyncError: names the rank, the engine or the tensor at fault.
            TeamLost: the actor has others, which are published when this engine has finished what it was asked before.
        """
        engine = self._engines[index]
        while self.has_actor and engine in self._down:
            async with self._exclusive:
                if not self._unpublished:
                    await self._send_weights([engine], self._version, verify=True)
                    self._down.discard(engine)
                    return
            if self.draining:
                raise TeamLost(f"{engine.name}: failed before it had finished what the next weights wait for")
            await asyncio.sleep(SAVE_POLL_S)
        self._down.discard(engine)

    async def lost_actors(self) -> list[str]:
        """The actor ranks that do not answer."""
        found = await asyncio.gather(*(actor.doing() for actor in self._actors))
        return [actor.name for actor, doing in zip(self._actors, found) if doing is None]

    async def lost_engines(self) -> list[int]:
        """The engines that do not work, of those that should."""
        engines = self._up
        found = await asyncio.gather(*(each.call(LOST_TIMEOUT_S, Engine.stats) for each in engines), return_exceptions=True)
        return [self._engines.index(engine) for engine, stats in zip(engines, found) if isinstance(stats, BaseException)]

    async def end(self) -> None:
        """Kill all processes with what they have started, and wait until they are gone; `start` may follow."""
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        await together([*(actor.end() for actor in self._actors), *(engine.end() for engine in self._engines)])
        self._down, self._exclusive, self._unpublished, self.draining = set(), asyncio.Lock(), False, False

    async def stop(self) -> None:
        """End all processes."""
        for stream in self._streams.values():
            stream.close()
        for process in self._actors + self._engines:
            process.kill()

    @property
    def _up(self) -> list[RemoteProcess[Engine]]:
        return [engine for engine in self._engines if engine not in self._down]

    async def _on_all_engines(self, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        await together(engine.call(self._config.cluster.sync_timeout_s, method, *args) for engine in self._up)

    async def _on_all_ranks(self, timeout_s: float, method: Callable, *args: Any) -> list[Any]:
        calls = [actor.call(timeout_s, method, *args) for actor in self._actors]
        return await on_all_ranks(self._actors, method.__name__, calls)
