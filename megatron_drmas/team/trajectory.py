"""What one run of a workflow leaves behind: its turns, its outcome and its return."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_drmas.data.questions import Question

NO_SIGNAL = "no_signal"  # the cause under which trajectories that dynamic sampling replaces are counted; no failure of a run


@dataclass
class Turn:
    """One agent call.

    `prompt_ids` and `token_ids` become int32 arrays and `logprobs` a float32 array of whatever sequences they are given as;
    calls with the same prompt may share one.
    `token_ids` are exactly the ids that the engine sampled; `text` is decoded from them and only read, never tokenized
    again for training.  `weight_versions` are spans (version of the weights, tokens that they sampled) in the order of the
    response, so their tokens add up to it; an update while the engine worked on the call begins another span.
    """

    agent: str
    policy: str
    index: int  # position among the trajectory's calls
    messages: list[dict[str, str]]
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    limit: int  # response tokens that the call was allowed
    finish_reason: str  # stop | length
    weight_versions: list[tuple[int, int]]
    text: str
    content: str | None  # what the agent's parser accepted
    verdict: int = -1  # 1 accepts, 0 rejects what the trajectory returns, as the workflow declares; -1 does neither
    reward: float = 0.0  # of this call alone, as the workflow sees it; counts with algorithm.reward.turn

    def __post_init__(self) -> None:
        self.prompt_ids = np.asarray(self.prompt_ids, np.int32)
        self.token_ids = np.asarray(self.token_ids, np.int32)
        self.logprobs = np.asarray(self.logprobs, np.float32)

    @property
    def valid(self) -> bool:
        return self.content is not None


@dataclass
class Outcome:
    """How a workflow ended; the environment turns it into a return."""

    answer: str | None  # None: the team gave none
    info: dict[str, Any] = field(default_factory=dict)
    reward: float | None = None  # the trajectory's return where the workflow decides it; None: the environment grades the answer


@dataclass
class Trajectory:
    """One run of the workflow on one question.

    A trajectory whose `failure` is set was cut short by something that is not the team's doing (a tool that failed, an
    engine's NaN, a prompt that cannot fit).  It is counted and masked out of training and evaluation averages.
    """

    question: Question
    group: int  # position of the question in the step
    sample: int  # position among the question's trajectories
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome | None = None
    reward: float = 0.0
    success: bool = False  # see `Environment.success`
    found: list[int] = field(default_factory=list)  # results of each tool call that returned a list
    role_rewards: dict[str, float] = field(
        default_factory=dict
    )  # agent -> mean of its calls' own; counts with algorithm.reward.role
    failure: str | None = None  # the cause
    failure_detail: str | None = None


class ServiceFailure(RuntimeError):
    """A service that trajectories rely on is gone for good; the policies are as they were."""


class TrajectoryFailure(Exception):
    """Ends one trajectory, never the run.

    Args:
        cause: short stable name under which the failure is counted (`tool`, `engine`, `prompt_too_long`, …).
        detail: for the log.
    """

    def __init__(self, cause: str, detail: str):
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail
