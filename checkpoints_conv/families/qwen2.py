"""Qwen2 and Qwen2.5: biases on query, key and value; small sizes are tied."""

from checkpoints_conv.families.base import ATTENTION, MLP, QKV_BIAS, Family

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=ATTENTION + QKV_BIAS + MLP,
    qkv_bias=True,
)
