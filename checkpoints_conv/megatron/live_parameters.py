"""Parameters of a live, possibly tensor-, pipeline- and expert-parallel GPTModel under their global names."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.mapping.model_mapping import EMBEDDING_NAME, OUTPUT_NAME, ModelMapping, canonical_name


@dataclass(frozen=True)
class TensorGroup:
    """The process group that one parameter is cut over."""

    rank: int
    size: int
    group: "torch.distributed.ProcessGroup"


@dataclass(frozen=True)
class LiveParameter:
    """One local parameter; `tied_copy` marks the last stage's copy of a tied embedding."""

    name: str  # global Megatron name
    parameter: torch.nn.Parameter
    tied_copy: bool

    @property
    def expert(self) -> bool:
        return ".local_experts." in self.name

    @property
    def tensor_group(self) -> TensorGroup:
        """Experts have a tensor-parallel layout of their own."""
        if self.expert:
            return TensorGroup(
                parallel_state.get_expert_tensor_parallel_rank(),
                parallel_state.get_expert_tensor_parallel_world_size(),
                parallel_state.get_expert_tensor_parallel_group(),
            )
        return TensorGroup(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_group(),
        )


def live_parameters(model_chunks: list, mapping: ModelMapping) -> Iterator[LiveParameter]:
    """The parameters of this rank, chunk by chunk in module order.

    Args:
        model_chunks: this rank's GPTModel chunks (several under virtual pipelining), wrapped in
            DistributedDataParallel or Float16Module or not.

    Raises:
        ConversionError: a parameter that the model's table does not know.
    """
    spec = mapping.spec
    local_experts = spec.experts // parallel_state.get_expert_model_parallel_world_size() if spec.experts else 0
    expert_offset = parallel_state.get_expert_model_parallel_rank() * local_experts if spec.experts else 0
    for chunk in unwrap_model(list(model_chunks)):
        # A chunk's layers are contiguous; layer_number counts from 1 over the whole model, whatever the pipeline.
        layers = chunk.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for local_name, parameter in chunk.named_parameters():
            name = canonical_name(local_name, offset, expert_offset, experts=spec.experts > 0)
            tied_copy = spec.tied and name == OUTPUT_NAME
            if tied_copy:
                name = EMBEDDING_NAME
            if name not in mapping.entries:
                raise ConversionError(
                    f"the model has a parameter {local_name!r} (global name {name!r}) that the table of "
                    f"{spec.architecture} does not know; was the model built from the same config.json?"
                )
            yield LiveParameter(name, parameter, tied_copy)
