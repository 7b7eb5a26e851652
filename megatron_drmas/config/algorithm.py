"""Settings of the algorithm: scores, advantages and loss.  Formulas are in `megatron_drmas.algorithm`.

The defaults are Dr. MAS (arXiv 2602.08847) as it trained the search team.
"""

from dataclasses import dataclass, field


@dataclass
class OverlongConfig:
    """DAPO's soft punishment of responses that come near the tokens that their call is allowed."""

    penalty: float = 0.0  # what a response that reaches the limit loses; 0: off
    cache: float = 0.2  # the penalty grows linearly over this last share of the limit


@dataclass
class RewardConfig:
    """What a row's score is made of; a weight of 0 needs no column."""

    trajectory: float = 1.0  # weight of the trajectory's return
    role: float = 0.0  # weight of the column role_reward
    turn: float = 0.0  # weight of the column turn_reward
    verdict: float = 0.0  # a verdict on what is returned gains this when the outcome bears it out and loses it otherwise
    success: float = 0.5  # a trajectory that returns at least this succeeded, for `verdict`
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    @property
    def of_turns(self) -> bool:
        """Whether what calls earn by themselves counts."""
        return bool(self.role or self.turn)


@dataclass
class AdvantageConfig:
    """How row scores become advantages."""

    estimator: str = "normalised"  # normalised | rloo | reinforce_pp_baseline | gigpo, or another registered name
    mean: str = "agent"  # group | agent: whose rows make the baseline
    std: str = "agent"  # group | agent | none: whose rows make the scale
    weighting: str = "step"  # step: every call is a sample | trajectory: every trajectory is, by the mean of its calls
    group_key: str = "question"  # question | question_agent | question_agent_turn: what is compared with one another
    epsilon: float = 1e-6  # added to the std
    clip: float = 0.0  # advantages are clipped to plus or minus this (TeamTR's A_max); 0: off
    gigpo_weight: float = 1.0  # gigpo: weight of the step-level advantage
    gigpo_discount: float = 0.95  # gigpo: discount of later rewards, per turn


@dataclass
class MismatchConfig:
    """Correction of the difference between the engine's and the trainer's probabilities of a sampled token."""

    correction: str = "none"  # none | truncate (TIS) | mask (IcePop) | sequence_mask
    low: float = 0.5  # mask, sequence_mask: smallest ratio trainer / engine that is kept
    high: float = 2.0  # truncate: cap of the ratio; mask, sequence_mask: largest ratio that is kept


@dataclass
class TrustRegionConfig:
    """TeamTR's limit of one agent's update."""

    delta: float = 0.01  # the update ends when the KL per message to the policy that sampled reaches this
    beta: float = 1.0  # first weight of that KL in the loss; it doubles and halves with the estimate


@dataclass
class LossConfig:
    """The policy loss of one mini-batch."""

    name: str = "ppo"  # ppo | gspo | teamtr, or another registered name
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 3.0  # ppo: with a negative advantage the loss is at most this times |advantage|; 0: off
    aggregation: str = "token_mean"  # token_mean | sequence_mean | fixed_length
    fixed_length: int = 0  # fixed_length: the number of tokens that every sequence's sum is divided by
    per_agent: bool = False  # every agent of the mini-batch has the same total weight
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # weight of KL(policy || frozen reference)
    kl_estimator: str = "k3"  # k1 | k2 | k3; k1's gradient is zero in expectation
    trust_region: TrustRegionConfig = field(default_factory=TrustRegionConfig)  # teamtr
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)


@dataclass
class AlgorithmConfig:
    """Everything between a trajectory's reward and an optimizer step."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    invalid_penalty: float = 0.01  # taken from the score of a row whose output could not be parsed
    updates_per_batch: int = 1  # optimizer steps a policy makes on one batch
    dynamic_sampling_draws: int = 1  # how often new questions may replace those whose returns are all equal (DAPO); 1: off
    sequential: bool = False  # agents update one after another, each on fresh trajectories of the updated team (TeamTR)
