"""TeamTR: one agent at a time inside a trust region, on fresh trajectories of the team as already updated.

A stage visits the agents in any order.  For each: fresh full-team rollouts, advantages normalized over the question's
trajectories (by std + epsilon as everywhere here, where the paper has sqrt(var + epsilon)) and clipped to A_max, then optimizer
steps of the loss `teamtr` until the estimated KL to the policy that sampled reaches delta.  The loss's beta follows the estimate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import LossConfig
from megatron_drmas.kernels.segments import dense_index, expand_rows, segment_sum

MAX_LOG_RATIO = 300.0  # of a message, in float64: sums over messages stay finite


def message_kl(sampled: Tensor, current: Tensor, sequence: Tensor, sequences: int) -> float:
    """Estimate of KL(pi_sampled || pi_current) per message: the mean over messages of sum_t log(pi_sampled / pi_current).

    Unbiased over messages of pi_sampled; a single batch's estimate can be negative.

    Args:
        sampled, current: [n], log-probs of the sampled tokens.
        sequence: int64 [n] in [0, sequences), the message of each token.
    """
    if sequences == 0:
        return 0.0
    return float(segment_sum((sampled - current).double(), sequence, sequences).mean())


def measure_update(batch: TurnBatch, sampled: Tensor, current: Tensor, config: LossConfig) -> dict[str, float]:
    """What an update did to the messages that it learned from.

    Args:
        batch: their rows, with advantages.
        sampled, current: [T'], log-probs before and after.

    Returns:
        message_kl; message_kl_bound, the mean over messages of w - 1 - log w with w the message's ratio, an estimate of
        the same KL that is never negative, for the certificate; and surrogate, the sum over messages of
        min(w A, clip(w) A) - A.  Divided by the trajectories of the whole batch, those included that do not call this agent,
        that is the certificate's L in units of the normalized advantage, less what clipping may hide.  A ratio is
        held at e^MAX_LOG_RATIO, its logarithm is not.
    """
    rows = len(batch)
    sequence = expand_rows(torch.arange(rows), batch.response_lengths)
    log_ratio = segment_sum((current - sampled).double(), sequence, rows)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    spoke = batch.response_lengths > 0
    advantage = batch.filled("advantages")[batch.response_offsets[:-1][spoke]].double()
    bounded = ratio[spoke].clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio[spoke] * advantage, bounded * advantage) - advantage
    return {
        "message_kl": message_kl(sampled, current, sequence, rows),
        "message_kl_bound": float((ratio - 1 - log_ratio).mean()),
        "surrogate": float(gain.sum()),
    }


@dataclass
class TrustRegion:
    """The adaptive weight of the KL term, and when to stop; plain state that a checkpoint can hold.

    After every optimizer step `observe` takes the KL estimate: over 1.5 delta doubles beta, under delta / 1.5 halves it
    (the adaptive-KL rule of PPO, arXiv 1707.06347, section 4).
    """

    delta: float
    beta: float
    min_beta: float = 1e-4
    max_beta: float = 1e4

    def observe(self, kl: float) -> bool:
        """Adapt beta; True: this agent's update ends, its KL has reached delta."""
        if kl > 1.5 * self.delta:
            self.beta = min(2 * self.beta, self.max_beta)
        elif kl < self.delta / 1.5:
            self.beta = max(self.beta / 2, self.min_beta)
        return kl >= self.delta


def penalty_constant(a_max: float, horizon: int, discount: float = 1.0) -> float:
    """c of the bound J(new) - J(old) >= L - c sqrt(delta), for episodes of `horizon` calls: sqrt(2) A_max sum_t t discount^t.

    A change of KL delta per call moves the distribution of call t by at most t sqrt(delta / 2) in total variation
    (Pinsker), which the advantage multiplies by at most 2 A_max.  As horizon grows with discount < 1 it becomes
    TeamTR's sqrt(2) discount A_max / (1 - discount)^2, which diverges as discount -> 1; this form stays finite.
    """
    calls = torch.arange(horizon, dtype=torch.float64)
    return float(2**0.5 * a_max * (calls * discount**calls).sum())


def certificate(
    surrogates: list[float],
    kls: list[float],
    a_max: float,
    horizon: int,
    discount: float = 1.0,
    slack: float = 0.0,
    fresh: bool = True,
) -> float:
    """Lower bound on the improvement of a stage's updates: sum_i (L_i - c sqrt(kl_i)) - slack.

    Args:
        surrogates: L_i of each agent's update, summed over an episode's calls and averaged over all trajectories.
        kls: the largest KL per call of each update; an estimate below 0 counts as 0.
        slack: what clipping, ratios and normalization may hide beyond that: 0 for the clipped surrogate, which never
            exceeds the unclipped one.
        fresh: every update had its own rollouts.  Where all n updates reuse the first ones, c becomes c n.
    """
    c = penalty_constant(a_max, horizon, discount) * (1 if fresh else len(kls))
    return sum(surrogate - c * max(kl, 0.0) ** 0.5 for surrogate, kl in zip(surrogates, kls, strict=True)) - slack


def certify(metrics: dict[str, dict], batch: TurnBatch) -> dict[str, dict]:
    """What the actors report of a stage; the trust region's figures become those of the agent that the update was for.

    Such an agent gets grad_norm and grad_norm_max, message_kl, message_kl_bound and beta, surrogate_gain (the mean over all
    trajectories of the batch, those included in which the agent was not called) and certificate (see `certificate`).
    Its policy gets the certificate too.

    Args:
        metrics: of the actors, by policy.
        batch: all rows that the stage sampled, with advantages.
    """
    for values in metrics.values():
        region = values.pop("trust_region", None)
        if region is None:
            continue
        trajectories = dense_index(batch.group, batch.trajectory)[0].unique().numel()
        largest, calls = float(batch.filled("advantages").abs().max()), int(batch.turn.max()) + 1
        gain = region.pop("surrogate") / trajectories
        values["certificate"] = certificate([gain], [region["message_kl_bound"]], largest, calls)
        (agent,) = values["agents"]
        norms = {key: values[key] for key in ("grad_norm", "grad_norm_max")}
        values["agents"][agent] |= norms | region | {"surrogate_gain": gain, "certificate": values["certificate"]}
    return metrics
