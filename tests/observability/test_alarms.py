"""Early warning: what runs away is named; what only varies, or comes in another unit, is not."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.observability.alarms import QUIET, WARM_UP, Episodes, Watch, likely_causes

AGENTS_OF = {"judge": ["verifier"], "writer": ["search", "answer"]}


def raised(values, metric="grad_norm_max", scope="policies", who="writer") -> list[list[dict]]:
    watch = Watch(AGENTS_OF)
    empty = {"skipped": {}, "nonfinite": {}, "agents": {}, "policies": {}}
    return [watch.check(empty | {"step": step, scope: {who: {metric: value}}}) for step, value in enumerate(values, 1)]


NORMS = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30)


@given(NORMS, st.sampled_from([0.25, 4.0, 1024.0]))
def test_alarms_do_not_depend_on_the_unit_of_the_gradient_norm(values, scale):
    scaled = raised([value * scale for value in values])
    assert [len(alarms) for alarms in raised(values)] == [len(alarms) for alarms in scaled]


@given(st.floats(0.0, 1e6), st.integers(1, 30))
def test_a_steady_metric_raises_nothing(value, steps):
    assert not any(raised([value] * steps))
    assert not any(raised([value] * steps, "response_length", "agents", "search"))


@given(st.lists(st.floats(1.0, 1.9), min_size=WARM_UP, max_size=20), st.floats(5.001, 1e6))
def test_a_spike_over_five_medians_alarms_once(values, factor):
    spike = sorted(values)[len(values) // 2] * factor
    *quiet, last, after = raised([*values, spike, values[0]])
    assert not any(quiet) and len(last) == 1 and not after
    assert last[0]["metric"] == "grad_norm_max" and last[0]["who"] == "writer" and last[0]["value"] == spike


def test_an_alarm_names_step_policy_and_agents():
    (alarm,) = raised([1.0] * WARM_UP + [50.0])[-1]
    assert (
        alarm["message"]
        == f"step {WARM_UP + 1}: grad_norm_max of policy writer (agents search, answer) is 50, over 5 times its running median 1"
    )


@pytest.mark.parametrize(
    "metric, scope, usual, factor",
    [
        ("grad_norm_max", "policies", 1.0, 1.04),
        ("entropy", "policies", 0.5, 0.97),
        ("entropy", "agents", 0.5, 0.92),
        ("entropy", "agents", 0.5, 1.02),
        ("response_length", "agents", 20.0, 1.02),
        ("response_length", "agents", 2000.0, 0.97),
    ],
)
def test_a_slow_drift_alarms_though_no_step_stands_out(metric, scope, usual, factor):
    """A few percent a step: the running median drifts along, the start does not."""
    alarms = raised([usual * factor**step for step in range(200)], metric, scope, "search" if scope == "agents" else "writer")
    assert not any(alarms[: WARM_UP + 5]) and alarms[-1]
    assert "its start" in alarms[-1][0]["message"] or "running median" in alarms[-1][0]["message"]


@settings(max_examples=20)
@given(st.lists(st.floats(0.6, 1.7), min_size=100, max_size=100))
def test_what_only_varies_about_its_start_raises_nothing(values):
    assert not any(raised(values, "entropy"))


@pytest.mark.parametrize(
    "metric, scope, who, usual, away",
    [
        ("grad_norm_max", "policies", "judge", 1.0, None),
        ("prob_ratio", "policies", "judge", 1.0, 1.06),
        ("prob_ratio", "agents", "search", 1.0, 1.06),
        ("entropy", "policies", "writer", 0.5, 1.6),
        ("entropy", "policies", "writer", 0.5, 0.04),
        ("response_length", "agents", "search", 20.0, 61.0),
        ("response_length", "agents", "search", 20.0, 6.0),
        ("baseline_inflation", "agents", "answer", 1.1, 3.1),
    ],
)
def test_what_runs_away_alarms_in_its_step_and_names_its_owner(metric, scope, who, usual, away):
    *before, last = raised([usual] * WARM_UP + [away], metric, scope, who)
    assert not any(before)
    assert len(last) == 1 and who in last[0]["message"] and metric in last[0]["message"]


def test_a_skipped_optimizer_step_alarms_and_names_policy_and_agents():
    line = {"step": 3, "skipped": {"writer": 1}, "nonfinite": {}, "agents": {}, "policies": {"writer": {"grad_norm_max": 0.5}}}
    (alarm,) = Watch(AGENTS_OF).check(line)
    assert alarm["message"].startswith("step 3: policy writer (agents search, answer) skipped 1 optimizer step")


def test_an_agent_with_a_policy_to_itself_does_not_alarm_twice():
    watch, empty = Watch(AGENTS_OF), {"skipped": {}, "nonfinite": {}}
    line = empty | {
        "step": 1,
        "agents": {name: {"prob_ratio": 2.0} for name in ("verifier", "search")},
        "policies": {"judge": {"prob_ratio": 2.0}},
    }
    assert [alarm["who"] for alarm in watch.check(line)] == ["search", "judge"]
    assert [alarm["who"] for alarm in watch.check(line | {"policies": {}})] == ["verifier", "search"]


def alarm(step, metric="entropy", who="writer", beyond=2.0):
    return {
        "metric": metric,
        "who": who,
        "value": 1.0,
        "beyond": beyond,
        "message": f"step {step}: {metric} of {who} is {beyond}",
    }


def test_an_end_says_the_first_the_last_and_the_worst_step_and_not_the_problem_again():
    episodes = Episodes()
    for step, beyond in ((3, 2.0), (4, 5.0), (6, 3.0)):
        episodes.add(step, [alarm(step, beyond=beyond)])
    (found,) = episodes.add(6 + QUIET, [alarm(6 + QUIET, who="judge")])[1]
    assert found.end_text() == "over: entropy of writer, in steps 3 to 6, worst in step 4"
    (found,) = episodes.add(6 + 2 * QUIET, [])[1]
    assert found.end_text() == f"over: entropy of judge, in step {6 + QUIET} only"


@given(st.lists(st.dictionaries(st.sampled_from(["judge", "writer"]), st.none() | st.floats(1.0, 9.0)), max_size=60))
def test_episodes_hold_every_alarm_once_and_lie_apart(steps):
    episodes, begun, ended = Episodes(), [], []
    for step, of_step in enumerate(steps, 1):
        new, over = episodes.add(step, [alarm(step, who=who, beyond=beyond) for who, beyond in of_step.items()])
        begun += new
        ended += over
    assert (
        begun == episodes.all
        and all(not episode.open for episode in ended)
        and sum(not episode.open for episode in begun) == len(ended)
    )
    for who in ("judge", "writer"):
        own = [episode for episode in episodes.all if episode.who == who]
        raised = {step: of_step[who] for step, of_step in enumerate(steps, 1) if who in of_step}
        assert sorted(raised) == sorted(step for episode in own for step in raised if episode.began <= step <= episode.last)
        for earlier, later in itertools.pairwise(own):
            assert later.began - earlier.last > QUIET and not earlier.open
        for episode in own:
            inside = {step: beyond for step, beyond in raised.items() if episode.began <= step <= episode.last}
            assert episode.began in inside and episode.last in inside and episode.worst in inside
            worst = float("inf") if None in inside.values() else max(inside.values())
            assert (float("inf") if episode.beyond is None else episode.beyond) == worst
            assert max(b - a for a, b in zip(sorted(inside), [*sorted(inside)[1:], episode.last + 1])) <= QUIET


def test_a_long_alarm_is_one_line():
    episodes = Episodes()
    for step in range(1, 33):
        episodes.add(step, [alarm(step, beyond=5.0 if step == 20 else 2.0)] if 12 <= step <= 30 else [])
    assert [episode.text() for episode in episodes.all] == ["from step 12 on, worst in 20: entropy of writer is 5.0"]
    episodes.add(35, [])
    assert [episode.text() for episode in episodes.all] == ["steps 12 to 30, worst in 20: entropy of writer is 5.0"]


@given(st.floats(1.06, 50.0))
def test_how_far_a_value_is_beyond_its_limit(value):
    (found,) = raised([value], "prob_ratio")[0]
    assert found["beyond"] == pytest.approx(value / 1.05)
    (found,) = raised([0.5] * WARM_UP + [0.05 / value], "entropy")[-1]
    assert found["beyond"] == pytest.approx(value)


@pytest.mark.parametrize(
    "config, named",
    [
        ({"rollout": {"top_p": 0.5}}, "rollout.top_p = 0.5"),
        ({"precision": {"mode": "fp32", "rollout": "bfloat16"}}, "precision.rollout = bfloat16"),
        ({"precision": {"mode": "fp8_emulated", "rollout": "float32"}}, "precision.mode = fp8_emulated"),
    ],
)
def test_a_probability_ratio_names_what_may_explain_it(config, named):
    line = {
        "step": 1,
        "skipped": {},
        "nonfinite": {},
        "agents": {},
        "policies": {"writer": {"prob_ratio": 2.0, "grad_norm_max": None}},
    }
    ratio, norm = Watch(AGENTS_OF, likely_causes(config)).check(line)
    assert f"; likely: {named}" in ratio["message"] and "likely" not in norm["message"]
    assert not likely_causes({"rollout": {"top_p": 1.0}, "precision": {"mode": "bf16", "rollout": "bfloat16"}})
