"""The policy loss of packed tokens.

`loss` is a plain sum, sum_t token_weights_t x token_loss_t: every normalization is in the weights, which
`token_weights` computes once for a whole mini-batch.  So the gradient of a mini-batch is the sum of the gradients of
its parts, however it is cut into micro-batches and data-parallel shares; a sequence must stay whole in one part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_drmas.algorithm.mismatch import mismatch_correction
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import LossConfig
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.setting import check_settings
from megatron_drmas.kernels.segments import expand_rows, segment_sum

MAX_LOG_RATIO = 20.0  # ratios are held at exp of this, 4.9e8: more would overflow in float32 sums of squares


@dataclass
class LossInputs:
    """n response tokens of whole sequences, all columns [n]."""

    logprobs: Tensor  # float32, under the policy being trained, with gradient
    engine_logprobs: Tensor  # float32, when the token was sampled
    advantages: Tensor  # float32
    token_weights: Tensor  # float32, from `token_weights`
    sequence: Tensor  # int64, row of each token, in [0, sequences)
    sequences: int
    old_logprobs: Tensor | None = None  # float32, trainer's before the first update on this batch; None: logprobs detached
    entropy: Tensor | None = None  # float32, with gradient; needed for entropy_coef
    reference_logprobs: Tensor | None = None  # float32, under the frozen reference; needed for kl_coef
    agent: Tensor | None = None  # int64, for the metrics; None: all tokens are of agent 0
    agents: int = 1
    beta: float = 0.0  # teamtr: weight of the KL to the policy that sampled


@dataclass
class LossOutputs:
    """The sum to differentiate and what to report.

    `sums` and `maxima` are detached and indexed by agent, float32 [agents]; add sums (take the maximum of maxima) over
    micro-batches and ranks, then divide a sum by the sum `tokens` for its mean:

    tokens, loss, clip_fraction (tokens whose gradient the clip removed, or limited to that of a ratio of e^20), ratio (pi /
    pi_old, at most e^20), kl_old (k3 estimate of KL(pi_old || pi)), kl_reference, entropy, prob_ratio
    (exp |log pi_old - log pi_engine|), logprob_diff_mean (|the same difference|),
    chi_square ((pi_old / pi_engine)^2 - 1), corrected_fraction (tokens whose importance weight was capped or masked),
    gradient_mass (|d loss / d logprob|, already weighted: report the sum, or its share).
    maxima: logprob_diff_max.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


TokenLoss = Callable[[LossInputs, Tensor, LossConfig], tuple[Tensor, Tensor]]
LOSSES: dict[str, TokenLoss] = {}


def register_loss(name: str) -> Callable[[TokenLoss], TokenLoss]:
    """Register `loss(inputs, log_ratio [n], config) -> (token loss [n], clipped bool [n])` as `algorithm.loss.name`."""

    def add(loss: TokenLoss) -> TokenLoss:
        if name in LOSSES:
            raise ValueError(f"loss {name!r} is registered twice; choose another name")
        LOSSES[name] = loss
        return loss

    return add


