"""What can be wrong with the algorithm's settings before anything runs."""

from operator import attrgetter

from megatron_drmas.algorithm.advantages import check_advantage_config
from megatron_drmas.algorithm.losses import check_loss_config
from megatron_drmas.algorithm.mismatch import check_mismatch_config
from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.config.errors import ConfigError

MOST = 1e6  # of a weight: beyond it float32 sums lose the rest
RANGES = {
    "invalid_penalty": (0.0, MOST), "reward.trajectory": (-MOST, MOST), "reward.role": (-MOST, MOST), "reward.turn": (-MOST, MOST),
    "reward.verdict": (-MOST, MOST), "reward.overlong.penalty": (0.0, MOST), "advantage.gigpo_discount": (0.0, 1.0),
    "advantage.gigpo_weight": (0.0, MOST), "advantage.clip": (0.0, MOST), "advantage.epsilon": (1e-12, 1.0), "loss.kl_coef": (0.0, MOST),
    "loss.entropy_coef": (-MOST, MOST), "loss.trust_region.delta": (1e-12, MOST), "loss.trust_region.beta": (1e-12, MOST),
    "loss.mismatch.low": (0.0, 1.0),
}


def check_algorithm_config(config: AlgorithmConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    for key, (least, most) in RANGES.items():
        value = attrgetter(key)(config)
        if not least <= value <= most:
            raise ConfigError(f"algorithm.{key}", value, "is out of range", f"use a number from {least:g} to {most:g}")
    check_advantage_config(config.advantage)
    check_loss_config(config.loss)
    check_mismatch_config(config.loss.mismatch)
    overlong = config.reward.overlong
    if not 0 <= overlong.cache < 1:
        raise ConfigError("algorithm.reward.overlong.cache", overlong.cache, "is a share of the limit", "choose a value in [0, 1)")
    reward = config.reward
    if not any((reward.trajectory, reward.role, reward.turn, reward.verdict)):
        raise ConfigError("algorithm.reward.trajectory", 0.0, "every weight of a reward is 0", "give one a weight: the default is 1")
    if config.sequential and config.loss.name != "teamtr":
        raise ConfigError("algorithm.sequential", True, "agents in turn need a trust region", "set algorithm.loss.name=teamtr")
    if config.loss.name == "teamtr" and not config.sequential:
        raise ConfigError("algorithm.loss.name", "teamtr", "bounds the update of one agent", "set algorithm.sequential=true")
    if config.dynamic_sampling_draws < 1:
        raise ConfigError(
            "algorithm.dynamic_sampling_draws", config.dynamic_sampling_draws, "must be at least 1", "1 draws once: off"
        )
