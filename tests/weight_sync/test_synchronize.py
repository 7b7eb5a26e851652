"""A weight update between senders and engines that only pretend: order, exactness, and bounded waiting."""

import asyncio
import time

import pytest

from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.synchronize import EngineCalls, SenderCalls, synchronize

PATIENCE_S = 30.0  # a test that waits so long has hung


class PretendSender:
    """A rank with the buckets of its pipeline stage."""

    def __init__(self, name: str, buckets: list[dict | None], log: list):
        self.name, self.log, self.ended = name, log, 0
        self._buckets = iter(buckets)

    def calls(self, **replaced) -> SenderCalls:
        return SenderCalls(
            **{"name": self.name, "begin_send": self.begin, "next_bucket": self.next, "end_send": self.end, **replaced}
        )

    async def begin(self, verify: bool) -> None:
        self.log.append(("begin_send", self.name))

    async def next(self) -> dict | None:
        await asyncio.sleep(0)
        info = next(self._buckets, None)
        self.log.append(("write", self.name, info and info["names"]))
        return info

    async def end(self) -> dict[str, str]:
        self.ended += 1
        self.log.append(("end_send", self.name))
        return {"a": "1", "b": "2"} if self.name == "rank 0" else {"c": "3"}


class PretendEngine:
    def __init__(self, name: str, log: list, digests: dict | None = None):
        self.name, self.log, self.loaded, self.version = name, log, [], None
        self.digests = digests or {"a": "1", "b": "2", "c": "3"}

    def calls(self, **replaced) -> EngineCalls:
        return EngineCalls(
            **{
                "name": self.name,
                "begin_update": self.begin,
                "load_bucket": self.load,
                "finish_update": self.finish,
                "weight_digests": self.digest,
                **replaced,
            }
        )

    async def begin(self) -> None:
        self.log.append(("begin_update", self.name))

    async def load(self, info: dict) -> None:
        await asyncio.sleep(0.01)
        self.log.append(("load", self.name, info["names"]))
        self.loaded += info["names"]

    async def finish(self, version: int) -> None:
        self.log.append(("finish", self.name))
        self.version = version

    async def digest(self) -> dict[str, str]:
        return self.digests


def bucket(*names: str) -> dict:
    return {"names": list(names)}


@pytest.fixture
def log() -> list:
    return []


@pytest.fixture
def senders(log) -> list[PretendSender]:
    """Two pipeline stages; the second of three ranks only takes part in gathering."""
    return [
        PretendSender("rank 0", [bucket("a"), bucket("b")], log),
        PretendSender("rank 1", [{}, {}], log),
        PretendSender("rank 2", [bucket("c")], log),
    ]


@pytest.fixture
def engines(log) -> list[PretendEngine]:
    return [PretendEngine("engine 0", log), PretendEngine("engine 1", log)]


def run(senders, engines, timeout_s=PATIENCE_S, verify=False):
    async def bounded():
        return await asyncio.wait_for(synchronize(senders, engines, 4, timeout_s, verify), PATIENCE_S)

    return asyncio.run(bounded())


def test_every_engine_loads_every_stages_tensors_once(senders, engines, log):
    stats = run([s.calls() for s in senders], [e.calls() for e in engines], verify=True)
    for engine in engines:
        assert sorted(engine.loaded) == ["a", "b", "c"] and engine.version == 4
    assert all(sender.ended == 1 for sender in senders)
    assert (stats.buckets, stats.tensors, stats.verified) == (3, 3, True)


def test_engines_rest_before_the_first_tensor_and_go_on_after_the_last(senders, engines, log):
    run([s.calls() for s in senders], [e.calls() for e in engines])
    kinds = [entry[0] for entry in log]
    last_begin = max(i for i, kind in enumerate(kinds) if kind == "begin_update")
    assert last_begin < kinds.index("load")
    assert max(i for i, kind in enumerate(kinds) if kind == "load") < kinds.index("finish")
    assert max(i for i, kind in enumerate(kinds) if kind == "finish") < kinds.index("end_send")


def test_a_bucket_is_written_while_the_one_before_is_loaded_and_no_further_ahead(log):
    names = [f"t{i}" for i in range(6)]
    sender, engine = PretendSender("rank 0", [bucket(name) for name in names], log), PretendEngine("engine 0", log)
    run([sender.calls()], [engine.calls()])
    written = {entry[2][0]: i for i, entry in enumerate(log) if entry[0] == "write" and entry[2]}
    loaded = {entry[2][0]: i for i, entry in enumerate(log) if entry[0] == "load"}
    for i in range(5):
        assert written[names[i + 1]] < loaded[names[i]]
        if i < 4:
            assert loaded[names[i]] < written[names[i + 2]]  # whose segment is that of bucket i


async def hang(*_):
    await asyncio.sleep(10 * PATIENCE_S)


async def fail(*_):
    raise RuntimeError("the process is gone")


FAULTS = [(hang, r"did not answer {}.* within the update's 0.5 s"), (fail, "failed in {}.*: the process is gone")]


@pytest.mark.parametrize("call", ["begin_send", "next_bucket", "end_send"])
@pytest.mark.parametrize("fault, message", FAULTS)
def test_a_lost_rank_is_named_in_bounded_time(senders, engines, call, fault, message):
    began = time.monotonic()
    calls = [senders[0].calls(), senders[1].calls(), senders[2].calls(**{call: fault})]
    with pytest.raises(WeightSyncError, match="weight update 4: rank 2 " + message.format(call)):
        run(calls, [e.calls() for e in engines], timeout_s=0.5)
    assert time.monotonic() - began < PATIENCE_S
    assert senders[0].ended


@pytest.mark.parametrize("call", ["begin_update", "load_bucket", "finish_update"])
@pytest.mark.parametrize("fault, message", FAULTS)
def test_a_lost_engine_is_named_in_bounded_time_and_the_senders_memory_freed(senders, engines, call, fault, message):
    with pytest.raises(WeightSyncError, match="weight update 4: engine 1 " + message.format(call)):
        run([s.calls() for s in senders], [engines[0].calls(), engines[1].calls(**{call: fault})], timeout_s=0.5)
    assert all(sender.ended for sender in senders)
    assert engines[1].version is None


def test_a_failure_to_load_names_the_tensors(senders, engines):
    with pytest.raises(WeightSyncError, match=r"engine 0 failed in load_bucket \(a … a\)"):
        run([s.calls() for s in senders], [engines[0].calls(load_bucket=fail), engines[1].calls()])


def test_an_engine_that_computes_with_other_weights_is_named_with_the_tensor(senders, log):
    wrong = PretendEngine("engine 1", log, {"a": "1", "b": "stale", "c": "3"})
    with pytest.raises(WeightSyncError, match=r"the weights of engine 1 .* 1 of 3 tensors differ: b"):
        run([s.calls() for s in senders], [wrong.calls()], verify=True)


def test_the_same_bucket_from_two_gpus_is_loaded_once_with_both_handles(log):
    infos = [{"names": ["a", "b"], "ipc_handles": [{f"gpu{rank}": 1}, {f"gpu{rank}": 2}]} for rank in range(2)]
    senders = [PretendSender(f"rank {rank}", [info], log) for rank, info in enumerate(infos)]
    engine = PretendEngine("engine 0", log)
    loaded = []

    async def load(info: dict) -> None:
        loaded.append(info)

    run([s.calls() for s in senders], [engine.calls(load_bucket=load)])
    assert loaded == [{"names": ["a", "b"], "ipc_handles": [{"gpu0": 1, "gpu1": 1}, {"gpu0": 2, "gpu1": 2}]}]
