"""Evaluation of a team; also a command.

    python -m megatron_drmas.evaluate [--config-name NAME] [key=value …]

evaluates the policies as their model folders are (`policies.<name>.model=outputs/<run>/hf/<name>` for trained ones),
prints one JSON line per mode, and keeps these lines and the trajectories in <output_dir>/<name>/evaluations/<time>/.
"""

import asyncio
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_drmas.config.schema import EvaluationConfig, RunConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.observability.health import UnhealthyRun, refusal
from megatron_drmas.observability.history import to_json, write_atomically
from megatron_drmas.observability.records import GREEDY, SAMPLED, EvaluationRecord, Share, plain
from megatron_drmas.rollout.collector import Collector, Sampling
from megatron_drmas.run_lock import RunLock
from megatron_drmas.team.trajectory import Trajectory

if TYPE_CHECKING:
    from megatron_drmas.cluster.cluster import Cluster
    from megatron_drmas.observability.run_log import RunLog


def evaluation_modes(config: EvaluationConfig) -> list[tuple[str, int, Sampling]]:
    """(mode, answers per question, sampling) of each evaluation; the random numbers are the same every time."""
    modes = [(SAMPLED, config.samples, Sampling(config.temperature, config.top_p, "evaluation"))]
    if config.greedy:
        modes.append((GREEDY, 1, Sampling(0.0, 1.0, "evaluation/greedy")))
    return modes


async def evaluate(
    collector: Collector, questions: list[Question], step: int, mode: str, samples: int, sampling: Sampling
) -> tuple[EvaluationRecord, list[Trajectory]]:
    """avg@k and pass@k: the mean over a question's k answers, then over questions, however many turns each took.

    A trajectory that failed for no fault of the team is left out of its question's mean; a question without any other
    is left out altogether.  pass@k is over the questions that have all k answers: with fewer, one success is less likely.
    """
    trajectories = await collector.collect(questions, samples, sampling)
    return summarize(trajectories, step, mode, samples, sampling), trajectories


def summarize(trajectories: list[Trajectory], step: int, mode: str, samples: int, sampling: Sampling) -> EvaluationRecord:
    """The record of an evaluation whose trajectories are `samples` of each question."""
    of_question: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.failure is None:
            of_question[trajectory.group].append(trajectory)
    of_source: dict[str, list[list[Trajectory]]] = defaultdict(list)
    for answers in of_question.values():
        of_source[_source(answers[0].question)].append(answers)
    whole = [answers for answers in of_question.values() if len(answers) == samples]
    return EvaluationRecord(
        step=step,
        mode=mode,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        samples=samples,
        samples_min=min(map(len, of_question.values()), default=0),
        asked=len({trajectory.group for trajectory in trajectories}),
        **asdict(share(of_question.values())),
        pass_at_k=sum(any(answer.success for answer in answers) for answers in whole) / len(whole) if whole else None,
        pass_questions=len(whole),
        by_source={source: share(found) for source, found in sorted(of_source.items())},
        masked=dict(Counter(trajectory.failure for trajectory in trajectories if trajectory.failure)),
        trajectories=len(trajectories),
        trained_on=sum(answers[0].question.in_training for answers in of_question.values()),
    )


def share(questions: Collection[list[Trajectory]]) -> Share:
    """Means and standard errors over questions, each with its trajectories."""
    found: dict[str, Any] = {}
    for figure in ("reward", "success"):
        means = [sum(float(getattr(answer, figure)) for answer in answers) / len(answers) for answers in questions]
        found[figure] = sum(means) / len(means) if means else math.nan
        found[f"{figure}_stderr"] = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Share(questions=len(questions), **found)


