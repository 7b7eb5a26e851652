"""The normalizations that are compared, and what the paper reports for them."""

from dataclasses import dataclass

from megatron_drmas.config.algorithm import AdvantageConfig


@dataclass(frozen=True)
class Variant:
    """A way to normalize, and its row of Dr. MAS's Table 3 (search; avg@16 and pass@16 in percent)."""

    label: str
    advantage: AdvantageConfig
    paper: tuple[float, float] | None

    @property
    def overrides(self) -> list[str]:
        settings = self.advantage
        return [f"algorithm.advantage.{key}={getattr(settings, key)}" for key in ("estimator", "mean", "std", "weighting")]


# The paper's group baseline, its equation (2), is of trajectories; the second row weighs every call instead.
VARIANTS = {
    "group_trajectory": Variant(
        "μ, σ (by trajectory)", AdvantageConfig(mean="group", std="group", weighting="trajectory"), (28.0, 40.5)
    ),
    "group_step": Variant("μ, σ (by call)", AdvantageConfig(mean="group", std="group", weighting="step"), None),
    "agent_mean": Variant("μ_k, σ", AdvantageConfig(mean="agent", std="group"), (39.1, 53.5)),
    "agent_std": Variant("μ, σ_k", AdvantageConfig(mean="group", std="agent"), (42.9, 57.6)),
    "agent": Variant("μ_k, σ_k", AdvantageConfig(mean="agent", std="agent"), (43.8, 58.3)),
}
