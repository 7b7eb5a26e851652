"""A run without a trainer: the same records for the same step, on a clock that only phases move."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_drmas.observability.records import (
    GREEDY,
    SAMPLED,
    EvaluationRecord,
    Share,
    StepRecord,
    TrajectoryRecord,
    TurnRecord,
)
from megatron_drmas.observability.run_log import RunLog

CONFIG = {
    "name": "team",
    "team": {"agents": {"verifier": {"policy": "judge"}, "search": {"policy": "writer"}, "answer": {"policy": "writer"}}},
}
STEPS = 6


class Clock:
    """Seconds that stand still until told otherwise."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step_record(step: int) -> StepRecord:
    draw = random.Random(step).random
    agents = {
        agent: {"reward": draw(), "response_length": 5 + draw(), "calls_per_trajectory": 1.0}
        for agent in ("verifier", "search", "answer")
    }
    policies = {
        policy: {"loss": draw(), "grad_norm": 0.5 + draw(), "prob_ratio": 1 + 1e-5 * draw(), "logprob_diff_max": 1e-4 * draw()}
        for policy in ("judge", "writer")
    }
    if step == 5:
        policies["writer"]["grad_norm"] = float("nan")
        del agents["answer"]
    if step == 6:
        policies["judge"]["grad_norm"] = 40.0  # far over the running median of five steps
    for metrics in policies.values():
        metrics["grad_norm_max"] = metrics["grad_norm"]
    return StepRecord(
        step,
        reward=draw() - 0.5,
        success=draw(),
        trajectories=32,
        tokens_generated=1000 + step,
        tokens_trained=900,
        agents=agents,
        policies=policies,
        masked={"retrieval timed out": 2} if step in (2, 5) else {},
        skipped={"writer": 1} if step == 5 else {},
    )


def evaluation_record(step: int, mode: str) -> EvaluationRecord:
    """Rewards below zero; one question of the sampled mode has lost an answer."""
    rate, samples = (step + 2) / 10, 4 if mode == SAMPLED else 1
    sources = {"1 hop": Share(20, rate - 1.5, rate, 0.1, 0.05), "2 hops": Share(30, rate / 2 - 1.5, rate / 2, 0.1, 0.05)}
    return EvaluationRecord(
        step,
        mode,
        0.6,
        1.0,
        samples,
        samples - (mode == SAMPLED),
        50,
        50,
        rate - 1.5,
        rate,
        0.08,
        0.04,
        min(1.0, rate + 0.1),
        49 if mode == SAMPLED else 50,
        sources,
        {"retrieval timed out": 1} if mode == SAMPLED else {},
    )


def trajectory_record(step: int, text: str = "") -> TrajectoryRecord:
    turns = [
        TurnRecord(
            "verifier",
            "judge",
            0,
            "who is the mayor of Bexo ?" + text,
            "<verify>yes</verify>",
            "yes",
            True,
            "stop",
            9,
            3,
            8,
            [(0, 3)],
            score=0.5,
            advantage=-1.0,
        ),
        TurnRecord("answer", "writer", 1, "…", text, None, False, "length", 9, 8, 8, [(0, 8)]),
    ]
    return TrajectoryRecord(f"q{step}", f"question of step {step}", "1 hop", 0, 0, ["Tarvel"], text or None, -0.5, False, turns)


def play_steps(folder: Path, first: int = 1, last: int = STEPS, resume_step: int | None = None, text: str = "") -> RunLog:
    """Log a run's steps; the log is left open, as a killed process leaves it."""
    clock = Clock()
    log = RunLog(folder, CONFIG, "team", 0, STEPS, resume_step, clock)
    with log.phase("start engines"):
        clock.now += 8
    log.started()
    for step in range(first - 1, last + 1):
        if step >= first:
            for phase, seconds in (("generate", 2.0), ("update", 3.0), ("weight_sync", 0.25)):
                with log.phase(phase):
                    clock.now += seconds
            log.log_step(step_record(step))
            log.log_trajectories(step, [trajectory_record(step, text)])
        for mode in (SAMPLED, GREEDY):
            if step in (0, 3, STEPS) and not log.evaluated(step, mode):
                with log.phase("evaluate"):
                    clock.now += 4
                log.log_evaluation(evaluation_record(step, mode), [trajectory_record(step, text)])
    return log


@pytest.fixture
def play() -> Iterator[Callable[..., RunLog]]:
    """`play_steps`; what it leaves open is closed after the test."""
    opened = []

    def play_and_remember(*args, **kwargs) -> RunLog:
        opened.append(play_steps(*args, **kwargs))
        return opened[-1]

    yield play_and_remember
    for log in opened:
        log.finish("closed by the test")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a whole run; not to be changed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    play_steps(folder).finish("finished")
    return folder


@pytest.fixture
def read_summary() -> Callable[[Path], dict]:
    def strict(folder: Path) -> dict:
        return json.loads((folder / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return strict
