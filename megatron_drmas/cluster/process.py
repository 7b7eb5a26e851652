"""One supervised process: a Ray actor, its name, its log file, and errors that mention both."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from megatron_drmas.cluster.whereabouts import TOKEN_BYTES, Doing, Whereabouts, ask, kill_group
from megatron_drmas.cluster.worker import AsyncWorker, Worker

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class ProcessFailure(RuntimeError):
    """A process of the run died, raised, or did not answer in time."""


class ProcessLost(ProcessFailure):
    """A process of the run died, or did not answer in time: another may take its place."""


class TeamLost(ProcessLost):
    """A process that cannot be replaced alone."""


class ProcessSilent(ProcessLost):
    """A process that did not answer in time; it may still be there."""


class RemoteProcess(Generic[T]):
    """An object of class T in a process of its own, somewhere in the Ray cluster, once it has been launched.

    Args:
        kind: T, from a module that can be imported before the process's variables are set.
        name: for errors, such as "actor of policy 'verifier', rank 1".
        log: its log file, on the machine it runs on.
        environment: variables set before the object is built.
        asynchronous: the object has coroutine methods and serves several calls at a time.
        bundle: (placement group, index) to run in; None: anywhere.
    """

    def __init__(
        self,
        kind: type[T],
        name: str,
        log: Path,
        environment: dict[str, str],
        asynchronous: bool = False,
        bundle: tuple[Any, int] | None = None,
    ):
        self.name = name
        self.log = log
        self._kind = kind
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if asynchronous:
            options["max_concurrency"] = 64
        if bundle is not None:
            options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=bundle[0], placement_group_bundle_index=bundle[1]
            )
        self._worker, self._options = ray.remote(AsyncWorker if asynchronous else Worker), options
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._arguments = str(log.resolve()), environment, self._token
        self._handle: Any = None
        self._where: Whereabouts | None = None

    def launch(self, py_executable: str | None = None) -> None:
        """Have Ray start the process; at once, before any call, and again after `end`.

        Args:
            py_executable: what Ray starts it with; None: this Python.
        """
        if py_executable:
            self._options["runtime_env"] = {"py_executable": py_executable}
        self._handle = self._worker.options(**self._options).remote(*self._arguments)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """An address and a free port on the process's machine."""
        return await self._wait("address", self._handle.address.remote(), timeout_s)

    async def build(self, timeout_s: float, *args: Any) -> None:
        """Construct the object with `args`."""
        self._where = await self._wait("whereabouts", self._handle.whereabouts.remote(), timeout_s)
        await self._wait("build", self._handle.build.remote(self._kind, *args), timeout_s)

    @overload
    async def call(
        self, timeout_s: float, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def call(self, timeout_s: float, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    async def call(self, timeout_s: float, method: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object, given as the class's own: `await process.call(60, Engine.submit, requests)`.

        Raises:
            ProcessFailure: the process died, the method raised, or it did not answer in `timeout_s`; the message names the
                process, what happened, and the log.
        """
        name = method.__name__
        return await self._wait(name, self._handle.call.remote(name, *args, **kwargs), timeout_s)

    async def doing(self) -> Doing | None:
        """What its main thread does; None if it does not answer."""
        return None if self._where is None else await ask(self._where, self._token)

    def kill(self) -> None:
        """End the process at once."""
        if self._handle is not None:
            ray.kill(self._handle)

    async def end(self) -> None:
        """Kill the process with all that it has started, and wait until they are gone."""
        where, self._where = self._where, None
        if where is not None:
            await kill_group(where)
        self.kill()

    async def _wait(self, method: str, ref: ray.ObjectRef, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
        except TimeoutError as error:
            raise ProcessSilent(f"{self.name}: {method} did not end in {timeout_s:g} s; log: {self.log}") from error
        except RayTaskError as error:
            raise ProcessFailure(f"{self.name}: {method} failed: {_last_line(error)}; log: {self.log}") from error
        except OutOfMemoryError as error:
            raise ProcessLost(
                f"{self.name}: Ray ended it during {method} because the machine ran out of memory; log: {self.log}"
            ) from error
        except RayError as error:
            raise ProcessLost(f"{self.name}: died during {method}: {_last_line(error)}; log: {self.log}") from error


def _last_line(error: RayError) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else None
    if cause is not None:
        return f"{type(cause).__name__}: {cause}".split("\n")[0]
    return str(error).strip().split("\n")[-1].partition(" Some common causes")[0]
