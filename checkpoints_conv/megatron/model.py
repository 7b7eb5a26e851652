"""A `ModelSpec` as a Megatron-Core model, for verifying a checkpoint and for training."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from checkpoints_conv.families.spec import ModelSpec


def transformer_config(spec: ModelSpec, **fields: Any) -> TransformerConfig:
    """Megatron's configuration of a model; by default in fp32, unfused, for one rank.

    Args:
        fields: of TransformerConfig, for layout, precision and kernels.
    """
    defaults = {
        "use_cpu_initialization": not torch.cuda.is_available(),
        "moe_token_dispatcher_type": "alltoall",  # checked wherever sequence lengths vary, also without experts
        "pipeline_dtype": torch.float32,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**spec.transformer_arguments(), **(defaults | fields))


def build_model(
    spec: ModelSpec,
    config: TransformerConfig,
    layers: ModuleSpec | TransformerBlockSubmodules | None = None,
    model_class: type[GPTModel] = GPTModel,
    **arguments: Any,
) -> list[GPTModel]:
    """This rank's model chunks on its device; call inside initialized groups.

    Without CUDA, `checkpoints_conv.megatron.cpu.install()` must have been called.

    Args:
        config: see `transformer_config`.
        layers: Megatron layer spec; None: the local one.
        model_class: of the chunks.
        arguments: of `model_class`, in addition to those that the spec decides.

    Returns:
        One model, or one per virtual pipeline stage.
    """
    if layers is None:
        layers = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    chunks = config.virtual_pipeline_model_parallel_size
    models = [
        model_class(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=spec.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=spec.max_position,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
            rope_scaling=spec.rope_scaling_factor is not None,
            rope_scaling_factor=spec.rope_scaling_factor or 1.0,
            vp_stage=stage,
            **arguments,
        )
        for stage in (range(chunks) if chunks else [None])
    ]
    return [model.cuda(torch.cuda.current_device()) for model in models]
