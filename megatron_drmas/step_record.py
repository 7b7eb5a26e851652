"""What the log keeps of a step."""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_drmas.algorithm.agent_statistics import agent_statistics
from megatron_drmas.algorithm.scores import row_scores
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.observability.health import count_causes, count_step, share
from megatron_drmas.observability.metric import Reduction
from megatron_drmas.observability.metrics import HEALTH, UPDATE_REDUCTIONS
from megatron_drmas.observability.records import StepRecord, TrajectoryRecord, TurnRecord, plain
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.trajectory import NO_SIGNAL, Trajectory, Turn

ZERO = 1e-6  # an advantage that is no larger teaches nothing


@dataclass
class Stage:
    """One update of a step: with `algorithm.sequential` an agent's, else the only one."""

    trajectories: list[Trajectory]
    batch: TurnBatch  # their rows, with advantages
    metrics: dict[str, dict]  # of the actors, by policy
    ages: Tensor  # int32 [T'], updates by which the weights that sampled a token are older than those that trained on it


def step_record(step: int, whole: Stage) -> StepRecord:
    """The record of a training step.

    Args:
        step: counted from 1.
        whole: all of the step (see `merge_stages`).
    """
    trajectories, batch, metrics = whole.trajectories, whole.batch, whole.metrics
    finished = [trajectory for trajectory in trajectories if trajectory.failure is None]
    # What the team earns on the questions as they come, those included that dynamic sampling replaced for want of signal.
    drawn = [trajectory for trajectory in trajectories if trajectory.failure in (None, NO_SIGNAL)]
    contexts = _context_ages(batch, whole.ages)
    agents = {
        name: _agent_metrics(batch, index, len(finished)) | _age_metrics(batch, index, whole.ages, contexts) | statistics
        for (index, name), statistics in zip(enumerate(batch.agents), agent_statistics(batch))
    }
    health = count_step(trajectories, _zero_advantages(batch))
    for kind in HEALTH:
        for name, count in health[kind]["agents"].items():
            agents[name][f"{kind}_rate"] = share(count)
    policies = {}
    for policy, values in metrics.items():
        policies[policy] = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        for index, of_agent in values.get("agents", {}).items():
            agents[batch.agents[index]] |= of_agent
    return StepRecord(
        step=step,
        reward=_mean(trajectory.reward for trajectory in drawn),
        success=_mean(trajectory.success for trajectory in drawn),
        trajectories=len(trajectories),
        tokens_generated=sum(len(turn.token_ids) for trajectory in trajectories for turn in trajectory.turns),
        tokens_trained=int(sum(values["tokens"] for values in metrics.values())),
        agents=agents,
        policies=policies,
        masked=count_causes(trajectories),
        skipped={policy: int(values["skipped"]) for policy, values in metrics.items() if values["skipped"]},
        nonfinite={
            policy: [batch.agents[index] for index in values["nonfinite_agents"]]
            for policy, values in metrics.items()
            if values["nonfinite_agents"]
        },
        health=health,
        workflow=_reported(finished),
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def _reported(trajectories: list[Trajectory]) -> dict[str, float]:
    """The mean of every finite number that workflows put into `Outcome.info`, over the trajectories that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for key, value in trajectory.outcome.info.items() if trajectory.outcome else ():
            if isinstance(value, Real) and abs(value) <= sys.float_info.max:  # type: ignore[operator]
                found[str(key)].append(float(value))
    return {key: _mean(values) for key, values in found.items()}


def _zero_advantages(batch: TurnBatch) -> dict[str, list[int]]:
    """Of every agent, its rows without an advantage and all of those that learn."""
    zero = batch.filled("advantages")[batch.response_offsets[:-1]].abs() <= ZERO
    counts = {}
    for index, name in enumerate(batch.agents):
        rows = (batch.agent == index) & batch.trainable
        counts[name] = [int((zero & rows).sum()), int(rows.sum())]
    return counts


def _agent_metrics(batch: TurnBatch, agent: int, trajectories: int) -> dict[str, float]:
    rows = batch.select(batch.agent == agent)
    if not len(rows):
        return {"calls_per_trajectory": 0.0}
    advantages = rows.filled("advantages")[rows.response_offsets[:-1]]
    return {
        "reward": rows.reward.double().mean().item(),
        "own_reward": rows.filled("turn_reward").double().mean().item(),
        "advantage_mean": advantages.mean().item(),
        "advantage_std": advantages.std(correction=0).item(),
        "response_length": rows.response_lengths.to(torch.float32).mean().item(),
        "calls_per_trajectory": len(rows) / trajectories,
    }


def token_ages(batch: TurnBatch, updates: int, trained: Collection[str]) -> Tensor:
    """Updates of its policy by which the weights that sampled a token are older than `updates`, int32 [T'].

    Args:
        updates: made and published so far.
        trained: the policies that they change; the weights of any other have age 0.
    """
    changes = torch.tensor([policy in trained for policy in batch.policies], dtype=torch.bool)[batch.policy]
    return (updates - batch.weight_versions) * changes.repeat_interleave(batch.response_lengths)


def _context_ages(batch: TurnBatch, ages: Tensor) -> Tensor:
    """The age of the oldest token that a row's trajectory had sampled until then, whatever policy sampled it, [R]."""
    oldest = torch.zeros(len(batch), dtype=ages.dtype)
    rows = torch.arange(len(batch)).repeat_interleave(batch.response_lengths)
    oldest.scatter_reduce_(0, rows, ages, "amax")
    most: dict[int, int] = {}
    for row in torch.argsort(batch.turn, stable=True).tolist():
        trajectory = int(batch.trajectory[row])
        oldest[row] = most[trajectory] = max(int(oldest[row]), most.get(trajectory, 0))
    return oldest


def _age_metrics(batch: TurnBatch, agent: int, ages: Tensor, contexts: Tensor) -> dict[str, float]:
    rows = batch.agent == agent
    own = ages[rows.repeat_interleave(batch.response_lengths)]
    if not len(own):
        return {}
    return {"age": own.double().mean().item(), "age_max": float(own.max()), "context_age_max": float(contexts[rows].max())}


def merge_stages(stages: list[Stage]) -> Stage:
    """All trajectories of a step, their rows and the metrics of all its updates; groups are numbered through."""
    if len(stages) == 1:
        return stages[0]
    trajectories: list[Trajectory] = []
    for stage in stages:
        groups = max((trajectory.group for trajectory in trajectories), default=-1) + 1
        for trajectory in stage.trajectories:
            trajectory.group += groups
        trajectories += stage.trajectories
    first = stages[0].batch
    rows = collate(trajectories, first.agents, first.policies, set())
    rows.trainable = torch.cat([stage.batch.trainable for stage in stages])
    rows.advantages = torch.cat([stage.batch.filled("advantages") for stage in stages])
    metrics: dict[str, dict] = {}
    for stage in stages:
        metrics = merge_metrics(metrics, stage.metrics)
    return Stage(trajectories, rows, metrics, torch.cat([stage.ages for stage in stages]))


def merge_metrics(earlier: dict[str, dict], later: dict[str, dict]) -> dict[str, dict]:
    """Metrics by policy of all updates so far; of a policy that was updated twice as the table of metrics reduces them."""
    return earlier | {
        policy: _merge(earlier[policy], values) if policy in earlier else values for policy, values in later.items()
    }


def _merge(a: dict, b: dict) -> dict:
    merged = {"nonfinite_agents": sorted({*a["nonfinite_agents"], *b["nonfinite_agents"]}), "agents": a["agents"] | b["agents"]}
    for key in b.keys() - merged.keys():
        reduction = UPDATE_REDUCTIONS[key]
        if reduction is Reduction.SUM:
            merged[key] = a[key] + b[key]
        elif reduction is Reduction.LAST:
            merged[key] = b[key]
        elif reduction in (Reduction.STEP_MAX, Reduction.TOKEN_MAX):
            merged[key] = max((value for value in (a[key], b[key]) if not math.isnan(value)), default=math.nan)
        else:
            weight = "optimizer_steps" if reduction in (Reduction.TOKEN_SUM, Reduction.STEP_MEAN) else "tokens"
            shares = [(values[key], values[weight]) for values in (a, b) if values[weight]]
            merged[key] = sum(value * share for value, share in shares) / sum(share for _, share in shares) if shares else b[key]
    return merged


def trajectory_records(
    trajectories: list[Trajectory],
    config: RunConfig,
    tokenizers: dict[str, ChatTokenizer],
    batch: TurnBatch | None = None,
    refused: bool = False,
) -> list[TrajectoryRecord]:
    """What is kept of a step's or an evaluation's trajectories: as many as config.logging says, in their order.

    Where that is not all, the first of each failure's cause comes first, and the others are spread over the questions.

    Args:
        tokenizers: by policy; they turn prompts back into text.
        batch: of a training step, the rows of all its trajectories that are not masked, with advantages.
        refused: they are of a training step that has no rows.
    """
    settings = config.logging
    most = settings.trajectories_per_evaluation if batch is None and not refused else settings.trajectories_per_step
    scores = None if batch is None else row_scores(batch, config.algorithm).tolist()
    places = [] if batch is None else zip(batch.trajectory.tolist(), batch.turn.tolist())
    row_of = {place: row for row, place in enumerate(places)}

    def turn_record(number: int, turn: Turn) -> TurnRecord:
        record = TurnRecord(
            agent=turn.agent,
            policy=turn.policy,
            index=turn.index,
            prompt=tokenizers[turn.policy].prompt_text(turn.prompt_ids.tolist()),
            response=turn.text,
            content=turn.content,
            valid=turn.valid,
            finish_reason=turn.finish_reason,
            prompt_tokens=len(turn.prompt_ids),
            response_tokens=len(turn.token_ids),
            max_response_tokens=turn.limit,
            weight_versions=turn.weight_versions,
            reward=turn.reward,
            logprob_mean=float(turn.logprobs.mean(dtype="float64")),
            logprob_min=float(turn.logprobs.min()),
        )
        row = row_of.get((number, turn.index))
        if batch is not None and scores is not None and row is not None:
            record.trained, record.score = bool(batch.trainable[row]), scores[row]
            record.advantage = batch.filled("advantages")[batch.response_offsets[row]].item()
        if settings.token_ids:
            record.prompt_ids, record.response_ids = turn.prompt_ids.tolist(), turn.token_ids.tolist()
            record.logprobs = turn.logprobs.tolist()
        return record

    def record(number: int) -> TrajectoryRecord:
        trajectory = trajectories[number]
        question, outcome = trajectory.question, trajectory.outcome
        return TrajectoryRecord(
            question_id=question.id,
            question=question.text,
            source=question.data_source,
            group=trajectory.group,
            sample=trajectory.sample,
            expected=list(question.answers),
            answer=outcome.answer if outcome else None,
            reward=trajectory.reward,
            success=trajectory.success,
            turns=[turn_record(number, turn) for turn in trajectory.turns],
            role_rewards=trajectory.role_rewards,
            info={key: _loggable(value) for key, value in outcome.info.items()} if outcome else {},
            masked=trajectory.failure and f"{trajectory.failure}: {trajectory.failure_detail}",
        )

    return [record(number) for number in chosen(trajectories, most)]


def chosen(trajectories: list[Trajectory], most: int | None) -> list[int]:
    """Positions of the trajectories that are kept; None: all."""
    if most is None or most >= len(trajectories):
        return list(range(len(trajectories)))
    first_of: dict[str, int] = {}
    for number, trajectory in enumerate(trajectories):
        if trajectory.failure is not None:
            first_of.setdefault(trajectory.failure, number)
    spread = (number * len(trajectories) // most for number in range(most))
    return sorted(list(dict.fromkeys([*first_of.values(), *spread]))[:most])


def _loggable(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError:
        return repr(value)
