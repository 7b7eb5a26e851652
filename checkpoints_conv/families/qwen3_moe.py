"""Qwen3-MoE: Qwen3's attention with a router and experts in every layer."""

from checkpoints_conv.families.base import ATTENTION, EXPERTS, MOE, QK_NORM, Family

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config_class="Qwen3MoeConfig",
    layer=ATTENTION + QK_NORM + MOE,
    qk_norm=True,
    moe=True,
    fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    also_read=(*EXPERTS, "num_local_experts", "sliding_window", "use_sliding_window", "max_window_layers"),
    neutral={"qk_norm": (True,), "use_qk_norm": (True,)},
)
