"""Requests and samples over one connection from the driver to an engine's process.

A call through Ray costs more than a step of a small engine, so what is generated travels beside it: a frame of requests
one way for each turn of the driver's event loop, a frame of samples back for each step of the engine.  A frame is two
sizes, JSON and the bytes of arrays; nothing that is read can run code.
"""

import asyncio
import hmac
import json
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import NoReturn, Protocol

import numpy as np

from megatron_drmas.rollout.engine_messages import Request, Sample

SIZES = struct.Struct("<II")
MAX_BYTES = 2**30  # of a frame
TOKEN_BYTES = 32
HELLO_TIMEOUT_S = 10.0
HEARTBEAT_S = 2.0  # at most between two frames of an engine that has requests
STALLED_S = 60.0  # without even those: the process does not answer

IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


def pack_requests(requests: Sequence[Request]) -> bytes:
    """A frame for `unpack_requests`."""
    rows = [(r.key, r.seed, r.temperature, r.top_p, r.max_tokens, len(r.prompt_ids)) for r in requests]
    return _frame(rows, (request.prompt_ids.astype(IDS, copy=False) for request in requests))


def unpack_requests(rows: list, data: bytes) -> list[Request]:
    """The requests of a frame's two parts; their arrays share `data`."""
    requests, at = [], 0
    for *settings, length in rows:
        key, seed, temperature, top_p, max_tokens = settings
        requests.append(Request(key, np.frombuffer(data, IDS, length, at), seed, temperature, top_p, max_tokens))
        at += length * IDS.itemsize
    return requests


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """A frame for `unpack_samples`."""
    rows = [(s.key, s.finish_reason, s.weight_versions, s.error, len(s.token_ids)) for s in samples]
    parts = chain.from_iterable((s.token_ids.astype(IDS, copy=False), s.logprobs.astype(LOGPROBS, copy=False)) for s in samples)
    return _frame(rows, parts)


def unpack_samples(rows: list, data: bytes) -> list[Sample]:
    """The samples of a frame's two parts, with arrays of their own, as they outlive those they came with."""
    samples, at = [], 0
    for key, finish_reason, weight_versions, error, length in rows:
        ids, logprobs = np.frombuffer(data, IDS, length, at), np.frombuffer(data, LOGPROBS, length, at + length * IDS.itemsize)
        samples.append(
            Sample(
                key, ids.copy(), logprobs.copy(), finish_reason, [(version, tokens) for version, tokens in weight_versions], error
            )
        )
        at += length * (IDS.itemsize + LOGPROBS.itemsize)
    return samples


def _frame(rows: list[tuple], arrays: Iterable[np.ndarray]) -> bytes:
    header, data = json.dumps(rows).encode(), b"".join(array.tobytes() for array in arrays)
    return b"".join((SIZES.pack(len(header), len(data)), header, data))


async def _read(reader: asyncio.StreamReader) -> tuple[list, bytes]:
    header, data = SIZES.unpack(await reader.readexactly(SIZES.size))
    if header + data > MAX_BYTES:
        raise ConnectionError(f"a frame of {header + data} bytes; {MAX_BYTES} are the limit")
    return json.loads(await reader.readexactly(header)), await reader.readexactly(data)


class Served(Protocol):
    """What is needed of an `Engine`."""

    async def submit(self, requests: list[Request]) -> None: ...

    async def poll(self, timeout_s: float) -> list[Sample]: ...


async def listen(engine: Served, host: str, token: bytes) -> int:
    """Serve one `EngineStream`, the first that knows the token, until it goes away or the engine cannot go on.

    Returns:
        The port.
    """
    left, work = 0, asyncio.Event()

    async def receive(reader: asyncio.StreamReader) -> None:
        nonlocal left
        while True:
            requests = unpack_requests(*await _read(reader))
            left += len(requests)
            await engine.submit(requests)
            work.set()

    async def send(writer: asyncio.StreamWriter) -> None:
        nonlocal left
        while True:
            if not left:
                work.clear()
                await work.wait()
            samples = await engine.poll(HEARTBEAT_S)
            left -= len(samples)
            writer.write(pack_samples(samples))
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                given = await reader.readexactly(len(token))
            if not server.is_serving() or not hmac.compare_digest(given, token):
                return
            server.close()  # there is one driver
            tasks = [asyncio.ensure_future(receive(reader)), asyncio.ensure_future(send(writer))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # the driver asks for the engine's error
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # a stranger
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, 0)
    return server.sockets[0].getsockname()[1]


class EngineStream:
    """The driver's end: an `EngineHandle`.

    Args:
        lost: called when the connection has ended, or nothing has come of a busy engine for `STALLED_S`; raises what
            happened to the engine.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: Callable[[], Awaitable[NoReturn]]):
        self._reader, self._writer, self._lost = reader, writer, lost

    @classmethod
    async def connect(cls, host: str, port: int, token: bytes, lost: Callable[[], Awaitable[NoReturn]]) -> "EngineStream":
        """Reach what `listen` serves.

        Raises:
            OSError: nothing listens there.
        """
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(token)
        return cls(reader, writer, lost)

    async def submit(self, requests: list[Request]) -> None:
        """Hand requests over."""
        try:
            self._writer.write(pack_requests(requests))
            await self._writer.drain()
        except ConnectionError:
            await self._lost()

    async def poll(self, timeout_s: float) -> list[Sample]:
        """The samples of the next frame, which an engine with requests sends at least every `HEARTBEAT_S`, even if empty."""
        try:
            async with asyncio.timeout(STALLED_S):
                frame = await _read(self._reader)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._lost()
        return unpack_samples(*frame)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()
