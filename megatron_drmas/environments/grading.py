"""Grading of mathematical answers by exact comparison (`answers.equality`), in processes that can be killed.

A computer-algebra system fed with a model's text can run forever (`10^{10^{10}}`) or eat all memory; its own
time limits are signals, which do not interrupt C code.  So answers are compared in worker processes under hard limits,
and a worker that exceeds one is killed and replaced.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_drmas.config.setting import setting
from megatron_drmas.environments.base import ServiceFailure
from megatron_drmas.team.parsing import BOX, last_boxed

MAX_CHARS = 2000  # of an answer, and of a gold one
START_TIMEOUT_S = 60.0
_WORKER = Path(__file__).with_name("grading_worker.py")
_ROOT = Path(__file__).parents[2]  # where the worker finds this package


@dataclass
class GraderConfig:
    """Worker processes that grade answers which code must parse."""

    workers: int = setting("Worker processes", 1, minimum=1)
    timeout_s: float = setting("Seconds that one answer may take; one that takes longer is wrong", 10.0, minimum=0.1)
    memory_mib: int = setting("Address space of a worker in MiB", 2048, minimum=1)


class GraderError(ServiceFailure):
    """A worker process could not be started at all."""


@dataclass(frozen=True)
class GradeResult:
    """The verdict on one answer.

    `error` says why an answer could not be compared (an unclosed box, too long, time limit, memory limit).
    Such an answer is wrong: it is scored 0 and not masked out, or a policy could learn to escape its grade.
    """

    correct: bool
    error: str | None = None


class _Died(Exception):
    """The worker ended, or was killed, before it answered."""


class _Worker:
    """One worker process, started when first needed and again after it was killed."""

    def __init__(self, memory_mib: int, timeout_s: float):
        self._memory_mib = memory_mib
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self._process is not None:
            return
        # The hash seed fixes sympy's ordering, and so the verdicts; -P keeps this folder, which has a math.py, off the worker's
        # import path.
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_WORKER), str(self._memory_mib), str(self._timeout_s + 1.0), env=environment,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )  # fmt: skip
        try:
            line = await asyncio.wait_for(self._pipes()[1].readline(), START_TIMEOUT_S)
        except TimeoutError:
            line = b""
        except BaseException:
            await self.kill()
            raise
        if line.strip() != b"ready":
            errors = self._process.stderr
            await self.kill()
            assert errors is not None
            reason = (await errors.read()).decode(errors="replace").strip().splitlines()
            raise GraderError(
                f"a grading worker did not start with environment.grader.memory_mib={self._memory_mib}: "
                f"{reason[-1] if reason else 'no message'}"
            )

    async def ask(self, answer: str, gold: str) -> GradeResult:
        await self.start()
        try:
            stdin, stdout = self._pipes()
            stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
            line = await asyncio.wait_for(stdout.readline(), self._timeout_s)
        except BaseException:  # a late answer must never be taken for the next question's
            await self.kill()
            raise
        if not line.endswith(b"\n"):
            await self.kill()
            raise _Died
        return GradeResult(**json.loads(line))

    def _pipes(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        return process.stdin, process.stdout

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


class Grader:
    """A pool of grading workers for one event loop.

    workers: processes; timeout_s: wall-clock seconds one answer may take; memory_mib: address space of a worker
    (the libraries themselves take about 70 MiB of it).  `restarts` counts workers that were killed, by cause.
    """

    def __init__(self, workers: int, timeout_s: float, memory_mib: int):
        self._workers = [_Worker(memory_mib, timeout_s) for _ in range(workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self.restarts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start every worker; raises GraderError when one cannot run."""
        await asyncio.gather(*(worker.start() for worker in self._workers))
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def grade(self, content: str, gold: str) -> GradeResult:
        r"""Whether what an agent's parser accepted equals `gold` mathematically; either is LaTeX or plain text.

        Where one of them holds a box (`\boxed{…}`), its content is compared.
        """
        answer, expected = (last_boxed(text) if BOX.search(text) else text for text in (content, gold))
        if answer is None or expected is None:
            return GradeResult(
                False, f"the last box of the {'answer' if answer is None else 'gold answer'} is empty or not closed"
            )
        for what, text in (("answer", answer), ("gold answer", expected)):
            if len(text) > MAX_CHARS:
                return GradeResult(False, f"{what} of {len(text)} characters; the limit is {MAX_CHARS}")
        worker = await self._idle.get()
        try:
            for _ in range(2):  # a worker can be killed for another reason than its answer, an answer kills twice
                try:
                    return await worker.ask(answer, expected)
                except (_Died, ConnectionError):
                    self.restarts["died"] += 1
            return GradeResult(False, "the grading worker died")
        except TimeoutError:
            self.restarts["time limit"] += 1
            return GradeResult(False, "time limit")
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """Kill every worker; answers that are being graded end with an error."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))
