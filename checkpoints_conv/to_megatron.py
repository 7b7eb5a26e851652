"""Hugging Face folder -> Megatron distributed checkpoint, streaming."""

import json
from pathlib import Path
from typing import Optional

import torch

from checkpoints_conv.dist_writer import DistWriter
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.hf_folder import HfFolder, read_config
from checkpoints_conv.hf_writer import copy_side_files
from checkpoints_conv.mapping import ModelMapping
from checkpoints_conv.progress import byte_progress
from checkpoints_conv.staging import Staging, fingerprint

HF_FILES = "hf"  # folder inside the checkpoint with the HF config, tokenizer and chat template
COMMON = "common.pt"
# megatron.core.dist_checkpointing.core.CheckpointingConfig; importing Megatron for it would take seconds.
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def to_megatron(hf: Path, out: Path, dtype: Optional[torch.dtype] = None, allow_pickle: bool = False) -> None:
    """Convert a Hugging Face folder.

    The result loads with `megatron.core.dist_checkpointing.load` under any tensor, pipeline, virtual-pipeline, expert and
    data-parallel layout and under either layer spec.  Its folder `hf` keeps what `to_hf` needs beside the weights.

    Args:
        dtype: of the result; None: as stored.
        allow_pickle: read pytorch_model.bin (with `weights_only`) where there are no safetensors.

    Raises:
        ConversionError: see `HfFolder`, `ModelMapping.check_hf` and `Staging`.
    """
    config = read_config(hf)
    spec = family_of(config).model_spec(config)
    mapping = ModelMapping(spec)
    folder = HfFolder(hf, allow_pickle)
    folder.check(mapping)
    dtypes = {name: dtype or _common_dtype(name, mapping, folder) for name in mapping.megatron_names()}

    job = {"operation": "to-megatron", "source": str(hf.resolve()), "files": fingerprint(hf), "dtype": str(dtype)}
    total = sum(
        torch.Size(entry.rule.megatron_shape(spec)).numel() * dtypes[name].itemsize
        for name, entry in mapping.entries.items()
    )
    staging = Staging(out, job, total)
    with staging.writing() as beside, byte_progress(f"{hf.name} -> Megatron", total) as advance:
        DistWriter(beside, mapping, dtypes, folder.tensor, advance).write()
        torch.save({}, beside / COMMON)
        (beside / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
        (beside / HF_FILES).mkdir(exist_ok=True)
        copy_side_files(hf, beside / HF_FILES)
        staging.finish()


def _common_dtype(name: str, mapping: ModelMapping, folder: HfFolder) -> torch.dtype:
    """The dtype of the HF tensors that one parameter is made of."""
    hf_names = mapping.entry(name).hf
    dtypes = {folder.dtypes[hf_name] for hf_name in hf_names}
    if len(dtypes) > 1:
        raise ConversionError(f"{', '.join(hf_names)} become one tensor but differ in dtype; choose one with --dtype")
    return dtypes.pop()
