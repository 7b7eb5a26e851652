"""What can be wrong with the algorithm's settings before anything runs."""

from megatron_drmas.algorithm.advantages import check_advantage_config
from megatron_drmas.algorithm.losses import check_loss_config
from megatron_drmas.algorithm.mismatch import check_mismatch_config
from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.config.errors import ConfigError


def check_algorithm_config(config: AlgorithmConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    check_advantage_config(config.advantage)
    check_loss_config(config.loss)
    check_mismatch_config(config.loss.mismatch)
    overlong = config.reward.overlong
    if not 0 <= overlong.cache < 1:
        raise ConfigError("algorithm.reward.overlong.cache", overlong.cache, "is a share of the limit", "choose a value in [0, 1)")
    if overlong.penalty < 0:
        raise ConfigError("algorithm.reward.overlong.penalty", overlong.penalty, "is negative", "DAPO uses 1; 0 switches it off")
    trust = config.loss.trust_region
    if trust.delta <= 0 or trust.beta <= 0:
        raise ConfigError(
            "algorithm.loss.trust_region.delta", trust.delta, "delta and beta must be positive", "the paper uses delta 0.01"
        )
    if config.sequential and config.loss.name != "teamtr":
        raise ConfigError("algorithm.sequential", True, "agents in turn need a trust region", "set algorithm.loss.name=teamtr")
    if config.loss.name == "teamtr" and not config.sequential:
        raise ConfigError("algorithm.loss.name", "teamtr", "bounds the update of one agent", "set algorithm.sequential=true")
    if config.dynamic_sampling_draws < 1:
        raise ConfigError(
            "algorithm.dynamic_sampling_draws", config.dynamic_sampling_draws, "must be at least 1", "1 draws once: off"
        )
