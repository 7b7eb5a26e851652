"""Settings of the algorithm: scores, advantages and loss.  Formulas are in `megatron_drmas.algorithm`.

The defaults are Dr. MAS (arXiv 2602.08847) with its paper's settings for question answering.
"""

from dataclasses import dataclass, field

from megatron_drmas.config.setting import setting

MAX_WEIGHT = 1e6  # beyond it float32 sums lose the rest


@dataclass
class OverlongConfig:
    """DAPO's soft punishment of responses that come near the tokens that their call is allowed."""

    penalty: float = setting("What a response that reaches the limit loses; 0: off", 0.0, minimum=0, maximum=MAX_WEIGHT)
    cache: float = setting("The penalty grows linearly over this last share of the limit", 0.2, minimum=0, below=1)


@dataclass
class RewardConfig:
    """What a row's score is made of; a weight of 0 needs no column."""

    trajectory: float = setting("Weight of the trajectory's return", 1.0, minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)
    role: float = setting("Weight of the column role_reward", 0.0, minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)
    turn: float = setting("Weight of the column turn_reward", 0.0, minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)
    verdict: float = setting(
        "A verdict on what is returned gains this when the outcome bears it out and loses it otherwise",
        0.0,
        minimum=-MAX_WEIGHT,
        maximum=MAX_WEIGHT,
    )
    verdict_threshold: float = setting(
        "A verdict that accepts is borne out by a trajectory that returns at least this, one that rejects by any other", 0.5
    )
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    @property
    def use_turn_rewards(self) -> bool:
        """Whether what calls earn by themselves counts."""
        return bool(self.role or self.turn)


@dataclass
class AdvantageConfig:
    """How row scores become advantages."""

    estimator: str = setting("How scores become advantages", "normalized", registry="estimator")
    mean: str = setting("Whose rows make the baseline", "agent", choices={"group": "all agents'", "agent": "the agent's own"})
    std: str = setting(
        "Whose rows make the scale", "agent", choices={"group": "all agents'", "agent": "the agent's own", "none": "no scale"}
    )
    weighting: str = setting(
        "What is a sample of the statistics",
        "step",
        choices={"step": "every turn", "trajectory": "every trajectory, by the mean of its turns"},
    )
    group_key: str = setting(
        "Rows that are compared with one another share this",
        "question",
        choices={"question": "", "question_agent": "", "question_agent_turn": ""},
    )
    epsilon: float = setting("Added to the std", 1e-6, minimum=1e-12, maximum=1)
    clip: float = setting(
        "Advantages are clipped to plus or minus this (TeamTR's A_max); 0: off", 0.0, minimum=0, maximum=MAX_WEIGHT
    )
    gigpo_weight: float = setting("gigpo: weight of the step-level advantage", 1.0, minimum=0, maximum=MAX_WEIGHT)
    gigpo_discount: float = setting("gigpo: discount of later rewards, per turn", 0.95, minimum=0, maximum=1)


@dataclass
class MismatchConfig:
    """Correction of the difference between the engine's and the trainer's probabilities of a sampled token."""

    correction: str = setting(
        "What is done about the difference",
        "none",
        choices={"none": "", "truncate": "TIS", "mask": "IcePop", "sequence_mask": "by sequence"},
    )
    low: float = setting("mask, sequence_mask: smallest ratio trainer / engine that is kept", 0.5, minimum=0, below=1)
    high: float = setting("truncate: cap of the ratio; mask, sequence_mask: largest ratio that is kept", 2.0, above=1)


@dataclass
class TrustRegionConfig:
    """TeamTR's limit of one agent's update."""

    delta: float = setting(
        "The update ends when the KL per message to the policy that sampled reaches this", 0.01, minimum=1e-12, maximum=MAX_WEIGHT
    )
    beta: float = setting(
        "First weight of that KL in the loss; it doubles and halves with the estimate", 1.0, minimum=1e-12, maximum=MAX_WEIGHT
    )


@dataclass
class LossConfig:
    """The policy loss of one mini-batch."""

    name: str = setting("The surrogate", "ppo", registry="loss")
    clip_low: float = setting("The ratio is clipped to at least 1 - clip_low", 0.2, minimum=0, below=1)
    clip_high: float = setting("The ratio is clipped to at most 1 + clip_high", 0.2, minimum=0)
    dual_clip: float = setting(
        "ppo: with a negative advantage the loss is at most this times |advantage|; 0: off", 3.0, minimum=0
    )
    aggregation: str = setting(
        "How tokens are averaged",
        "token_mean",
        choices={
            "token_mean": "over all tokens",
            "sequence_mean": "within, then over sequences",
            "fixed_length": "sums over fixed_length",
        },
    )
    fixed_length: int = setting("fixed_length: the number of tokens that every sequence's sum is divided by", 0, minimum=0)
    per_agent: bool = setting("Every agent of the mini-batch has the same total weight", False)
    entropy_coef: float = setting("Weight of the entropy bonus", 0.0, minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)
    kl_coef: float = setting("Weight of KL(policy || frozen reference)", 0.0, minimum=0, maximum=MAX_WEIGHT)
    kl_estimator: str = setting(
        "Estimator of that KL", "k3", choices={"k1": "its gradient is zero in expectation", "k2": "", "k3": ""}
    )
    trust_region: TrustRegionConfig = field(default_factory=TrustRegionConfig)  # teamtr
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)


@dataclass
class AlgorithmConfig:
    """Everything between a trajectory's reward and an optimizer step."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    invalid_penalty: float = setting(
        "Taken from the score of a row whose output could not be parsed", 0.01, minimum=0, maximum=MAX_WEIGHT
    )
    updates_per_batch: int = setting("Optimizer steps that a policy makes on one batch", 1, minimum=1)
    minibatches_by: str = setting(
        "What is dealt out to these steps at random",
        "turn",
        choices={"turn": "single turns", "question": "all turns on a question, which share most of their tokens"},
    )
    dynamic_sampling_draws: int = setting(
        "How often new questions may replace those whose returns are all equal (DAPO); 1: off", 1, minimum=1
    )
    staleness: int = setting(
        "Updates by which the weights that sampled a token may be older than those that train on it; above 0 the engines go on "
        "while actors train",
        0,
        minimum=0,
    )
    sequential: bool = setting("Agents update one after another, each on fresh trajectories of the updated team (TeamTR)", False)
