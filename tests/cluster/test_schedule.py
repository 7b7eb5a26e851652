"""A step's schedule: who shares GPUs takes turns, who does not never moves, and no phase holds more than the devices have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.cluster.schedule import PoolOverflow, Resident, State, step_schedule

GIB = 1 << 30
ON, WEIGHTS, AWAY = State.ON_DEVICE, State.WEIGHTS, State.AWAY


def resident(policy, role, gpus, weights, rest):
    gpus = [(0, gpu) for gpu in gpus]
    sizes = {ON: weights + rest, WEIGHTS: weights, AWAY: 0}
    return Resident(policy, role, {state: dict.fromkeys(gpus, size) for state, size in sizes.items()})


def policy(name, gpus, actor=(2, 14), engines=(2, 6)):
    return [resident(name, "actor", gpus, *actor), resident(name, "engines", gpus, *engines)]


def names(schedule, phase):
    return [set(each.policies) for each in schedule.phase(phase)]


def test_policies_on_gpus_of_their_own_update_and_sync_side_by_side():
    schedule = step_schedule([*policy("a", [0, 1]), *policy("b", [2])])
    assert names(schedule, "update") == [{"a", "b"}] and names(schedule, "sync") == [{"a", "b"}]
    assert schedule.peak() == {(0, 0): 16, (0, 1): 16, (0, 2): 16}


def test_three_policies_on_the_gpus_of_one_update_in_turn_largest_first():
    schedule = step_schedule([*policy("a", [0]), *policy("b", [0], actor=(4, 28)), *policy("c", [0])])
    assert names(schedule, "update") == [{"b"}, {"a"}, {"c"}] and names(schedule, "sync") == [{"a"}, {"b"}, {"c"}]
    assert schedule.peak() == {(0, 0): 32} and schedule.everything() == {(0, 0): 88}


def test_room_decides_who_updates_beside_whom():
    team = [*policy("a", [0]), *policy("b", [0]), *policy("c", [0])]
    assert names(step_schedule(team, 32), "update") == [{"a", "b"}, {"c"}]
    roomy = step_schedule(team, 72)
    assert not roomy.takes_turns and names(roomy, "update") == [{"a", "b", "c"}] == names(roomy, "sync")


def test_what_cannot_fit_is_refused_with_the_sum():
    with pytest.raises(
        PoolOverflow, match=r"generate of a, b: 8.00 \(engines of a\) \+ 8.00 \(engines of b\) = 16.00 GiB on GPU 0"
    ):
        step_schedule(
            [*policy("a", [0], (2 * GIB, GIB), (2 * GIB, 6 * GIB)), *policy("b", [0], (GIB, GIB), (GIB, 7 * GIB))], 15 * GIB
        )


def test_a_frozen_policy_keeps_generating_and_sleeps_only_where_others_train():
    frozen = resident("judge", "engines", [0], 2, 6)
    schedule = step_schedule([*policy("a", [0]), frozen])
    assert [phase.states["engines of judge"] for phase in schedule.phases] == [ON, AWAY, AWAY]
    apart = step_schedule([*policy("a", [1]), frozen])
    assert {phase.states["engines of judge"] for phase in apart.phases} == {ON}


gpus = st.sets(st.integers(0, 3), min_size=1)
teams = st.lists(st.tuples(gpus, gpus, st.integers(1, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=4)


@given(teams, st.one_of(st.none(), st.integers(10, 120)))
def test_laws(team, limit):
    residents = []
    for number, (of_actor, of_engines, weights, rest, trainable) in enumerate(team):
        if trainable:
            residents.append(resident(str(number), "actor", of_actor, weights, rest))
        residents.append(resident(str(number), "engines", of_engines, weights, rest))
    try:
        schedule = step_schedule(residents, limit)
    except PoolOverflow:
        assert limit is not None
        return
    trained = sorted(name for phase in schedule.phase("update") for name in phase.policies)
    synced = sorted(name for phase in schedule.phase("sync") for name in phase.policies)
    assert trained == synced == sorted(each.policy for each in residents if each.role == "actor")
    by_name = {each.name: each for each in residents}
    for phase in schedule.phases:
        on = {name for name, state in phase.states.items() if state == ON}
        if phase.name == "update":
            assert all(phase.states[f"actor of {name}"] == ON for name in phase.policies)
        if phase.name == "sync":
            states = [(phase.states[f"actor of {name}"], phase.states[f"engines of {name}"]) for name in phase.policies]
            assert all(AWAY not in both for both in states)
        if phase.name == "generate":
            assert {f"engines of {each.policy}" for each in residents} <= on
        if limit is None:  # what computes has its GPUs to itself: actors, or engines
            actors = [by_name[name] for name in on if by_name[name].role == "actor"]
            assert len(set().union(*(each.gpus for each in actors))) == sum(len(each.gpus) for each in actors) or not actors
            engines = set().union(*(by_name[name].gpus for name in on if by_name[name].role == "engines"))
            assert all(engines.isdisjoint(each.gpus) for each in actors)
        else:
            assert max(schedule.held(phase.states).values()) <= limit
    for each in residents:
        alone = all(not each.gpus & other.gpus for other in residents if other is not each)
        assert not alone or {phase.states[each.name] for phase in schedule.phases} == {ON}
