"""The interface of a device."""

from abc import ABC, abstractmethod
from typing import Any

from megatron_drmas.config.schema import EngineConfig


class Device(ABC):
    """One kind of hardware that actors and engines run on.

    Class attributes:
        name: as in `cluster.device`.
        collectives: torch.distributed's back end.
        accelerated: Transformer Engine's layers and Megatron's fused kernels run on it.
        placed: processes are given devices of their own, which `cluster.placement` counts.
        sleeps: engines can give their memory back while actors train.
        forks: processes may be forked from one that has imported their libraries.
    """

    name: str
    collectives: str
    accelerated: bool
    placed: bool
    sleeps: bool
    forks: bool

    @abstractmethod
    def activate(self, rank: int) -> None:
        """Make this process ready for Megatron, before its groups are made; imports torch."""

    @abstractmethod
    def environment(self, devices: tuple[int, ...], threads: int) -> dict[str, str]:
        """Variables of an actor's or engine's process.

        Args:
            devices: that it may use, counted from 0 among those that its machine lets it see.
            threads: of its CPU kernels.
        """

    @abstractmethod
    def engine_environment(self, threads: int) -> dict[str, str]:
        """Variables that vLLM reads once, at import, in addition to those of `environment`."""

    @abstractmethod
    def engine_arguments(self, engine: EngineConfig, deterministic: bool, sleep: bool) -> dict[str, Any]:
        """vLLM's `EngineArgs` that depend on the device."""

    @abstractmethod
    def cache_bytes(self, engine: EngineConfig, weights: int) -> int:
        """What an engine takes of each of its devices to generate, beyond its weights; called in its process."""
