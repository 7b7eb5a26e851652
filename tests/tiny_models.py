"""Small random Hugging Face model folders (weights and config, no tokenizer) for tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 235,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,  # fixed in Megatron-Core, like the two factors above
}


def make_llama(directory: str, seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float32, **overrides) -> str:
    """Write a Llama with Llama-3 RoPE scaling; `overrides` are LlamaConfig fields.  Returns `directory`."""
    config = LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": tied, **overrides})
    return _write(LlamaForCausalLM, config, directory, seed, dtype)


def make_qwen2(directory: str, seed: int = 0, tied: bool = False, dtype: torch.dtype = torch.float32, **overrides) -> str:
    """Write a Qwen2 whose q, k and v biases are not zero; `overrides` are Qwen2Config fields.  Returns `directory`."""
    config = Qwen2Config(**{**SIZES, "tie_word_embeddings": tied, **overrides})
    return _write(Qwen2ForCausalLM, config, directory, seed, dtype)


def make_qwen3_moe(directory: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> str:
    """Write a Qwen3-MoE of four experts, two a token; `overrides` are Qwen3MoeConfig fields.  Returns `directory`."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True, "head_dim": 32}
    return _write(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**SIZES, **experts, **overrides}), directory, seed, dtype)


def _write(model_class: type, config, directory: str, seed: int, dtype: torch.dtype) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(directory)
    return directory
