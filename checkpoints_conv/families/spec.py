"""`ModelSpec`: a decoder-only model as its Hugging Face config describes it, in one plain dataclass."""

from dataclasses import dataclass

from checkpoints_conv.errors import ConversionError


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and switches that weights, layouts and `megatron.core`'s TransformerConfig follow from."""

    architecture: str  # HF architectures[0], e.g. "LlamaForCausalLM"
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int  # width of a dense MLP
    vocab: int  # unpadded
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool  # RMSNorm over head_dim on queries and keys
    rope_theta: float
    rope_scaling_factor: float | None  # Llama 3 scaling; None: plain RoPE
    norm_eps: float
    max_position: int
    experts: int = 0  # 0: dense
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_experts: bool = True  # the chosen experts' probabilities are renormalized to sum to 1

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_groups * self.head_dim

    def transformer_arguments(self) -> dict:
        """The fields of Megatron's TransformerConfig that depend on the model alone, not on layout or precision."""
        import torch.nn.functional as F

        experts = {}
        if self.experts:
            experts = {
                "num_moe_experts": self.experts,
                "moe_router_topk": self.experts_per_token,
                "moe_ffn_hidden_size": self.expert_ffn,
                "moe_router_pre_softmax": not self.normalize_experts,
                "moe_router_load_balancing_type": "none",
                "moe_router_dtype": "fp32",
            }
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.kv_groups,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.ffn,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **experts,
        }

    def padded_vocab(self, tp_size: int, multiple: int = 128) -> int:
        """The smallest multiple of `multiple * tp_size` that holds the vocabulary (Megatron's padding)."""
        step = multiple * tp_size
        return -(-self.vocab // step) * step

    def check_layout(self, tp_size: int, pp_size: int = 1, ep_size: int = 1) -> None:
        """Refuse a layout that the weights cannot be divided into.

        Raises:
            ConversionError: names the size that does not divide, and the sizes that would do.
        """
        fits = self.tensor_parallel_sizes()
        if tp_size not in fits:
            raise ConversionError(
                f"tensor parallel size {tp_size} does not fit {self.architecture} with {self.heads} heads, "
                f"{self.kv_groups} KV groups and FFN width {self.expert_ffn or self.ffn}: it must divide all three; "
                f"possible: {', '.join(map(str, fits))}"
            )
        if self.layers % pp_size:
            fits = [n for n in range(1, self.layers + 1) if self.layers % n == 0]
            raise ConversionError(
                f"pipeline size {pp_size} does not divide {self.layers} layers; possible: {', '.join(map(str, fits))}"
            )
        if ep_size > 1 and (not self.experts or self.experts % ep_size):
            raise ConversionError(f"expert parallel size {ep_size} does not divide {self.experts} experts")

    def tensor_parallel_sizes(self) -> list[int]:
        """All tensor parallel sizes that divide heads, KV groups and MLP widths."""
        widths = [self.heads, self.kv_groups] + ([self.expert_ffn] if self.experts else [self.ffn])
        return [n for n in range(1, self.kv_groups + 1) if not any(width % n for width in widths)]
