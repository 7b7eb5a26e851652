"""Qwen3 dense: norms on queries and keys, a head_dim of its own, no biases."""

from checkpoints_conv.families.base import ATTENTION, MLP, QK_NORM, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layer=ATTENTION + QK_NORM + MLP,
    qk_norm=True,
    default_head_dim=128,
    requires={"attention_bias": False},
)
