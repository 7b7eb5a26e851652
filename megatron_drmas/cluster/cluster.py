"""All processes of a run: started together, supervised, ended together.

An engine that fails is replaced while its callers wait.  When anything else of the team fails, `rebuild` replaces all of it, and
who drives the cluster goes on from its last checkpoint.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

import megatron_drmas.environments
import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.batch import TurnBatch
from megatron_drmas.cluster.device_pool import DevicePool
from megatron_drmas.cluster.fork_server import ForkServer
from megatron_drmas.cluster.machine import gpu_memory, object_store_bytes
from megatron_drmas.cluster.placement import place, resolve_device
from megatron_drmas.cluster.policy_runtime import PolicyRuntime
from megatron_drmas.cluster.process import ProcessFailure, ProcessLost, TeamLost
from megatron_drmas.cluster.process_environment import process_environment
from megatron_drmas.cluster.ray_start import RaySession, make_folder, named_cluster
from megatron_drmas.cluster.schedule import PoolOverflow, step_schedule
from megatron_drmas.cluster.supervision import Restarts, RestartsExhausted
from megatron_drmas.concurrency import together
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.devices import DEVICES
from megatron_drmas.environments.base import ENVIRONMENTS, Environment, Place, ServiceFailure
from megatron_drmas.rollout.client import EngineErrors, EngineHandle, EngineTimeout, PolicyClient
from megatron_drmas.rollout.collector import Collector
from megatron_drmas.rollout.engine_health import EngineHealth
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.team import Team
from megatron_drmas.weight_sync.errors import WeightSyncError

# What ends a run by its name.
FAILURES = (ProcessFailure, ServiceFailure, EngineTimeout, EngineErrors, WeightSyncError, PoolOverflow, RestartsExhausted)

Phase = Callable[[str], AbstractContextManager[Any]]


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _say_restart(cause: str, detail: str) -> None:
    _say(f"restart: {cause} ({detail})")


class Cluster:
    """The actors and engines of every policy, the environment, and the collector over them.

    An asynchronous context manager; whatever it started ends with it.

    Args:
        config: a validated configuration.
        phase: shows and times a named phase of the start.
        note: says what was found out.
        restarted: called with what was restarted, and why.
        actors: whether trainable policies get their Megatron actors; without them the team can only be evaluated.
    """

    def __init__(
        self,
        config: RunConfig,
        phase: Phase = contextlib.nullcontext,
        note: Callable[[str], None] = _say,
        restarted: Callable[[str, str], None] = _say_restart,
        actors: bool = True,
    ):
        self.config = config
        self.run_dir = Path(config.output_dir) / config.name
        self.collector: Collector
        self.policies: dict[str, PolicyRuntime] = {}
        self.pool: DevicePool
        self.restarts = Restarts(config.cluster.restarts)
        self._unchanged: set[str] = set()  # trainable policies that the latest update left as they were
        self._phase = phase
        self._note = note
        self._restarted = restarted
        self._actors = actors
        self._stack = contextlib.AsyncExitStack()
        self._clients = contextlib.AsyncExitStack()
        self._replacing = asyncio.Lock()  # an engine that shares devices
        self._generating = True  # as long as the actors and engines that share devices stay as they are
        self._servers: dict[str, ForkServer] = {}  # by role

    async def __aenter__(self) -> "Cluster":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.pool.schedule.takes_turns:
            self._note(f"shared pool: {self.pool.summary()}")
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        device = resolve_device(config)
        placement = place(config, device, self._actors)
        logs = self.run_dir / "logs"
        environment = ENVIRONMENTS[config.environment.name](
            config.environment, Place(logs, config.cluster.start_timeout_s, self._restarted)
        )
        self._stack.callback(environment.end)
        begun = environment.begin()
        if not begun:  # what it relies on is there already, or is missed before anything else has started
            await self._enter(environment)
        with self._phase("start Ray"):
            slots = {"engine": sum(map(len, placement.engines.values()))}
            if self._actors:
                slots["actor"] = sum(map(len, placement.actors.values()))
            forks = DEVICES[device].forks and named_cluster() is None
            for role in slots if forks else ():  # they import while Ray starts
                server = ForkServer(role, make_folder(), process_environment(role, config, device), logs / f"{role}_imports.log")
                self._servers[role] = await self._stack.enter_async_context(server)
            session = RaySession(sum(slots.values()), config.cluster.start_timeout_s, logs, object_store_bytes(config), not forks)
            self._stack.callback(session.stop)
            await session.start()
            bundles = await _reserve(config, device)
        tokenizers = {name: ChatTokenizer(policy.model, policy.template_options) for name, policy in config.policies.items()}
        for name in config.policies:
            stop_ids = tokenizers[name].stop_ids
            self.policies[name] = PolicyRuntime(name, config, stop_ids, device, placement, bundles, logs, self._py_executable)
            self._stack.push_async_callback(self.policies[name].stop)
        self._crowded = any(len(set(policies)) > 1 for policies in placement.crowded().values())
        self._device, self._environment, self._tokenizers = device, environment, tokenizers
        self._stack.push_async_callback(self._close_clients)
        with self._phase("start actors and engines"):
            await self._start_policies()
        if begun:
            await self._enter(environment)
        if not self.trainable:
            await self.pool.enter(self.pool.schedule.generating)
        await self._open_collector()

    async def _start_policies(self) -> None:
        if self._crowded:
            for policy in self.policies.values():  # each measures a device that it has for itself
                await policy.start()
        else:
            await together(policy.start() for policy in self.policies.values())
        self.pool = self._pool(self._device)

    async def _open_collector(self) -> None:
        config, clients = self.config, {}
        for name, policy in self.policies.items():
            recover = partial(self._replace_engine, name)
            client = PolicyClient(name, policy.engine_handles(), config.rollout.timeout_s, config.deterministic, recover)
            clients[name] = await self._clients.enter_async_context(client)
        team = Team.from_config(config.team)
        self.collector = Collector(team, self._environment, clients, self._tokenizers, config.rollout, config.seed)

    async def _close_clients(self) -> None:
        await self._clients.aclose()

    async def rebuild(self) -> None:
        """Kill every actor and engine, and start others in their places, with the model folders' weights.

        Who waits for one of the old ones is to be cancelled before; `load`, if there is a checkpoint, and `sync_weights` are
        to follow.

        Raises:
            ProcessFailure: one of them did not start.
        """
        await self._close_clients()
        await together(policy.end() for policy in self.policies.values())
        self._unchanged = set()
        await self._start_policies()
        await self._open_collector()

    async def _replace_engine(self, name: str, index: int, health: EngineHealth, error: Exception) -> EngineHandle:
        """Start an engine again that has failed, and give it its policy's weights.

        Raises:
            RestartsExhausted: it has been started again as often as it may.
            TeamLost: the team has to be rebuilt for it.
        """
        policy = self.policies[name]
        engine = policy.engine_name(index)
        policy.take_down(index)
        problem = str(error) if engine in str(error) else f"{engine}: {error}"
        if policy.joined:
            raise TeamLost(f"{problem}; its transport joins all engines in one group, which one cannot enter again") from error
        while True:
            self.restarts.engine(engine, problem)
            self._restarted(engine, problem)
            health.restarting()
            try:
                handle = await self._replacement(policy, index, health)
                health.updated()
                return handle
            except TeamLost:
                raise
            except (ProcessFailure, WeightSyncError) as failure:
                if isinstance(failure, WeightSyncError) and await policy.lost_actors():
                    raise TeamLost(str(failure)) from failure
                health.died()
                problem = str(failure)

    async def _replacement(self, policy: PolicyRuntime, index: int, health: EngineHealth) -> EngineHandle:
        """A new process for an engine, with the policy's weights."""
        if not policy.takes_turns:
            handle = await policy.replace_engine(index)
            health.started()
            await policy.refresh_engine(index)
            return handle
        async with self._replacing:
            if not self._generating:
                raise TeamLost(f"{policy.engine_name(index)}: failed when its devices were in use by others")
            clients = self.collector.clients.values()
            try:
                await together(client.hold() for client in clients)
                async with self.pool.vacated(policy.name):
                    handle = await policy.replace_engine(index)
                    health.started()
                    if policy.has_actor:
                        await self.pool.meet(policy.name)
                        await policy.sync_weights(policy.version, verify=True)
                return handle
            finally:
                for client in clients:
                    client.release()

    async def _py_executable(self, role: str) -> str | None:
        """What Ray starts the processes of a role with; None: this Python.

        Raises:
            ProcessFailure: not known in time.
        """
        server = self._servers.get(role)
        if server is None:
            return None
        timeout_s = self.config.cluster.start_timeout_s
        try:
            found = await server.py_executable(timeout_s)
        except TimeoutError as error:
            raise ProcessFailure(
                f"{role}s: importing their libraries did not end in {timeout_s:g} s (cluster.start_timeout_s); log: {server.log}"
            ) from error
        if found is None:
            self._note(
                f"warning: {role}s import their libraries one by one, since doing it once for all failed; log: {server.log}"
            )
        return found

    async def _enter(self, environment: Environment) -> None:
        await self._stack.enter_async_context(environment)
        found = await environment.check()
        if found:
            self._note(found)

    @property
    def trainable(self) -> dict[str, PolicyRuntime]:
        """The policies that have an actor."""
        return {name: policy for name, policy in self.policies.items() if policy.has_actor}

    @property
    def generated_tokens(self) -> int:
        """Response tokens that the engines have returned so far."""
        return sum(client.generated_tokens for client in self.collector.clients.values())

    async def update(self, batch: TurnBatch, step: int) -> dict[str, dict]:
        """Train every policy on its own rows: side by side where the pool has room, else in turn.

        A policy without a row to train on stays as it is.

        Returns:
            The actors' metrics by policy; a policy without a row to train on has none.
        """
        shares = {}
        for name in self.trainable:
            rows = batch.select(batch.trainable & (batch.policy == batch.policies.index(name)))
            if len(rows):
                shares[name] = rows
        async with self._replacing:  # until it has its devices no more
            self._generating = False
        self._unchanged = self.trainable.keys() - shares.keys()
        metrics: dict[str, dict] = {}
        for phase in self.pool.schedule.phase("update"):
            names = [name for name in phase.policies if name in shares]
            if names:
                await self.pool.enter(phase, keep=self.policies.keys() - shares.keys(), idle=self._unchanged)
                results = await together(self.policies[name].update(shares[name], step) for name in names)
                metrics |= dict(zip(names, results))
        return {name: metrics[name] for name in shares}

    @contextlib.contextmanager
    def draining(self) -> Iterator[None]:
        """The next `sync_weights` waits for what engines were asked: one that waits for its weights must not be waited for."""
        for policy in self.policies.values():
            policy.draining = True
        try:
            yield
        finally:
            for policy in self.policies.values():
                policy.draining = False

    async def sync_weights(self, version: int, verify: bool = False) -> None:
        """Bring every engine to its actor's weights, and let the team generate.

        Args:
            version: what the engines report as `weight_version` from then on.
            verify: compare the engines' weights with the actors', tensor by tensor.
        """
        for phase in self.pool.schedule.phase("sync"):
            names = [name for name in phase.policies if name not in self._unchanged]
            if names:
                await self.pool.enter(phase, idle=self._unchanged)
                await together(self._publish(self.policies[name], version, verify) for name in names)
        await self.pool.enter(self.pool.schedule.generating)
        await together(self.policies[name].set_version(version) for name in self._unchanged)
        self._unchanged, self._generating = set(), True

    async def _publish(self, policy: PolicyRuntime, version: int, verify: bool) -> None:
        """Bring a policy's engines to its actor's weights; those that turn out to have failed are replaced, and get them then."""
        while True:
            try:
                await policy.sync_weights(version, verify)
                return
            except WeightSyncError as error:
                if await policy.lost_actors():
                    raise ProcessLost(str(error)) from error
                lost = await policy.lost_engines()
                if not lost:
                    raise
                if policy.takes_turns:
                    raise ProcessLost(str(error)) from error
                for index in lost:
                    policy.take_down(index)
                    self.collector.clients[policy.name].broken(index, error)
                verify = True

    async def begin_save(self, folder: Path) -> None:
        """Copy what every actor's checkpoint holds, and begin to write it to folder/<policy>.

        Engines that share an actor's devices must be idle.
        """
        await self._with_actors(PolicyRuntime.begin_save, folder)

    async def finish_save(self) -> None:
        """Wait until every actor's checkpoint is written."""
        await together(policy.finish_save() for policy in self.trainable.values())

    async def load(self, folder: Path) -> None:
        """Restore every actor from folder/<policy>."""
        await self._with_actors(PolicyRuntime.load, folder)

    async def export(self, folder: Path) -> None:
        """Write every trained policy as a Hugging Face folder, folder/<policy>."""
        await self._with_actors(PolicyRuntime.export, folder)

    async def _with_actors(self, work: Callable[[PolicyRuntime, Path], Awaitable[None]], folder: Path) -> None:
        """Do it with every actor on its devices: at the same time, or in turn where they share them."""
        if not self.pool.schedule.takes_turns:
            await together(work(policy, folder / name) for name, policy in self.trainable.items())
            return
        for name, policy in self.trainable.items():
            async with self._replacing, self.pool.lend(name):
                await work(policy, folder / name)

    def _pool(self, device: str) -> DevicePool:
        """The residents of virtual or real devices; an empty pool where nothing is placed on any."""
        residents = [resident for policy in self.policies.values() for resident in policy.residents()]
        gib = self.config.cluster.gpu_memory_gib
        schedule = step_schedule(residents, gpu_memory(gib) if gib or DEVICES[device].placed else None)
        if schedule.takes_turns:
            self._note("\n".join(["shared pool, by phases of a step:", *(f"    {line}" for line in schedule.lines())]))
        moves, states = {}, {}
        for resident in residents:
            policy = self.policies[resident.policy]
            moves[resident.name] = policy.move_actor if resident.role == "actor" else policy.move_engines
            states[resident.name] = policy.initial_state
        return DevicePool(schedule, moves, states)


async def _reserve(config: RunConfig, device: str) -> Any | None:
    """A placement group with one bundle per node; None on the CPUs of one node.  Untested here with GPUs."""
    nodes, gpus = config.cluster.nodes, config.cluster.gpus_per_node if DEVICES[device].placed else 0
    if nodes == 1 and not gpus:
        return None
    group = ray.util.placement_group([{"CPU": 1, "GPU": gpus}] * nodes, strategy="STRICT_SPREAD")
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), config.cluster.start_timeout_s)
    except TimeoutError as error:
        seen = "; it counts those that CUDA_VISIBLE_DEVICES lets each node's Ray see" if gpus else ""
        raise ProcessFailure(
            f"Ray has not found cluster.nodes={nodes} nodes with a free CPU and {gpus} free GPUs each in "
            f"{config.cluster.start_timeout_s:g} s{seen}"
        ) from error
    return group
