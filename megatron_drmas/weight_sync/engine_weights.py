"""The tensors a vLLM model computes with, back under their HF names."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from megatron_drmas.weight_sync.errors import WeightSyncError

# What computes with the experts' weights as they are loaded; on CPUs, thanks to `extension.PlainExperts`.
AS_LOADED = (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


def iter_loaded_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a decoder as whole HF tensors; collective over the engine's tensor-parallel workers.

    vLLM keeps q, k, v in one matrix and gate, up in another (the model's `packed_modules_mapping` has the names), all
    experts of a layer in two, pads the vocabulary, and cuts all of these over its workers.  A parameter that two modules
    share is yielded once.

    Raises:
        WeightSyncError: experts in a kernel's own layout, or spread over workers.
    """
    packed: Any = model.packed_modules_mapping
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, RoutedExperts):
                yield from _experts(path.removesuffix(".routed_experts"), module, kind, parameter.detach())
                continue
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


def _experts(path: str, module: RoutedExperts, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The experts of a layer: `w13_weight` [expert, gate rows above up rows, hidden] or `w2_weight` [expert, hidden, ffn]."""
    backend = module.quant_method.unquantized_backend
    if backend not in AS_LOADED or module.use_ep:
        what = "are spread over the workers" if module.use_ep else f"are in the layout of vLLM's {backend.value} kernels"
        raise WeightSyncError(f"{path}: its weights {what}, and cannot be compared tensor by tensor")
    for number, expert in enumerate(tensor):
        if kind == "w13_weight":
            gate, up = map(_gather, expert.chunk(2))
            yield f"{path}.{number}.gate_proj.weight", gate
            yield f"{path}.{number}.up_proj.weight", up
        else:
            yield f"{path}.{number}.down_proj.weight", tensor_model_parallel_all_gather(expert, dim=1)


def _gather(part: Tensor, copies: int = 1) -> Tensor:
    """Rows of all workers; `copies` neighbors hold the same."""
    rows = tensor_model_parallel_all_gather(part.contiguous(), dim=0)
    return rows.view(-1, *part.shape)[::copies].flatten(0, 1)
