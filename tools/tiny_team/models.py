"""The tiny team's two model families, about a million parameters each, as Hugging Face folders."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tools.tiny_team.tokenizer import END, PAD, build_tokenizer, save_tokenizer

# Six heads in two groups over two layers: tensor parallel 2 and pipeline parallel 2 both divide them.
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "initializer_range": 0.02,
}
# Megatron-Core fixes the last three; head size 32 at this base has frequencies in all three bands of the scaling.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
POLICIES = ("qwen2", "llama")


def build_model(policy: str, seed: int) -> PreTrainedModel:
    """A randomly initialized model in fp32.

    The embedding, which is the output layer too, starts with rows of length one: with the usual short ones, logits stay
    small for long, and copying a name from the prompt is learned a hundred steps later.

    Args:
        policy: "qwen2" (the Verifier's) or "llama" (the Search and Answer agents').
        seed: of the initialization; torch's global generator is left as it was.
    """
    vocab = len(build_tokenizer())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if policy == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES, vocab_size=vocab, max_position_embeddings=2048))
        elif policy == "llama":
            model = LlamaForCausalLM(
                LlamaConfig(**SIZES, vocab_size=vocab, max_position_embeddings=16384, rope_parameters=LLAMA3_ROPE)
            )
        else:
            raise ValueError(f"policy {policy!r}: the tiny team has {' and '.join(POLICIES)}")
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=SIZES["hidden_size"] ** -0.5)
    return model


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Write weights, configuration, generation configuration and tokenizer."""
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD, do_sample=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def store_policy(folder: Path, to: Path) -> None:
    """Copy a policy's folder with the weights rounded to bfloat16, which halves them; replaces what is at `to`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    temp_path = to.with_name(to.name + ".part")
    shutil.rmtree(temp_path, ignore_errors=True)
    save_policy(model, temp_path)
    shutil.rmtree(to, ignore_errors=True)
    temp_path.rename(to)
