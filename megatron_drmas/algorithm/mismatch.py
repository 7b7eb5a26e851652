"""Corrections for the difference between the trainer's and the engine's probability of a sampled token.

The behavior policy is the engine's; the trainer's log-probs of the same tokens differ by kernels and precision.
How many tokens a correction touches is the metric `corrected_fraction`, which has a limit in `observability.alarms`.
"""

import torch
from torch import Tensor

from megatron_drmas.config.algorithm import MismatchConfig
from megatron_drmas.kernels.segments import segment_sum


def mismatch_correction(log_ratio: Tensor, sequence: Tensor, sequences: int, config: MismatchConfig) -> tuple[Tensor, Tensor]:
    """Weights of the token losses and which tokens were capped or masked, float32 [n] and bool [n]; no gradient.

    With rho = pi_trainer / pi_engine per token:
    truncate: min(rho, high) (truncated importance sampling, Yao et al. 2025).
    mask: rho where low <= rho <= high, else 0 (IcePop, Ling Team 2025).
    sequence_mask: 1 or 0 for a whole sequence, by exp(mean_t log rho_t) within [low, high].

    Args:
        log_ratio: [n], log pi_trainer - log pi_engine.
        sequence: int64 [n] in [0, sequences).
    """
    log_ratio = log_ratio.detach()
    if config.correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if config.correction == "truncate":
        ratio = log_ratio.exp()
        return ratio.clamp(max=config.high), ratio > config.high
    if config.correction == "mask":
        ratio = log_ratio.exp()
        outside = (ratio < config.low) | (ratio > config.high)
        return torch.where(outside, 0.0, ratio), outside
    length = torch.bincount(sequence, minlength=sequences).clamp(min=1)
    mean = (segment_sum(log_ratio, sequence, sequences) / length).exp()
    outside = ((mean < config.low) | (mean > config.high))[sequence]
    return (~outside).to(log_ratio.dtype), outside
