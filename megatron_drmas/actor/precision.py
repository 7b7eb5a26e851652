"""What `precision.mode` means for an actor.

fp32, bf16: parameters and arithmetic in that type; bf16 keeps float32 main parameters and gradients in the optimizer.
fp8: bf16 with the transformer layers' matrix products in FP8 by Transformer Engine (Hopper and newer): E4M3 forward,
    E5M2 gradients, the recipe, margin, history and bf16 layers of `precision.fp8`; parameters stay bf16, for FP8
    parameters are reported to give NaN in reinforcement learning.  The output layer is never FP8.  Untested here.
fp8_emulated: fp32 with the same roundings inside the same layers, on any machine; see `fp8_emulation` for
    what is emulated and what is not.
"""

import torch

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import PrecisionConfig
from megatron_drmas.config.setting import check_settings
from megatron_drmas.devices import DEVICES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp8_emulated": torch.float32}
TOKEN_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 128}  # what FP8 products need of each dimension


def check_precision(precision: PrecisionConfig, device: str, layers: int) -> None:
    """Refuse what cannot work.

    Args:
        device: cpu | cuda.
        layers: of the smallest model.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    mode, fp8 = precision.mode, precision.fp8
    check_settings(precision, "precision")
    if mode == "fp8" and not DEVICES[device].accelerated:
        raise ConfigError("precision.mode", mode, "needs Transformer Engine on a Hopper or newer GPU", "use fp8_emulated")
    if not mode.startswith("fp8"):
        return
    kept = fp8.bf16_first_layers + fp8.bf16_last_layers
    if kept > layers:
        problem = f"with bf16_last_layers = {fp8.bf16_last_layers} does not fit {layers} layers"
        raise ConfigError("precision.fp8.bf16_first_layers", fp8.bf16_first_layers, problem, "lower them")
    if kept and fp8.recipe == "delayed":
        problem = "Megatron keeps no layers in bf16 under delayed scaling"
        raise ConfigError("precision.fp8.recipe", fp8.recipe, problem, "use tensorwise or blockwise")


def fp8_arguments(precision: PrecisionConfig) -> dict:
    """`TransformerConfig`'s arguments for mode fp8; none in any other mode."""
    if precision.mode != "fp8":
        return {}
    fp8 = precision.fp8
    return {
        "fp8": "hybrid",
        "fp8_recipe": fp8.recipe,
        "fp8_margin": fp8.margin,
        "fp8_amax_history_len": fp8.amax_history_len,
        "fp8_amax_compute_algo": "max",
        "fp8_param": False,
        "first_last_layers_bf16": fp8.bf16_first_layers + fp8.bf16_last_layers > 0,
        "num_layers_at_start_in_bf16": fp8.bf16_first_layers,
        "num_layers_at_end_in_bf16": fp8.bf16_last_layers,
    }


def token_multiple(precision: PrecisionConfig) -> int:
    """The number that the tokens of a micro-batch must be a multiple of, per sequence-parallel rank."""
    return TOKEN_MULTIPLES[precision.fp8.recipe] if precision.mode == "fp8" else 1


def environment(precision: PrecisionConfig) -> dict[str, str]:
    """Environment variables that an actor's process needs before its imports."""
    if precision.mode == "fp8" and precision.fp8.recipe == "blockwise":
        return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}  # Hopper has no power-of-two block scales in hardware
    return {}
