"""Llama 3.x, and models of its architecture (SmolLM2): grouped-query attention, SwiGLU, Llama 3 RoPE scaling or none."""

from checkpoints_conv.families.base import ATTENTION, MLP, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    config_class="LlamaConfig",
    layer=ATTENTION + MLP,
    llama3_rope=True,
    fixed={"attention_bias": False, "mlp_bias": False},
)
