"""A checkpoint of either kind, seen as Hugging Face tensors, and what it is."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.formats.dist_reader import DistReader, is_dist_checkpoint
from checkpoints_conv.formats.hf_folder import HfFolder, read_config
from checkpoints_conv.formats.row_blocks import Block
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.to_hf import side_files


class Checkpoint:
    """A Hugging Face folder or a Megatron distributed checkpoint; opening it checks it against its config.

    Raises:
        ConversionError: neither of the two, or see `HfFolder` and `DistReader`.
    """

    def __init__(self, folder: Path, hf_files: Path | None = None):
        """
        Args:
            hf_files: folder with the config of a Megatron checkpoint that `to_megatron` did not make.
        """
        if not folder.is_dir():
            raise ConversionError(f"{folder} is not a directory")
        self.folder = folder
        self.megatron = is_dist_checkpoint(folder)
        if not self.megatron and not (folder / "config.json").is_file():
            raise ConversionError(
                f"{folder} is neither a Hugging Face folder (no config.json) nor a complete Megatron distributed "
                "checkpoint (no metadata.json and .metadata)"
            )
        self.config_folder = side_files(folder, hf_files) if self.megatron else folder
        config = read_config(self.config_folder)
        self.spec = family_of(config).model_spec(config)
        self.mapping = ModelMapping(self.spec)
        self.shapes = self.mapping.hf_shapes()
        if self.megatron:
            reader = DistReader(folder, self.mapping)
            self._read: Callable[[str], Iterable[tuple[str, list[Block]]]] = reader.read
            self.dtypes = {hf_name: reader.dtype(name) for name, entry in self.mapping.entries.items() for hf_name in entry.hf}
        else:
            source = HfFolder(folder)
            source.check(self.mapping)
            self._read = lambda name: [(hf_name, [source.block(hf_name)]) for hf_name in self.mapping.entry(name).hf]
            self.dtypes = {name: source.dtypes[name] for name in self.shapes}

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * self.dtypes[name].bytes for name, shape in self.shapes.items())

    def read(self, name: str) -> Iterable[tuple[str, list[Block]]]:
        """The HF tensors of one Megatron parameter, by its global name, as blocks of rows."""
        return self._read(name)

    def dtype_names(self) -> str:
        return ", ".join(sorted({dtype.value for dtype in self.dtypes.values()}))


def inspect(folder: Path, hf_files: Path | None = None) -> str:
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
