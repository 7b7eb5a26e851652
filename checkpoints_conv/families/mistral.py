"""Mistral without sliding window (7B v0.3, Nemo): Llama's tensors under its own architecture name."""

from checkpoints_conv.families.base import ATTENTION, MLP, Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    config_class="MistralConfig",
    layer=ATTENTION + MLP,
    also_read=("sliding_window",),
)
