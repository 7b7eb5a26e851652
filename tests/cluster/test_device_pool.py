"""The account of the devices: room is taken when it has been given back, whatever the order of the answers."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.cluster.device_pool import DevicePool
from megatron_drmas.cluster.schedule import PoolOverflow, State, step_schedule
from tests.cluster.test_schedule import AWAY, ON, policy

TEAM = [*policy("a", [0]), *policy("b", [0]), *policy("c", [0])]


class Devices:
    """What is really there, from when a resident begins to come until it has gone."""

    def __init__(self, schedule, seed=0, fails=None):
        self.schedule, self.random, self.fails = schedule, random.Random(seed), fails
        self.there = dict.fromkeys(schedule.residents, AWAY)
        self.most = 0
        self.kept = {}

    def move(self, name):
        async def moving(before, state, keep):
            assert self.there[name] == before
            entering = (before, state) in ((AWAY, ON), (AWAY, State.WEIGHTS), (State.WEIGHTS, ON))
            if entering:
                self.there[name] = state
            self.most = max(self.most, *self.schedule.held(self.there).values())
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
            if name == self.fails:
                raise RuntimeError(f"{name} failed")
            self.there[name] = state
            self.kept[name] = keep
            return 0 if state == AWAY else None

        return moving

    def pool(self):
        return DevicePool(self.schedule, {name: self.move(name) for name in self.schedule.residents}, dict(self.there))


async def steps(pool, count, idle=()):
    for _ in range(count):
        for phase in [*pool.schedule.phase("update"), *pool.schedule.phase("sync"), *pool.schedule.phase("generate")]:
            await pool.enter(phase, keep=idle, idle=idle)


@given(st.integers(0, 1000), st.sampled_from([None, 24, 32, 72]))
def test_no_order_of_answers_holds_more_than_the_schedule_says(seed, limit):
    devices = Devices(step_schedule(TEAM, limit), seed)
    pool = devices.pool()
    asyncio.run(asyncio.wait_for(steps(pool, 2), 10))
    assert devices.most <= max(devices.schedule.peak().values()) == max(pool.peak.values())


def test_who_has_nothing_to_train_on_stays_away_and_keeps_its_weights():
    devices = Devices(step_schedule(TEAM))
    pool = devices.pool()

    async def run():
        await pool.enter(*pool.schedule.phase("generate"))
        for phase in [*pool.schedule.phase("update"), *pool.schedule.phase("sync")]:
            if "b" not in phase.policies:
                await pool.enter(phase, keep={"b"}, idle={"b"})
                assert devices.there["actor of b"] == devices.there["engines of b"] == AWAY
        assert devices.kept["engines of b"] and not devices.kept["engines of a"]
        await pool.enter(*pool.schedule.phase("generate"))
        assert devices.there["engines of b"] == ON

    asyncio.run(run())


def test_a_loan_ends_as_it_began():
    devices = Devices(step_schedule(TEAM))
    pool = devices.pool()

    async def run():
        await pool.enter(*pool.schedule.phase("generate"))
        before = dict(devices.there)
        async with pool.lend("b"):
            assert {name for name, state in devices.there.items() if state == ON} == {"actor of b"}
        assert devices.there == before

    asyncio.run(run())


def test_a_failed_move_is_raised_and_gives_nothing_to_others():
    devices = Devices(step_schedule(TEAM), fails="engines of a")
    pool = devices.pool()
    with pytest.raises(RuntimeError, match="engines of a failed"):
        asyncio.run(steps(pool, 1))


def test_who_left_and_still_holds_memory_is_named():
    schedule = step_schedule(TEAM)

    async def stays(before, state, keep):
        return 3 << 30

    pool = DevicePool(
        schedule, dict.fromkeys(schedule.residents, stays), dict.fromkeys(schedule.residents, ON) | {"actor of a": AWAY}
    )
    with pytest.raises(PoolOverflow, match=r"(actor|engines) of . still holds 3.00 GiB"):
        asyncio.run(pool.enter(pool.schedule.phase("update")[1]))


def test_an_engine_is_started_again_on_devices_that_nobody_else_holds():
    """Which are as they were afterwards; what shares none of them never moves."""
    devices = Devices(step_schedule([*TEAM, *policy("far", [1])], None))
    pool = devices.pool()

    async def main():
        await pool.enter(pool.schedule.generating)
        before = dict(pool.states)
        async with pool.vacated("b"):
            away = {name for name, state in devices.there.items() if state == AWAY}
            assert {name for name in away if "far" not in name} == {name for name in pool.states if "far" not in name}
            assert devices.there["engines of far"] == before["engines of far"] == ON
            await pool.meet("b")
            assert [name for name, state in devices.there.items() if state == State.WEIGHTS] == ["actor of b", "engines of b"]
        assert pool.states == before == devices.there
        assert all(kept for name, kept in devices.kept.items() if "far" not in name), "engines that sleep keep their weights"

    asyncio.run(asyncio.wait_for(main(), 10))