async def evaluate_team(cluster: "Cluster", log: "RunLog", questions: list[Question], step: int, beside: bool = False) -> None:
    """In a training run: evaluate in every mode that is due after `step` steps and not in the log, and log it.

    Args:
        beside: the next step's rollout goes on meanwhile.

    Raises:
        UnhealthyRun: too many trajectories are masked for an average to mean anything.
    """
    from megatron_drmas.step_record import trajectory_records

    config: RunConfig = cluster.config
    settings, last = config.evaluation, step == config.steps
    if not (settings.before if step == 0 else (last and settings.after) or (settings.every and step % settings.every == 0)):
        return
    for mode, samples, sampling in evaluation_modes(settings):
        if log.evaluated(step, mode):
            continue
        name = f"evaluate ({mode})"
        with log.background(name) if beside else log.phase(name):
            record, trajectories = await evaluate(cluster.collector, questions, step, mode, samples, sampling)
        versions = {(turn.policy, version) for each in trajectories for turn in each.turns for version, _ in turn.weight_versions}
        assert len(versions) == len(dict(versions)), f"weights changed during the evaluation: {sorted(versions)}"
        problem = refusal(trajectories, config.health, f"the {mode} evaluation after {step} steps does not count")
        if problem:
            raise UnhealthyRun(problem)
        kept = []
        with log.contained("trajectories"):
            kept = trajectory_records(trajectories, config, cluster.collector.tokenizers)
        log.log_evaluation(record, kept, beside)


def _source(question: Question) -> str:
    hop = question.extra.get("hop")
    return f"{hop} hop" if hop is not None else question.data_source or "all"


async def evaluate_checkpoints(config: RunConfig, folder: Path) -> AsyncIterator[EvaluationRecord]:
    """Start engines on the policies' model folders and evaluate, one mode after the other.

    Args:
        folder: gets config.yaml, results.jsonl with what is yielded, and trajectories_<mode>.jsonl.

    Raises:
        UnhealthyRun: too many trajectories are masked for an average to mean anything; they are kept.
    """
    from megatron_drmas.cluster.cluster import Cluster
    from megatron_drmas.cluster.machine import fit_to_machine
    from megatron_drmas.config.load import to_yaml
    from megatron_drmas.data.question_sets import load_question_sets
    from megatron_drmas.step_record import trajectory_records

    config, fitted = fit_to_machine(config)
    print(f"evaluate: {fitted}", file=sys.stderr)
    questions = load_question_sets(config.data).evaluation
    results = ""
    async with Cluster(config, actors=False) as cluster:
        folder.mkdir(parents=True)
        write_atomically(folder / "config.yaml", to_yaml(config))
        for mode, samples, sampling in evaluation_modes(config.evaluation):
            record, trajectories = await evaluate(cluster.collector, questions, 0, mode, samples, sampling)
            kept = trajectory_records(trajectories, config, cluster.collector.tokenizers)
            write_atomically(folder / f"trajectories_{mode}.jsonl", "".join(to_json(plain(found)) + "\n" for found in kept))
            problem = refusal(trajectories, config.health, f"the {mode} evaluation does not count")
            if problem:
                raise UnhealthyRun(problem)
            results += to_json(plain(record)) + "\n"
            write_atomically(folder / "results.jsonl", results)
            yield record


def main() -> int:
    from megatron_drmas.command import run_command
    from megatron_drmas.validate import validate

    async def evaluate_here(config: RunConfig) -> None:
        run_dir = Path(config.output_dir) / config.name
        with RunLock(run_dir):
            folder = run_dir / "evaluations" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            async for record in evaluate_checkpoints(config, folder):
                print(to_json(plain(record)), flush=True)
        print(f"evaluate: results and trajectories in {folder}", file=sys.stderr)

    def command(config: RunConfig) -> None:
        from megatron_drmas.cluster.cluster import FAILURES

        try:
            asyncio.run(evaluate_here(config))
        except (UnhealthyRun, *FAILURES) as failure:
            sys.exit(f"evaluate: {failure}")

    try:
        return run_command("python -m megatron_drmas.evaluate", command, validate)
    except KeyboardInterrupt:
        print("evaluate: interrupted; modes that were finished are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
