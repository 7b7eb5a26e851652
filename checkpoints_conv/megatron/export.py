"""A live Megatron model as Hugging Face tensors, one parameter at a time: for saving, and for weight updates."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.hf_writer import (
    MAX_SHARD_BYTES,
    copy_side_files,
    plan_shards,
    replace_folder,
    shard_names,
    write_index,
)
from checkpoints_conv.formats.safetensors_file import SafetensorsWriter, TensorEntry
from checkpoints_conv.formats.tensors import block_of, dtype_of, hf_tensors
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.megatron.live_parameters import LiveParameter, live_parameters


def iter_hf_tensors(model_chunks: list, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Whole HF tensors of this pipeline stage, on every tensor-parallel (and expert-parallel) rank of it.

    Collective over the stage's tensor-parallel and expert-parallel ranks: all of them must iterate to the end.  Every HF
    name is published by exactly one stage; a tied embedding by the first.  One parameter is gathered at a time.

    Yields:
        (HF name, tensor) in the model's dtype, without vocabulary padding.  A tensor may share the parameter's memory:
        clone what must outlive the next optimizer step.
    """
    mapping = ModelMapping(spec)
    for live in live_parameters(model_chunks, mapping):
        if live.tied_copy:
            continue
        tensors = live.tensor_group
        cut = mapping.entry(live.name).rule.tp_dim is not None
        shards = _all_gather(live.parameter.detach(), tensors.size, tensors.group) if cut else [live.parameter.detach()]
        if live.expert:
            yield from _experts(live, shards, mapping)
        else:
            yield from hf_tensors(mapping, live.name, shards)


def export_hf_folder(
    model_chunks: list, spec: ModelSpec, source: "str | Path", folder: "str | Path", max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a live model as a Hugging Face folder, atomically; an existing folder is replaced.

    Collective over all ranks; `folder` must be on storage that they share.  One rank of each pipeline stage writes that
    stage's shards, one tensor in memory at a time.

    Args:
        source: folder with the config, tokenizer and chat template to copy.
    """
    folder = Path(folder)
    temp_path = folder.with_name(folder.name + ".incomplete")
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(temp_path, ignore_errors=True)
        temp_path.mkdir(parents=True)
    own = plan_shards(stage_entries(model_chunks, spec), max_shard_bytes)
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    torch.distributed.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    shards = [shard for stage in stages for shard in stage]
    before = sum(map(len, stages[: parallel_state.get_pipeline_model_parallel_rank()]))
    torch.distributed.barrier()
    files = [temp_path / name for name in shard_names(len(shards))[before : before + len(own)]]
    _write_stage(iter_hf_tensors(model_chunks, spec), own, files)
    torch.distributed.barrier()
    if first:
        write_index(temp_path, shards)
        copy_side_files(Path(source), temp_path, shards[0][0].dtype)
        replace_folder(temp_path, folder)
    torch.distributed.barrier()


def stage_entries(model_chunks: list, spec: ModelSpec) -> list[TensorEntry]:
    """What `iter_hf_tensors` yields on this pipeline stage, in the same order, without gathering anything."""
    mapping = ModelMapping(spec)
    shapes = mapping.hf_shapes()
    return [
        TensorEntry(hf_name, shapes[hf_name], dtype_of(live.parameter))
        for live in live_parameters(model_chunks, mapping)
        if not live.tied_copy
        for name in _published(live, mapping)
        for hf_name in mapping.entry(name).hf
    ]


def _write_stage(tensors: Iterator[tuple[str, Tensor]], shards: list[list[TensorEntry]], files: list[Path]) -> None:
    """Every rank iterates, since the tensors are gathered; one of them writes."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    writes = parallel_state.get_tensor_model_parallel_rank() == 0 and replica == 0
    for shard, file in zip(shards, files, strict=True):
        if not writes:
            for _ in shard:
                next(tensors)
            continue
        writer = SafetensorsWriter(file, shard)
        for _ in shard:
            name, tensor = next(tensors)
            writer.write(name, [block_of(tensor.cpu())])
        writer.close()


def _experts(live: LiveParameter, shards: list[Tensor], mapping: ModelMapping) -> Iterator[tuple[str, Tensor]]:
    """The experts with the same local number on every expert-parallel rank."""
    group = parallel_state.get_expert_model_parallel_group()
    names = _published(live, mapping)
    gathered = [_all_gather(shard, len(names), group) for shard in shards]  # [tensor rank][expert rank]
    for rank, name in enumerate(names):
        yield from hf_tensors(mapping, name, [shard[rank] for shard in gathered])


def _published(live: LiveParameter, mapping: ModelMapping) -> list[str]:
    """Global Megatron names that a local parameter is gathered for: its own, or one expert of every expert-parallel rank."""
    if not live.expert:
        return [live.name]
    ranks = parallel_state.get_expert_model_parallel_world_size()
    local = mapping.spec.experts // ranks
    before, rest = live.name.split(".local_experts.")
    number, after = rest.split(".", 1)
    return [f"{before}.local_experts.{int(number) % local + rank * local}.{after}" for rank in range(ranks)]


def _all_gather(tensor: Tensor, size: int, group: Any) -> list[Tensor]:
    if size == 1:
        return [tensor]
    pieces = [torch.empty_like(tensor) for _ in range(size)]
    torch.distributed.all_gather(pieces, tensor.contiguous(), group=group)
    return pieces
