"""A Hugging Face folder to a Megatron distributed checkpoint, streaming."""

import json
import math
from pathlib import Path

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.formats.dist_writer import DistWriter
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.hf_folder import HfFolder, read_config
from checkpoints_conv.formats.hf_writer import copy_side_files
from checkpoints_conv.formats.staging import Staging, check_unchanged, fingerprint
from checkpoints_conv.mapping.dist_keys import HF_FILES, place_of
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.progress import byte_progress

# megatron.core.dist_checkpointing.core.CheckpointingConfig; importing Megatron for it would take seconds.
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def to_megatron(hf: Path, out: Path, dtype: Dtype | None = None, allow_pickle: bool = False) -> None:
    """Convert a Hugging Face folder.

    The result loads with `megatron.core.dist_checkpointing.load` under any tensor, pipeline, virtual-pipeline, expert and
    data-parallel layout and under either layer spec.  Its folder `hf` keeps what `to_hf` needs in addition to the weights.

    Args:
        dtype: of the result; None: as stored.
        allow_pickle: read pytorch_model.bin (with `weights_only`) where there are no safetensors.

    Raises:
        ConversionError: see `HfFolder`, `ModelMapping.check_hf` and `Staging`.
    """
    config = read_config(hf)
    files = fingerprint(hf)
    spec = family_of(config).model_spec(config)
    mapping = ModelMapping(spec)
    folder = HfFolder(hf, allow_pickle)
    folder.check(mapping)
    dtypes = dict.fromkeys(mapping.megatron_names(), dtype) if dtype else _stored_dtypes(mapping, folder)
    job = {"operation": "to-megatron", "source": str(hf.resolve()), "files": files, "dtype": str(dtype)}
    total = sum(math.prod(entry.rule.megatron_shape(spec)) * dtypes[name].bytes for name, entry in mapping.entries.items())
    staging = Staging(out, job, total)
    with staging.writing() as temp_path, byte_progress(f"{hf.name} -> Megatron", total) as advance:
        DistWriter(temp_path, mapping, dtypes, folder).write(advance)
        (temp_path / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
        (temp_path / HF_FILES).mkdir(exist_ok=True)
        copy_side_files(hf, temp_path / HF_FILES)
        check_unchanged(hf, files)
        staging.finish()


def _stored_dtypes(mapping: ModelMapping, folder: HfFolder) -> dict[str, Dtype]:
    """The dtype of every Megatron parameter; the same for all under one key of the checkpoint.

    Raises:
        ConversionError: names two HF tensors of one key whose dtypes differ.
    """
    first: dict[str, str] = {}  # key -> its first HF tensor
    dtypes = {}
    for name, entry in mapping.entries.items():
        for hf_name in entry.hf:
            other = first.setdefault(place_of(name, mapping).key, hf_name)
            if folder.dtypes[hf_name] != folder.dtypes[other]:
                raise ConversionError(
                    f"{other} is {folder.dtypes[other]} and {hf_name} is {folder.dtypes[hf_name]}, but Megatron stores them "
                    "in one tensor; choose a dtype with --dtype"
                )
            dtypes[name] = folder.dtypes[hf_name]
    return dtypes
