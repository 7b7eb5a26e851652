"""The settings of one policy's actor: plain data, the same on every rank."""

from dataclasses import dataclass, field

from megatron_drmas.config.algorithm import LossConfig
from megatron_drmas.config.schema import PolicyConfig, PrecisionConfig


@dataclass
class ActorSettings:
    """Settings of a `PolicyActor`; `megatron_drmas.validate` says which of them cannot work."""

    name: str  # the policy
    policy: PolicyConfig
    precision: PrecisionConfig = field(default_factory=lambda: PrecisionConfig(mode="fp32"))
    loss: LossConfig = field(default_factory=LossConfig)
    temperature: float = 1.0  # at which the engines sampled; log-probs are those of logits / temperature
    seed: int = 0
    deterministic: bool = False
    device: str = "cpu"  # cpu | cuda
    transport: str = "shm"  # to the engines; a name registered in megatron_drmas.weight_sync
    total_steps: int = 1  # training steps of the run
    updates_per_batch: int = 1  # optimizer steps on each batch
    minibatches_by: str = "turn"  # what is dealt out to them: turn | question

    @property
    def decay_steps(self) -> int:
        """Optimizer steps over which the learning rate decays."""
        return self.policy.optimizer.schedule_steps(self.total_steps * self.updates_per_batch)
