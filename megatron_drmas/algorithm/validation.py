"""What can be wrong with the algorithm's settings before anything runs."""

from megatron_drmas.algorithm.advantages import check_advantage_config
from megatron_drmas.algorithm.losses import check_loss_config
from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.setting import check_settings


def check_algorithm_config(config: AlgorithmConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    check_settings(config, "algorithm")
    check_advantage_config(config.advantage)
    check_loss_config(config.loss)
    reward = config.reward
    if not any((reward.trajectory, reward.role, reward.turn, reward.verdict)):
        raise ConfigError(
            "algorithm.reward.trajectory", 0.0, "every weight of a reward is 0", "give one a weight: the default is 1"
        )
    if config.sequential and config.loss.name != "teamtr":
        raise ConfigError("algorithm.sequential", True, "agents in turn need a trust region", "set algorithm.loss.name=teamtr")
    if config.loss.name == "teamtr" and not config.sequential:
        raise ConfigError("algorithm.loss.name", "teamtr", "bounds the update of one agent", "set algorithm.sequential=true")
