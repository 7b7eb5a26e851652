"""Trajectories → `TurnBatch`."""

from typing import Iterable

import torch

from megatron_drmas.batch import TurnBatch
from megatron_drmas.team.trajectory import Trajectory


def collate(trajectories: Iterable[Trajectory], agents: tuple[str, ...], policies: tuple[str, ...], trainable: set[str]) -> TurnBatch:
    """The turns of all trajectories that did not fail, in order.

    Args:
        trajectories: of one step.
        agents: names that number the column `agent`.
        policies: names that number the column `policy`.
        trainable: the agents that learn.
    """
    numbered = [(number, trajectory) for number, trajectory in enumerate(trajectories) if trajectory.failure is None]
    rows = [(number, trajectory, turn) for number, trajectory in numbered for turn in trajectory.turns]
    agent_index = {name: index for index, name in enumerate(agents)}
    policy_index = {name: index for index, name in enumerate(policies)}

    def column(values: Iterable, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype)

    lengths = column((len(turn.prompt_ids) + len(turn.token_ids) for _, _, turn in rows), torch.int64)
    return TurnBatch(
        tokens=column((token for _, _, turn in rows for part in (turn.prompt_ids, turn.token_ids) for token in part), torch.int64),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        prompt_lengths=column((len(turn.prompt_ids) for _, _, turn in rows), torch.int64),
        engine_logprobs=column((logprob for _, _, turn in rows for logprob in turn.logprobs), torch.float32),
        agent=column((agent_index[turn.agent] for _, _, turn in rows), torch.int64),
        policy=column((policy_index[turn.policy] for _, _, turn in rows), torch.int64),
        group=column((trajectory.group for _, trajectory, _ in rows), torch.int64),
        trajectory=column((number for number, _, _ in rows), torch.int64),
        turn=column((turn.index for _, _, turn in rows), torch.int64),
        reward=column((trajectory.reward for _, trajectory, _ in rows), torch.float32),
        valid=column((turn.valid for _, _, turn in rows), torch.bool),
        trainable=column((turn.agent in trainable for _, _, turn in rows), torch.bool),
        weight_version=column((turn.weight_version for _, _, turn in rows), torch.int64),
        role_reward=column((trajectory.role_rewards.get(turn.agent, 0.0) for _, trajectory, turn in rows), torch.float32),
        turn_reward=column((turn.reward for _, _, turn in rows), torch.float32),
        response_limits=column((turn.limit for _, _, turn in rows), torch.int64),
        verdict=column((turn.verdict for _, _, turn in rows), torch.int64),
        state=column((hash(tuple(turn.prompt_ids)) for _, _, turn in rows), torch.int64),
        agents=agents, policies=policies,
    )
