"""Batches as columns, with no padding and no object per row: `TokenBatch`, and `TurnBatch` with the columns of RL.

A row is a prompt and one response; in a `TurnBatch` it is a turn, one call of an agent.  Token columns are flat with
offsets; *response columns* hold the response tokens only, row after row.
"""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Where segments of these lengths begin, and the last one ends: int64 [R + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def gather_segments(flat: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    """The segments `rows` of a flat column, concatenated in that order.

    Args:
        flat: [T], segment r being flat[offsets[r]:offsets[r + 1]].
        offsets: int64 [R + 1].
        rows: int64 [S], indices into the R segments.
    """
    lengths = (offsets[1:] - offsets[:-1])[rows]
    starts = torch.repeat_interleave(offsets[rows] - offsets_of(lengths)[:-1], lengths)
    return flat[starts + torch.arange(int(lengths.sum()))]


@dataclass
class TokenBatch:
    """R rows with T tokens in all: what a pass through a model needs.

    The columns of a subclass have one value a row, unless they are named in its `token_columns` (one value a token) or
    `response_columns` (one value a response token).
    """

    tokens: Tensor  # int64 [T], prompt then response of each row
    offsets: Tensor  # int64 [R + 1], into tokens
    prompt_lengths: Tensor  # int64 [R]

    token_columns: ClassVar[tuple[str, ...]] = ("tokens",)
    response_columns: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row_name(self, row: int) -> str:
        """What messages call a row."""
        return f"row {row}"

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, int64 [R]."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def response_lengths(self) -> Tensor:
        """Response tokens of each row, int64 [R]."""
        return self.lengths - self.prompt_lengths

    @property
    def response_offsets(self) -> Tensor:
        """Offsets of the rows in the response columns, int64 [R + 1]."""
        return offsets_of(self.response_lengths)

    def select(self, rows: Tensor) -> Self:
        """The batch of these rows, in this order.

        Args:
            rows: int64 indices [S], or a bool mask [R].
        """
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor):
                continue
            if field.name == "offsets":
                changed[field.name] = offsets_of(self.lengths[rows])
            elif field.name in self.token_columns:
                changed[field.name] = gather_segments(value, self.offsets, rows)
            elif field.name in self.response_columns:
                changed[field.name] = gather_segments(value, self.response_offsets, rows)
            else:
                changed[field.name] = value[rows]
        return replace(self, **changed)


@dataclass
class TurnBatch(TokenBatch):
    """R turns of a team; T' of the T tokens are response tokens."""

    engine_logprobs: Tensor  # float32 [T'], log-probability of each response token when it was sampled
    agent: Tensor  # int64 [R], index into agents
    policy: Tensor  # int64 [R], index into policies
    group: Tensor  # int64 [R], the question: index into questions
    trajectory: Tensor  # int64 [R]
    sample: Tensor  # int64 [R], position of the trajectory among the question's
    turn: Tensor  # int64 [R], position of the call within its trajectory
    reward: Tensor  # float32 [R], return of the row's trajectory
    valid: Tensor  # bool [R], the output could be parsed
    trainable: Tensor  # bool [R], the agent and its policy learn
    weight_versions: Tensor  # int32 [T'], version of the weights that sampled each response token
    agents: tuple[str, ...]
    policies: tuple[str, ...]
    questions: tuple[str, ...]  # ids
    role_reward: Tensor | None = None  # float32 [R], what the row's role earned in the trajectory
    turn_reward: Tensor | None = None  # float32 [R], what this call earned
    response_limits: Tensor | None = None  # int64 [R], response tokens that the call was allowed
    verdict: Tensor | None = None  # int64 [R], 1 accepts, 0 rejects what the trajectory returned, -1 the row does neither
    state: Tensor | None = None  # int64 [R], equal where calls had the same prompt (GiGPO's anchor)
    reference_logprobs: Tensor | None = None  # float32 [T'], under the frozen reference policy
    advantages: Tensor | None = None  # float32 [T']
    token_weights: Tensor | None = None  # float32 [T'], weight of each token's loss; they carry every normalization

    response_columns: ClassVar[tuple[str, ...]] = (
        "engine_logprobs",
        "weight_versions",
        "reference_logprobs",
        "advantages",
        "token_weights",
    )

    def row_name(self, row: int) -> str:
        """Such as "question q7, sample 3, call 2 (agent search)", counted from 0 as in the logged trajectories."""
        question, agent = self.questions[int(self.group[row])], self.agents[int(self.agent[row])]
        return f"question {question}, sample {int(self.sample[row])}, call {int(self.turn[row])} (agent {agent})"

    def filled(self, column: str) -> Tensor:
        """An optional column that must be there; ValueError if it is not."""
        values = getattr(self, column)
        if values is None:
            raise ValueError(f"the batch has no column {column}")
        return values
