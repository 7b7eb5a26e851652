"""From a batch of turns to token-level advantages: `compute_advantages`."""

from torch import Tensor

from megatron_drmas.algorithm.estimators import ESTIMATORS, group_columns
from megatron_drmas.algorithm.scores import row_scores, score_magnitudes
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.setting import check_settings
from megatron_drmas.kernels.agent_advantage import agent_advantages
from megatron_drmas.kernels.segments import dense_index, expand_rows


def check_advantage_config(config: AdvantageConfig) -> None:
    """Refuse unknown choices.

    Raises:
        ConfigError: names the key, the value and the choices.
    """
    check_settings(config, "algorithm.advantage")
    if config.estimator not in ESTIMATORS:
        raise ConfigError(
            "algorithm.advantage.estimator", config.estimator, "unknown", f"choose one of {', '.join(sorted(ESTIMATORS))}"
        )
    if config.estimator == "rloo" and config.std != "none":
        raise ConfigError("algorithm.advantage.std", config.std, "rloo has no scale", "set algorithm.advantage.std=none")


def compute_advantages(batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """The advantage of every response token, float32 [T']: the same value on all tokens of a row.

    `batch` must hold all rows of the team on its questions, trainable or not: statistics are of what was sampled, and
    do not depend on which agents share a policy, on the order of the rows, or on how rows are split later.
    A run's columns are on the driver's CPU; columns on CUDA take the fused kernel where it covers the settings.

    Raises:
        ConfigError: an unknown estimator or choice.
        ValueError: a score or an advantage is not finite, or a column that a setting needs is missing.
    """
    advantage = config.advantage
    check_advantage_config(advantage)
    scores = row_scores(batch, config)
    if scores.is_cuda and advantage.estimator == "normalized" and advantage.weighting == "step" and not advantage.clip:
        group, _ = dense_index(*group_columns(batch, advantage.group_key))
        return agent_advantages(
            scores,
            group,
            batch.agent,
            batch.response_offsets,
            advantage.mean,
            advantage.std,
            advantage.epsilon,
            score_magnitudes(batch, config),
        )
    rows = ESTIMATORS[advantage.estimator](scores, batch, config)
    if len(rows) != len(batch) or not rows.isfinite().all():
        wrong = f"{len(rows)} advantages for {len(batch)} rows"
        if len(rows) == len(batch):
            row = int((~rows.isfinite()).nonzero()[0])
            wrong = f"advantage {float(rows[row])} of {batch.row_name(row)}"
        raise ValueError(f"estimator {advantage.estimator!r} returned {wrong}")
    if advantage.clip:
        rows = rows.clamp(-advantage.clip, advantage.clip)
    return expand_rows(rows, batch.response_lengths)
