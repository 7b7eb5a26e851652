"""Hugging Face weights into a live Megatron model, in any layout, without a file in between."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.hf_folder import HfFolder
from checkpoints_conv.formats.tensors import megatron_shard
from checkpoints_conv.mapping.model_mapping import ModelMapping
from checkpoints_conv.megatron.live_parameters import LiveParameter, live_parameters


def load_hf_weights(model_chunks: list, hf_dir: "str | Path", spec: ModelSpec) -> None:
    """Set every local parameter from an HF folder; collective over the pipeline and expert-parallel groups.

    Each rank reads only what it holds.  The embedding is zero-padded to the model's padded vocabulary, and a tied
    model's last stage gets its copy.  If an optimizer exists, call its `reload_model_params()` afterwards.

    Args:
        model_chunks: this rank's GPTModel chunks, inside an initialized Megatron process.
        hf_dir: folder with config.json and safetensors.
        spec: of that folder's config, and of the model.

    Raises:
        ConversionError: on every rank, when weights, config and model disagree, or when over all pipeline stages some
            parameter was not set exactly once.
    """
    mapping = ModelMapping(spec)
    folder = HfFolder(hf_dir)
    folder.check(mapping)
    names: list[str] = []
    fault = None
    try:
        for live in live_parameters(model_chunks, mapping):
            _set(live, folder, mapping)
            if not live.tied_copy:
                names.append(live.name)
    except ConversionError as error:  # raised below on every rank: one rank alone would leave the others waiting
        fault = str(error)
    check_bijection(names, mapping, fault)


def check_bijection(names: list[str], mapping: ModelMapping, fault: "str | None" = None) -> None:
    """Every parameter of the model exactly once over pipeline stages and expert-parallel ranks.

    Args:
        names: global Megatron names that this rank holds, without the last stage's copy of a tied embedding.
        fault: what went wrong on this rank.

    Raises:
        ConversionError: on every rank of the groups.
    """
    reports = _gather((names, fault), parallel_state.get_pipeline_model_parallel_group())
    faults = [text for _, text in reports if text]
    if mapping.spec.experts:
        # Pipeline ranks of one expert-parallel rank are merged first; only experts differ between those.
        own = [name for stage, _ in reports for name in stage]
        by_rank = _gather((own, faults), parallel_state.get_expert_model_parallel_group())
        faults = [text for _, texts in by_rank for text in texts]
        shared = [name for name in by_rank[0][0] if ".local_experts." not in name]
        held = shared + [name for rank, _ in by_rank for name in rank if ".local_experts." in name]
    else:
        held = [name for stage, _ in reports for name in stage]
    if faults:
        raise ConversionError("; ".join(faults))
    counts = Counter(held)
    twice = [name for name, count in counts.items() if count > 1]
    absent = [name for name in mapping.megatron_names() if name not in counts]
    if twice or absent:
        raise ConversionError(
            f"the pipeline stages do not hold every parameter exactly once: held twice {twice[:5]}, absent {absent[:5]}"
        )


def _set(live: LiveParameter, folder: HfFolder, mapping: ModelMapping) -> None:
    tensors = live.tensor_group
    shape = live.parameter.shape
    padded_vocab = shape[0] * tensors.size if mapping.entry(live.name).rule.vocab else None
    shard = megatron_shard(mapping, live.name, folder.tensor, tensors.rank, tensors.size, padded_vocab)
    if shard.shape != shape:
        raise ConversionError(
            f"{live.name} of the model is {list(shape)} on tensor-parallel rank {tensors.rank} of {tensors.size}, "
            f"its weights are {list(shard.shape)}; was the model built from the same config.json?"
        )
    with torch.no_grad():
        live.parameter.copy_(shard)


def _gather(value: object, group: Any) -> list:
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values
