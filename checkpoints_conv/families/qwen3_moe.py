"""Qwen3-MoE: Qwen3's attention with a router and experts in every layer."""

from checkpoints_conv.families.base import ATTENTION, MOE, QK_NORM, Family

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer=ATTENTION + QK_NORM + MOE,
    qk_norm=True,
    moe=True,
    requires={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
