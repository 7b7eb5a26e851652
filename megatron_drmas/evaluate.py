"""Evaluation of a team; also a command.

    python -m megatron_drmas.evaluate [--config-name NAME] [key=value …]

evaluates the policies as their model folders are (`policies.<name>.model=outputs/<run>/hf/<name>` for trained ones)
and prints one JSON line per mode.
"""

import asyncio
import json
import sys
from collections import Counter, defaultdict
from dataclasses import asdict

from megatron_drmas.config.schema import EvaluationConfig, RunConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.observability.health import UnhealthyRun, refusal
from megatron_drmas.observability.records import GREEDY, SAMPLED, EvaluationRecord
from megatron_drmas.rollout.collector import Collector, Sampling
from megatron_drmas.team.trajectory import Trajectory


def evaluation_modes(config: EvaluationConfig) -> list[tuple[str, int, Sampling]]:
    """(mode, answers per question, sampling) of each evaluation; the random numbers are the same every time."""
    modes = [(SAMPLED, config.samples, Sampling(config.temperature, config.top_p, "evaluation"))]
    if config.greedy:
        modes.append((GREEDY, 1, Sampling(0.0, 1.0, "evaluation/greedy")))
    return modes


async def evaluate(
    collector: Collector, questions: list[Question], step: int, mode: str, samples: int, sampling: Sampling,
) -> tuple[EvaluationRecord, list[Trajectory]]:
    """avg@k and pass@k: the mean over a question's k answers, then over questions, however many turns each took.

    A trajectory that failed for no fault of the team is left out of its question's mean; a question without any other
    is left out altogether.
    """
    trajectories = await collector.collect(questions, samples, sampling)
    rewards: dict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.failure is None:
            rewards[trajectory.group].append(trajectory.reward)
    averages = {group: sum(values) / len(values) for group, values in rewards.items()}
    by_source: dict[str, list[float]] = defaultdict(list)
    for group, average in averages.items():
        by_source[_source(questions[group])].append(average)
    record = EvaluationRecord(
        step=step, mode=mode, questions=len(averages), trained_on=sum(questions[group].in_training for group in averages), samples=samples,
        exact_match=_mean(averages.values()), pass_at_k=_mean(float(max(values) > 0) for values in rewards.values()),
        by_source={source: {"exact_match": _mean(values), "questions": len(values)} for source, values in sorted(by_source.items())},
        masked=dict(Counter(trajectory.failure for trajectory in trajectories if trajectory.failure)), trajectories=len(trajectories),
    )
    return record, trajectories


def _source(question: Question) -> str:
    hop = question.extra.get("hop")
    return f"{hop} hop" if hop is not None else question.data_source or "all"


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


async def evaluate_checkpoints(config: RunConfig) -> list[EvaluationRecord]:
    """Start engines on the policies' model folders and evaluate.

    Raises:
        UnhealthyRun: too many trajectories are masked for an average to mean anything.
    """
    from megatron_drmas.cluster.cluster import Cluster
    from megatron_drmas.data.question_sets import load_question_sets

    questions = load_question_sets(config.data).evaluation
    async with Cluster(config, actors=False) as cluster:
        found = []
        for mode, samples, sampling in evaluation_modes(config.evaluation):
            record, trajectories = await evaluate(cluster.collector, questions, 0, mode, samples, sampling)
            problem = refusal(trajectories, config.health, f"the {mode} evaluation does not count")
            if problem:
                raise UnhealthyRun(problem)
            found.append(record)
        return found


def main() -> int:
    from megatron_drmas.command import run_command
    from megatron_drmas.validate import validate

    def command(config: RunConfig) -> None:
        from megatron_drmas.cluster.cluster import FAILURES

        try:
            records = asyncio.run(evaluate_checkpoints(config))
        except (UnhealthyRun, *FAILURES) as failure:
            sys.exit(f"evaluate: {failure}")
        for record in records:
            print(json.dumps(asdict(record)))

    return run_command("python -m megatron_drmas.evaluate", command, validate)


if __name__ == "__main__":
    sys.exit(main())
