"""What a run yields to look at, as plain data that JSON can hold.

Metric dictionaries are open: every numeric key reaches metrics.jsonl, TensorBoard and the report.  The keys
named below are the ones that the summary, the alarms and the report know by name.
"""

import math
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Optional

import numpy as np

SAMPLED, GREEDY = "sampled", "greedy"
GENERATE, WEIGHT_SYNC, CHECKPOINT = "generate", "weight_sync", "checkpoint"  # phases that the summary knows by name


@dataclass
class StepRecord:
    """One training step.  `step` counts from 1; the policies are those after the step's update.

    `agents[id]`: reward (mean over the agent's rows), own_reward (what its calls earned by themselves; 0 where
    the algorithm does not ask), advantage_mean, advantage_std, response_length (tokens), masked_rate,
    truncated_rate, invalid_rate and zero_advantage_rate (shares of `health`), calls_per_trajectory, baseline_inflation (the factor by which a group baseline would inflate the agent's squared
    advantage), and what the actor reports by agent.
    `policies[name]`: loss, grad_norm (before clipping, mean over optimizer steps), grad_norm_max, clip_fraction, entropy,
    lr, prob_ratio (mean trainer/engine token probability ratio), logprob_diff_max, logprob_diff_mean.
    """

    step: int
    reward: float  # mean over trajectories
    trajectories: int
    tokens_generated: int
    tokens_trained: int
    agents: dict[str, dict[str, float]]
    policies: dict[str, dict[str, float]]
    masked: dict[str, int] = field(default_factory=dict)  # cause -> trajectories left out of the update
    skipped: dict[str, int] = field(default_factory=dict)  # policy -> optimizer steps skipped (non-finite gradient)
    nonfinite: dict[str, list[str]] = field(default_factory=dict)  # policy -> agents whose own loss was not finite
    health: dict[str, dict[str, Any]] = field(default_factory=dict)  # counts, see `health.count_step`

    def __post_init__(self):
        for scope in ("agents", "policies"):
            for name, metrics in getattr(self, scope).items():
                for key, value in metrics.items():
                    if isinstance(value, (dict, list, tuple, str)) or value is None:
                        raise TypeError(f"StepRecord.{scope}[{name!r}][{key!r}] = {value!r} is not a number; log numbers only")


@dataclass
class EvaluationRecord:
    """The team on the evaluation questions after `step` steps (0: before training)."""

    step: int
    mode: str  # SAMPLED | GREEDY
    questions: int
    samples: int  # k: answers per question
    exact_match: float  # avg@k: mean over the k answers, then over questions
    pass_at_k: float  # share of questions with any of the k answers right
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)  # hop or data source -> {exact_match, questions}
    masked: dict[str, int] = field(default_factory=dict)  # cause -> trajectories that could not be run to their end
    trajectories: int = 0  # all, the masked ones included
    trained_on: int = 0  # of `questions`: those that are training questions too


def name_questions(questions: int, trained_on: Optional[int]) -> str:
    """What evaluation questions are called: held-out only where none of them is trained on."""
    if not trained_on:
        return f"{questions} held-out questions"
    return f"{questions} training questions" if trained_on >= questions else f"{questions} questions, {trained_on} of them training questions"


@dataclass
class TurnText:
    """One agent call, as a person reads it."""

    agent: str
    prompt: str
    response: str
    valid: bool  # the output could be parsed


@dataclass
class TrajectoryRecord:
    """One run of the workflow on one question."""

    question: str
    expected: list[str]  # accepted answers
    answer: Optional[str]  # the team's; None when it gave none
    reward: float
    turns: list[TurnText]
    source: str = ""  # data source or hop
    masked: Optional[str] = None  # cause, when it was left out of the update


def plain(value: Any) -> Any:
    """`value` as what strict JSON can hold: dataclasses become dictionaries, numpy and torch scalars Python's,
    tuples lists, and non-finite numbers None.

    Raises:
        TypeError: a value of any other type.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic) or getattr(value, "ndim", None) == 0:
        value = value.item()
        if isinstance(value, (bool, int)):
            return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be logged; pass numbers, strings, lists or dictionaries")
