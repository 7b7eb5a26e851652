"""What a checkpoint is: family, sizes, and the layouts that it can be trained in."""

from pathlib import Path
from typing import Optional

from checkpoints_conv.checkpoint import Checkpoint


def inspect(folder: Path, hf_files: Optional[Path] = None) -> str:
    """A report of a Hugging Face folder or Megatron checkpoint, for people.

    Raises:
        ConversionError: see `Checkpoint`.
    """
    checkpoint = Checkpoint(folder, hf_files)
    spec = checkpoint.spec
    layers = spec.layers
    rope = f"base {spec.rope_theta:g}"
    if spec.rope_scaling_factor:
        rope += f", Llama 3 scaling by {spec.rope_scaling_factor:g}"
    extras = [
        name
        for name, there in (("q/k/v biases", spec.qkv_bias), ("q/k norms", spec.qk_norm), ("tied embeddings", spec.tied))
        if there
    ]
    rows = {
        "checkpoint": f"{'Megatron distributed' if checkpoint.megatron else 'Hugging Face'}, {folder}",
        "family": spec.architecture,
        "parameters": f"{checkpoint.parameters:,}",
        "bytes": f"{checkpoint.bytes:,} ({checkpoint.dtype_names()})",
        "layers": f"{layers}, hidden {spec.hidden}, FFN {spec.expert_ffn or spec.ffn}",
        "attention": f"{spec.heads} heads in {spec.kv_groups} KV groups, head size {spec.head_dim}",
        "vocabulary": f"{spec.vocab:,}",
        "positions": f"{spec.max_position:,}; RoPE {rope}",
        "features": ", ".join(extras) or "none",
        "tensor parallel": ", ".join(map(str, spec.tensor_parallel_sizes())),
        "pipeline": ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0),
    }
    if spec.experts:
        rows["experts"] = f"{spec.experts}, {spec.experts_per_token} a token"
        rows["expert parallel"] = ", ".join(str(n) for n in range(1, spec.experts + 1) if spec.experts % n == 0)
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
