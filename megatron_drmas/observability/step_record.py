"""What the log keeps of a step."""

import torch

from megatron_drmas.algorithm.agent_statistics import agent_statistics
from megatron_drmas.observability.health import WHAT, count_causes, count_step, share
from megatron_drmas.observability.records import StepRecord, TrajectoryRecord, TurnText
from megatron_drmas.batch import TurnBatch
from megatron_drmas.team.trajectory import NO_SIGNAL, Trajectory

READABLE = 8  # trajectories kept to read, per step
ZERO = 1e-6  # an advantage that is no larger teaches nothing


def step_record(step: int, trajectories: list[Trajectory], batch: TurnBatch, metrics: dict[str, dict], tokens_generated: int) -> StepRecord:
    """The record of a training step.

    Args:
        step: counted from 1.
        trajectories: all of the step's.
        batch: their rows, with advantages.
        metrics: of the actors, by policy; of several updates in a step, as `algorithm.update_metrics.merge_metrics` merges them.
        tokens_generated: response tokens that the engines returned.
    """
    finished = [trajectory for trajectory in trajectories if trajectory.failure is None]
    # What the team earns on the questions as they come, those included that dynamic sampling replaced for want of signal.
    returns = [trajectory.reward for trajectory in trajectories if trajectory.failure in (None, NO_SIGNAL)]
    agents = {
        name: _agent_metrics(batch, index, len(finished)) | statistics
        for (index, name), statistics in zip(enumerate(batch.agents), agent_statistics(batch))
    }
    health = count_step(trajectories, _zero_advantages(batch))
    for kind in WHAT:
        for name, count in health[kind]["agents"].items():
            agents[name][f"{kind}_rate"] = share(count)
    policies = {}
    for policy, values in metrics.items():
        policies[policy] = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        for index, of_agent in values.get("agents", {}).items():
            agents[batch.agents[index]] |= of_agent
    return StepRecord(
        step=step, reward=sum(returns) / len(returns) if returns else float("nan"),
        trajectories=len(trajectories), tokens_generated=tokens_generated, tokens_trained=int(sum(values["tokens"] for values in metrics.values())),
        agents=agents, policies=policies,
        masked=count_causes(trajectories),
        skipped={policy: int(values["skipped"]) for policy, values in metrics.items() if values["skipped"]},
        nonfinite={
            policy: [batch.agents[index] for index in values["nonfinite_agents"]]
            for policy, values in metrics.items() if values["nonfinite_agents"]
        },
        health=health,
    )


def _zero_advantages(batch: TurnBatch) -> dict[str, list[int]]:
    """Of every agent, its rows without an advantage and all of those that learn."""
    zero = batch.advantages[batch.response_offsets[:-1]].abs() <= ZERO
    counts = {}
    for index, name in enumerate(batch.agents):
        rows = (batch.agent == index) & batch.trainable
        counts[name] = [int((zero & rows).sum()), int(rows.sum())]
    return counts


def _agent_metrics(batch: TurnBatch, agent: int, trajectories: int) -> dict[str, float]:
    rows = batch.select(batch.agent == agent)
    if not len(rows):
        return {"calls_per_trajectory": 0.0}
    advantages = rows.advantages[rows.response_offsets[:-1]]
    return {
        "reward": rows.reward.mean().item(),
        "own_reward": rows.turn_reward.mean().item(),
        "advantage_mean": advantages.mean().item(),
        "advantage_std": advantages.std(correction=0).item(),
        "response_length": rows.response_lengths.to(torch.float32).mean().item(),
        "calls_per_trajectory": len(rows) / trajectories,
    }


def trajectory_records(trajectories: list[Trajectory], most: int = READABLE) -> list[TrajectoryRecord]:
    """A few whole trajectories, spread over the questions, and first one of each failure's cause."""
    failed = {trajectory.failure: trajectory for trajectory in trajectories if trajectory.failure is not None}
    stride = max(1, len(trajectories) // most)
    return [_readable(trajectory) for trajectory in [*failed.values(), *trajectories[::stride]][:most]]


def _readable(trajectory: Trajectory) -> TrajectoryRecord:
    turns = [
        TurnText(turn.agent, "\n\n".join(message["content"] for message in turn.messages), turn.text, turn.valid) for turn in trajectory.turns
    ]
    return TrajectoryRecord(
        question=trajectory.question.text, expected=list(trajectory.question.answers),
        answer=trajectory.outcome.answer if trajectory.outcome else None, reward=trajectory.reward, turns=turns,
        source=trajectory.question.data_source, masked=trajectory.failure and f"{trajectory.failure}: {trajectory.failure_detail}",
    )
