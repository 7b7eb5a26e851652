"""Runs in a process of its own with Transformer Engine's Python half on the path: what `BranchAttention` tells its attention.

    python -m tests.actor.te_branches

The kernels, which need a GPU, are replaced by a loop over the sequences that the arguments describe.
"""

import inspect

from tests.te_stub.engine import install

install()

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch import DotProductAttention

from megatron_drmas.actor.branches import Branches
from megatron_drmas.actor.packing import PackedSequences
from megatron_drmas.actor.transformer_engine_layers import BranchAttention

SIGNATURE = inspect.signature(DotProductAttention.forward)
ROWS = [[0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7, 8], [6, 7, 8, 9, 10, 11], [12]]  # paths of packed tokens
OWN = [5, 1, 3, 3, 1]


def loop(*args, **kwargs) -> torch.Tensor:
    """As `DotProductAttention.forward` documents `thd` and padding_causal_bottom_right; grouped queries by repetition."""
    told = SIGNATURE.bind(*args, **kwargs).arguments
    assert told["qkv_format"] == "thd" and told["attn_mask_type"] == "padding_causal_bottom_right"
    q_offsets, kv_offsets = told["cu_seqlens_q"], told["cu_seqlens_kv"]
    assert q_offsets.dtype == kv_offsets.dtype == torch.int32
    assert told["max_seqlen_q"] >= int(q_offsets.diff().max()) and told["max_seqlen_kv"] >= int(kv_offsets.diff().max())
    outputs = []
    for sequence in range(len(q_offsets) - 1):
        own, path = (slice(*offsets[sequence : sequence + 2].tolist()) for offsets in (q_offsets, kv_offsets))
        q, k, v = (x.transpose(0, 1) for x in (told["query_layer"][own], told["key_layer"][path], told["value_layer"][path]))
        repeats = len(q) // len(k)
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def main() -> None:
    """Compare with the local attention, forward and backward."""
    DotProductAttention.forward = loop
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = BranchAttention(config, 1, AttnMaskType.padding_causal, "self")
    branches = Branches.of(OWN, [np.array(row) for row in ROWS])
    packed = PackedSequences(qkv_format="thd", max_seqlen_q=6, max_seqlen_kv=6, branches=branches)
    torch.manual_seed(0)
    qkv = [torch.randn(13, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    output = attention(*qkv, None, AttnMaskType.padding_causal, packed_seq_params=packed)
    expected = branches.attend(*qkv, None)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    gradient = torch.randn_like(output)
    for got, wanted in zip(torch.autograd.grad(output, qkv, gradient), torch.autograd.grad(expected, qkv, gradient), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    print("equal")


if __name__ == "__main__":
    main()
