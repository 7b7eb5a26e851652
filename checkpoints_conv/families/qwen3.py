"""Qwen3 dense: norms on queries and keys, a head_dim of its own, no biases."""

from checkpoints_conv.families.base import ATTENTION, MLP, QK_NORM, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    config_class="Qwen3Config",
    layer=ATTENTION + QK_NORM + MLP,
    qk_norm=True,
    fixed={"attention_bias": False},
    also_read=("sliding_window", "use_sliding_window", "max_window_layers"),
    neutral={"qk_norm": (True,), "use_qk_norm": (True,)},
)
