"""The driver's side of a weight update: actor ranks send, engines load, and every wait has a timeout."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_drmas.concurrency import together
from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.verify import compare

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # for a sender to free its memory after a failure


@dataclass
class SenderCalls:
    """How to reach the sender in one actor rank; every call returns an awaitable.

    Attributes:
        name: for errors, such as "actor rank 1 of policy 'solver'".
        begin_send: (verify) starts an update.
        next_bucket: the next update info; {} when this rank publishes nothing; None at the end.
        end_send: frees what was sent and returns its digests ({} unless verify).
    """

    name: str
    begin_send: Callable[[bool], Awaitable[None]]
    next_bucket: Callable[[], Awaitable[dict | None]]
    end_send: Callable[[], Awaitable[dict[str, str]]]


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
        except TimeoutError as error:
            raise WeightSyncError(
                f"weight update {self.version}: {who} did not answer {what} within the update's {self.timeout_s:g} s"
            ) from error
        except Exception as error:
            raise WeightSyncError(f"weight update {self.version}: {who} failed in {what}: {error}") from error


async def synchronize(
    senders: Sequence[SenderCalls], engines: Sequence[EngineCalls], version: int, timeout_s: float, verify: bool = False
) -> SyncStats:
    """Bring every engine to the actor's weights.

    All ranks are asked for their next bucket together, since gathering tensors is collective within a pipeline stage;
    they write it while the engines load the one before.

    Args:
        senders: the ranks of one model replica, all of its pipeline stages; every stage publishes its own tensors.
        engines: all replicas; each loads everything.
        version: what the engines' samples report from then on.
        timeout_s: for the whole update.
        verify: compare the engines' weights with what was sent, tensor by tensor.

    Raises:
        WeightSyncError: a rank or an engine died, failed, or did not answer in time: its name and, where one tensor is
            at fault, the tensor's.  The engines stay paused or say that their weights are incomplete.
    """
    began = time.monotonic()
    update = _Update(asyncio.get_running_loop().time() + timeout_s, timeout_s, version)
    try:
        await together(update.wait(engine.name, "begin_update", engine.begin_update()) for engine in engines)
        await together(update.wait(sender.name, "begin_send", sender.begin_send(verify)) for sender in senders)
        await _transfer(update, senders, engines)
        await together(update.wait(engine.name, "finish_update", engine.finish_update(version)) for engine in engines)
        digests = await together(update.wait(sender.name, "end_send", sender.end_send()) for sender in senders)
    except BaseException:
        await asyncio.gather(*(_forget(sender) for sender in senders))
        raise
    if verify:
        sent = {name: value for of_rank in digests for name, value in of_rank.items()}
        loaded = await together(update.wait(engine.name, "weight_digests", engine.weight_digests()) for engine in engines)
        for engine, found in zip(engines, loaded):
            compare(sent, found, engine.name)
        update.stats.verified = True
    update.stats.seconds = time.monotonic() - began
    return update.stats


async def _transfer(update: _Update, senders: Sequence[SenderCalls], engines: Sequence[EngineCalls]) -> None:
    """All buckets, one round of writing ahead of the loading."""
    sending = list(senders)
    loading: asyncio.Task | None = None
    try:
        while sending:
            infos = await together(update.wait(sender.name, "next_bucket", sender.next_bucket()) for sender in sending)
            sending = [sender for sender, info in zip(sending, infos) if info is not None]
            if loading is not None:
                await loading
            loading = asyncio.ensure_future(_load(update, engines, _join([info for info in infos if info])))
        if loading is not None:
            await loading
    except BaseException:
        if loading is not None:
            loading.cancel()
        raise


def _join(infos: list[dict]) -> list[dict]:
    """Update infos of one round; those of one bucket, published from several GPUs, become one."""
    joined: dict[tuple[str, ...], dict] = {}
    for info in infos:
        first = joined.setdefault(tuple(info["names"]), info)
        if first is not info:
            handles = zip(first["ipc_handles"], info["ipc_handles"], strict=True)
            joined[tuple(info["names"])] = {**first, "ipc_handles": [mine | other for mine, other in handles]}
    return list(joined.values())


async def _load(update: _Update, engines: Sequence[EngineCalls], infos: list[dict]) -> None:
    for info in infos:
        what = f"load_bucket ({info['names'][0]} … {info['names'][-1]})"
        await together(update.wait(engine.name, what, engine.load_bucket(info)) for engine in engines)
        update.stats.buckets += 1
        update.stats.tensors += len(info["names"])


async def _forget(sender: SenderCalls) -> None:
    """Let a sender free its memory after a failure; one that cannot answer frees it when its process ends."""
    try:
        await asyncio.wait_for(sender.end_send(), CLOSE_TIMEOUT_S)
    except Exception as error:  # the failure that led here is the one to raise
        logger.warning("%s did not free its buckets: %r", sender.name, error)
