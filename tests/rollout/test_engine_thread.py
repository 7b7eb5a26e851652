"""The engine's thread and its submit/poll interface, over a model that only counts."""

import asyncio
import sys
import threading
import time
import types
from collections import Counter

import pytest

from megatron_drmas.rollout.engine import Engine
from megatron_drmas.rollout.engine_messages import EngineError, EngineSettings, Request, Sample
from tests.engine_process import ENVIRONMENT, request

STEPS_PER_REQUEST = 3


class CountingCore:
    """Stands in for vLLM: a request ends after some steps; every step's batch is kept."""

    vocab_size, max_model_len, kv_cache_tokens = 10, 100, 1000
    bytes, asleep = {"weights": 0, "cache": 0}, False

    def __init__(self, settings: EngineSettings):
        if settings.model == "broken":
            raise ValueError("no such folder")
        self.batches: list[list[int]] = []
        self.counts: Counter = Counter()
        self.incomplete, self.updating = None, False
        self.gate = threading.Event()  # a step waits for it
        self.gate.set()
        self._left: dict[int, int] = {}

    @property
    def running(self) -> bool:
        return bool(self._left)

    @property
    def paused(self) -> bool:
        return self.updating or self.incomplete is not None

    def admit(self, requests: list[Request]) -> list[Sample]:
        for one in requests:
            self._left[one.key] = STEPS_PER_REQUEST
        return []

    def step(self) -> list[Sample]:
        self.gate.wait()
        self.batches.append(list(self._left))
        if -1 in self._left:
            raise RuntimeError("a kernel failed")
        self._left = {key: left - 1 for key, left in self._left.items()}
        done = [key for key, left in self._left.items() if left == 0]
        for key in done:
            del self._left[key]
        return [Sample(key, [1], [-0.5], "stop", [(0, 1)]) for key in done]

    def begin_update(self) -> None:
        self.updating = True

    def finish_update(self, version: int) -> None:
        self.updating = False

    def reset_prefix_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


@pytest.fixture
def make(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    module = types.ModuleType("megatron_drmas.rollout.llm_core")
    module.LLMCore = CountingCore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    started = []

    def start(**settings) -> Engine:
        engine = Engine(EngineSettings(**{"name": "solver", "model": "folder", "stop_ids": (), **settings}))
        engine.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine._core.gate.set()
        engine.shutdown()


def requests(*keys: int) -> list[Request]:
    return [request(key, [1]) for key in keys]


async def collect(engine: Engine, count: int) -> list[int]:
    keys: list[int] = []
    while len(keys) < count:
        keys += [sample.key for sample in await engine.poll(5.0)]
    return keys


def test_every_request_comes_back_once(make):
    async def run():
        engine = make()
        for first in range(0, 30, 3):
            await engine.submit(requests(first, first + 1, first + 2))
        assert sorted(await collect(engine, 30)) == list(range(30))
        assert await engine.poll(0.01) == []

    asyncio.run(run())


def test_one_submit_enters_the_batch_as_a_whole_and_in_order(make):
    async def run():
        engine = make()
        await engine.submit(requests(5, 3, 9, 1))
        await collect(engine, 4)
        assert engine._core.batches[0] == [5, 3, 9, 1]

    asyncio.run(run())


def test_deterministic_batches_depend_on_the_submits_alone(make):
    async def batches(pause_s: float) -> list[list[int]]:
        engine = make(deterministic=True)
        for keys in ((0, 1), (2,), (3, 4, 5)):
            await engine.submit(requests(*keys))
            await asyncio.sleep(pause_s)
        await collect(engine, 6)
        return engine._core.batches

    expected = [[0, 1]] * STEPS_PER_REQUEST + [[2]] * STEPS_PER_REQUEST + [[3, 4, 5]] * STEPS_PER_REQUEST
    assert asyncio.run(batches(0.0)) == asyncio.run(batches(0.05)) == expected


def test_without_it_later_requests_join_a_running_batch(make):
    async def run():
        engine = make()
        engine._core.gate.clear()
        await engine.submit(requests(0))
        await asyncio.sleep(0.05)
        await engine.submit(requests(1))
        engine._core.gate.set()
        await collect(engine, 2)
        assert [0, 1] in engine._core.batches

    asyncio.run(run())


def test_a_dying_thread_wakes_the_poll_and_is_named_with_its_cause(make):
    async def run():
        engine = make()
        polling = asyncio.ensure_future(engine.poll(30.0))
        await asyncio.sleep(0.05)
        await engine.submit(requests(-1))
        for call in (polling, engine.poll(1.0), engine.submit(requests(2)), engine.begin_update()):
            with pytest.raises(EngineError, match=r"'solver'.*a kernel failed") as caught:
                await call
            assert isinstance(caught.value.__cause__, RuntimeError)

    asyncio.run(run())


def test_a_command_that_waits_for_a_dying_thread_is_answered(make):
    async def run():
        engine = make()
        engine._core.gate.clear()
        await engine.submit(requests(-1))
        await asyncio.sleep(0.05)
        waiting = asyncio.ensure_future(engine.begin_update())
        await asyncio.sleep(0.05)
        engine._core.gate.set()
        with pytest.raises(EngineError, match="a kernel failed"):
            await asyncio.wait_for(waiting, 5.0)

    asyncio.run(run())


def test_a_failing_command_is_its_callers_error_only(make):
    async def run():
        engine = make()
        with pytest.raises(AttributeError):
            await engine.weight_digests()
        await engine.submit(requests(1))
        assert await collect(engine, 1) == [1]

    asyncio.run(run())


def test_incomplete_weights_refuse_requests_and_polls_by_name(make):
    async def run():
        engine = make()
        engine._core.incomplete = "lm_head.weight did not come"
        for call in (engine.submit(requests(1)), engine.poll(1.0)):
            with pytest.raises(EngineError, match=r"'solver' holds incomplete weights .lm_head.weight did not come"):
                await call

    asyncio.run(run())


def test_requests_submitted_during_an_update_wait_for_its_end(make):
    async def run():
        engine = make()
        await engine.begin_update()
        await engine.submit(requests(1))
        assert await engine.poll(0.1) == [] and engine._core.batches == []
        await engine.finish_update(1)
        assert await collect(engine, 1) == [1]

    asyncio.run(run())


def test_two_polls_at_once_are_refused(make):
    async def run():
        engine = make()
        first = asyncio.ensure_future(engine.poll(0.2))
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="polled twice"):
            await engine.poll(0.1)
        assert await first == []

    asyncio.run(run())


def test_poll_waits_no_longer_than_asked(make):
    async def run():
        engine = make()
        began = time.monotonic()
        assert await engine.poll(0.05) == []
        assert time.monotonic() - began >= 0.05

    asyncio.run(run())


def test_an_engine_that_is_not_running_says_so(make):
    async def run():
        with pytest.raises(EngineError, match="never started"):
            await Engine(EngineSettings("solver", "folder", ())).submit(requests(1))
        engine = make()
        engine.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            await engine.submit(requests(1))

    asyncio.run(run())


def test_start_raises_what_kept_the_model_from_loading(make):
    with pytest.raises(ValueError, match="no such folder"):
        make(model="broken")


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"])
def test_a_variable_that_is_read_at_import_must_be_right_beforehand(make, monkeypatch, variable):
    monkeypatch.setenv(variable, "7")
    with pytest.raises(ValueError, match=f"{variable} is '7'"):
        make()
