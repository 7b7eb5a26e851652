"""Trajectories → `TurnBatch`."""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

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
    turns = [turn for _, trajectory in kept for turn in trajectory.turns]
    turns_of = np.fromiter((len(trajectory.turns) for _, trajectory in kept), np.int64, len(kept))
    states: dict[bytes, int] = {}

    def of_turns(values: Iterable[Any], dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.fromiter(values, dtype, len(turns)))

    def of_trajectories(values: Iterable[Any], dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.fromiter(values, dtype, len(kept)).repeat(turns_of))

    def field(name: str) -> Iterator[Any]:
        return map(attrgetter(name), turns)

    def numbered(name: str, numbers: dict[str, Any], dtype: type = np.int64) -> Tensor:
        return of_turns(map(numbers.__getitem__, field(name)), dtype)

    prompt_lengths, response_lengths = of_turns(map(len, field("prompt_ids"))), of_turns(map(len, field("token_ids")))
    return TurnBatch(
        tokens=_flat(np.int64, list(chain.from_iterable(map(attrgetter("prompt_ids", "token_ids"), turns)))),
        offsets=offsets_of(prompt_lengths + response_lengths),
        prompt_lengths=prompt_lengths,
        engine_logprobs=_flat(np.float32, list(field("logprobs"))),
        agent=numbered("agent", {name: index for index, name in enumerate(agents)}),
        policy=numbered("policy", {name: index for index, name in enumerate(policies)}),
        group=of_trajectories(trajectory.group for _, trajectory in kept),
        trajectory=of_trajectories(number for number, _ in kept),
        sample=of_trajectories(trajectory.sample for _, trajectory in kept),
        turn=of_turns(field("index")),
        reward=of_trajectories((trajectory.reward for _, trajectory in kept), np.float32),
        valid=of_turns(field("valid"), np.bool_),
        trainable=numbered("agent", {name: name in trainable for name in agents}, np.bool_),
        weight_versions=_spread([span for turn in turns for span in turn.weight_versions]),
        role_reward=of_turns((t.role_rewards.get(turn.agent, 0.0) for _, t in kept for turn in t.turns), np.float32),
        turn_reward=of_turns(field("reward"), np.float32),
        response_limits=of_turns(field("limit")),
        verdict=of_turns(field("verdict")),
        state=of_turns(states.setdefault(ids.tobytes(), len(states)) for ids in field("prompt_ids")),
        agents=agents,
        policies=policies,
        questions=tuple(questions.get(group, "") for group in range(max(questions, default=-1) + 1)),
    )


def _spread(spans: list[tuple[int, int]]) -> Tensor:
    """The version of every token, int32."""
    versions, tokens = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return torch.from_numpy(versions.astype(np.int32).repeat(tokens))


def _flat(dtype: type, parts: list[np.ndarray]) -> Tensor:
    """Arrays one after the other."""
    return torch.from_numpy(np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype))
