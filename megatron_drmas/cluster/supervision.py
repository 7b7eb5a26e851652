"""How often what has failed is started again, and which of several processes that work together is the one that failed."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from megatron_drmas.cluster.process import ProcessFailure, ProcessLost, ProcessSilent
from megatron_drmas.cluster.whereabouts import Doing

FRUITLESS = 3  # returns to a checkpoint without a step beyond the furthest
GRACE_S = 5.0  # for the other ranks to say what has happened to them
ASK_EVERY_S = 5.0
SILENT_S = 60.0  # without an answer from a thread that has nothing else to do


class RestartsExhausted(RuntimeError):
    """What has failed is not started again, having been as often as it may."""


class Restarts:
    """Counts what is started again.

    Args:
        most: of each engine, and of returns of the team to a checkpoint; `cluster.restarts`.
    """

    def __init__(self, most: int):
        self._most = most
        self._counts: Counter[str] = Counter()
        self._furthest = 0
        self._fruitless = 0

    def engine(self, name: str, problem: str) -> None:
        """Count a restart of an engine.

        Raises:
            RestartsExhausted: it has been started again as often as it may.
        """
        self._count(name, problem, "it was started again")

    def team(self, done: int, problem: str) -> None:
        """Count a return of the whole team to its last checkpoint.

        Args:
            done: steps that had been done.

        Raises:
            RestartsExhausted: it has returned as often as it may, or three times since a step was done that had not been before.
        """
        if done > self._furthest:
            self._furthest, self._fruitless = done, 0
        if self._fruitless == FRUITLESS:
            raise RestartsExhausted(
                f"{problem}; the team went back to its checkpoint {FRUITLESS} times and never came beyond step {done}"
            )
        self._count("", problem, "the team went back to its checkpoint")
        self._fruitless += 1

    def _count(self, key: str, problem: str, what: str) -> None:
        if self._counts[key] == self._most:
            raise RestartsExhausted(f"{problem}; {what} {self._most} times (cluster.restarts)")
        self._counts[key] += 1


class Rank(Protocol):
    """A process that works together with others."""

    name: str

    async def doing(self) -> Doing | None: ...


async def on_all_ranks(ranks: Sequence[Rank], method: str, calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of a collective call on every rank.

    Args:
        ranks: the processes.
        method: name of what they do, for errors.
        calls: of each rank.

    Raises:
        ProcessFailure: of the rank that failed first, rather than of one that only waited for it: one that died, or else that
            answers nothing, or that does something else while others wait for it.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    watch = asyncio.ensure_future(_silent(ranks, method))
    try:
        pending = set(tasks)
        while pending:
            done, _ = await asyncio.wait({*pending, watch}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if any(task.exception() is not None for task in done if task is not watch):
                if pending:
                    await asyncio.wait(pending, timeout=GRACE_S)
                raise await _culprit(ranks, method, tasks)
            if watch in done:
                raise watch.result()
        return [task.result() for task in tasks]
    finally:
        for task in (*tasks, watch):
            task.cancel()
        await asyncio.gather(*tasks, watch, return_exceptions=True)


async def _silent(ranks: Sequence[Rank], method: str) -> ProcessFailure:
    """Ask the ranks what they are doing until one has not answered for `SILENT_S`."""
    now = asyncio.get_running_loop().time
    heard = [now()] * len(ranks)

    async def ask(index: int) -> None:
        if await ranks[index].doing() is not None:
            heard[index] = now()

    while True:
        await asyncio.sleep(ASK_EVERY_S)
        await asyncio.gather(*map(ask, range(len(ranks))))
        silent = [rank.name for rank, last in zip(ranks, heard) if now() - last >= SILENT_S]
        if silent:
            return ProcessSilent(f"{' and '.join(silent)}: no answer for {SILENT_S:g} s during {method}")


async def _culprit(ranks: Sequence[Rank], method: str, tasks: Sequence[asyncio.Task]) -> BaseException:
    """What to raise after some ranks failed, and others may still be at work."""
    errors = {rank.name: task.exception() for rank, task in zip(ranks, tasks) if task.done()}
    first = next(error for error in errors.values() if error is not None)
    for error in errors.values():
        if isinstance(error, ProcessLost) and not isinstance(error, ProcessSilent):
            return error
    at_work = [rank for rank in ranks if isinstance(errors.get(rank.name, ProcessSilent()), ProcessSilent)]
    doing = dict(zip((rank.name for rank in at_work), await asyncio.gather(*(rank.doing() for rank in at_work))))
    stopped = [name for name, what in doing.items() if what is None]
    stuck = {name: what.place for name, what in doing.items() if what is not None and not what.waits}
    waiting = {name: what.place for name, what in doing.items() if what is not None and what.waits}
    if stopped:
        return ProcessSilent(f"{' and '.join(stopped)}: no answer during {method}; {_others(len(ranks) - len(stopped))}")
    if stuck:
        where = "; ".join(f"{name}: stuck in {place}" for name, place in stuck.items())
        return ProcessSilent(f"{where}, during {method}; {_others(len(ranks) - len(stuck))}")
    if waiting:
        where = "; ".join(f"{name} in {place}" for name, place in waiting.items())
        return ProcessSilent(f"{method}: a collective hangs, every rank waits for another: {where}")
    return first


def _others(count: int) -> str:
    return f"{count} other {'rank waits' if count == 1 else 'ranks wait'} for it"
