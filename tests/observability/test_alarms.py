"""Early warning: what runs away is named; what only varies, or comes in another unit, is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.observability.alarms import WARM_UP, Watch

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


@given(st.lists(st.floats(0.5, 2.0), min_size=200, max_size=200))
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
    line = empty | {"step": 1, "agents": {name: {"prob_ratio": 2.0} for name in ("verifier", "search")}, "policies": {"judge": {"prob_ratio": 2.0}}}
    assert [alarm["who"] for alarm in watch.check(line)] == ["search", "judge"]
    assert [alarm["who"] for alarm in watch.check(line | {"policies": {}})] == ["verifier", "search"]
