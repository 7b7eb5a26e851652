"""Row scores: rewards at trajectory, role and turn level, verifier credit, and penalties."""

from functools import reduce

import torch
from torch import Tensor

from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import AlgorithmConfig, OverlongConfig


def row_scores(batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """The score of every row, float32 [R].

        s = w_trajectory R(trajectory) + w_role r_role + w_turn r_turn + w_verdict c - penalty [output invalid] - overlong

    with c = 1 or -1 on a verdict on what the trajectory returned, and 0 elsewhere.

    The declared weights follow UnityMAS-O (rewards at role, turn and trajectory level); w_trajectory = alpha and
    w_turn = 1 is AT-GRPO's alpha x team + local reward; the invalid-output penalty is Dr. MAS's and falls only on the
    row that earned it.

    Raises:
        ValueError: a weighted column is missing, or a score is not finite.
    """
    scores = reduce(torch.add, score_terms(batch, config))
    if len(scores) and not torch.stack(scores.aminmax()).isfinite().all():
        row = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(
            f"score of {batch.row_name(row)} = {float(scores[row])}: "
            "advantages need finite scores; mask the trajectory or correct its reward"
        )
    return scores


def score_magnitudes(batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """The sum of the sizes of what every row's score adds up, float32 [R]: its rounding error is a share of this.

    Rewards and penalties that cancel leave a score far below it, but not its rounding error.
    """
    return reduce(torch.add, (term.abs() for term in score_terms(batch, config)))


def score_terms(batch: TurnBatch, config: AlgorithmConfig) -> list[Tensor]:
    """What the rows' scores add up, float32 [R] each; the trajectory's part is the first.

    Raises:
        ValueError: a weighted column is missing.
    """
    reward = config.reward
    terms = [reward.trajectory * batch.reward]
    for weight, column in ((reward.role, "role_reward"), (reward.turn, "turn_reward")):
        if weight:
            terms.append(weight * required_column(batch, column, f"algorithm.reward.{column[:-7]} = {weight}"))
    if reward.verdict:
        verdict = required_column(batch, "verdict", f"algorithm.reward.verdict = {reward.verdict}")
        terms.append(reward.verdict * verdict_credit(verdict, batch.reward >= reward.verdict_threshold))
    if config.invalid_penalty:
        terms.append(-config.invalid_penalty * ~batch.valid)
    if reward.overlong.penalty:
        limits = required_column(batch, "response_limits", f"algorithm.reward.overlong.penalty = {reward.overlong.penalty}")
        terms.append(-overlong_penalty(batch.response_lengths, limits, reward.overlong))
    return terms


def required_column(batch: TurnBatch, column: str, wanted_by: str) -> Tensor:
    """An optional column of the batch.

    Raises:
        ValueError: the batch lacks it; names the setting that needs it.
    """
    values = getattr(batch, column)
    if values is None:
        raise ValueError(
            f"{wanted_by} needs the column {column}, which this batch lacks; let the environment or workflow fill it"
        )
    return values


def verdict_credit(verdict: Tensor, acceptable: Tensor) -> Tensor:
    """+1 for a verdict that the outcome bears out, -1 for one that it does not, 0 for a row without a verdict.

    Args:
        verdict: int [R]; 1 accepts, 0 rejects, -1: no verdict.
        acceptable: bool [R], a verdict that accepts is borne out.
    """
    agrees = (verdict == 1) == acceptable
    return torch.where(verdict < 0, 0.0, agrees.float() * 2 - 1)


def overlong_penalty(lengths: Tensor, limits: Tensor, config: OverlongConfig) -> Tensor:
    """0 up to (1 - cache) of the limit, then linear, the whole penalty at the limit (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        lengths: int64 [R], response tokens.
        limits: int64 [R], tokens that the call was allowed.
    """
    cache = (config.cache * limits).clamp(min=1.0)
    return config.penalty * ((lengths - (limits - cache)) / cache).clamp(0, 1)
