"""The table of metrics: everything that the code logs has a row, and every row is logged."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_drmas.actor import metrics as actor_metrics
from megatron_drmas.actor.trust_region import TrustRegions
from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.losses import LossInputs, policy_loss, token_weights
from megatron_drmas.algorithm.teamtr import certify
from megatron_drmas.config.algorithm import AlgorithmConfig, LossConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.evaluate import summarize
from megatron_drmas.observability.metrics import METRICS, metric_of
from megatron_drmas.observability.records import CHECKPOINT, GENERATE, GREEDY
from megatron_drmas.observability.report import load_run, render
from megatron_drmas.observability.run_log import RunLog
from megatron_drmas.observability.tensorboard import scalars
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.collector import Sampling
from megatron_drmas.step_record import Stage, step_record
from megatron_drmas.team.trajectory import Outcome, Trajectory, Turn
from tools.metrics_reference import reference

LOSS = LossConfig(name="teamtr", kl_coef=0.1, aggregation="sequence_mean")


def trajectories() -> list[Trajectory]:
    """Two questions' worth: returns that differ, a failure, a tool that found nothing."""

    def turn(index):
        return Turn("solver", "writer", index, [], [5, 6], [7, 8, 1], [-0.1, -0.2, -0.3], 8, "stop", [(0, 3)], "text", "text")

    made = []
    for sample, (reward, failure) in enumerate([(1.0, None), (0.0, None), (0.0, "retrieval")]):
        question = Question("q", "what?", ("x",), "tests")
        outcome = None if failure else Outcome("x", {"searches": sample})
        made.append(Trajectory(question, 0, sample, [turn(0)], outcome, reward, reward > 0, found=[0], failure=failure))
    return made


@pytest.fixture
def one_process():
    """A process group of this process alone, for the actor's reductions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def stage(one_process, monkeypatch) -> Stage:
    """An update as the actor makes and reports it, with TeamTR's trust region and a reference policy."""
    monkeypatch.setattr(actor_metrics, "owns_results", lambda: True)
    drawn = trajectories()
    batch = collate(drawn, ("solver",), ("writer",), {"solver"})
    batch.advantages = compute_advantages(batch, AlgorithmConfig())
    sequence = torch.repeat_interleave(torch.arange(len(batch)), batch.response_lengths)
    logprobs = (batch.engine_logprobs * 1.1).requires_grad_()
    weights = token_weights(batch, LOSS)
    outputs = policy_loss(
        LossInputs(
            logprobs,
            batch.engine_logprobs,
            batch.advantages,
            weights,
            sequence,
            len(batch),
            entropy=-logprobs,
            reference_logprobs=batch.engine_logprobs,
        ),
        LOSS,
    )
    assert set(outputs.sums) == set(actor_metrics.SUMS), "the actor reduces what the table names"
    update = actor_metrics.UpdateMetrics(1, "cpu", reference=True)
    update.add([outputs], 1.0, True)
    update.add([outputs], float("nan"), False)
    region = TrustRegions(LOSS).update(batch, batch.engine_logprobs)
    region.reached(lambda _: logprobs.detach())
    return Stage(
        drawn, batch, certify({"writer": update.report(0.1) | {"trust_region": region.metrics}}, batch), batch.weight_versions
    )


def test_what_is_logged_is_in_the_table_and_what_is_in_the_table_is_logged(stage, tmp_path):
    log = RunLog(tmp_path, {"team": {"agents": {"solver": {"policy": "writer"}}}}, "run", 0, 1)
    log.started()
    record = summarize(stage.trajectories, 0, GREEDY, 1, Sampling(0.0, 1.0, "evaluation"))
    log.log_evaluation(record)
    with log.phase(GENERATE), log.background(CHECKPOINT):
        pass
    log.log_step(step_record(1, stage))
    log.finish("finished")
    lines = [line for line in load_run(tmp_path).lines if line["kind"] in ("step", "evaluation")]
    rows = {}
    for line in lines:
        for tag in scalars(line):
            rows[tag] = metric_of(tag)
    assert [tag for tag, row in rows.items() if row is None] == []
    assert [metric.name for metric in METRICS if metric.tensorboard and metric not in rows.values()] == []
    assert all(metric.key in line for line in lines for metric in METRICS if not metric.tensorboard)
    page = render(load_run(tmp_path))
    glossary = page[page.index("What the metrics mean") : page.index("Configuration")]
    assert all(f"<td>{row.name}</td>" in glossary for row in rows.values())


@pytest.mark.parametrize("tag", ["team/rewards", "agent/a/b/reward", "policy/writer/", "time", "evaluation/greedy/by_source/x/y"])
def test_other_tags_have_no_row(tag):
    assert metric_of(tag) is None


def test_names_are_unique_and_every_row_says_what_it_is():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.title and metric.unit and metric.reduction and metric.description
        assert not re.search(r"\.$", metric.description), "descriptions are phrases"


def test_the_page_is_current(repository):
    assert (repository / "docs" / "metrics.md").read_text() == reference(), "run python -m tools.metrics_reference"
