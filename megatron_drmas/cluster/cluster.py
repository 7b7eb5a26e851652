"""All processes of a run: started together, supervised, ended together."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

import megatron_drmas.environments
import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.batch import TurnBatch
from megatron_drmas.cluster.fork_server import ForkServer
from megatron_drmas.cluster.machine import object_store_bytes
from megatron_drmas.cluster.placement import place, resolve_device
from megatron_drmas.cluster.policy_runtime import PolicyRuntime, process_environment
from megatron_drmas.cluster.process import ProcessFailure
from megatron_drmas.cluster.ray_start import RaySession, make_folder, named_cluster
from megatron_drmas.concurrency import together
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.devices import DEVICES
from megatron_drmas.environments.base import ENVIRONMENTS, Environment, Place, ServiceFailure
from megatron_drmas.rollout.client import EngineTimeout, PolicyClient
from megatron_drmas.rollout.collector import Collector
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.team import Team
from megatron_drmas.weight_sync.errors import WeightSyncError

FAILURES = (ProcessFailure, ServiceFailure, EngineTimeout, WeightSyncError)  # what ends a run by its name

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
        self._phase = phase
        self._note = note
        self._restarted = restarted
        self._actors = actors
        self._stack = contextlib.AsyncExitStack()
        self._servers: dict[str, ForkServer] = {}  # by role

    async def __aenter__(self) -> "Cluster":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        device = resolve_device(config)
        placement = place(config, device)
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
            self.policies[name] = PolicyRuntime(
                name,
                config,
                tokenizers[name].stop_ids,
                device,
                placement.actors[name] if self._actors else [],
                placement.engines[name],
                bundles,
                logs,
                self._py_executable,
            )
            self._stack.push_async_callback(self.policies[name].stop)
        with self._phase("start actors and engines"):
            await together(policy.start() for policy in self.policies.values())
        if begun:
            await self._enter(environment)
        clients = {}
        for name, policy in self.policies.items():
            client = PolicyClient(name, policy.engine_handles(), config.rollout.timeout_s, lockstep=config.deterministic)
            clients[name] = await self._stack.enter_async_context(client)
        self.collector = Collector(Team.from_config(config.team), environment, clients, tokenizers, config.rollout, config.seed)

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
        """Train every policy on its own rows, all at the same time.

        Returns:
            The actors' metrics by policy; a policy without a row to train on has none.
        """
        shares = {}
        for name in self.trainable:
            rows = batch.select(batch.trainable & (batch.policy == batch.policies.index(name)))
            if len(rows):
                shares[name] = rows
        metrics = await together(self.policies[name].update(rows, step) for name, rows in shares.items())
        return dict(zip(shares, metrics))

    async def sync_weights(self, version: int, verify: bool = False) -> None:
        """Bring every engine to its actor's weights.

        Args:
            version: what the engines report as `weight_version` from then on.
            verify: compare the engines' weights with the actors', tensor by tensor.
        """
        await together(policy.sync_weights(version, verify) for policy in self.trainable.values())

    async def begin_save(self, folder: Path) -> None:
        """Copy what every actor's checkpoint holds, and begin to write it to folder/<policy>."""
        await together(policy.begin_save(folder / name) for name, policy in self.trainable.items())

    async def finish_save(self) -> None:
        """Wait until every actor's checkpoint is written."""
        await together(policy.finish_save() for policy in self.trainable.values())

    async def load(self, folder: Path) -> None:
        """Restore every actor from folder/<policy>."""
        await together(policy.load(folder / name) for name, policy in self.trainable.items())

    async def export(self, folder: Path) -> None:
        """Write every trained policy as a Hugging Face folder, folder/<policy>."""
        await together(policy.export(folder / name) for name, policy in self.trainable.items())


async def _reserve(config: RunConfig, device: str) -> Any | None:
    """A placement group with one bundle per node; None on CPUs.  Untested here for want of a GPU."""
    if not DEVICES[device].placed:
        return None
    bundle = {"GPU": config.cluster.gpus_per_node, "CPU": 1}
    group = ray.util.placement_group([bundle] * config.cluster.nodes, strategy="STRICT_SPREAD")
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), config.cluster.start_timeout_s)
    except TimeoutError as error:
        raise ProcessFailure(
            f"Ray has not found {config.cluster.nodes} nodes with cluster.gpus_per_node={config.cluster.gpus_per_node} free GPUs "
            f"each in {config.cluster.start_timeout_s:g} s; it counts those that CUDA_VISIBLE_DEVICES lets each node's Ray see"
        ) from error
    return group
