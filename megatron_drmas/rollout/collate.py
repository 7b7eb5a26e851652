"""Trajectories → `TurnBatch`."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron_drmas.batch import TurnBatch, offsets_of
from megatron_drmas.team.trajectory import Trajectory


def collate(
    trajectories: Iterable[Trajectory], agents: tuple[str, ...], policies: tuple[str, ...], trainable: set[str]
) -> TurnBatch:
    """The turns of all trajectories that did not fail, in order.

    Args:
        trajectories: of one step.
        agents: names that number the column `agent`.
        policies: names that number the column `policy`.
        trainable: the agents that learn.
    """
    trajectories = list(trajectories)
    questions = {trajectory.group: trajectory.question.id for trajectory in trajectories}
    kept = [(number, trajectory) for number, trajectory in enumerate(trajectories) if trajectory.failure is None]
    places = [(number, trajectory) for number, trajectory in kept for _ in trajectory.turns]
    turns = [turn for _, trajectory in kept for turn in trajectory.turns]
    agent_index = {name: index for index, name in enumerate(agents)}
    policy_index = {name: index for index, name in enumerate(policies)}

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64)

    def floats(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32)

    prompt_lengths = ints(len(turn.prompt_ids) for turn in turns)
    response_lengths = ints(len(turn.token_ids) for turn in turns)
    return TurnBatch(
        tokens=_flat(np.int64, (part for turn in turns for part in (turn.prompt_ids, turn.token_ids))),
        offsets=offsets_of(prompt_lengths + response_lengths),
        prompt_lengths=prompt_lengths,
        engine_logprobs=_flat(np.float32, (turn.logprobs for turn in turns)),
        agent=ints(agent_index[turn.agent] for turn in turns),
        policy=ints(policy_index[turn.policy] for turn in turns),
        group=ints(trajectory.group for _, trajectory in places),
        trajectory=ints(number for number, _ in places),
        sample=ints(trajectory.sample for _, trajectory in places),
        turn=ints(turn.index for turn in turns),
        reward=floats(trajectory.reward for _, trajectory in places),
        valid=torch.tensor([turn.valid for turn in turns], dtype=torch.bool),
        trainable=torch.tensor([turn.agent in trainable for turn in turns], dtype=torch.bool),
        weight_versions=_spread([span for turn in turns for span in turn.weight_versions]),
        role_reward=floats(trajectory.role_rewards.get(turn.agent, 0.0) for (_, trajectory), turn in zip(places, turns)),
        turn_reward=floats(turn.reward for turn in turns),
        response_limits=ints(turn.limit for turn in turns),
        verdict=ints(turn.verdict for turn in turns),
        state=ints(hash(tuple(turn.prompt_ids)) for turn in turns),
        agents=agents,
        policies=policies,
        questions=tuple(questions.get(group, "") for group in range(max(questions, default=-1) + 1)),
    )


def _spread(spans: list[tuple[int, int]]) -> Tensor:
    """The version of every token, int32."""
    versions, tokens = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return torch.from_numpy(versions.astype(np.int32).repeat(tokens))


def _flat(dtype: type, parts: Iterable[list]) -> Tensor:
    """Lists one after the other, without a step of the interpreter for each number."""
    parts = list(parts)
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype, count=sum(map(len, parts))))
