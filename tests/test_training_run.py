"""An evaluation beside the next step's rollout: of the same weights, and over before they change."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from megatron_drmas.checkpointing import CheckpointError, Checkpoints
from megatron_drmas.cluster.process import ProcessFailure, ProcessLost
from megatron_drmas.config.load import compose_config
from megatron_drmas.data.question_sets import QuestionSets
from megatron_drmas.data.questions import load_questions
from megatron_drmas.data.sampler import QuestionSampler
from megatron_drmas.observability.health import UnhealthyRun
from megatron_drmas.rollout.tickets import Tickets
from megatron_drmas.team.trajectory import Trajectory
from megatron_drmas.training_run import TrainingRun, load_newest
from megatron_drmas.weight_sync.errors import WeightSyncError


@pytest.fixture
def run_of(tmp_path):
    """A run, `go` that its evaluations wait for, and what was logged, in its order."""
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")

    def make(*overrides, failure=None, stop=None):
        config = compose_config("search_hetero", ["steps=3", f"data.eval={path}", "evaluation.every=1", *overrides])
        go, logged = asyncio.Event(), []

        class Collector:
            tokenizers: dict = {}

            async def collect(self, questions, samples, sampling):
                await go.wait()
                return [Trajectory(questions[0], 0, 0, failure=failure, failure_detail="")]

        log = SimpleNamespace(
            evaluated=lambda *_: False,
            phase=lambda name: contextlib.nullcontext(logged.append(f"wait: {name}")),
            background=lambda name: contextlib.nullcontext(logged.append(f"beside: {name}")),
            contained=lambda _: contextlib.nullcontext(),
            log_evaluation=lambda record, kept, beside: logged.append((record.step, record.mode, beside)),
        )
        cluster = SimpleNamespace(config=config, collector=Collector())
        sets = QuestionSets(load_questions(str(path), "data.eval"), load_questions(str(path), "data.eval"))

        async def unless_requested(work):
            await work

        stop = SimpleNamespace(unless_requested=unless_requested)
        return TrainingRun(config, cluster, log, None, None, sets, None, {}, 0, 1, stop, None), go, logged

    return make


def test_an_evaluation_runs_beside_the_next_rollout_and_ends_before_the_update(run_of):
    async def main():
        run, go, logged = run_of()
        await run.evaluate(1)
        logged.append("rollout")
        await asyncio.sleep(0)
        assert logged == ["rollout", "beside: evaluate (sampled)"]
        asyncio.get_running_loop().call_soon(go.set)
        await run.end_evaluation()
        assert logged[2:] == ["wait: evaluate", (1, "sampled", True), "beside: evaluate (greedy)", (1, "greedy", True)]
        await run.end_evaluation()
        await run.drop_evaluation()
        assert len(logged) == 6

    asyncio.run(main())


@pytest.mark.parametrize("overrides, step", [(["deterministic=true"], 1), ([], 3)])
def test_it_is_a_phase_where_there_is_no_rollout_or_rounds_must_not_mix(run_of, overrides, step):
    async def main():
        run, go, logged = run_of(*overrides)
        go.set()
        await run.evaluate(step)
        assert logged[:2] == ["wait: evaluate (sampled)", (step, "sampled", False)] and len(logged) == 4
        await run.end_evaluation()
        assert len(logged) == 4

    asyncio.run(main())


def test_one_that_does_not_count_stops_the_run_before_the_update(run_of):
    async def main():
        run, go, _ = run_of(failure="retrieval")
        go.set()
        await run.evaluate(0)
        with pytest.raises(UnhealthyRun, match="the sampled evaluation after 0 steps does not count"):
            await run.end_evaluation()

    asyncio.run(main())


def test_one_that_is_not_over_when_the_run_ends_is_left_to_its_continuation(run_of):
    async def main():
        run, _, logged = run_of()
        await run.evaluate(1)
        await asyncio.sleep(0)
        await run.drop_evaluation()
        assert logged == ["beside: evaluate (sampled)"]

    asyncio.run(main())


class Loading:
    """A cluster that cannot load some checkpoints, and has to be rebuilt after it has tried."""

    def __init__(self, fails):
        self.fails, self.tried, self.broken = fails, [], False

    async def load(self, folder):
        assert not self.broken
        self.tried.append(folder.name)
        if folder.name in self.fails:
            self.broken = True
            raise self.fails[folder.name]

    async def rebuild(self):
        self.broken = False


def load_from(tmp_path, steps, fails):
    checkpoints, said = Checkpoints(tmp_path / "checkpoints", keep=9), []
    for step in steps:
        checkpoints.begin(step)
        checkpoints.commit(step, {"config": {}, "sampler": {"cursor": step}, "healthy": True})
    cluster = Loading(fails)
    return checkpoints, cluster, said, lambda: asyncio.run(load_newest(cluster, checkpoints, said.append))


def test_what_cannot_be_loaded_is_passed_over_and_said(tmp_path):
    bad = ProcessFailure("actor 0: load failed: no such tensor")
    checkpoints, cluster, said, load = load_from(tmp_path, (1, 2, 3, 4), {"step_000003": bad})
    (checkpoints.complete()[3] / "state.json").write_text("{")
    assert load() == (2, {"step": 2, "sampler": {"cursor": 2}, "config": {}}) and not cluster.broken
    assert cluster.tried == ["step_000003", "step_000002"]
    assert "step_000004/state.json is damaged; tries step_000003" in said[0]
    assert "step_000003 cannot be loaded: actor 0: load failed: no such tensor; tries step_000002" in said[1]


def test_nothing_that_can_be_loaded_ends_the_run_and_a_lost_rank_blames_no_checkpoint(tmp_path):
    bad = ProcessFailure("actor 0: load failed")
    *_, load = load_from(tmp_path, (1, 2), {"step_000001": bad, "step_000002": bad})
    with pytest.raises(CheckpointError, match="step_000001 cannot be loaded: .* no checkpoint before it; resume=never"):
        load()
    _, cluster, _, load = load_from(tmp_path / "other", (1, 2), {"step_000002": ProcessLost("actor 0: died")})
    with pytest.raises(ProcessLost):
        load()
    assert cluster.tried == ["step_000002"]


def test_after_a_return_the_steps_since_the_checkpoint_are_done_again_and_versions_rise(run_of, tmp_path):
    """A rank dies in step 3, one more while the team goes back to step 1, and the run goes on to its end."""
    checkpoints, cluster, said, _ = load_from(tmp_path, (1,), {})
    published, counted, rewound = [], [], []

    async def sync_weights(version, verify):
        published.append((version, verify))
        if len(published) == 3:
            raise WeightSyncError("actor 0 did not answer")

    async def rewind(step):
        rewound.append(step)

    async def main():
        run, *_ = run_of("evaluation.every=0", "evaluation.after=false")
        cluster.draining = contextlib.nullcontext
        cluster.sync_weights, cluster.config, cluster.collector = sync_weights, run.config, run.cluster.collector
        cluster.restarts = SimpleNamespace(team=lambda done, problem: counted.append((done, problem)))
        run.cluster, run.checkpoints, run.confirm = cluster, checkpoints, lambda _: None
        run.saver = SimpleNamespace(rewind=rewind)
        run.tickets = Tickets(QuestionSampler(9, 0, True), 0, 3)
        run.begun = run.tickets.state_dict()
        checkpoints.begin(1)
        checkpoints.commit(1, {"config": {}, "sampler": run.begun, "healthy": True})
        run.log = SimpleNamespace(
            phase=lambda _: contextlib.nullcontext(),
            abandon=None,
            log_restart=lambda *_: None,
            note=said.append,
            rewind=lambda _: None,
        )
        attempts = []
        for step in run.steps:
            async with run.surviving():
                attempts.append(step)
                if attempts == [1, 2, 3]:
                    raise ProcessLost("actor 1: died")
                await run.sync_weights(step)
                run.done = step
        return attempts

    assert asyncio.run(main()) == [1, 2, 3, 2, 3]
    assert published == [(1, True), (2, False), (3, True), (4, True), (5, True), (6, False)]
    assert [done for done, _ in counted] == [2, 2] and "did not answer" in counted[1][1]
    assert rewound == [0, 0, 1] and said[-1] == "goes on from step_000001"
