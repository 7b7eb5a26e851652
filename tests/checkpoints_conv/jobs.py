"""What the tests let Megatron ranks do; every function here runs inside an initialized layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.hf_folder import HfFolder, read_config
from checkpoints_conv.megatron import cpu
from checkpoints_conv.megatron.export import export_hf_folder, iter_hf_tensors
from checkpoints_conv.megatron.forward import load_dist_checkpoint, model_logprobs
from checkpoints_conv.megatron.load import load_hf_weights
from checkpoints_conv.megatron.model import build_model, transformer_config
from tests.checkpoints_conv.ranks import Layout


def initialize(layout: Layout, rank: int, store: Path) -> None:
    cpu.install()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=layout.size)
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.virtual,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(rank)


def destroy() -> None:
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def each(job: Callable, arguments: list[tuple]) -> list:
    """One job on several arguments, in one initialization of Megatron."""
    return [job(*args) for args in arguments]


def spec_of(folder: Path) -> ModelSpec:
    config = read_config(folder)
    return family_of(config).model_spec(config)


def build(spec: ModelSpec, layers: Any = None, **fields: Any) -> list:
    """This rank's chunks in the current layout, of random parameters; `fields` are TransformerConfig's."""
    layout = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    }
    if spec.experts:
        layout["expert_model_parallel_size"] = parallel_state.get_expert_model_parallel_world_size()
        layout["expert_tensor_parallel_size"] = parallel_state.get_expert_tensor_parallel_world_size()
    return build_model(spec, transformer_config(spec, **layout, **fields), layers, parallel_output=False)


def loaded(folder: Path) -> tuple[list, ModelSpec]:
    spec = spec_of(folder)
    chunks = build(spec)
    load_hf_weights(chunks, folder, spec)
    return chunks, spec


def export(folder: Path, exported: Path) -> dict:
    """Load, export tensor by tensor and as a folder.

    Returns:
        names this rank yields, those that differ from the folder, this rank's stage, and the non-zero padded rows.
    """
    chunks, spec = loaded(folder)
    source = HfFolder(folder)
    names, wrong = [], []
    for name, tensor in iter_hf_tensors(chunks, spec):
        names.append(name)
        if not torch.equal(tensor, source.tensor(name)):
            wrong.append(name)
    export_hf_folder(chunks, spec, folder, exported, max_shard_bytes=100_000)
    return {
        "names": names,
        "wrong": wrong,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "padding": sum(_padding_mass(chunk, spec) for chunk in chunks),
        "untied": [name for chunk in chunks for name in _wrong_tied_copies(chunk, spec, source)],
    }


def _vocabulary(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name: tensor.data for name, tensor in chunk.named_parameters() if name in names}


def _padding_mass(chunk: torch.nn.Module, spec: ModelSpec) -> float:
    first = parallel_state.get_tensor_model_parallel_rank()
    mass = 0.0
    for weight in _vocabulary(chunk).values():
        rows = torch.arange(len(weight)) + first * len(weight)
        mass += float(weight[rows >= spec.vocab].abs().sum())
    return mass


def _wrong_tied_copies(chunk: torch.nn.Module, spec: ModelSpec, source: HfFolder) -> list[str]:
    """The names of tied vocabulary weights of this chunk that are not the embedding."""
    if not spec.tied:
        return []
    rank = parallel_state.get_tensor_model_parallel_rank()
    wrong = []
    for name, weight in _vocabulary(chunk).items():
        rows = source.tensor("model.embed_tokens.weight")[rank * len(weight) : (rank + 1) * len(weight)]
        if not torch.equal(weight[: len(rows)], rows):
            wrong.append(name)
    return wrong


def load_and_save_dist(folder: Path, checkpoint: Path, saved: Path, per_layer: bool = False) -> list[str]:
    """Load the converter's checkpoint by Megatron's loader, then save it by Megatron's, beside an optimizer's state.

    Args:
        per_layer: save one key per layer.

    Returns:
        Parameters that differ from loading the Hugging Face folder.
    """
    chunks, spec = loaded(folder)
    others = build(spec)
    load_dist_checkpoint(others, checkpoint)
    metadata = {"non_homogeneous_layers": True} if per_layer else None
    state = {f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(others)}
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    moment = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg", torch.ones(3), (0, rank, world))
    state |= {"optimizer": {"exp_avg": moment}, "iteration": 7}
    if rank == 0:
        saved.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(saved))
    return differing(chunks, others)


def logprobs(folder: Path, tokens: torch.Tensor, factor: "float | None" = None) -> torch.Tensor:
    """Log-probs [t, vocab] of a model on one pipeline stage; `factor` replaces the config's RoPE factor."""
    chunks, spec = loaded(folder)
    if factor is not None:
        rotary = chunks[0].rotary_pos_emb
        plain = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2) / spec.head_dim)
        rotary.inv_freq = rotary._apply_scaling(plain, factor=factor)
    return model_logprobs(chunks[0], spec, tokens)


def sharded_keys(folder: Path) -> list[str]:
    """Keys of the model's distributed checkpoint, with the shapes of its tensors."""
    (model,) = build(spec_of(folder))
    return describe_keys(model.sharded_state_dict())


def describe_keys(state: dict) -> list[str]:
    """'key shape' of every sharded tensor and 'key' of every sharded object."""
    parts = []
    for value in state.values():
        parts += nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
    return sorted({f"{p.key} {list(p.global_shape)}" if isinstance(p, ShardedTensor) else p.unique_key for p in parts})


def load_saved(folder: Path, saved: Path) -> list[str]:
    """Load a distributed checkpoint by Megatron; returns the parameters that differ from the Hugging Face folder's."""
    chunks, spec = loaded(folder)
    others = build(spec)
    load_dist_checkpoint(others, saved)
    return differing(chunks, others)


def differing(chunks: list, others: list) -> list[str]:
    return [
        name
        for chunk, other in zip(chunks, others, strict=True)
        for (name, ours), theirs in zip(chunk.named_parameters(), other.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    ]


def load_part(folder: Path) -> str:
    """Load only this rank's first chunk; returns the error."""
    spec = spec_of(folder)
    chunks = build(spec)
    try:
        load_hf_weights(chunks[:1], folder, spec)
    except ConversionError as error:
        return str(error)
    return ""


def load_other(folder: Path, other: Path) -> str:
    """Load a folder into the model of another config; returns the error."""
    chunks = build(spec_of(other))
    try:
        load_hf_weights(chunks, folder, spec_of(folder))
    except ConversionError as error:
        return str(error)
    return ""
