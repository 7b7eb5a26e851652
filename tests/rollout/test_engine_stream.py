"""The connection between the driver and an engine: nothing is lost or changed on it, and what ends it is told."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.rollout import engine_stream
from megatron_drmas.rollout.engine_messages import Request, Sample
from megatron_drmas.rollout.engine_stream import SIZES, EngineStream, listen

TOKEN = b"t" * engine_stream.TOKEN_BYTES
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)


class Lost(Exception):
    pass


async def lost():
    raise Lost


class Echo:
    """Samples what it was asked; dies of a negative key."""

    def __init__(self):
        self.finished, self.arrived = [], asyncio.Event()

    async def submit(self, requests):
        if any(request.key < 0 for request in requests):
            raise RuntimeError("died")
        self.finished += [
            Sample(
                r.key,
                r.prompt_ids,
                np.full(len(r.prompt_ids), r.temperature),
                "stop",
                [(r.seed, len(r.prompt_ids))],
                f"{r.top_p}",
            )
            for r in requests
        ]
        self.arrived.set()

    async def poll(self, timeout_s):
        try:
            await asyncio.wait_for(self.arrived.wait(), timeout_s)
        except TimeoutError:
            return []
        self.arrived.clear()
        finished, self.finished = self.finished, []
        return finished


def connected(use, token=TOKEN):
    async def run():
        port = await listen(Echo(), "127.0.0.1", TOKEN)
        stream = await EngineStream.connect("127.0.0.1", port, token, lost)
        try:
            return await asyncio.wait_for(use(stream, port), 10)
        finally:
            stream.close()

    return asyncio.run(run())


def fields(message):
    return [
        getattr(message, name) if name in ("key", "seed", "error") else str(getattr(message, name)) for name in message.__slots__
    ]


@given(
    st.lists(st.builds(Request, st.integers(0, 2**40), IDS, st.integers(0, 2**31), st.floats(0, 2), st.floats(0, 1), st.just(9)))
)
@settings(max_examples=50)
def test_requests_arrive_as_they_were_sent(requests):
    header, data = SIZES.unpack_from(frame := engine_stream.pack_requests(requests))
    assert len(frame) == SIZES.size + header + data

    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        return await engine_stream._read(reader)

    assert [fields(r) for r in engine_stream.unpack_requests(*asyncio.run(read()))] == [fields(r) for r in requests]


@given(st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_every_request_has_its_own_sample_whatever_travels_together(batches):
    async def use(stream, port):
        asked = {}
        for batch in batches:
            requests = [Request(len(asked) + k, ids, k, 0.1 * k, 1 / (k + 3), 8) for k, ids in enumerate(batch)]
            await stream.submit(requests)
            asked |= {request.key: request for request in requests}
        samples = []
        while len(samples) < len(asked):
            samples += await stream.poll(1.0)
        return asked, samples

    asked, samples = connected(use)
    assert sorted(sample.key for sample in samples) == sorted(asked)
    for sample in samples:
        request = asked[sample.key]
        assert sample.token_ids.tolist() == request.prompt_ids.tolist() and sample.weight_versions == [
            (request.seed, len(request.prompt_ids))
        ]
        assert sample.logprobs.tolist() == [np.float32(request.temperature)] * len(request.prompt_ids)
        assert (sample.finish_reason, sample.error) == ("stop", str(request.top_p))


def test_an_engine_at_work_is_heard_of_and_an_idle_one_is_silent(monkeypatch):
    monkeypatch.setattr(engine_stream, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(engine_stream, "STALLED_S", 0.3)
    monkeypatch.setattr(Echo, "poll", lambda self, timeout_s: asyncio.sleep(timeout_s, []))

    async def use(stream, port):
        with pytest.raises(Lost):  # nothing was asked
            await stream.poll(1.0)
        await stream.submit([Request(1, [1], 0, 1.0, 1.0, 1)])
        return [await stream.poll(1.0) for _ in range(3)]

    assert connected(use) == [[], [], []]


def test_the_end_of_an_engine_ends_the_connection():
    async def use(stream, port):
        await stream.submit([Request(-1, [1], 0, 1.0, 1.0, 1)])
        with pytest.raises(Lost):
            await stream.poll(1.0)
        return True

    assert connected(use)


@pytest.mark.parametrize("token", [b"x" * len(TOKEN), b"GET / HTTP/1.1\r\n" * 4])
def test_a_stranger_is_turned_away_and_a_second_driver_too(token):
    async def refused(stream, port):
        with pytest.raises(Lost):
            await stream.poll(1.0)
        friend = await EngineStream.connect("127.0.0.1", port, TOKEN, lost)
        await friend.submit([Request(1, [1], 0, 1.0, 1.0, 1)])
        found = await friend.poll(1.0)
        with pytest.raises(OSError):
            await EngineStream.connect("127.0.0.1", port, TOKEN, lost)
        friend.close()
        return [sample.key for sample in found]

    assert connected(refused, token) == [1]
