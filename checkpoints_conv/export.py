"""A live Megatron model as Hugging Face tensors, one parameter at a time: for saving, and for weight updates."""

from typing import Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor

from checkpoints_conv.live import LiveParameter, live_parameters
from checkpoints_conv.mapping import ModelMapping
from checkpoints_conv.spec import ModelSpec


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
            yield from mapping.to_hf(live.name, shards)


def _experts(live: LiveParameter, shards: list[Tensor], mapping: ModelMapping) -> Iterator[tuple[str, Tensor]]:
    """The experts that stand at the same place on every expert-parallel rank."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    group = parallel_state.get_expert_model_parallel_group()
    local = mapping.spec.experts // ranks
    before, number, after = _split_expert(live.name)
    gathered = [_all_gather(shard, ranks, group) for shard in shards]  # [tensor rank][expert rank]
    for rank in range(ranks):
        name = f"{before}{number % local + rank * local}{after}"
        yield from mapping.to_hf(name, [shard[rank] for shard in gathered])


def _split_expert(name: str) -> tuple[str, int, str]:
    before, rest = name.split(".local_experts.")
    number, after = rest.split(".", 1)
    return f"{before}.local_experts.", int(number), f".{after}"


def _all_gather(tensor: Tensor, size: int, group) -> list[Tensor]:
    if size == 1:
        return [tensor]
    pieces = [torch.empty_like(tensor) for _ in range(size)]
    torch.distributed.all_gather(pieces, tensor.contiguous(), group=group)
    return pieces
