"""Transformer Engine's attention for packed micro-batches that share tokens; import it only where Transformer Engine is.

Written to the documented interfaces and not yet run on a GPU: `policies.X.packing=auto` does not choose it.
"""

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention

from megatron_drmas.actor.packing import PackedSequences
from megatron_drmas.kernels.gather import take_rows


class BranchAttention(TEDotProductAttention):
    """Causal attention along each branch of a packed micro-batch, by kernels of ragged sequences (cuDNN, FlashAttention)."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention output [t, heads · head_dim] of query [t, heads, head_dim], key and value [t, groups, head_dim]."""
        assert packed_seq_params is not None and packed_seq_params.branches is not None, "rows are packed"
        branches = packed_seq_params.branches
        # Megatron's own forward cannot ask for this mask: its enumeration lacks the name.
        return DotProductAttention.forward(
            self,
            query,
            take_rows(key, branches.path),
            take_rows(value, branches.path),
            qkv_format="thd",
            cu_seqlens_q=branches.query_offsets,
            cu_seqlens_kv=branches.path_offsets,
            max_seqlen_q=packed_seq_params.max_seqlen_q,
            max_seqlen_kv=packed_seq_params.max_seqlen_kv,
            attn_mask_type="padding_causal_bottom_right",
        )
