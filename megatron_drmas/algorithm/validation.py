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
    if config.staleness and config.sequential:
        problem = "with algorithm.sequential each agent learns from trajectories of the team just updated"
        raise ConfigError("algorithm.staleness", config.staleness, problem, "use 0")
    if config.staleness and config.loss.mismatch.correction == "none":
        problem = "tokens of older weights need a correction"
        raise ConfigError(
            "algorithm.staleness", config.staleness, problem, "set algorithm.loss.mismatch.correction=truncate, or use 0"
        )
    if config.loss.name == "teamtr" and not config.sequential:
        raise ConfigError("algorithm.loss.name", "teamtr", "bounds the update of one agent", "set algorithm.sequential=true")
