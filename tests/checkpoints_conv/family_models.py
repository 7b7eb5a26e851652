"""A tiny random model of every family, as transformers writes it: the odd sizes are on purpose."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec

# Fits TP 1, 2 and 4, PP 1 and 2, and VPP 2; neither the vocabulary nor the FFN is a power of two.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VARIANTS = [(family, tied) for family in FAMILIES for tied in (False, True)]


def family_config(family: str, tied: bool = False, **overrides) -> PretrainedConfig:
    """The tiny config of a family; `overrides` are config fields."""
    kind, fields = FAMILIES[family]
    return kind(**{**SIZES, **fields, "tie_word_embeddings": tied, **overrides})


def config_json(family: str, tied: bool = False, **overrides) -> dict:
    """What the tiny model's config.json says."""
    return {**family_config(family, tied, **overrides).to_dict(), "architectures": [ARCHITECTURES[family]]}


def tiny_spec(family: str = "llama", tied: bool = False, **overrides) -> ModelSpec:
    config = config_json(family, tied, **overrides)
    return family_of(config).model_spec(config)


def make_model(
    folder: Path, family: str, tied: bool = False, dtype: torch.dtype = torch.float32, max_shard_size: str = "200KB", **overrides
) -> Path:
    """Write a model whose norms and biases are random too, in several shards; returns `folder`."""
    with torch.random.fork_rng():
        torch.manual_seed(len(family))
        model = AutoModelForCausalLM.from_config(family_config(family, tied, **overrides))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
