"""The driver's side of a policy's engines: many coroutines in, few messages out.

Calls made in one turn of the event loop travel to an engine together, and everything an engine has finished comes back
in one answer, so a thousand short calls do not cost a thousand messages.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from megatron_drmas.rollout.engine_messages import Request, Sample


class EngineHandle(Protocol):
    """One engine, wherever it lives."""

    def submit(self, requests: list[Request]) -> Awaitable[None]:
        """Hand requests over; returns when the engine has them."""

    def poll(self, timeout_s: float) -> Awaitable[list[Sample]]:
        """Samples that have finished; waits for at least one, or returns [] after about the time-out."""


class EngineTimeout(RuntimeError):
    """An engine that holds requests has been silent for too long."""


class PolicyClient:
    """Spreads one policy's calls over its engines; an asynchronous context manager.

    Args:
        policy: name, for errors.
        engines: the replicas; a request goes to the one with the fewest requests in flight.
        timeout_s: silence of an engine with requests in flight that counts as an error.
        lockstep: keep requests back until `flush`, and hand them over in the order of their seeds.
    """

    POLL_S = 2.0

    def __init__(self, policy: str, engines: Sequence[EngineHandle], timeout_s: float, lockstep: bool = False):
        self.policy = policy
        self.lockstep = lockstep
        self.generated_tokens = 0
        self._engines = engines
        self._timeout_s = timeout_s
        self._waiting: list[Request] = []
        self._in_flight: list[dict[int, asyncio.Future[Sample]]] = [{} for _ in engines]
        self._futures: dict[int, asyncio.Future[Sample]] = {}
        self._busy: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task] = set()
        self._flush_scheduled = False
        self._next_key = 0

    async def __aenter__(self) -> "PolicyClient":
        self._busy = [asyncio.Event() for _ in self._engines]
        for index in range(len(self._engines)):
            self._start(self._poll(index), index)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Requests that no engine has been given yet."""
        return len(self._waiting)

    def generate(
        self, prompt_ids: np.ndarray, seed: int, temperature: float, top_p: float, max_tokens: int
    ) -> "asyncio.Future[Sample]":
        """Ask for one response.

        Returns:
            A future whose exception is `EngineTimeout` when the engine has finished nothing for `timeout_s`, or else
            whatever ended the engine.
        """
        loop = asyncio.get_running_loop()
        key, self._next_key = self._next_key, self._next_key + 1
        future: asyncio.Future[Sample] = loop.create_future()
        self._futures[key] = future
        self._waiting.append(Request(key, prompt_ids, seed, temperature, top_p, max_tokens))
        if not self.lockstep and not self._flush_scheduled:
            self._flush_scheduled = True
            loop.call_soon(self.flush)
        return future

    def flush(self) -> None:
        """Hand all waiting requests to the engines."""
        self._flush_scheduled = False
        requests, self._waiting = self._waiting, []
        if self.lockstep:
            requests.sort(key=lambda request: (request.seed, request.prompt_ids.tobytes()))
        shares: list[list[Request]] = [[] for _ in self._engines]
        for request in requests:
            index = min(range(len(shares)), key=lambda i: len(self._in_flight[i]))
            self._in_flight[index][request.key] = self._futures.pop(request.key)
            shares[index].append(request)
        for index, share in enumerate(shares):
            if share:
                self._start(self._submit(index, share), index)

    async def _submit(self, index: int, share: list[Request]) -> None:
        await asyncio.wait_for(self._engines[index].submit(share), self._timeout_s)
        self._busy[index].set()

    async def _poll(self, index: int) -> None:
        now = asyncio.get_running_loop().time
        while True:
            if not self._busy[index].is_set():
                await self._busy[index].wait()
                heard = now()
            try:
                samples = await asyncio.wait_for(self._engines[index].poll(self.POLL_S), self._timeout_s)
            except TimeoutError:
                samples = []
            for sample in samples:
                self.generated_tokens += len(sample.token_ids)
                asked = self._in_flight[index].pop(sample.key)
                if not asked.done():  # the caller may have been cancelled
                    asked.set_result(sample)
            heard = now() if samples else heard
            if not self._in_flight[index]:
                self._busy[index].clear()
            elif now() - heard >= self._timeout_s:
                raise EngineTimeout(
                    f"engine {index} of policy {self.policy!r} has finished none of {len(self._in_flight[index])} requests in "
                    f"{now() - heard:.0f} s; see its log, or raise rollout.timeout_s"
                )

    def _start(self, work: Awaitable[None], index: int) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(done, index))

    def _finished(self, task: asyncio.Task, index: int) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        stranded, self._in_flight[index] = self._in_flight[index], {}
        for future in stranded.values():
            if not future.done():
                future.set_exception(error)
