"""The driver's side of a policy's engines: many coroutines in, few messages out.

Calls made in one turn of the event loop travel to an engine together, and everything an engine has finished comes back
in one answer, so a thousand short calls do not cost a thousand messages.

An engine that dies, falls silent or returns errors is replaced while its callers wait: what it had not finished is sampled again,
with the same prompts and seeds, by it or by another engine of the policy.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from megatron_drmas.rollout.engine_health import FAILURES, EngineHealth, EngineState
from megatron_drmas.rollout.engine_messages import Request, Sample


class EngineHandle(Protocol):
    """One engine, wherever it lives."""

    def submit(self, requests: list[Request]) -> Awaitable[None]:
        """Hand requests over; returns when the engine has them."""

    def poll(self, timeout_s: float) -> Awaitable[list[Sample]]:
        """Samples that have finished; waits for at least one, or returns [] after about the time-out."""


class EngineTimeout(RuntimeError):
    """An engine that holds requests has been silent for too long."""


class EngineErrors(RuntimeError):
    """An engine has returned nothing but errors."""


# (engine's number, its health, what happened) -> the handle of a process that has taken its place, with the policy's weights;
# raises when there is to be none.
Recover = Callable[[int, EngineHealth, Exception], Awaitable[EngineHandle]]


@dataclass(slots=True)
class _Asked:
    """A request and who waits for its sample."""

    request: Request
    future: "asyncio.Future[Sample]"
    failures: int = 0  # errors that engines have returned for it

    @property
    def key(self) -> int:
        return self.request.key


class PolicyClient:
    """Spreads one policy's calls over its engines; an asynchronous context manager.

    Args:
        policy: name, for errors.
        engines: the replicas; a request goes to the one with the fewest requests in flight.
        timeout_s: silence of an engine with requests in flight that counts as an error.
        lockstep: keep requests back until `flush`, and hand them over in the order of their seeds.  What an engine had not
            finished when it failed then goes to its successor together with what it had, so that the same batch is computed.
        recover: replaces an engine that has failed; None: its requests fail.
    """

    POLL_S = 2.0

    def __init__(
        self,
        policy: str,
        engines: Sequence[EngineHandle],
        timeout_s: float,
        lockstep: bool = False,
        recover: Recover | None = None,
    ):
        self.policy = policy
        self.lockstep = lockstep
        self.generated_tokens = 0
        self._timeout_s = timeout_s
        self._recover = recover
        self._waiting: list[_Asked] = []
        self._replicas = [_Replica(self, index, engine) for index, engine in enumerate(engines)]
        self._tasks: set[asyncio.Task] = set()
        self._flush_scheduled = False
        self._held = self._missed = False  # whether engines get nothing more, and whether something was kept back meanwhile
        self._ended: Exception | None = None  # why an engine is not replaced any more
        self._keys = itertools.count()

    async def __aenter__(self) -> "PolicyClient":
        for replica in self._replicas:
            self.start(replica.run())
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

    @property
    def health(self) -> list[EngineHealth]:
        """Of each engine."""
        return [replica.health for replica in self._replicas]

    def generate(
        self, prompt_ids: np.ndarray, seed: int, temperature: float, top_p: float, max_tokens: int
    ) -> "asyncio.Future[Sample]":
        """Ask for one response.

        Returns:
            A future whose exception is whatever ended the engine where it is not replaced, such as `EngineTimeout` when it has
            finished nothing for `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        self._waiting.append(_Asked(Request(next(self._keys), prompt_ids, seed, temperature, top_p, max_tokens), future))
        self._schedule()
        return future

    def flush(self) -> None:
        """Hand all waiting requests to the engines."""
        self._flush_scheduled = False
        if self._held:
            self._missed = True
            return
        waiting, self._waiting = self._waiting, []
        if self._ended is not None:
            _fail(waiting, self._ended)
            return
        if self.lockstep:
            waiting.sort(key=lambda asked: (asked.request.seed, asked.request.prompt_ids.tobytes()))
        # In lockstep an engine that is being replaced gets its share too, so that what is computed together stays the same.
        serving = [replica for replica in self._replicas if self.lockstep or replica.health.serves] or self._replicas
        shares: dict[int, list[_Asked]] = {replica.index: [] for replica in serving}
        for asked in waiting:
            replica = min(serving, key=lambda each: len(each.in_flight))
            replica.in_flight[asked.key] = asked
            shares[replica.index].append(asked)
        for index, share in shares.items():
            if share:
                self._replicas[index].hand_over(share)

    async def hold(self) -> None:
        """Give the engines nothing more until `release`; returns when those that serve have finished what they have."""
        self._held = True
        while any(replica.in_flight and replica.health.serves for replica in self._replicas):
            await asyncio.sleep(_Replica.DRAIN_POLL_S)

    def release(self) -> None:
        """Go on."""
        self._held, missed, self._missed = False, self._missed, False
        if missed:
            self.flush()

    def broken(self, index: int, error: Exception) -> None:
        """An engine was found to have failed: it is replaced."""
        self._replicas[index].broken(error)

    def again(self, stranded: list[_Asked]) -> None:
        """Requests that their engine has not answered, or not with a sample, before those that wait already."""
        self._waiting[:0] = stranded
        self._schedule()

    def end(self, error: Exception) -> None:
        """What is asked from here on fails."""
        self._ended = error

    async def recovered(self, replica: "_Replica", error: Exception) -> EngineHandle:
        """A handle to what takes the engine's place; raises if nothing does."""
        if self._recover is None:
            raise error
        return await self._recover(replica.index, replica.health, error)

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @property
    def replaces(self) -> bool:
        """Whether engines that fail are replaced."""
        return self._recover is not None

    def _schedule(self) -> None:
        if not self.lockstep and not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside, for as long as the client is open."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Replica:
    """One engine of a client: what it has been given, and what becomes of it."""

    DRAIN_POLL_S = 0.02

    def __init__(self, client: PolicyClient, index: int, handle: EngineHandle):
        self.index = index
        self.handle = handle
        self.health = EngineHealth(client.timeout_s)
        self.in_flight: dict[int, _Asked] = {}
        self.round: list[_Asked] = []  # in lockstep, all that it was given last
        self._client = client
        self._busy = asyncio.Event()
        self._broken: asyncio.Future[Exception] | None = None  # what handing over has met

    def hand_over(self, share: list[_Asked]) -> None:
        """Give it requests that are in flight with it from here on; later, if it is being replaced."""
        self.round = share
        if self.health.serves:
            self._client.start(self._submit([asked.request for asked in share]))

    def broken(self, error: Exception) -> None:
        """It was found to have failed."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(error)

    async def run(self) -> None:
        """Take what it finishes, and have it replaced when it fails, until it is not replaced any more."""
        while True:
            self._broken = asyncio.get_running_loop().create_future()
            polling = asyncio.ensure_future(self._poll())
            try:
                await asyncio.wait((polling, self._broken), return_when=asyncio.FIRST_COMPLETED)
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
            error = self._broken.result() if self._broken.done() else polling.exception()
            assert isinstance(error, Exception)
            self.health.died()
            self._busy.clear()
            if self._client.replaces and not self._client.lockstep and any(each.serves for each in self._client.health):
                stranded, self.in_flight = list(self.in_flight.values()), {}
                self._client.again(stranded)
            try:
                self.handle = await self._client.recovered(self, error)
            except Exception as last:
                self._give_up(last)
                return
            if self.in_flight:
                share = self.round if self._client.lockstep else list(self.in_flight.values())
                self.hand_over(share)

    async def _submit(self, requests: list[Request]) -> None:
        handle = self.handle
        try:
            await asyncio.wait_for(handle.submit(requests), self._client.timeout_s)
        except Exception as error:
            if handle is self.handle:  # else it has been replaced meanwhile
                self.broken(error)
            return
        if handle is self.handle:
            self._busy.set()

    async def _poll(self) -> None:
        """Raises what has happened to the engine."""
        while True:
            if not self._busy.is_set():
                self.health.working(False)
                await self._busy.wait()
                self.health.working(True)
            try:
                samples = await asyncio.wait_for(self.handle.poll(self._client.POLL_S), self._client.timeout_s)
            except TimeoutError:
                samples = []
            for sample in samples:
                self._take(sample)
            if not self.in_flight:
                self._busy.clear()
                continue
            silence = self.health.silent_for()
            if self.health.state is EngineState.DEAD:
                raise EngineTimeout(
                    f"engine {self.index} of policy {self._client.policy!r} has finished none of {len(self.in_flight)} requests "
                    f"in {silence:.0f} s; see its log, or raise rollout.timeout_s"
                )

    def _take(self, sample: Sample) -> None:
        asked = self.in_flight.get(sample.key)
        if asked is None:  # sampled a second time, or forgotten
            return
        if sample.finish_reason == "error" and self._client.replaces and asked.failures < FAILURES and self.health.failed():
            asked.failures += 1
            if self.health.state is EngineState.DEAD:
                raise EngineErrors(
                    f"engine {self.index} of policy {self._client.policy!r} returned {FAILURES} errors in a row: {sample.error}"
                )
            if self._client.lockstep:
                self._client.start(self._submit([each.request for each in self.round]))  # the batch as it was
            else:
                del self.in_flight[sample.key]
                self._client.again([asked])
            return
        del self.in_flight[sample.key]
        self._client.generated_tokens += len(sample.token_ids)
        if sample.finish_reason != "error":
            self.health.progressed()
        if not asked.future.done():  # the caller may have been cancelled
            asked.future.set_result(sample)

    def _give_up(self, error: Exception) -> None:
        self.health.retired()
        self._client.end(error)
        stranded, self.in_flight = self.in_flight, {}
        _fail(stranded.values(), error)


def _fail(waiting: Iterable[_Asked], error: Exception) -> None:
    for asked in waiting:
        if not asked.future.done():
            asked.future.set_exception(error)