@register_loss("ppo")
def ppo(inputs: LossInputs, log_ratio: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token (arXiv 1707.06347, eq. 7) with separate bounds (DAPO's clip-higher, arXiv 2503.14476)
    and the dual clip for negative advantages (arXiv 1912.09729, eq. 5)."""
    return _clipped(log_ratio, inputs.advantages, config, config.dual_clip)


@register_loss("gspo")
def gspo(inputs: LossInputs, log_ratio: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The surrogate with one length-normalized ratio per sequence, exp(mean_t log ratio_t) (GSPO, arXiv 2507.18071, eq. 5 and 7).

    The paper's bounds are far tighter than PPO's: clip_low 3e-4, clip_high 4e-4.
    """
    length = torch.bincount(inputs.sequence, minlength=inputs.sequences).clamp(min=1)
    mean = segment_sum(log_ratio, inputs.sequence, inputs.sequences) / length
    return _clipped(mean[inputs.sequence], inputs.advantages, config, 0.0)


@register_loss("teamtr")
def teamtr(inputs: LossInputs, log_ratio: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The surrogate with one ratio per message, prod_t pi_t / pi_old_t (TeamTR).

    `policy_loss` adds beta x sum_t log(pi_old_t / pi_t): with sequence_mean weights beta times the estimate of
    KL(pi_old || pi) that stops the update.
    """
    total = segment_sum(log_ratio, inputs.sequence, inputs.sequences)
    return _clipped(total[inputs.sequence], inputs.advantages, config, 0.0)


class _HeldExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exponent: Tensor) -> Tensor:
        value = exponent.clamp(max=MAX_LOG_RATIO).exp()
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def held_exp(exponent: Tensor) -> Tensor:
    """exp(x) up to e^20, which it is held at; its gradient is its value: exp(x), from x = 20 on that of x = 20.

    So the gradient of a ratio keeps its sign and stays finite however large the ratio is, where clamping x would make it 0.
    """
    return _HeldExp.apply(exponent)


def _clipped(log_ratio: Tensor, advantages: Tensor, config: LossConfig, dual_clip: float) -> tuple[Tensor, Tensor]:
    """max(-A w, -A clip(w)) with w = exp(log_ratio), for A < 0 at most dual_clip |A| if that is given.

    For A < 0 and without dual_clip w is not bounded from above, by PPO's definition: d loss / d log w = |A| w pushes back the
    harder the further the policy has gone.  Beyond w = e^20 it pushes as at e^20 (`held_exp`), and counts as clipped.
    """
    ratio = held_exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    clipped = clipped | ((advantages != 0) & (log_ratio > MAX_LOG_RATIO))
    if dual_clip:
        ceiling = -advantages * dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return loss, clipped


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens of the policy, [n] (Schulman, "Approximating KL divergence").

    With r = pi_ref / pi: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, with r held at e^20 (`held_exp`).  As a loss only
    k2 has the gradient of that KL in expectation; k1's is zero in expectation, k3's is that of KL(reference || policy).
    """
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    return held_exp(log_r) - 1 - log_r


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The weighted loss sum of these tokens and its metrics; n = 0 gives a zero that can be differentiated.

    Raises:
        ConfigError: entropy_coef or kl_coef without the column it needs.
    """
    if config.entropy_coef and inputs.entropy is None:
        raise ConfigError(
            "algorithm.loss.entropy_coef", config.entropy_coef, "needs the tokens' entropy", "pass LossInputs.entropy"
        )
    if config.kl_coef and inputs.reference_logprobs is None:
        raise ConfigError(
            "algorithm.loss.kl_coef", config.kl_coef, "needs the reference's log-probs", "pass LossInputs.reference_logprobs"
        )
    logprobs = inputs.logprobs
    old = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    log_ratio = logprobs - old
    token_loss, clipped = LOSSES[config.name](inputs, log_ratio, config)
    correction, corrected = mismatch_correction(old - inputs.engine_logprobs, inputs.sequence, inputs.sequences, config.mismatch)
    token_loss = token_loss * correction
    reported = {"clip_fraction": clipped, "corrected_fraction": corrected}
    # The terms below hold the policy back; a token that the correction masks is held back like any other.
    if inputs.beta:
        token_loss = token_loss - inputs.beta * segment_sum(log_ratio, inputs.sequence, inputs.sequences)[inputs.sequence]
    if config.kl_coef:
        assert inputs.reference_logprobs is not None, "kl_coef needs the reference's log-probs"
        kl = kl_penalty(logprobs, inputs.reference_logprobs, config.kl_estimator)
        token_loss = token_loss + config.kl_coef * kl
        reported["kl_reference"] = kl
    if config.entropy_coef:
        assert inputs.entropy is not None, "entropy_coef needs the entropy"
        token_loss = token_loss - config.entropy_coef * inputs.entropy
    weighted = inputs.token_weights * token_loss
    loss = weighted.sum()
    if logprobs.requires_grad:
        reported["gradient_mass"] = torch.autograd.grad(loss, logprobs, retain_graph=True)[0].abs()

    mismatch = old - inputs.engine_logprobs
    reported |= {
        "tokens": torch.ones_like(weighted),
        "loss": weighted,
        "ratio": held_exp(log_ratio),
        "kl_old": kl_penalty(old, logprobs, "k3"),
        "prob_ratio": held_exp(mismatch.abs()),
        "logprob_diff_mean": mismatch.abs(),
        "chi_square": held_exp(mismatch).square() - 1,
    }
    if inputs.entropy is not None:
        reported["entropy"] = inputs.entropy
    agent = torch.zeros_like(inputs.sequence) if inputs.agent is None else inputs.agent
    sums = {name: segment_sum(values.detach().float(), agent, inputs.agents) for name, values in reported.items()}
    largest = weighted.new_zeros(inputs.agents).scatter_reduce_(0, agent, mismatch.detach().abs(), "amax")
    return LossOutputs(loss, sums, {"logprob_diff_max": largest})


def token_weights(batch: TurnBatch, config: LossConfig) -> Tensor:
    """The weight of every response token of one mini-batch, float32 [T']; `batch` is the mini-batch of all ranks.

    With S trainable sequences of L_i tokens: token_mean 1 / sum_i L_i; sequence_mean 1 / (S L_i);
    fixed_length 1 / (S x fixed_length) (Dr. GRPO, arXiv 2503.20783).
    With per_agent, S and the sum are each agent's own and every agent present weighs 1 / (agents present), so that a
    talkative role cannot capture a shared policy.  Rows that are not trainable weigh 0 and are not counted.
    """
    lengths = batch.response_lengths
    active = batch.trainable & (lengths > 0)
    share = batch.agent if config.per_agent else torch.zeros_like(batch.agent)
    shares = len(batch.agents) if config.per_agent else 1
    sequences = segment_sum(active.double(), share, shares)
    if config.aggregation == "token_mean":
        weights = 1 / segment_sum(lengths.double() * active, share, shares)[share]
    elif config.aggregation == "sequence_mean":
        weights = 1 / (sequences[share] * lengths)
    else:
        weights = 1 / (sequences[share] * config.fixed_length)
    weights = torch.where(active, weights / (sequences > 0).sum(), 0.0)
    return expand_rows(weights.float(), lengths)


def check_loss_config(config: LossConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    check_settings(config, "algorithm.loss")
    if config.name not in LOSSES:
        raise ConfigError("algorithm.loss.name", config.name, "unknown", f"choose one of {', '.join(sorted(LOSSES))}")
    if config.aggregation == "fixed_length" and config.fixed_length < 1:
        raise ConfigError(
            "algorithm.loss.fixed_length", config.fixed_length, "must be positive", "set it to the longest response"
        )
    if config.dual_clip and config.dual_clip <= 1:
        raise ConfigError("algorithm.loss.dual_clip", config.dual_clip, "must exceed 1", "use 3, or 0 to switch it off")
    if config.name == "teamtr" and config.aggregation != "sequence_mean":
        raise ConfigError(
            "algorithm.loss.aggregation", config.aggregation, "teamtr averages over messages", "set it to sequence_mean"
        )
