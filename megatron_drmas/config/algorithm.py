"""Settings of the algorithm: advantages and loss.  Formulas are in `megatron_drmas.algorithm`."""

from dataclasses import dataclass, field


@dataclass
class AdvantageConfig:
    """How row scores become advantages."""

    estimator: str = "normalised"  # a name registered in megatron_drmas.algorithm.advantages
    mean: str = "agent"  # group | agent
    std: str = "agent"  # group | agent | none
    weighting: str = "step"  # step: every call is a sample | trajectory: a trajectory's rows are averaged first
    group_key: str = "question"  # question | question_agent | question_agent_turn
    epsilon: float = 1e-6


@dataclass
class LossConfig:
    """The policy loss of one mini-batch."""

    name: str = "ppo"  # a name registered in megatron_drmas.algorithm.losses
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    aggregation: str = "token_mean"  # token_mean | sequence_mean | fixed_length
    entropy_coef: float = 0.0


@dataclass
class AlgorithmConfig:
    """Everything between a trajectory's reward and an optimizer step."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    invalid_penalty: float = 0.01  # taken from the score of a row whose output could not be parsed
    updates_per_batch: int = 1  # optimizer steps a policy makes on one batch
