"""The health rule: what warns, what stops, and that it never stops a run that only has a bad step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.config.schema import HealthConfig, ShareConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.observability.health import NOTHING_LEARNABLE, HealthRule, count_step, evaluation_alarms, in_short, refusal
from megatron_drmas.observability.metrics import HEALTH
from megatron_drmas.team.trajectory import NO_SIGNAL, Trajectory, Turn

QUESTION = Question("q", "what?", ("x",))


def turn(agent, index=0, valid=True, finish="stop"):
    return Turn(agent, "p", index, [], [1], [2], [-0.1], 8, finish, [(0, 1)], "t", "t" if valid else None)


def trajectory(agents=("search",), failure=None, reward=0.0, **use_turn_rewards):
    turns = [turn(agent, index, **use_turn_rewards) for index, agent in enumerate(agents)]
    return Trajectory(QUESTION, 0, 0, turns, reward=reward, failure=failure, failure_detail=failure and f"{failure} said no")


def line(
    step=1, masked=(0, 10), truncated=(0, 10), invalid=(0, 10), zero=(0, 10), found_nothing=(0, 10), rewarded=(5, 10), agents=None
):
    given = zip((*HEALTH, "rewarded"), (masked, truncated, invalid, zero, found_nothing, rewarded))
    counts = {kind: {"team": list(count), "agents": {}} for kind, count in given}
    for kind, found in (agents or {}).items():
        counts[kind]["agents"] = found
    return {"step": step, "masked": {"retrieval": masked[0]} if masked[0] else {}, "health": counts}


TRAJECTORIES = st.lists(
    st.builds(
        trajectory,
        st.lists(st.sampled_from(["search", "answer"]), max_size=4),
        st.sampled_from([None, None, "retrieval", "engine", NO_SIGNAL]),
        st.sampled_from([0.0, 1.0]),
        valid=st.booleans(),
        finish=st.sampled_from(["stop", "length"]),
    ),
    max_size=30,
)


@given(TRAJECTORIES, st.randoms())
def test_counts_are_sums_over_agents_and_do_not_depend_on_the_order(trajectories, random):
    counts = count_step(trajectories, {"search": [1, 2], "answer": [0, 0]})
    for kind in ("truncated", "invalid"):
        assert counts[kind]["team"] == [sum(count[i] for count in counts[kind]["agents"].values()) for i in (0, 1)]
    assert counts["masked"]["team"][1] == len(trajectories) and counts["zero_advantage"] == {
        "team": [1, 2],
        "agents": {"search": [1, 2]},
    }
    for found in counts.values():
        for n, of in (found["team"], *found["agents"].values()):
            assert 0 <= n <= of
    random.shuffle(trajectories)
    assert count_step(trajectories, {"search": [1, 2], "answer": [0, 0]}) == counts


@given(TRAJECTORIES, st.floats(0.01, 1.0))
def test_a_step_is_refused_exactly_when_too_many_are_masked(trajectories, stop):
    problem = refusal(trajectories, HealthConfig(masked=ShareConfig(None, stop), min_calls=1000), "step 7")
    failed = sum(each.failure not in (None, NO_SIGNAL) for each in trajectories)
    assert (problem is not None) == (bool(trajectories) and failed / len(trajectories) >= stop)
    assert refusal(trajectories, HealthConfig(masked=ShareConfig(None, None)), "step 7") is None


def test_a_refusal_names_step_causes_limit_and_remedy_in_one_line():
    found = [trajectory(failure="retrieval")] * 67 + [trajectory(("verifier",))] * 29
    problem = refusal(found, HealthConfig(), "step 3")
    assert problem.startswith("step 3: 67 of 96 trajectories were masked (retrieval 67; most often retrieval said no)")
    assert "health.masked.stop is 0.5" in problem and "retrieval server" in problem and "\n" not in problem


def test_an_agent_whose_trajectories_are_lost_refuses_the_step_though_most_of_it_is_whole():
    found = [trajectory(("verifier", "search"), failure="retrieval")] * 10 + [trajectory(("verifier",))] * 90
    assert "10 of 10 trajectories in which agent search spoke" in refusal(found, HealthConfig(), "step 1")
    few = [trajectory(("verifier", "search"), failure="retrieval")] * 7 + [trajectory(("verifier",))] * 90
    assert refusal(few, HealthConfig(), "step 1") is None, "an agent that speaks seldom stops no run by itself"


def test_what_dynamic_sampling_replaces_is_not_lost():
    assert refusal([trajectory(failure=NO_SIGNAL)] * 9 + [trajectory()], HealthConfig(), "step 1") is None


@pytest.mark.parametrize("kind", HEALTH)
@given(n=st.integers(0, 20), of=st.integers(1, 20), warn=st.floats(0.01, 1.0))
def test_a_share_warns_at_its_limit_and_above(kind, n, of, warn):
    n = min(n, of)
    config = HealthConfig(**{other: ShareConfig(warn if other == kind else None) for other in HEALTH})
    key = "zero" if kind == "zero_advantage" else kind
    alarms = HealthRule(config).check(line(**{key: (n, of)}))
    if kind == "zero_advantage" and n == of:
        assert [alarm["metric"] for alarm in alarms] == [NOTHING_LEARNABLE]
    else:
        assert [alarm["metric"] for alarm in alarms] == [kind] * (n / of >= warn)
        assert all(alarm["who"] == "team" and f"{n} of {of}" in alarm["message"] and alarm["beyond"] >= 1 for alarm in alarms)


def test_an_agent_is_named_with_the_team_or_alone_but_not_twice():
    rule = HealthRule(HealthConfig())
    (alarm,) = rule.check(line(invalid=(12, 16), agents={"invalid": {"search": [12, 12], "answer": [0, 4]}}))
    assert alarm["who"] == "team" and alarm["message"] == "step 1: 12 of 16 outputs could not be parsed (search 12 of 12)"
    (alarm,) = rule.check(line(2, invalid=(12, 40), agents={"invalid": {"search": [12, 12], "answer": [0, 28]}}))
    assert alarm["who"] == "search" and alarm["message"] == "step 2: agent search: 12 of 12 outputs could not be parsed"
    assert not rule.check(line(3, invalid=(7, 40), agents={"invalid": {"search": [7, 7], "answer": [0, 33]}}))


def test_nothing_learnable_is_said_at_once_with_what_explains_it():
    found = line(truncated=(10, 10), invalid=(10, 10), zero=(10, 10), rewarded=(0, 10))
    alarms = HealthRule(HealthConfig()).check(found)
    assert [alarm["metric"] for alarm in alarms] == [NOTHING_LEARNABLE, "truncated", "invalid"]
    assert alarms[0]["message"] == (
        "step 1: nothing can be learned: all 10 advantages are 0 (no trajectory earned a reward, 10 of 10 outputs could not be "
        "parsed, 10 of 10 responses reached their limit); raise rollout.max_response_tokens or the agent's max_response_tokens"
    )
    assert in_short(alarms) == "nothing learnable, truncated 1.00, invalid 1.00"


@given(st.lists(st.sampled_from(["nothing", "solved", "fine"]), max_size=30), st.integers(1, 6))
def test_the_run_stops_after_so_many_steps_in_a_row_and_not_before(steps, patience):
    """A step that teaches something, and one in which everything succeeds, begin the count again."""
    kinds = {"nothing": {"zero": (10, 10), "rewarded": (0, 10)}, "solved": {"zero": (10, 10), "rewarded": (10, 10)}, "fine": {}}
    rule, in_a_row = HealthRule(HealthConfig(patience=patience)), 0
    for number, kind in enumerate(steps, 1):
        rule.check(line(number, **kinds[kind]))
        in_a_row = in_a_row + 1 if kind == "nothing" else 0
        assert (rule.stop is not None) == (in_a_row >= patience)
        if rule.stop:
            assert rule.stop.startswith(f"step {number}: nothing can be learned") and f"health.patience = {patience}" in rule.stop


@pytest.mark.parametrize("kind", ["truncated", "invalid", "zero_advantage", "found_nothing"])
def test_another_share_stops_the_run_only_when_asked_to_and_after_patience(kind):
    bad = line(**{"zero" if kind == "zero_advantage" else kind: (9, 10)})
    patient = HealthRule(HealthConfig(patience=2))  # found_nothing stops by itself, but only when no query finds anything
    asked = HealthRule(HealthConfig(**{kind: ShareConfig(0.5, 0.9)}, patience=2))
    for _ in range(5):
        patient.check(bad)
    assert patient.stop is None
    asked.check(bad)
    assert asked.stop is None
    asked.check(bad)
    assert f"health.{kind}.stop is 0.9" in asked.stop


def test_an_evaluation_warns_of_what_it_left_out():
    found = {"step": 4, "mode": "greedy", "masked": {"retrieval": 30}, "trajectories": 100}
    (alarm,) = evaluation_alarms(found, HealthConfig())
    assert alarm["message"] == "evaluation after 4 steps, greedy: 30 of 100 trajectories were masked (retrieval 30)"
    assert not evaluation_alarms(found | {"masked": {"retrieval": 19}}, HealthConfig())


@pytest.mark.parametrize(
    "of_step, healthy",
    [
        ({}, True),
        ({"masked": (2, 10)}, False),
        ({"truncated": (10, 10), "invalid": (10, 10)}, True),
        ({"zero": (10, 10), "rewarded": (0, 10)}, False),
        ({"zero": (10, 10), "rewarded": (10, 10)}, True),
        ({"found_nothing": (10, 10)}, False),
        ({"found_nothing": (0, 0)}, True),
    ],
)
def test_a_step_is_healthy_while_its_policies_can_be_relied_on(of_step, healthy):
    rule = HealthRule(HealthConfig())
    rule.check(line(**of_step))
    assert rule.healthy is healthy
    strict = HealthRule(HealthConfig(truncated=ShareConfig(0.5, 0.9)))
    strict.check(line(**of_step))
    assert strict.healthy is (healthy and "truncated" not in of_step)


def test_a_server_that_answers_without_passages_is_seen():
    """200 and {"result": [[]]}: no trajectory fails, and the team learns to answer without having read anything."""
    step = line(found_nothing=(10, 10))
    rule = HealthRule(HealthConfig(patience=3))
    for _ in range(3):
        (alarm,) = rule.check(step)
        assert alarm["message"] == "step 1: 10 of 10 queries found nothing" and not rule.healthy
    assert "health.found_nothing.stop is 1" in rule.stop
    trajectories = [trajectory(), trajectory()]
    trajectories[0].found, trajectories[1].found = [0, 2], [0]
    assert count_step(trajectories, {})["found_nothing"] == {"team": [2, 3], "agents": {}}
