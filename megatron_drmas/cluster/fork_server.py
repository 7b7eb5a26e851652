"""Workers that are forked from a process in which a role's libraries are imported, instead of importing them each.

Importing torch, Megatron and vLLM is most of what an actor or an engine does before it can work, and the same in all of them.
A `ForkServer` imports them once, and each Ray worker of its role is a fork of it (`forking` says how).  A process that has
threads, or has used a GPU, cannot be forked: this is for devices that say so (`Device.forks`).
"""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType

from megatron_drmas.cluster import forking

# What an object of the role imports.
PRELOADED: dict[str, tuple[str, ...]] = {
    "actor": ("megatron_drmas.actor.policy_actor", "megatron_drmas.weight_sync.transport"),
    "engine": ("megatron_drmas.rollout.llm_core",),
}
POLL_S = 0.02
ENDING_TIMEOUT_S = 5.0


class ForkServer:
    """A role's server; an asynchronous context manager.  It ends with this process, and its workers with it.

    Args:
        role: actor | engine.
        folder: for its socket, with a short path and of this user alone; removed at the end.
        environment: variables that the role's libraries read at import.
        log: file that takes what importing them says.
    """

    def __init__(self, role: str, folder: Path, environment: dict[str, str], log: Path):
        self.role = role
        self.log = log
        self._socket = folder / "socket"
        # OpenBLAS starts its threads when it is loaded
        self._environment = os.environ | environment | {"OPENBLAS_NUM_THREADS": "1"}
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> "ForkServer":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", forking.__name__, "serve", str(self._socket), *PRELOADED[self.role]),
                stdin=asyncio.subprocess.PIPE,  # its end is this process's
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # out of reach of a terminal's Ctrl-C, as Ray's processes are
            )
        return self

    async def py_executable(self, timeout_s: float) -> str | None:
        """For the runtime environment of the role's Ray actors, as soon as the imports are done.

        Returns:
            None where the server has failed: the workers are to import by themselves, and say what is wrong.

        Raises:
            TimeoutError: it is still importing after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._socket.exists():
            if self._process.returncode is not None:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError
            await asyncio.sleep(POLL_S)
        return f"{sys.executable} -I -S {forking.__file__} worker {self._socket}"

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), ENDING_TIMEOUT_S)
        except TimeoutError:  # it is still importing
            self._process.kill()
            await self._process.wait()
        shutil.rmtree(self._socket.parent, ignore_errors=True)
