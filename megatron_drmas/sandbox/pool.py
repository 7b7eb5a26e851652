"""A pool of sandboxes, each started before it is needed and used once."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

from megatron_drmas.sandbox.guest import SIZE_DIGITS
from megatron_drmas.sandbox.isolation import guest_command
from megatron_drmas.sandbox.settings import SandboxConfig
from megatron_drmas.team.trajectory import ServiceFailure

START_TIMEOUT_S = 30.0
STARTS = 3  # of one sandbox, before the machine is taken to be unable
CHUNK = 65536
ENDING_S = 1.0  # that a program has left when it has closed its output


class SandboxError(ServiceFailure):
    """No sandbox can be started."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        stdout, stderr: what it printed, as UTF-8 with invalid bytes replaced, up to the limit.
        exit_code: its status, negative for a signal of its own; None where it was killed at a limit.
        killed: "time" or "output", the limit that it exceeded; None where it ended by itself.
        seconds: that it ran.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    killed: str | None
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0


class _Guest:
    """One sandbox: it waits for its program, runs it, and is gone."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._left = 0
        self.killed: str | None = None

    def send(self, code: str, stdin: str | None, limit: int) -> None:
        """Let it become a program that may print `limit` bytes."""
        self._left = limit
        request = json.dumps({"code": code, "stdin": stdin}).encode()
        self._write(f"{len(request):0{SIZE_DIGITS}}".encode() + request)

    async def read_all(self, timeout_s: float) -> tuple[str, str]:
        """What it prints on both streams, until it has ended or is over a limit."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.close()
        reading = asyncio.gather(self._read(process.stdout), self._read(process.stderr))
        await asyncio.wait((reading,), timeout=timeout_s)
        if not reading.done():
            self.over("time")
        return await reading

    async def ask(self, line: str, timeout_s: float) -> str | None:
        """The line that it answers to one; None if it has ended or is over a limit."""
        assert self._process.stdout is not None
        self._write(line.encode() + b"\n")
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                answer = await self._process.stdout.readline()
        except TimeoutError:
            self.over("time")
            return None
        except ValueError:  # longer than the stream holds
            self.over("output")
            return None
        self._left -= len(answer)
        if self._left < 0:
            self.over("output")
            return None
        return answer.decode(errors="replace")[:-1] if answer.endswith(b"\n") else None

    def over(self, limit: str) -> None:
        """It exceeded a limit: its processes are killed."""
        self.killed = self.killed or limit
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int | None:
        """End all of its processes, those that it has started included; its exit status, None if it had to be killed.

        One that has closed its streams may end by itself.
        """
        closed = all(stream is not None and stream.at_eof() for stream in (self._process.stdout, self._process.stderr))
        try:
            await asyncio.wait_for(self._process.wait(), ENDING_S if closed else 0.0)
        except TimeoutError:
            self.over("end")
            await self._process.wait()
        return None if self.killed else self._process.returncode

    async def _read(self, stream: asyncio.StreamReader) -> str:
        parts = []
        while data := await stream.read(CHUNK):
            parts.append(data[: max(self._left, 0)])
            self._left -= len(data)
            if self._left < 0:
                self.over("output")
        return b"".join(parts).decode(errors="replace")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)


class Session:
    """A program that answers lines with lines, until `deadline` in the event loop's time."""

    def __init__(self, guest: _Guest, deadline: float):
        self._guest = guest
        self._deadline = deadline

    async def ask(self, line: str) -> str | None:
        """Its answer; None if it has ended, or was killed at a limit."""
        return await self._guest.ask(line, self._deadline - asyncio.get_running_loop().time())

    @property
    def killed(self) -> str | None:
        """As `ProgramResult.killed`."""
        return self._guest.killed


class SandboxPool:
    """Runs programs, as many at a time as it has workers; an asynchronous context manager.

    Args:
        config: limits.
        kind: of `isolation.choose_kind`.
        workers: sandboxes that are kept ready; `sessions` needs as many as it runs programs.

    Attributes:
        counts: programs by how they ended: ended, time, output.
    """

    def __init__(self, config: SandboxConfig, kind: str, workers: int):
        self._config = config
        self._kind = kind
        self._ready: asyncio.Queue[tuple[int, asyncio.Task[_Guest]]] = asyncio.Queue()
        self._workers = workers
        self._taking = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[_Guest]] = {}
        self.counts = {"ended": 0, "time": 0, "output": 0}

    async def __aenter__(self) -> "SandboxPool":
        for worker in range(self._workers):
            self._renew(worker)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for result in await asyncio.gather(*self._tasks.values(), return_exceptions=True):  # those that start come to their end
            if isinstance(result, _Guest):
                await result.end()

    async def run(self, code: str, stdin: str = "") -> ProgramResult:
        """Run Python source as a program.

        Args:
            stdin: all of its standard input.

        Raises:
            SandboxError: no sandbox could be started.
        """
        async with self._guests(1) as (guest,):
            began = time.monotonic()
            guest.send(code, stdin, self._limit)
            stdout, stderr = await guest.read_all(self._config.timeout_s)
            exit_code = await guest.end()
            self.counts[guest.killed or "ended"] += 1
            return ProgramResult(stdout, stderr, exit_code, guest.killed, time.monotonic() - began)

    @contextlib.asynccontextmanager
    async def sessions(self, *codes: str) -> AsyncIterator[list[Session]]:
        """Programs that run side by side, each in a sandbox of its own, and read lines of standard input as they come.

        Raises:
            SandboxError: no sandbox could be started.
        """
        async with self._guests(len(codes)) as guests:
            deadline = asyncio.get_running_loop().time() + self._config.timeout_s
            for guest, code in zip(guests, codes):
                guest.send(code, None, self._limit)
            yield [Session(guest, deadline) for guest in guests]
            for guest in guests:
                self.counts[guest.killed or "ended"] += 1

    @property
    def _limit(self) -> int:
        return self._config.output_kib * 1024

    @contextlib.asynccontextmanager
    async def _guests(self, count: int) -> AsyncIterator[list[_Guest]]:
        """So many at once, or none: those that wait for more would wait for each other."""
        async with self._taking:
            taken = [await self._ready.get() for _ in range(count)]
        guests: list[_Guest] = []
        try:
            for _, starting in taken:
                guests.append(await starting)
            yield guests
        finally:
            for worker, _ in taken:
                self._renew(worker)
            for guest in guests:
                await guest.end()

    def _renew(self, worker: int) -> None:
        task = self._tasks[worker] = asyncio.ensure_future(self._start(worker))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised where the guest is taken
        self._ready.put_nowait((worker, task))

    async def _start(self, worker: int) -> _Guest:
        problem = ""
        for _ in range(STARTS):
            process = await asyncio.create_subprocess_exec(
                *guest_command(self._config, self._kind, worker),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
            )
            guest = _Guest(process)
            assert process.stderr is not None
            try:
                line = await asyncio.wait_for(process.stderr.readline(), START_TIMEOUT_S)
            except TimeoutError:
                line = b"it did not answer"
            except BaseException:
                await guest.end()
                raise
            if line == b"ready\n":
                return guest
            problem = line.decode(errors="replace").strip()
            await guest.end()
        raise SandboxError(f"a sandbox ({self._kind}) did not start {STARTS} times: {problem or 'no message'}")
