"""What one policy's actor is told: plain data, the same on every rank."""

from dataclasses import dataclass, field

from megatron_drmas.config.algorithm import LossConfig
from megatron_drmas.config.schema import PolicyConfig, PrecisionConfig


@dataclass
class ActorSettings:
    """Settings of a `PolicyActor`.

    Raises:
        ValueError: a value that the actor cannot use; names the key, the value and the remedy.
    """

    name: str  # the policy
    policy: PolicyConfig
    precision: PrecisionConfig = field(default_factory=lambda: PrecisionConfig(mode="fp32"))
    loss: LossConfig = field(default_factory=LossConfig)
    temperature: float = 1.0  # at which the engines sampled; log-probs are those of logits / temperature
    seed: int = 0
    deterministic: bool = False
    device: str = "cpu"  # cpu | cuda
    total_steps: int = 1  # training steps of the run
    updates_per_batch: int = 1  # optimizer steps on each batch

    def __post_init__(self) -> None:
        key = f"policies.{self.name}"
        parallel, optimizer = self.policy.parallel, self.policy.optimizer
        if self.precision.mode not in ("fp32", "bf16", "fp8", "fp8_emulated"):
            raise ValueError(f"precision.mode={self.precision.mode!r}: use fp32, bf16, fp8 or fp8_emulated")
        if self.precision.mode == "fp8" and self.device != "cuda":
            raise ValueError("precision.mode='fp8' needs Transformer Engine on a Hopper or newer GPU; use fp8_emulated")
        if parallel.sequence and parallel.tensor == 1:
            raise ValueError(f"{key}.parallel.sequence=true needs {key}.parallel.tensor > 1, got 1; set sequence=false")
        if optimizer.decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"{key}.optimizer.decay={optimizer.decay!r}: use constant, linear or cosine")
        if optimizer.min_lr > optimizer.lr:
            raise ValueError(
                f"{key}.optimizer.min_lr={optimizer.min_lr} is above {key}.optimizer.lr={optimizer.lr}; lower min_lr"
            )
        if not 0 <= optimizer.warmup_steps < self.decay_steps:
            raise ValueError(
                f"{key}.optimizer.warmup_steps={optimizer.warmup_steps} must be at least 0 and less than the "
                f"{self.decay_steps} optimizer steps of the schedule; lower it or raise {key}.optimizer.decay_steps"
            )
        if self.policy.micro_batch_tokens < 1:
            raise ValueError(f"{key}.micro_batch_tokens={self.policy.micro_batch_tokens} must be at least 1")

    @property
    def decay_steps(self) -> int:
        """Optimizer steps over which the learning rate decays."""
        return self.policy.optimizer.schedule_steps(self.total_steps * self.updates_per_batch)
