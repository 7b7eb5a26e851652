"""The driver's side of a weight update: actor ranks send, engines load, and nobody waits for ever."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Optional, Sequence

from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.verify import compare

CLOSE_TIMEOUT_S = 5.0  # for a sender to free its memory after a failure


@dataclass
class SenderCalls:
    """How to reach the sender in one actor rank; every call returns an awaitable.

    Attributes:
        name: for errors, such as "actor of policy 'solver', rank 1".
        open: (version, verify) starts an update.
        next_bucket: the next update info; {} when this rank publishes nothing; None at the end.
        close: ends the update and returns the digests of what was sent ({} unless verify).
    """

    name: str
    open: Callable[[int, bool], Awaitable[None]]
    next_bucket: Callable[[], Awaitable[Optional[dict]]]
    close: Callable[[], Awaitable[dict[str, str]]]


@dataclass
class EngineCalls:
    """How to reach one engine; the methods of `rollout.engine.Engine`, every call returns an awaitable."""

    name: str
    begin_update: Callable[[], Awaitable[None]]
    load_bucket: Callable[[dict], Awaitable[None]]
    finish_update: Callable[[int], Awaitable[None]]
    weight_digests: Callable[[], Awaitable[dict[str, str]]]


@dataclass
class SyncStats:
    """Of one update: seconds, buckets, tensors, and whether the engines' weights were compared with the actor's."""

    seconds: float = 0.0
    buckets: int = 0
    tensors: int = 0
    verified: bool = False


@dataclass
class _Update:
    """An update under way; `deadline` in the event loop's time."""

    deadline: float
    timeout_s: float
    version: int
    stats: SyncStats = field(default_factory=SyncStats)

    async def wait(self, who: str, what: str, answer: Awaitable[Any]) -> Any:
        """An answer, within what is left of the time.

        Raises:
            WeightSyncError: names who did not answer, or what it answered.
        """
        left = self.deadline - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(answer, max(left, 0.0))
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise WeightSyncError(
                f"weight update {self.version}: {who} did not answer {what} within the update's {self.timeout_s:g} s"
            ) from error
        except Exception as error:
            raise WeightSyncError(f"weight update {self.version}: {who} failed in {what}: {error}") from error


async def synchronise(
    stages: Sequence[Sequence[SenderCalls]], engines: Sequence[EngineCalls], version: int, timeout_s: float, verify: bool = False,
) -> SyncStats:
    """Bring every engine to the actor's weights.

    The ranks of a stage read the same tensors in step, since gathering them is collective; the next bucket is written
    while the engines load the one before.

    Args:
        stages: per pipeline stage, the ranks that hold it together; each stage publishes its own tensors.
        engines: all replicas; each loads everything.
        version: what the engines' samples report from then on.
        timeout_s: for the whole update.
        verify: compare the engines' weights with what was sent, tensor by tensor.

    Raises:
        WeightSyncError: a rank or an engine died, failed, or did not answer in time: its name and, where one tensor is
            at fault, the tensor's.  The engines keep resting or say that their weights are incomplete.
    """
    began = time.monotonic()
    update = _Update(asyncio.get_running_loop().time() + timeout_s, timeout_s, version)
    senders = [sender for stage in stages for sender in stage]
    try:
        await _all(update.wait(engine.name, "begin_update", engine.begin_update()) for engine in engines)
        await _all(update.wait(sender.name, "open", sender.open(version, verify)) for sender in senders)
        await _transfer(update, stages, engines)
        await _all(update.wait(engine.name, "finish_update", engine.finish_update(version)) for engine in engines)
        digests = await _all(update.wait(sender.name, "close", sender.close()) for sender in senders)
    except BaseException:
        await asyncio.wait([asyncio.ensure_future(_forget(sender)) for sender in senders], timeout=CLOSE_TIMEOUT_S)
        raise
    if verify:
        sent = {name: value for part in digests for name, value in part.items()}
        loaded = await _all(update.wait(engine.name, "weight_digests", engine.weight_digests()) for engine in engines)
        for engine, found in zip(engines, loaded):
            compare(sent, found, engine.name)
        update.stats.verified = True
    update.stats.seconds = time.monotonic() - began
    return update.stats


async def _transfer(update: _Update, stages: Sequence[Sequence[SenderCalls]], engines: Sequence[EngineCalls]) -> None:
    """Every stage's buckets, one stage after the other; a bucket is loaded while the next is written."""
    for stage in stages:
        loading: Optional[asyncio.Task] = None
        try:
            while (info := await _next_bucket(update, stage)) is not None:
                if loading is not None:
                    await loading
                loading = asyncio.ensure_future(_load(update, engines, info))
                update.stats.buckets += 1
                update.stats.tensors += len(info["names"])
            if loading is not None:
                await loading
        except BaseException:
            if loading is not None:
                loading.cancel()
            raise


async def _next_bucket(update: _Update, stage: Sequence[SenderCalls]) -> Optional[dict]:
    """A stage's next update info, put together from what its ranks publish."""
    infos = await _all(update.wait(sender.name, "next_bucket", sender.next_bucket()) for sender in stage)
    ended = [sender.name for sender, info in zip(stage, infos) if info is None]
    if ended and len(ended) < len(stage):
        raise WeightSyncError(f"weight update {update.version}: {', '.join(ended)} ended before the other ranks of its stage")
    published = [info for info in infos if info]
    if ended:
        return None
    if not published:
        raise WeightSyncError(f"weight update {update.version}: none of {', '.join(s.name for s in stage)} published its tensors")
    merged = published[0]
    for other in published[1:]:  # the same tensors, reachable from another GPU
        merged = {**merged, "ipc_handles": [a | b for a, b in zip(merged["ipc_handles"], other["ipc_handles"], strict=True)]}
    return merged


async def _load(update: _Update, engines: Sequence[EngineCalls], info: dict) -> None:
    what = f"load_bucket ({info['names'][0]} … {info['names'][-1]})"
    await _all(update.wait(engine.name, what, engine.load_bucket(info)) for engine in engines)


async def _forget(sender: SenderCalls) -> None:
    """Let a sender free its memory after a failure; one that cannot answer frees it when its process ends."""
    try:
        await sender.close()
    except Exception:  # the failure that led here is the one to report
        pass


async def _all(waits: Any) -> list[Any]:
    """Wait for all; the first failure is raised at once and the other waits end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
