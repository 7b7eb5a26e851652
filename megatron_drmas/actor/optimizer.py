"""AdamW under Megatron's (distributed) optimizer, its schedule, and a step that refuses a gradient that is not finite."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_drmas.actor.precision import DTYPES
from megatron_drmas.actor.settings import ActorSettings


def build_optimizer(model: DistributedDataParallel, settings: ActorSettings) -> MegatronOptimizer:
    """The optimizer of this rank's parameters; biases and norms are not decayed (Megatron's rule)."""
    optimizer, bf16 = settings.policy.optimizer, DTYPES[settings.precision.mode] == torch.bfloat16
    _let_distributed_optimizer_load()
    built = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.grad_clip,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=optimizer.distributed,
        ),
        [model],
    )
    _start_adamw_states(built)
    return built


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step counter again: Megatron's load hands one tensor to all of them, and torch's
    AdamW counts in place."""
    for part in _torch_adamws(optimizer):
        for state in part.state.values():
            state["step"] = state["step"].clone()


def configure_again(optimizer: MegatronOptimizer) -> None:
    """Give the parameter groups the configured settings: a checkpoint brings those of the run that saved it, and Megatron's
    schedule takes the bounds of the learning rate from the groups.  Rate and weight decay of a step are the schedule's."""
    config = optimizer.config
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = config.lr, config.min_lr
        group["betas"], group["eps"] = (config.adam_beta1, config.adam_beta2), config.adam_eps


def build_schedule(optimizer: MegatronOptimizer, settings: ActorSettings) -> OptimizerParamScheduler:
    """Linear warmup, then the configured decay, counted in optimizer steps.

    Optimizer step k (from 0) of w warmup steps uses lr · (k + 1) / (w + 1), so that the first is not lost at rate 0.
    """
    chosen = settings.policy.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=chosen.lr / (chosen.warmup_steps + 1),
        max_lr=chosen.lr,
        min_lr=chosen.min_lr,
        lr_warmup_steps=chosen.warmup_steps,
        lr_decay_steps=settings.decay_steps,
        lr_decay_style=chosen.decay,
        start_wd=chosen.weight_decay,
        end_wd=chosen.weight_decay,
        wd_incr_steps=settings.decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a checkpoint brings the step count; a longer run may stretch the decay
    )


def optimizer_step(optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> tuple[float, bool]:
    """Clip and apply the gradient, and advance the schedule; leave everything alone if the gradient is not finite.

    Returns:
        The gradient's norm before clipping, over all ranks, and whether the step was made; both equal on every rank.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm, False
    if optimizer.config.clip_grad > 0:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip_grad_by_total_norm_fp32(parameters, optimizer.config.clip_grad, norm)
    optimizer.step_with_ready_grads()
    schedule.step(increment=1)
    return norm, True


def _torch_adamws(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    """The torch optimizers inside; none where Transformer Engine's or Apex's FusedAdam is in use."""
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    return [part for part in parts if isinstance(part, torch.optim.AdamW)]


def _start_adamw_states(optimizer: MegatronOptimizer) -> None:
    """Fill in the states that torch makes in its first step: Megatron can neither save nor load without them."""
    for part in _torch_adamws(optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                part.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _let_distributed_optimizer_load() -> None:
    """Let the distributed optimizer of Megatron-Core 0.16 load the state of torch's AdamW.

    It copies every state key of a parameter from the checkpoint's tensors, but torch's `step` is not among those
    (it is restored elsewhere in the load), so the load ends in KeyError: 'step'.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "completes", False):
        return

    def complete(self: Any, model_param: Any, tensors: dict) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        present = {key: state[key] for key in ("step",) if key in state and key not in tensors}
        original(self, model_param, {**present, **tensors})

    complete.completes = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = complete
