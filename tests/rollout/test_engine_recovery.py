"""Engines that fail while they have requests: every caller gets the sample of its own prompt and seed, all the same."""

import asyncio

import pytest

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.rollout.client import EngineTimeout, PolicyClient
from megatron_drmas.rollout.engine_health import EngineState
from megatron_drmas.rollout.engine_messages import EngineSettings, Sample
from tests.engine_process import EngineProcess, prompt
from tests.tiny_models import make_qwen2

REQUESTS = [([3 + n, 5], n) for n in range(6)]  # (prompt, seed)


class Fake:
    """An engine that says each prompt backwards and with its seed, one request at a time."""

    def __init__(self, dies_after=None, silent_after=None, errors=0, dead_on_arrival=False):
        self.dies_after, self.silent_after, self.errors, self.dead = dies_after, silent_after, errors, dead_on_arrival
        self.submits, self.queue, self.done, self.arrived = [], [], 0, asyncio.Event()

    async def submit(self, requests):
        if self.dead:
            raise ConnectionError("gone")
        self.submits.append([(request.prompt_ids.tolist(), request.seed) for request in requests])
        self.queue += requests
        self.arrived.set()

    async def poll(self, timeout_s):
        if not self.queue:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), timeout_s)
        if self.done == self.dies_after:
            raise ConnectionError("died")
        if self.done == self.silent_after:
            await asyncio.sleep(timeout_s)
            return []
        self.done += 1
        request = self.queue.pop(0)
        if self.errors:
            self.errors -= 1
            return [Sample(request.key, [], [], "error", [], "not finite")]
        ids = [*reversed(request.prompt_ids.tolist()), request.seed]
        return [Sample(request.key, ids, [-0.5] * len(ids), "stop", [(0, len(ids))])]


def ask(engines, successors, lockstep=False, timeout_s=5.0, requests=REQUESTS):
    """What the callers get; the engines that were used; and what was said when one was replaced."""
    used, said = list(engines), []

    async def recover(index, health, error):
        said.append((index, str(error)))
        assert health.state is EngineState.DEAD
        health.restarting()
        await asyncio.sleep(0.02)
        if not successors:
            raise RuntimeError("no more")
        health.started()
        used.append(successors.pop(0))
        await asyncio.sleep(0.02)
        assert not used[-1].submits, "it was stale"
        health.updated()
        return used[-1]

    async def main():
        client = PolicyClient("p", engines, timeout_s, lockstep, recover)
        client.POLL_S = 0.02
        async with client:
            futures = [client.generate(prompt_ids, seed, 1.0, 1.0, 9) for prompt_ids, seed in requests]
            if lockstep:
                client.flush()
            return await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10)

    return asyncio.run(main()), used, said


def right(samples):
    return [sample.token_ids.tolist() for sample in samples] == [[*reversed(ids), seed] for ids, seed in REQUESTS]


@pytest.mark.parametrize(
    "fault", [{"dies_after": 2}, {"dies_after": 0}, {"dead_on_arrival": True}, {"errors": 3}, {"silent_after": 2}]
)
@pytest.mark.parametrize("lockstep", [False, True])
def test_nobody_notices(fault, lockstep):
    samples, used, said = ask([Fake(**fault)], [Fake()], lockstep, timeout_s=0.3 if "silent_after" in fault else 5.0)
    assert right(samples) and [index for index, _ in said] == [0]
    if lockstep:
        assert used[1].submits == [[(ids, seed) for ids, seed in REQUESTS]], "the batch as it was, what was finished included"
    elif "dies_after" in fault:
        assert sum(map(len, used[1].submits)) == len(REQUESTS) - fault["dies_after"]


def test_another_engine_takes_over_what_was_stranded():
    samples, used, said = ask([Fake(dies_after=1), Fake()], [Fake()])
    assert right(samples) and len(said) == 1
    assert sum(map(len, used[1].submits)) == len(REQUESTS) - 1


def test_one_error_is_tried_again_without_a_new_process():
    samples, _, said = ask([Fake(errors=2)], [])
    assert right(samples) and not said


def test_errors_that_a_new_process_returns_too_are_the_callers():
    samples, _, said = ask([Fake(errors=99)], [Fake(errors=99)])
    assert [sample.error for sample in samples] == ["not finite"] * len(REQUESTS) and len(said) == 1


def test_silence_and_what_cannot_be_replaced_are_named():
    samples, _, said = ask([Fake(silent_after=0)], [], timeout_s=0.2)
    assert [str(error) for error in samples] == ["no more"] * len(REQUESTS)
    assert "engine 0 of policy 'p' has finished none of 6 requests" in said[0][1]

    async def without():
        client = PolicyClient("p", [Fake(silent_after=0)], 0.2)
        client.POLL_S = 0.02
        async with client:
            with pytest.raises(EngineTimeout, match="policy 'p'"):
                await client.generate([1], 0, 1.0, 1.0, 9)
            with pytest.raises(EngineTimeout):
                await client.generate([1], 0, 1.0, 1.0, 9)

    asyncio.run(without())


def test_engines_are_empty_when_they_are_held_and_go_on_after():
    async def main():
        async with PolicyClient("p", [Fake(), Fake()], 5.0) as client:
            first = [client.generate(ids, seed, 1.0, 1.0, 9) for ids, seed in REQUESTS]
            await asyncio.sleep(0)
            await client.hold()
            assert all(future.done() for future in first)
            later = client.generate([3], 1, 1.0, 1.0, 9)
            await asyncio.sleep(0.05)
            assert not later.done() and client.waiting == 1
            client.release()
            await asyncio.wait_for(later, 5)

    asyncio.run(main())


class Real:
    """An engine in a process of its own, as a handle."""

    def __init__(self, process):
        self.process, self.turn, self.asked = process, asyncio.Lock(), asyncio.Event()

    async def submit(self, requests):
        await self._call("submit", requests)

    async def poll(self, timeout_s):
        return await self._call("poll", min(timeout_s, 0.05))

    async def _call(self, *call):
        async with self.turn:
            return await asyncio.to_thread(self.process.call, *call)


def test_a_real_engine_that_is_killed_in_a_batch_changes_no_bit(tmp_path):
    size = EngineConfig(max_model_len=128, max_num_seqs=8, kv_cache_mib=32)
    settings = EngineSettings("verifier", make_qwen2(str(tmp_path)), (2,), size, deterministic=True)
    asked = [(prompt(9, start), start) for start in range(6)]

    async def generate(process, kill):
        successors = []

        async def recover(index, health, error):
            health.restarting()
            await asyncio.to_thread(process.__exit__)
            successors.append(await asyncio.to_thread(EngineProcess, settings))
            health.started()
            health.updated()
            return Real(successors[-1])

        client = PolicyClient("verifier", [Real(process)], 60.0, True, recover)
        try:
            async with client:
                futures = [
                    client.generate(ids, seed, 0.7, 1.0, length) for (ids, seed), length in zip(asked, (2, 90, 90, 90, 90, 90))
                ]
                client.flush()
                if kill:
                    await futures[0]
                    process.process.kill()
                samples = await asyncio.gather(*futures)
        finally:
            for successor in successors:
                successor.__exit__()
        return [(sample.token_ids.tolist(), sample.logprobs.tobytes()) for sample in samples], len(successors)

    with EngineProcess(settings) as process:
        undisturbed, _ = asyncio.run(generate(process, kill=False))
        disturbed, restarts = asyncio.run(generate(process, kill=True))
    assert disturbed == undisturbed and restarts == 1
