"""An evaluation beside the next step's rollout: of the same weights, and over before they change."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from megatron_drmas.config.load import compose_config
from megatron_drmas.data.question_sets import QuestionSets
from megatron_drmas.data.questions import load_questions
from megatron_drmas.observability.health import UnhealthyRun
from megatron_drmas.team.trajectory import Trajectory
from megatron_drmas.training_run import TrainingRun


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
