"""The tensors a vLLM model computes with, back under their HF names."""

from typing import Iterator

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from megatron_drmas.weight_sync.errors import WeightSyncError


def iter_loaded_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a dense decoder as whole HF tensors; collective over the engine's tensor-parallel workers.

    vLLM keeps q, k, v in one matrix and gate, up in another (the model's `packed_modules_mapping` has the names), pads
    the vocabulary, and cuts all of these over its workers.  A parameter that two modules share is yielded once.

    Raises:
        WeightSyncError: a layer of experts, whose packing vLLM chooses at run time.
    """
    packed = model.packed_modules_mapping
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if kind in ("w13_weight", "w2_weight"):
                raise WeightSyncError(f"{path}: the weights of expert layers cannot be compared tensor by tensor")
            prefix, _, last = path.rpartition(".")
            parts = _parts(module, kind, parameter.detach())
            names = packed[last] if len(parts) > 1 else [last]
            for name, part in zip(names, parts, strict=True):
                yield f"{prefix}.{name}.{kind}" if prefix else f"{name}.{kind}", part


def _parts(module: torch.nn.Module, kind: str, tensor: Tensor) -> list[Tensor]:
    """A module's parameter, whole, cut into its HF tensors."""
    if isinstance(module, QKVParallelLinear):
        kv = module.num_kv_heads * module.head_size
        q, k, v = tensor.split([module.num_heads * module.head_size, kv, kv])
        return [_gather(q), *(_gather(part, copies=module.num_kv_head_replicas) for part in (k, v))]
    if isinstance(module, MergedColumnParallelLinear):
        return [_gather(part) for part in tensor.split([size // module.tp_size for size in module.output_sizes])]
    if isinstance(module, ColumnParallelLinear):
        return [_gather(tensor)]
    if isinstance(module, RowParallelLinear) and kind == "weight":
        return [tensor_model_parallel_all_gather(tensor, dim=1)]
    if isinstance(module, VocabParallelEmbedding):
        return [_gather(tensor)[: module.org_vocab_size]]
    return [tensor]


def _gather(part: Tensor, copies: int = 1) -> Tensor:
    """Rows of all workers; `copies` neighbours hold the same."""
    rows = tensor_model_parallel_all_gather(part.contiguous(), dim=0)
    return rows.view(-1, *part.shape)[::copies].flatten(0, 1)
