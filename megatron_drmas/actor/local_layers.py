"""The layers that Megatron's local spec lacks for packed, sequence-parallel training without Transformer Engine."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_drmas.actor.packing import PackedSequences


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in fp32.

    Under sequence parallelism each rank sees a part of the tokens; the weight is marked so that Megatron sums its
    gradient over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class PackedAttention(MegatronModule):
    """Causal attention along each branch of a packed micro-batch (`Branches.attend`)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: "float | None" = None,
        softmax_scale: "float | None" = None,
        cp_comm_type: "str | None" = None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine's attention")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: "Tensor | None" = None,
        attn_mask_type: "AttnMaskType | None" = None,
        attention_bias: "Tensor | None" = None,
        packed_seq_params: "PackedSequences | None" = None,
    ) -> Tensor:
        """Attention output [t, heads · head_dim] of query [t, heads, head_dim], key and value [t, groups, head_dim]."""
        assert packed_seq_params is not None and packed_seq_params.branches is not None, "rows are packed"
        return packed_seq_params.branches.attend(query, key, value, self.softmax_scale)


class ChosenTokensLayer(TransformerLayer):
    """A last layer whose MLP runs only for the tokens that are predicted from (`PackedSequences.chosen`).

    Nothing attends to a last layer's output, so what it would be at a prompt's tokens does not matter.  Prompts are
    most of the tokens: this saves most of one layer's MLP, a third of all arithmetic in a model of two layers.
    """

    def forward(self, *args, packed_seq_params: PackedSequences, **kwargs):
        hidden_states, context = self._forward_attention(*args, packed_seq_params=packed_seq_params, **kwargs)
        chosen = hidden_states.index_select(0, packed_seq_params.chosen)
        return self._forward_mlp(chosen) if len(chosen) else chosen, context  # a router takes no empty input


def local_block_spec(config: TransformerConfig, choose_tokens: bool) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with this module's norm and attention, for this rank's layers.

    Args:
        choose_tokens: the model's last layer is a `ChosenTokensLayer`; not under sequence parallelism, which spreads
            the tokens over ranks.
    """
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = [layer] * get_num_layers_to_build(config)
    if choose_tokens and parallel_state.is_pipeline_last_stage():
        layers[-1] = replace(layer, module=ChosenTokensLayer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
