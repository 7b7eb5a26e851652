"""The process that an actor rank or an engine lives in.

This module imports nothing heavy: the environment of torch, Megatron and vLLM is set here, before they are imported.
"""

import asyncio
import contextlib
import inspect
import os
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from megatron_drmas.cluster.whereabouts import Whereabouts, answer_questions
from megatron_drmas.config.plugins import import_plugins_of_process

SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Worker:
    """Builds one object and calls its methods, on the process's main thread; made a Ray actor by `RemoteProcess`.

    Args:
        log: file that takes the process's output.
        environment: variables to set; CUDA_VISIBLE_DEVICES counts among the GPUs that the machine lets this process see.
        token: of who may ask what the process is doing.
    """

    def __init__(self, log: str, environment: dict[str, str], token: bytes):
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        devices = environment.get("CUDA_VISIBLE_DEVICES")
        if devices is not None:
            environment = environment | {"CUDA_VISIBLE_DEVICES": visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))}
        os.environ.update(environment)
        for name in SOCKET_INTERFACES:
            if name not in os.environ and (interface := interface_of(ray.util.get_node_ip_address())):
                os.environ[name] = interface  # by host name, Gloo and NCCL may find a loopback
        self._object: Any = None
        self._token = token

    def address(self) -> tuple[str, int]:
        """An address of this machine and a port that is free on it."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def whereabouts(self) -> Whereabouts:
        """Where the process is; from then on it answers what it is doing."""
        host = ray.util.get_node_ip_address() if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        group = os.getpgrp() if os.getpgrp() == os.getpid() else None
        port = answer_questions(host, self._token)
        return Whereabouts(ray.get_runtime_context().get_node_id(), group, host, port)

    def build(self, kind: type, *args: Any) -> None:
        """Construct the object; what `kind`'s constructor imports sees the process's variables."""
        with _logged():
            import_plugins_of_process()
            self._object = kind(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object; an exception is also written to the log."""
        with _logged():
            return getattr(self._object, method)(*args, **kwargs)


class AsyncWorker(Worker):
    """A worker whose object may have coroutine methods; plain methods run in a thread, so that nothing waits for them."""

    async def build(self, kind: type, *args: Any) -> None:  # type: ignore[override]  # Ray awaits it
        await asyncio.to_thread(super().build, kind, *args)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self._object, method)
        with _logged():
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            return await asyncio.to_thread(function, *args, **kwargs)


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def visible_devices(positions: str, allowed: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a process.

    Args:
        positions: comma-separated, counted from 0 among the GPUs that may be used.
        allowed: CUDA_VISIBLE_DEVICES as Slurm or a user set it, numbers or UUIDs; None: every GPU.

    Raises:
        ValueError: fewer GPUs are allowed than the run counts on.
    """
    if allowed is None:
        return positions
    devices = [device for device in allowed.split(",") if device]
    wanted = [int(position) for position in positions.split(",")]
    if max(wanted) >= len(devices):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={allowed!r} allows {len(devices)} GPUs on {socket.gethostname()}, "
            f"cluster.gpus_per_node counts on {max(wanted) + 1} or more"
        )
    return ",".join(devices[position] for position in wanted)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise
