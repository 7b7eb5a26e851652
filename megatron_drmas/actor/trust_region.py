"""TeamTR's trust regions of one policy (see `algorithm.teamtr`): one for the agents that an update learns from."""

from collections.abc import Callable

from torch import Tensor

from megatron_drmas.algorithm.teamtr import TrustRegion, measure_update
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import LossConfig


class TrustRegions:
    """The regions by the agents that are called in a batch: with algorithm.sequential, by the one whose turn it is."""

    def __init__(self, loss: LossConfig):
        self._loss = loss
        self._regions: dict[str, TrustRegion] = {}

    def update(self, batch: TurnBatch, sampled: Tensor) -> "TrustRegionUpdate":
        """Begin an update.

        Args:
            batch: its rows, with advantages.
            sampled: float32 [T'], log-probs of the response tokens before it.
        """
        speakers = ", ".join(batch.agents[agent] for agent in batch.agent.unique().tolist())
        settings = self._loss.trust_region
        region = self._regions.setdefault(speakers, TrustRegion(settings.delta, settings.beta))
        return TrustRegionUpdate(region, batch, sampled, self._loss)

    def state_dict(self) -> dict[str, float]:
        """beta by agents."""
        return {agents: region.beta for agents, region in self._regions.items()}

    def load_state_dict(self, betas: dict[str, float]) -> None:
        """Restore `state_dict`."""
        self._regions = {agents: TrustRegion(self._loss.trust_region.delta, beta) for agents, beta in betas.items()}


class TrustRegionUpdate:
    """One update inside a region.

    Attributes:
        metrics: after the latest step: message_kl, message_kl_bound, surrogate (see `teamtr.measure_update`) and beta.
    """

    def __init__(self, region: TrustRegion, batch: TurnBatch, sampled: Tensor, loss: LossConfig):
        self._region = region
        self._batch = batch
        self._sampled = sampled
        self._loss = loss
        self.metrics: dict[str, float] = {}

    @property
    def beta(self) -> float:
        """Weight of the KL in the next step's loss."""
        return self._region.beta

    def reached(self, logprobs: Callable[[TurnBatch], Tensor]) -> bool:
        """Whether the step just made brought the KL to the region's edge, which ends the update.

        Args:
            logprobs: gives the batch's log-probs under the weights as they are, float32 [T'].
        """
        self.metrics = measure_update(self._batch, self._sampled, logprobs(self._batch), self._loss)
        stop = self._region.observe(self.metrics["message_kl"])
        self.metrics["beta"] = self._region.beta
        return stop
