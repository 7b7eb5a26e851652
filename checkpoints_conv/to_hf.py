"""A Megatron distributed checkpoint to a Hugging Face folder, streaming."""

from pathlib import Path
from typing import Callable, Optional

import torch

from checkpoints_conv.dist_keys import HF_FILES
from checkpoints_conv.dist_reader import DistReader
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.hf_folder import read_config
from checkpoints_conv.hf_writer import MAX_SHARD_BYTES, copy_side_files, plan_shards, shard_names, write_index
from checkpoints_conv.mapping import EMBEDDING_NAME, ModelMapping
from checkpoints_conv.progress import byte_progress, run_parallel
from checkpoints_conv.safetensors_file import SafetensorsWriter, TensorEntry, file_bytes
from checkpoints_conv.staging import Staging, fingerprint


def to_hf(
    megatron: Path,
    out: Path,
    hf_files: Optional[Path] = None,
    dtype: Optional[torch.dtype] = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Convert a Megatron distributed checkpoint, of this converter or of a training run in any layout.

    Args:
        hf_files: folder with config.json, tokenizer and chat template; None: the checkpoint's own folder `hf`.
        dtype: of the result; None: as stored.
        max_shard_bytes: largest safetensors file.

    Raises:
        ConversionError: see `DistReader` and `Staging`.
    """
    side = side_files(megatron, hf_files)
    config = read_config(side)
    mapping = ModelMapping(family_of(config).model_spec(config))
    reader = DistReader(megatron, mapping)
    shapes = mapping.hf_shapes()
    entries = [
        TensorEntry(hf_name, shapes[hf_name], dtype or reader.dtype(name))
        for name, entry in mapping.entries.items()
        for hf_name in entry.hf
    ]
    total = sum(entry.bytes for entry in entries)
    job = {
        "operation": "to-hf",
        "source": str(megatron.resolve()),
        "files": fingerprint(megatron),
        "config": config,
        "dtype": str(dtype),
        "shard": max_shard_bytes,
    }
    staging = Staging(out, job, total)
    with staging.writing() as beside, byte_progress(f"{megatron.name} -> Hugging Face", total) as advance:
        shards = plan_shards(entries, max_shard_bytes)
        files = [beside / name for name in shard_names(len(shards))]

        def write_shard(number: int) -> None:
            if not _is_whole(files[number], shards[number]):
                _write_shard(files[number], shards[number], reader, dtype, advance)
            else:
                advance(sum(entry.bytes for entry in shards[number]))

        run_parallel(write_shard, range(len(shards)))
        write_index(beside, shards)
        copy_side_files(side, beside, dtype or reader.dtype(EMBEDDING_NAME))
        staging.finish()


def side_files(megatron: Path, hf_files: Optional[Path]) -> Path:
    """The folder with the config of a Megatron checkpoint.

    Raises:
        ConversionError: there is none.
    """
    side = hf_files or megatron / HF_FILES
    if not (side / "config.json").is_file():
        raise ConversionError(
            f"{side} has no config.json: name a folder with config.json and tokenizer (--hf-files); only checkpoints that "
            "to-megatron made bring their own"
        )
    return side


def _is_whole(file: Path, shard: list[TensorEntry]) -> bool:
    """Whether an interrupted run finished this shard; a power failure may have truncated it."""
    return file.is_file() and file.stat().st_size == file_bytes(shard)


def _write_shard(
    file: Path,
    shard: list[TensorEntry],
    reader: DistReader,
    dtype: Optional[torch.dtype],
    advance: Callable[[int], None],
) -> None:
    """A Megatron parameter whose HF tensors lie in two shards is read for each of them."""
    entries = {entry.name: entry for entry in shard}
    writer = SafetensorsWriter(file, shard, reader.maps)
    for name, entry in reader.mapping.entries.items():
        if entries.keys().isdisjoint(entry.hf):
            continue
        for hf_name, blocks in reader.read(name):
            if hf_name in entries:
                writer.write(hf_name, blocks if dtype is None else [block.to(dtype) for block in blocks])
                advance(entries[hf_name].bytes)
    writer.close()
