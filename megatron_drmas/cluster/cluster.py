"""All processes of a run: started together, supervised, ended together."""

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, ContextManager, Optional

import ray

import megatron_drmas.environments  # noqa: F401  registers the environments
import megatron_drmas.workflows  # noqa: F401  registers the workflows
from megatron_drmas.cluster.placement import place, resolve_device
from megatron_drmas.cluster.policy_runtime import PolicyRuntime
from megatron_drmas.cluster.process import ProcessFailure
from megatron_drmas.cluster.retrieval import RetrievalService
from megatron_drmas.cluster.signals import handlers_kept
from megatron_drmas.concurrency import together
from megatron_drmas.config.schema import EnvironmentConfig, RunConfig
from megatron_drmas.environments.base import ENVIRONMENTS, Environment
from megatron_drmas.rollout.batch import TurnBatch
from megatron_drmas.rollout.client import PolicyClient
from megatron_drmas.rollout.collector import Collector
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.team import Team

OBJECT_STORE_BYTES = 256 * 2**20  # holds a step's batches on a CPU

Phase = Callable[[str], ContextManager[Any]]


class Cluster:
    """The actors and engines of every policy, the retrieval server, and the collector over them.

    An asynchronous context manager; whatever it started ends with it.

    Args:
        config: a validated configuration.
        phase: shows and times a named phase of the start.
        actors: whether trainable policies get their Megatron actors; without them the team can only be evaluated.
    """

    def __init__(self, config: RunConfig, phase: Phase = contextlib.nullcontext, actors: bool = True):
        self.config = config
        self.run_dir = Path(config.output_dir) / config.name
        self.collector: Collector
        self.policies: dict[str, PolicyRuntime] = {}
        self._phase = phase
        self._actors = actors
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Cluster":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        device = resolve_device(config)
        placement = place(config, device)
        retrieval: Optional[RetrievalService] = None
        if config.environment.retrieval.corpus and not config.environment.retrieval.url:
            retrieval = RetrievalService(config.environment.retrieval, self.run_dir / "logs" / "retrieval.log")
            self._stack.callback(retrieval.stop)
        else:  # whatever it relies on is there already, or is missed before anything has started
            environment = await self._enter(config.environment)
        with self._phase("start Ray"), handlers_kept():
            start_ray(processes=sum(map(len, [*placement.actors.values(), *placement.engines.values()])))
            self._stack.callback(ray.shutdown)
            bundles = await _reserve(config, device)
        for name in config.policies:
            self.policies[name] = PolicyRuntime(
                name, config, device, placement.actors[name] if self._actors else [], placement.engines[name], bundles, self.run_dir / "logs",
            )
            self._stack.push_async_callback(self.policies[name].stop)
        with self._phase("start actors and engines"):
            await together(policy.start() for policy in self.policies.values())
        if retrieval is not None:
            url = await retrieval.ready(config.cluster.start_timeout_s)
            environment = await self._enter(replace(config.environment, retrieval=replace(config.environment.retrieval, url=url)))
        clients = {}
        for name, policy in self.policies.items():
            client = PolicyClient(name, policy.engine_handles(), config.rollout.timeout_s, lockstep=config.deterministic)
            clients[name] = await self._stack.enter_async_context(client)
        tokenizers = {name: ChatTokenizer(policy.model, policy.template_options) for name, policy in config.policies.items()}
        self.collector = Collector(Team.from_config(config.team), environment, clients, tokenizers, config.rollout, config.seed)

    async def _enter(self, config: EnvironmentConfig) -> Environment:
        environment = await self._stack.enter_async_context(ENVIRONMENTS[config.name](config))
        await environment.check()
        return environment

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

    async def save(self, folder: Path) -> None:
        """Write every actor's checkpoint to folder/<policy>."""
        await together(policy.save(folder / name) for name, policy in self.trainable.items())

    async def load(self, folder: Path) -> None:
        """Restore every actor from folder/<policy>."""
        await together(policy.load(folder / name) for name, policy in self.trainable.items())

    async def export(self, folder: Path) -> None:
        """Write every trained policy as a Hugging Face folder, folder/<policy>."""
        await together(policy.export(folder / name) for name, policy in self.trainable.items())


def start_ray(processes: int) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one on loopback.

    Args:
        processes: how many workers a cluster of our own keeps ready.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # devices are set by `placement`, not by Ray
    quiet = {"log_to_driver": False, "logging_level": "warning", "configure_logging": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        ray.init(num_cpus=processes, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)


async def _reserve(config: RunConfig, device: str) -> Optional[Any]:
    """A placement group with one bundle per node; None on CPUs.  Untested here for want of a GPU."""
    if device == "cpu":
        return None
    bundle = {"GPU": config.cluster.gpus_per_node, "CPU": 1}
    group = ray.util.placement_group([bundle] * config.cluster.nodes, strategy="STRICT_SPREAD")
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), config.cluster.start_timeout_s)
    except asyncio.TimeoutError as error:
        raise ProcessFailure(
            f"Ray has not found {config.cluster.nodes} nodes with cluster.gpus_per_node={config.cluster.gpus_per_node} free GPUs each "
            f"in {config.cluster.start_timeout_s:g} s; it counts those that CUDA_VISIBLE_DEVICES lets each node's Ray see"
        ) from error
    return group
