"""A Megatron distributed checkpoint to a Hugging Face folder, streaming."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.formats.casting import in_dtype
from checkpoints_conv.formats.dist_reader import DistReader, is_dist_checkpoint
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import read_config
from checkpoints_conv.formats.hf_writer import MAX_SHARD_BYTES, copy_side_files, plan_shards, shard_names, write_index
from checkpoints_conv.formats.row_blocks import Block
from checkpoints_conv.formats.safetensors_file import SafetensorsWriter, TensorEntry
from checkpoints_conv.formats.staging import Staging, check_unchanged, fingerprint
from checkpoints_conv.mapping.dist_keys import HF_FILES
from checkpoints_conv.mapping.model_mapping import EMBEDDING_NAME, ModelMapping
from checkpoints_conv.progress import byte_progress, run_parallel


def to_hf(
    megatron: Path, out: Path, hf_files: Path | None = None, dtype: Dtype | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Convert a Megatron distributed checkpoint, of this converter or of a training run in any layout.

    Args:
        hf_files: folder with config.json, tokenizer and chat template; None: the checkpoint's own folder `hf`.
        dtype: of the result; None: as stored.
        max_shard_bytes: largest safetensors file.

    Raises:
        ConversionError: see `DistReader` and `Staging`.
    """
    if not megatron.is_dir():
        raise ConversionError(f"{megatron} is not a directory")
    if not is_dist_checkpoint(megatron):
        instead = "it is a Hugging Face folder" if (megatron / "config.json").is_file() else "it lacks metadata.json or .metadata"
        raise ConversionError(f"{megatron} is not a complete Megatron distributed checkpoint: {instead}")
    files = fingerprint(megatron)
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
        "files": files,
        "config": config,
        "dtype": str(dtype),
        "shard": max_shard_bytes,
    }
    staging = Staging(out, job, total)
    with staging.writing() as temp_path, byte_progress(f"{megatron.name} -> Hugging Face", total) as advance:
        shards = plan_shards(entries, max_shard_bytes)
        paths = [temp_path / name for name in shard_names(len(shards))]

        run_parallel(lambda job: _write_shard(*job, reader, dtype), zip(paths, shards, strict=True), advance)
        write_index(temp_path, shards)
        copy_side_files(side, temp_path, dtype or reader.dtype(EMBEDDING_NAME))
        check_unchanged(megatron, files)
        staging.finish()


def side_files(megatron: Path, hf_files: Path | None) -> Path:
    """The folder with the config of a Megatron checkpoint.

    Raises:
        ConversionError: there is none.
    """
    side = hf_files or megatron / HF_FILES
    if not (side / "config.json").is_file():
        if hf_files:
            raise ConversionError(f"--hf-files {hf_files} has no config.json")
        raise ConversionError(
            f"{megatron} has no config.json, which only checkpoints made by to-megatron contain; name a folder with config.json "
            "and tokenizer (--hf-files)"
        )
    return side


def _tensors(shard: list[TensorEntry], reader: DistReader, dtype: Dtype | None) -> Iterator[tuple[str, Iterable[Block]]]:
    """The tensors of a shard, as blocks of rows.  A Megatron parameter whose HF tensors are in two shards is read for each."""
    wanted = {entry.name for entry in shard}
    for name, entry in reader.mapping.entries.items():
        if not wanted.isdisjoint(entry.hf):
            for hf_name, blocks in reader.read(name):
                if hf_name in wanted:
                    yield hf_name, (part for block in blocks for part in in_dtype(hf_name, block, dtype))


def _write_shard(file: Path, shard: list[TensorEntry], reader: DistReader, dtype: Dtype | None) -> Iterator[int]:
    """Write one file; yields the bytes of each tensor."""
    writer = SafetensorsWriter(file, shard)
    sizes = {entry.name: entry.bytes for entry in shard}
    for name, blocks in _tensors(shard, reader, dtype):
        writer.write(name, blocks)
        yield sizes[name]
    writer.close()
