"""The law of resuming: whatever was undone, the files end as those of a run that nothing disturbed."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_drmas.config.schema import HealthConfig
from megatron_drmas.observability.history import HistoryError, read_json_lines
from megatron_drmas.observability.records import SAMPLED
from megatron_drmas.observability.run_log import RunLog, closing_summary, finished_summary
from megatron_drmas.observability.summary import Summary
from tests.observability.conftest import CONFIG, evaluation_record, step_record

STEPS = 6
OF_A_START = ("startup_seconds", "restarts", "seconds", "peak_memory_gib")


def results(folder) -> list[dict]:
    lines = list(read_json_lines(folder / "metrics.jsonl"))
    return [
        {key: value for key, value in line.items() if key != "peak_memory_gib"}
        for line in lines
        if line["kind"] in ("step", "evaluation")
    ]


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, repr(event.value)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def trajectories(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "trajectories").iterdir()}


def assert_same_run(folder, undisturbed, read_summary):
    assert results(folder) == results(undisturbed)
    assert scalars(folder) == scalars(undisturbed)
    assert trajectories(folder) == trajectories(undisturbed)
    ours, theirs = read_summary(folder), read_summary(undisturbed)
    assert {key: value for key, value in ours.items() if key not in OF_A_START} == {
        key: value for key, value in theirs.items() if key not in OF_A_START
    }
    for phase in ("generate", "update", "weight_sync", "evaluate"):
        assert ours["seconds"][phase] == theirs["seconds"][phase]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_killed_run_resumed_from_an_earlier_step_ends_like_an_undisturbed_one(
    tmp_path_factory, play, undisturbed, read_summary, data
):
    reached = data.draw(st.integers(1, STEPS))
    resumed = data.draw(st.integers(1, reached))
    torn = data.draw(st.booleans())
    folder = tmp_path_factory.mktemp("killed")
    play(folder, last=reached)
    if torn:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"kind":"step","step":')
    play(folder, first=resumed + 1, resume_step=resumed).finish("finished")
    assert_same_run(folder, undisturbed, read_summary)
    assert read_summary(folder)["restarts"] == {"resumed": 1}


def test_a_run_that_goes_back_while_it_lives_ends_like_an_undisturbed_one(tmp_path, play, undisturbed, read_summary):
    folder = tmp_path / "rewound"
    log = play(folder, last=5)
    log.log_restart("engine writer")
    log.rewind(2)
    assert read_summary(folder)["step"] == 2
    assert [line["step"] for line in results(folder)] == [0, 0, 1, 2]
    log.finish("failed: stopped here")
    play(folder, first=3, resume_step=2).finish("finished")
    assert_same_run(folder, undisturbed, read_summary)
    assert read_summary(folder)["restarts"] == {"engine writer": 1, "resumed": 1}


def test_a_new_run_forgets_an_earlier_one_of_its_folder(tmp_path, play, undisturbed, read_summary):
    folder = tmp_path / "again"
    play(folder, last=4).finish("failed: out of memory")
    play(folder).finish("finished")
    assert_same_run(folder, undisturbed, read_summary)
    assert read_summary(folder)["restarts"] == {}


def test_the_summary_is_a_function_of_the_lines(undisturbed, read_summary):
    rebuilt = Summary("team", 0, STEPS)
    for line in read_json_lines(undisturbed / "metrics.jsonl"):
        rebuilt.add(line)
    assert rebuilt.as_dict() == read_summary(undisturbed)


def test_the_summary_says_what_was_learned_and_what_it_cost(undisturbed, read_summary):
    summary = read_summary(undisturbed)
    steps = [line for line in results(undisturbed) if line["kind"] == "step"]
    for mode, samples, whole in (("sampled", 4, 49), ("greedy", 1, 50)):
        assert summary["evaluation"][mode] == {
            "step": STEPS,
            "questions": 50,
            "trained_on": 0,
            "samples": samples,
            "pass_questions": whole,
            "reward": {"before": -1.3, "after": -0.7},
            "success": {"before": 0.2, "after": 0.8},
            "pass_at_k": {"before": pytest.approx(0.3), "after": pytest.approx(0.9)},
        }
    assert (summary["reward"], summary["success"]) == (steps[-1]["reward"], steps[-1]["success"])
    assert (summary["status"], summary["step"], summary["steps"], summary["seed"]) == ("finished", STEPS, STEPS, 0)
    assert summary["max_prob_ratio"] == max(policy["prob_ratio"] for line in steps for policy in line["policies"].values())
    assert summary["max_logprob_diff"] == max(
        policy["logprob_diff_max"] for line in steps for policy in line["policies"].values()
    )
    assert summary["seconds"] == {
        "start engines": 8.0,
        "other": 0.0,
        "evaluate": 24.0,
        "generate": 12.0,
        "update": 18.0,
        "weight_sync": 1.5,
    }
    assert summary["weight_sync_share"] == 0.25 / 5.25
    assert summary["tokens_per_second"] == sum(line["tokens_generated"] for line in steps) / 12.0
    assert (summary["masked"], summary["skipped"]) == ({"retrieval timed out": 7}, {"writer": 1})
    assert summary["alarms"] == {"grad_norm_max": 2, "skipped": 1}
    assert set(summary["agents"]) == {"verifier", "search", "answer"}  # the answerer spoke last in step 4
    assert summary["policies"]["writer"] == steps[-1]["policies"]["writer"]
    assert summary["peak_memory_gib"] > 0
    assert summary["startup_seconds"] > 0


def test_every_phase_counts_and_the_rest_is_named_other(tmp_path, play, read_summary):
    log = play(tmp_path, last=1)
    with log.phase("checkpoint"):
        log._clock.now += 2
    with log.phase("checkpoint"):
        log._clock.now += 1
    log._clock.now += 5
    log.finish("finished")
    assert (read_summary(tmp_path)["seconds"]["checkpoint"], read_summary(tmp_path)["seconds"]["other"]) == (3.0, 5.0)


@pytest.mark.parametrize(
    "error, status",
    [
        (None, "finished"),
        (ValueError("a\nb"), "failed: ValueError: a"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(1), "interrupted"),
    ],
)
def test_how_a_run_ended_stands_in_its_summary(tmp_path, read_summary, error, status):
    def run():
        with RunLog(tmp_path, {}, "team", 0, STEPS):
            assert read_summary(tmp_path)["status"] == "running"
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            run()
    else:
        run()
    assert read_summary(tmp_path)["status"] == status
    assert status in (tmp_path / "report.html").read_text()


def test_an_evaluation_counts_by_step_and_mode(tmp_path, play):
    log = play(tmp_path, last=4)
    assert log.evaluated(3, SAMPLED)
    assert not log.evaluated(4, SAMPLED) and not log.evaluated(3, "other")


def test_tensorboard_tags_are_stable(undisturbed):
    found = scalars(undisturbed)
    assert {
        "team/reward",
        "team/success",
        "team/trajectories",
        "team/tokens_generated",
        "team/tokens_trained",
        "time/generate",
        "time/update",
        "time/weight_sync",
        "time/other",
        "time/step",
        "throughput/tokens_per_second",
        "masked/retrieval timed out",
        "skipped/writer",
        "alarm/grad_norm_max/writer",
        "alarm/grad_norm_max/judge",
        "alarm/skipped/writer",
        *(
            f"agent/{agent}/{metric}"
            for agent in ("verifier", "search", "answer")
            for metric in ("reward", "response_length", "calls_per_trajectory")
        ),
        *(
            f"policy/{policy}/{metric}"
            for policy in ("judge", "writer")
            for metric in ("loss", "grad_norm", "grad_norm_max", "prob_ratio", "logprob_diff_max")
        ),
        *(
            f"evaluation/{mode}/{metric}"
            for mode in ("sampled", "greedy")
            for metric in (
                "reward",
                "success",
                "pass_at_k",
                "by_source/1 hop/reward",
                "by_source/2 hops/reward",
                "by_source/1 hop/success",
                "by_source/2 hops/success",
            )
        ),
    } == set(found)
    assert [step for step, _ in found["team/reward"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in found["agent/answer/reward"]] == [1, 2, 3, 4, 6]
    assert dict(found["policy/writer/grad_norm"])[5] == "nan"
    assert [step for step, _ in found["evaluation/greedy/success"]] == [0, 3, 6]


def test_the_configuration_is_kept(tmp_path, play):
    play(tmp_path, last=1)
    assert "policy: judge" in (tmp_path / "config.yaml").read_text()


def test_trajectories_of_steps_and_evaluations_are_kept_to_read(tmp_path, play):
    play(tmp_path, last=1)
    kept = {path.name: json.loads(path.read_text())["question"] for path in (tmp_path / "trajectories").iterdir()}
    assert kept == {
        "step_000001.jsonl": "question of step 1",
        "evaluation_sampled_000000.jsonl": "question of step 0",
        "evaluation_greedy_000000.jsonl": "question of step 0",
    }


def test_an_episode_is_said_at_its_beginning_and_its_end_and_logged_in_every_step(tmp_path, capsys):
    """High in steps 2 to 4 and 6, then quiet; and again in 13."""
    with RunLog(tmp_path, CONFIG, "team", 0, 14) as log:
        log.started()
        for step in range(1, 15):
            record = step_record(1)
            record.step = step
            record.policies["writer"]["prob_ratio"] = {2: 2.0, 3: 4.0, 4: 2.0, 6: 2.0, 13: 3.0}.get(step, 1.0)
            log.log_step(record)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("warning:", "over:"))]
    problem = "prob_ratio of policy writer (agents search, answer) is {}, over 1.05"
    assert said == [
        f"warning: step 2: {problem.format(2)}",
        "over: prob_ratio of writer, in steps 2 to 6, worst in step 3",
        f"warning: step 13: {problem.format(3)}",
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["alarms"] == {"prob_ratio": 2}
    assert (tmp_path / "report.html").read_text().count("over 1.05") == 2
    assert [len(line["alarms"]) for line in results(tmp_path)] == [step in (2, 3, 4, 6, 13) for step in range(1, 15)]


BROKEN = {  # what stands in the way -> what is said not to have been written
    "report.html": "the report",
    "summary.json": "the summary",
    "tensorboard": "TensorBoard's log",
    "trajectories": "trajectories",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_only_to_be_looked_at_never_ends_a_run(tmp_path, play, undisturbed, capsys, monkeypatch, name):
    """A folder where the file must go, or a file where the folder must, that cannot be removed."""
    folder = tmp_path / name
    if "." in name:
        (folder / "full").mkdir(parents=True)
    else:
        folder.write_text("in the way")
    monkeypatch.setattr("megatron_drmas.observability.run_log._remove", lambda path: None)
    for first, resume in ((1, None), (5, 4)):
        play(tmp_path, first=first, resume_step=resume).finish("finished")
        said = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith(f"warning: {BROKEN[name]} could not be written")
        ]
        assert said and len(said) == len(set(said)), "said once for each cause"
    assert results(tmp_path) == results(undisturbed)


@pytest.mark.parametrize(
    "function", ["write_report", "Summary.add", "TensorBoard.add", "Progress.step", "Progress.evaluation", "closing_summary"]
)
def test_a_fault_in_what_shows_a_run_is_a_warning(tmp_path, play, undisturbed, capsys, monkeypatch, function):
    def fail(*_, **__):
        raise ZeroDivisionError("math domain error")

    monkeypatch.setattr(f"megatron_drmas.observability.run_log.{function}", fail)
    play(tmp_path).finish("finished")
    assert capsys.readouterr().out.count("ZeroDivisionError: math domain error") == 1
    assert results(tmp_path) == results(undisturbed)


def test_changed_settings_are_said_kept_and_shown(tmp_path, play, read_summary, capsys):
    play(tmp_path, last=3)
    log = play(tmp_path, first=4, last=3, resume_step=3)
    log.log_changes({"policies.p.optimizer.lr": (1e-6, 2e-6), "steps": (3, 6)})
    log.finish("finished")
    assert "changed from step 4 on: policies.p.optimizer.lr = 2e-06 (was 1e-06)" in capsys.readouterr().out
    assert read_summary(tmp_path)["changes"] == {"3": {"policies.p.optimizer.lr": [1e-6, 2e-6], "steps": [3, 6]}}
    assert "policies.p.optimizer.lr" in (tmp_path / "report.html").read_text()
    play(tmp_path, first=6, resume_step=3).finish("finished")
    assert "3" in read_summary(tmp_path)["changes"], "it has happened, whatever is undone"


def test_an_evaluation_with_other_settings_is_no_before(tmp_path, play, read_summary):
    log = play(tmp_path, last=5)
    record = evaluation_record(6, SAMPLED)
    record.temperature = 1.0
    log.log_evaluation(record)
    log.finish("finished")
    found = read_summary(tmp_path)["evaluation"]
    assert found["sampled"]["success"] == {"before": None, "after": 0.8} and found["greedy"]["success"]["before"] == 0.2
    assert "→" not in "".join(line for line in closing_summary(tmp_path, read_summary(tmp_path)) if "sampled" in line)


def test_a_damaged_line_is_named_and_a_damaged_summary_is_made_anew(tmp_path, play, read_summary):
    play(tmp_path, last=2).finish("finished")
    (tmp_path / "summary.json").write_text("{")
    assert finished_summary(tmp_path, 2) is None
    play(tmp_path, first=3, last=2, resume_step=2).finish("finished")
    assert read_summary(tmp_path)["step"] == 2
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\xff{]\n")
    with pytest.raises(HistoryError, match=r"metrics.jsonl:\d+: .*remove the line"):
        RunLog(tmp_path, CONFIG, "team", 0, STEPS, resume_step=2)


def test_a_log_that_is_abandoned_writes_no_more(tmp_path, play):
    log = play(tmp_path, last=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    log.abandon()
    log.finish("failed: RunLockLost")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def health(masked=0, zero=0):
    agents = {"search": [zero, 10]}
    shares = {"masked": masked, "truncated": 0, "invalid": 0, "zero_advantage": zero, "found_nothing": 0, "rewarded": 0}
    return {kind: {"team": [n, 10], "agents": agents if kind == "zero_advantage" else {}} for kind, n in shares.items()}


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 5))
def test_a_resumed_run_judges_its_health_as_an_undisturbed_one(tmp_path_factory, cut):
    """Ill in step 2, then nothing to learn from step 4 on, with a patience of 3."""
    folder = tmp_path_factory.mktemp("health")
    config = HealthConfig(patience=3)
    stops = {}

    def play(first, resume_step):
        log = RunLog(folder, CONFIG, "team", 0, 8, resume_step, health=config)
        for step in range(first, 7):
            record = step_record(1)
            record.step, record.health = step, health(masked=3 if step == 2 else 0, zero=10 if step >= 4 else 0)
            stops[step] = log.log_step(record)
        return log

    play(1, None).finish("interrupted")
    log = play(cut + 1, cut or None)
    assert [step for step, problem in stops.items() if problem] == [6]
    assert log.healthy(since=2) is False and log.healthy(since=6)
    log.log_refused(7, "step 7 is not trained on: too many", {"retrieval": 9}, [])
    log.finish("failed: UnhealthyRun")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["alarms"] == {"masked": 1, "nothing_learnable": 1}
    assert summary["health"]["masked"] == {"last": 0.0, "worst": 0.3, "worst_step": 2} and summary["step"] == 6
    assert summary["refused"] == {"step": 7, "problem": "step 7 is not trained on: too many"} and summary["masked"] == {
        "retrieval": 9
    }
    report = (folder / "report.html").read_text()
    assert "step 7 is not trained on: too many" in report and report.count("nothing can be learned") == 1


def test_a_step_that_was_refused_is_forgotten_when_the_run_goes_on(tmp_path, play, read_summary):
    play(tmp_path, last=2).log_refused(3, "no", {"retrieval": 9}, [])
    assert read_summary(tmp_path)["refused"]
    play(tmp_path, first=3, resume_step=2).finish("finished")
    assert read_summary(tmp_path)["refused"] is None and "retrieval" not in read_summary(tmp_path)["masked"]


def test_a_restart_takes_no_time_from_the_phase_that_it_falls_into(tmp_path, play, read_summary):
    log = play(tmp_path, last=1)
    with log.phase("generate"):
        log._clock.now += 3
        log.log_restart("retrieval server", "it ended with code -9")
        log._clock.now += 4
    log.log_step(step_record(2))
    log.finish("finished")
    summary = read_summary(tmp_path)
    assert summary["restarts"] == {"retrieval server": 1}
    assert summary["seconds"]["generate"] == 2.0 + 7.0 and summary["seconds"]["other"] == 0.0
