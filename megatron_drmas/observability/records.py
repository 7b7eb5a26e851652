"""What a run yields to look at, as plain data that JSON can hold.

Metric dictionaries are open: every numeric key reaches metrics.jsonl, TensorBoard and the report.
"""

import math
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import numpy as np

SAMPLED, GREEDY = "sampled", "greedy"
GENERATE, WEIGHT_SYNC, CHECKPOINT = "generate", "weight_sync", "checkpoint"  # phases that the summary knows by name


@dataclass
class StepRecord:
    """One training step.  `step` counts from 1; the policies are those after the step's update.

    The keys of `agents[id]` and `policies[name]`, and the units of all fields, are in the table of metrics (docs/metrics.md).
    """

    step: int
    reward: float
    success: float
    trajectories: int
    tokens_generated: int
    tokens_trained: int
    agents: dict[str, dict[str, float]]
    policies: dict[str, dict[str, float]]
    masked: dict[str, int] = field(default_factory=dict)  # cause -> trajectories left out of the update
    skipped: dict[str, int] = field(default_factory=dict)  # policy -> optimizer steps skipped (non-finite gradient)
    nonfinite: dict[str, list[str]] = field(default_factory=dict)  # policy -> agents whose own loss was not finite
    health: dict[str, dict[str, Any]] = field(default_factory=dict)  # counts, see `health.count_step`
    workflow: dict[str, float] = field(default_factory=dict)  # means of the numbers in `Outcome.info`

    def __post_init__(self) -> None:
        for scope in ("agents", "policies"):
            for name, metrics in getattr(self, scope).items():
                for key, value in metrics.items():
                    if isinstance(value, (dict, list, tuple, str)) or value is None:
                        raise TypeError(f"StepRecord.{scope}[{name!r}][{key!r}] = {value!r} is not a number; log numbers only")


@dataclass
class Share:
    """Mean reward and success rate of some questions; a question counts once, with the mean over its own trajectories.

    The errors are standard errors of these means over the questions (sample standard deviation / sqrt(questions)); None for
    fewer than two questions.
    """

    questions: int
    reward: float
    success: float
    reward_stderr: float | None
    success_stderr: float | None


@dataclass
class EvaluationRecord:
    """The team on evaluation questions after `step` steps (0: before training).

    A trajectory that could not be run to its end is masked: its question counts with the others it has, and not at all
    without any.  pass@k is over the questions that have all k.
    """

    step: int
    mode: str  # SAMPLED | GREEDY
    temperature: float
    top_p: float
    samples: int  # k: answers asked for per question
    samples_min: int  # fewest unmasked answers of a question that counts
    asked: int  # questions, those without an unmasked answer included
    questions: int  # that have an unmasked answer
    reward: float  # avg@k: mean over a question's answers, then over questions
    success: float  # avg@k of success
    reward_stderr: float | None  # see `Share`
    success_stderr: float | None
    pass_at_k: float | None  # share of the questions with k unmasked answers where one succeeded; None: there is none
    pass_questions: int  # questions with k unmasked answers
    by_source: dict[str, Share] = field(default_factory=dict)  # by hop or data source
    masked: dict[str, int] = field(default_factory=dict)  # cause -> trajectories that could not be run to their end
    trajectories: int = 0  # all, the masked ones included
    trained_on: int = 0  # of `questions`: those that are training questions too


def name_questions(questions: int, trained_on: int | None) -> str:
    """What evaluation questions are called: held-out only where none of them is trained on."""
    if not trained_on:
        return f"{questions} held-out questions"
    return (
        f"{questions} training questions"
        if trained_on >= questions
        else f"{questions} questions, {trained_on} of them training questions"
    )


@dataclass
class TurnRecord:
    """One agent call."""

    agent: str
    policy: str
    index: int  # position among the trajectory's calls
    prompt: str  # as the model saw it: with the chat template and its marks
    response: str
    content: str | None  # what the agent's parser accepted
    valid: bool  # the output could be parsed
    finish_reason: str  # stop | length
    prompt_tokens: int
    response_tokens: int
    max_response_tokens: int
    weight_versions: list[tuple[int, int]]  # spans (version, response tokens) in the response's order
    reward: float = 0.0  # of this call by itself
    logprob_mean: float | None = None  # engine's log-probabilities of the response tokens
    logprob_min: float | None = None
    trained: bool = False  # its agent learned from it
    score: float | None = None  # what the advantage was computed from; None: masked, or in an evaluation
    advantage: float | None = None
    prompt_ids: list[int] | None = None  # with logging.token_ids
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None


@dataclass
class TrajectoryRecord:
    """One run of the workflow on one question."""

    question_id: str
    question: str
    source: str  # data source
    group: int  # position of the question in the step or evaluation
    sample: int  # position among the question's trajectories
    expected: list[str]  # accepted answers
    answer: str | None  # the team's; None when it gave none
    reward: float
    success: bool
    turns: list[TurnRecord]
    role_rewards: dict[str, float] = field(default_factory=dict)  # agent -> mean of what its calls earned by themselves
    info: dict[str, Any] = field(default_factory=dict)  # what the workflow says of its outcome
    masked: str | None = None  # cause, when it was left out of the update or of the averages


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
