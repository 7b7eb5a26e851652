"""What carries an actor's weights to its engines: one interface, and the registry from which a transport is chosen.

A transport has two ends.  The actor's is a `Transport`; the engine's is the back end of vLLM's weight-transfer API that its
`engine_class` names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.weight_sync.sender import BucketSender


@dataclass(frozen=True)
class Route:
    """Between which processes the weights of a policy travel.

    Attributes:
        device: cpu | cuda.
        shared: the engines are on the actor's own GPUs, all of them.
        pipeline: the actor's pipeline stages.
        meets: an engine is on the GPU of a rank that sends.
        nodes: number of nodes that hold the actor and the engines.
    """

    device: str
    shared: bool
    pipeline: int
    nodes: int = 1
    meets: bool = False


class Transport(ABC):
    """The actor's end, one instance in every rank.

    Class attributes:
        name: under which it is registered, on both sides.
        every_rank_publishes: each rank has something for some engine; otherwise one rank of every pipeline stage sends.
        joins: the senders and the engines form groups of their own before the first update.
    """

    name: str
    every_rank_publishes: bool = False
    joins: bool = False

    @classmethod
    @abstractmethod
    def objection(cls, route: Route) -> str | None:
        """Why it cannot serve a route, or None if it can."""

    @classmethod
    def engine_class(cls) -> type | None:
        """The engine's end, a subclass of vLLM's `WeightTransferEngine`; None: vLLM brings a back end of this name.

        Called in the engines' workers only: import vLLM here, so that no other process has to.
        """
        return None

    @classmethod
    def engine_init_infos(cls, addresses: Sequence[tuple[str, int]], engines: int, tensor: int) -> list[dict]:
        """What each engine's back end is initialized with.

        Args:
            addresses: of each pipeline stage's sender: its machine, and a port that is free there.
            engines: replicas.
            tensor: workers of each.
        """
        return [{} for _ in range(engines)]

    @classmethod
    def sender_init_infos(cls, addresses: Sequence[tuple[str, int]], engines: int, tensor: int) -> list[dict]:
        """What each stage's sender joins with; the arguments are those of `engine_init_infos`.  Only where `joins`."""
        raise NotImplementedError

    def join(self, info: dict) -> None:
        """Join the transfer group, in the process of a stage's sender, while the engines join; only where `joins`."""
        raise NotImplementedError

    @abstractmethod
    def sender(
        self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None, publish: bool, verify: bool
    ) -> BucketSender:
        """A sender for one update; the arguments are `BucketSender`'s."""


TRANSPORTS: dict[str, type[Transport]] = {}


def register_transport(name: str) -> Callable[[type[Transport]], type[Transport]]:
    """Make a transport available as `cluster.transport`; `auto` tries them in the order of their registration."""

    def add(transport: type[Transport]) -> type[Transport]:
        if name in TRANSPORTS:
            raise ValueError(f"a transport named {name!r} exists already")
        transport.name = name
        TRANSPORTS[name] = transport
        return transport

    return add


def choose_transport(wanted: str, route: Route, policy: str) -> type[Transport]:
    """The transport of a policy.

    Args:
        wanted: `cluster.transport`: a registered name, or auto for the first that serves the route.
        policy: for errors.

    Raises:
        ConfigError: it is unknown, or does not serve the route.
    """
    if wanted != "auto" and wanted not in TRANSPORTS:
        raise ConfigError("cluster.transport", wanted, "no such transport", f"choose one of: auto, {', '.join(TRANSPORTS)}")
    objections = {}
    for name in TRANSPORTS if wanted == "auto" else [wanted]:
        objections[name] = TRANSPORTS[name].objection(route)
        if objections[name] is None:
            return TRANSPORTS[name]
    problem = "; ".join(f"{name}: {objection}" for name, objection in objections.items())
    raise ConfigError("cluster.transport", wanted, f"cannot serve policy {policy!r} ({problem})", "use auto, or another layout")
