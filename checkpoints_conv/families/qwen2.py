"""Qwen2 and Qwen2.5: biases on query, key and value; small sizes are tied."""

from checkpoints_conv.families.base import ATTENTION, MLP, QKV_BIAS, Family

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    config_class="Qwen2Config",
    layer=ATTENTION + QKV_BIAS + MLP,
    qkv_bias=True,
    also_read=("sliding_window", "use_sliding_window", "max_window_layers"),
    neutral={"attention_bias": (True,), "qkv_bias": (True,)},
)
