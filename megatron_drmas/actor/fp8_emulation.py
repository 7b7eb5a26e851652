"""FP8 linear layers emulated on any machine: what FP8 rounds is rounded, in the arithmetic of the tensors' own type.

Emulated, inside every linear layer of the chosen transformer layers: inputs and weights are quantized to E4M3 and
output gradients to E5M2, with the scaling recipe's scales, and dequantized before the three matrix products
(forward, input gradient, weight gradient).  Values beyond the format's range saturate, as Transformer Engine's casts do.

Not emulated: the tensor cores' accumulation order and precision, the power-of-two scales that block-wise FP8 uses
unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 (which `precision.environment` sets), and FP8 parameters.
Attention's products, norms, embedding, router and output layer are not quantized, neither here nor by
`precision: fp8`.

Recipes, as in Transformer Engine's documentation of DelayedScaling, Float8CurrentScaling and Float8BlockScaling:
tensorwise: one scale per tensor, from its own largest magnitude.
delayed: one scale per tensor, from the largest magnitude of its last `amax_history_len` uses; 1 at first.
blockwise: one scale per 1 x 128 values of inputs and gradients, along the dimension that the product sums over, and
    per 128 x 128 values of weights.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_drmas.config.schema import Fp8Config

INPUT, WEIGHT, GRADIENT = range(3)
FORMATS = {INPUT: torch.float8_e4m3fn, WEIGHT: torch.float8_e4m3fn, GRADIENT: torch.float8_e5m2}
BLOCK = 128


def round_to_fp8(values: Tensor, scale: "Tensor | float", dtype: torch.dtype) -> Tensor:
    """`values` as the nearest ones that FP8 can hold at this scale, in their own type; beyond the range they saturate."""
    largest = torch.finfo(dtype).max
    return ((values.float() * scale).clamp(-largest, largest).to(dtype).float() / scale).to(values.dtype)


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The factor that brings `amax` to the format's largest value, divided by 2^margin; 1 where amax is 0."""
    return torch.where(amax > 0, torch.finfo(dtype).max / amax / 2**margin, 1.0)


class TensorwiseScaling:
    """One scale per tensor, from its own largest magnitude."""

    def quantize(self, values: Tensor, slot: int, record: bool) -> Tensor:
        """`values` [m, k], whose last dimension the product sums over, rounded; `record`: this use is of a training pass."""
        amax = values.detach().abs().amax().float() if values.numel() else torch.zeros(())
        return round_to_fp8(values, scale_for(amax, FORMATS[slot]), FORMATS[slot])

    def for_weight_gradient(self, values: Tensor, rounded: Tensor, slot: int) -> Tensor:
        """The same tensor for the product that sums over its first dimension; `rounded` is `quantize`'s result."""
        return rounded


class DelayedScaling(TensorwiseScaling):
    """One scale per tensor, from the largest magnitudes of its earlier uses.

    The magnitudes are the largest over the tensor- and data-parallel ranks, as Transformer Engine reduces them, so every
    rank has the same history.  Uses without gradient leave no trace.
    """

    def __init__(self, config: Fp8Config):
        self.margin = config.margin
        self.history = torch.zeros(len(FORMATS), config.amax_history_len)

    def quantize(self, values: Tensor, slot: int, record: bool) -> Tensor:
        self.history = self.history.to(values.device)
        rounded = round_to_fp8(values, scale_for(self.history[slot].amax(), FORMATS[slot], self.margin), FORMATS[slot])
        if record:
            self._record(values.detach().abs().amax().float() if values.numel() else torch.zeros(()), slot)
        return rounded

    def _record(self, amax: Tensor, slot: int) -> None:
        if parallel_state.model_parallel_is_initialized():
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=parallel_state.get_amax_reduction_group())
        self.history[slot] = self.history[slot].roll(1)
        if amax.isfinite():
            self.history[slot, 0] = amax


class BlockwiseScaling(TensorwiseScaling):
    """One scale per 128 values along the dimension that the product sums over; weights one per 128 x 128."""

    def quantize(self, values: Tensor, slot: int, record: bool) -> Tensor:
        return _round_blocks(values, (BLOCK if slot == WEIGHT else 1, BLOCK), FORMATS[slot])

    def for_weight_gradient(self, values: Tensor, rounded: Tensor, slot: int) -> Tensor:
        return _round_blocks(values, (BLOCK, 1), FORMATS[slot])


def _round_blocks(values: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    rows, columns = values.shape
    padded = nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    amax = tiles.abs().amax((1, 3), keepdim=True).float()
    return round_to_fp8(tiles, scale_for(amax, dtype), dtype).view_as(padded)[:rows, :columns]


class _Fp8Linear(torch.autograd.Function):
    """y = Q(x) Q(w)^T, with dx = Q(g) Q(w) and dw = Q(g)^T Q(x)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scaling: TensorwiseScaling, training: bool) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rounded_x, rounded_weight = scaling.quantize(flat, INPUT, training), scaling.quantize(weight, WEIGHT, training)
        ctx.save_for_backward(scaling.for_weight_gradient(flat, rounded_x, INPUT), rounded_weight)
        ctx.scaling = scaling
        return (rounded_x @ rounded_weight.t()).view(*x.shape[:-1], weight.shape[0])  # x may be an expert's without a token

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and weight from the output's gradient, itself rounded (E5M2) for both products."""
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        rounded = ctx.scaling.quantize(flat, GRADIENT, True)
        grad_x = (rounded @ weight).view(*gradient.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.scaling.for_weight_gradient(flat, rounded, GRADIENT).t() @ x
        return grad_x, grad_weight, None, None


def make_scaling(config: Fp8Config) -> TensorwiseScaling:
    """The scaling of one linear layer."""
    if config.recipe == "delayed":
        return DelayedScaling(config)
    return {"tensorwise": TensorwiseScaling, "blockwise": BlockwiseScaling}[config.recipe]()


def emulate_fp8(model: nn.Module, config: Fp8Config, layers: int) -> list[str]:
    """Make the linear layers of a built Megatron model round as FP8 does.

    Args:
        model: GPTModel of the local spec, or one pipeline stage of it.
        layers: of the whole model; the first `bf16_first_layers` and last `bf16_last_layers` are left as they are.

    Returns:
        Names of the linear layers that now round.
    """
    changed = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, TransformerLayer):
            continue
        if not config.bf16_first_layers < layer.layer_number <= layers - config.bf16_last_layers:
            continue
        for name, linear in layer.named_modules():
            if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
                _patch(linear, make_scaling(config))
                changed.append(f"{prefix}.{name}")
    return changed


def _patch(linear: nn.Module, scaling: TensorwiseScaling) -> None:
    def forward_impl(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group, **unused) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = _Fp8Linear.apply(input, weight, scaling, torch.is_grad_enabled())
        return output if bias is None else output + bias

    linear._forward_impl = forward_impl
    if isinstance(scaling, DelayedScaling):  # the history is part of a checkpoint, where Transformer Engine keeps it too
        linear.get_extra_state = lambda: scaling.history
        linear.set_extra_state = lambda state: None if state is None else scaling.history.copy_(state)
