"""`Family`: a model family as a declarative table, and the rules that decoder-only families share."""

from dataclasses import dataclass, field
from typing import Any, Optional

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.values import flag, group, positive, whole
from checkpoints_conv.families.rules import QKV, GateUp, Replicated, Row, Rule, Vocabulary
from checkpoints_conv.families.spec import ModelSpec

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def layer_rule(kind: type[Rule], megatron: str, hf: dict[str, tuple[str, ...]]) -> Rule:
    """A rule inside a layer: `hf` maps HF names to shapes, both sides relative to the layer."""
    return kind(LAYER + megatron, tuple(HF_LAYER + name for name in hf), tuple(hf.values()))


EMBEDDING = Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),))
FINAL_NORM = Replicated("decoder.final_layernorm.weight", ("model.norm.weight",), (("hidden",),))
OUTPUT = Vocabulary("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),))  # untied only

ATTENTION = (
    layer_rule(
        Replicated, "self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": ("hidden",)}
    ),
    layer_rule(
        QKV,
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("q_size", "hidden"),
            "self_attn.k_proj.weight": ("kv_size", "hidden"),
            "self_attn.v_proj.weight": ("kv_size", "hidden"),
        },
    ),
    layer_rule(Row, "self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q_size")}),
)
QKV_BIAS = (
    layer_rule(
        QKV,
        "self_attention.linear_qkv.bias",
        {
            "self_attn.q_proj.bias": ("q_size",),
            "self_attn.k_proj.bias": ("kv_size",),
            "self_attn.v_proj.bias": ("kv_size",),
        },
    ),
)
QK_NORM = (
    layer_rule(Replicated, "self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}),
    layer_rule(Replicated, "self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}),
)
MLP = (
    layer_rule(Replicated, "mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": ("hidden",)}),
    layer_rule(
        GateUp,
        "mlp.linear_fc1.weight",
        {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    ),
    layer_rule(Row, "mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", "ffn")}),
)
MOE = (
    layer_rule(Replicated, "pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}),
    layer_rule(Replicated, "mlp.router.weight", {"mlp.gate.weight": ("experts", "hidden")}),
    layer_rule(
        GateUp,
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        {
            "mlp.experts.{expert}.gate_proj.weight": ("expert_ffn", "hidden"),
            "mlp.experts.{expert}.up_proj.weight": ("expert_ffn", "hidden"),
        },
    ),
    layer_rule(
        Row,
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        {"mlp.experts.{expert}.down_proj.weight": ("hidden", "expert_ffn")},
    ),
)

# Keys that mark a checkpoint as something else than a plain text decoder, with what to say about them.
FOREIGN = {
    "quantization_config": "a quantised checkpoint; convert the original bf16 or fp32 weights",
    "compression_config": "a quantised checkpoint; convert the original bf16 or fp32 weights",
    "vision_config": "a multimodal checkpoint; only text decoders are supported",
    "audio_config": "a multimodal checkpoint; only text decoders are supported",
    "text_config": "a multimodal checkpoint; only text decoders are supported",
}

MOST_LAYERS, MOST_EXPERTS = 1000, 1024  # far more than any model has; each becomes names of tensors before one is read

# What megatron.core's RotaryEmbedding._apply_scaling fixes.
MEGATRON_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Family:
    """One model family: its HF architecture, its table, and what its configs may say."""

    architecture: str  # HF architectures[0]
    model_type: str  # HF model_type
    layer: tuple[Rule, ...]  # rules in {layer} (and {expert})
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False  # every layer is a mixture of experts
    llama3_rope: bool = False  # the family comes with Llama 3 RoPE scaling
    default_head_dim: Optional[int] = None  # head_dim when the config has none; None: hidden / heads
    requires: dict[str, Any] = field(default_factory=dict)  # config keys that, where present, must have this value

    def model_spec(self, config: dict) -> ModelSpec:
        """The sizes and switches that an HF config states.

        Args:
            config: the contents of config.json, as transformers 4 or 5 write it.

        Raises:
            ConversionError: names the key that is missing or makes no sense, or the feature that is not supported.
        """
        self._refuse(config)
        hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        groups = whole(config, "num_key_value_heads", heads)
        if heads % groups:
            raise ConversionError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
        theta, factor = self._rope(config)
        return ModelSpec(
            architecture=self.architecture,
            layers=whole(config, "num_hidden_layers", most=MOST_LAYERS),
            hidden=hidden,
            heads=heads,
            kv_groups=groups,
            head_dim=whole(config, "head_dim", self.default_head_dim or hidden // heads),
            ffn=whole(config, "intermediate_size"),
            vocab=whole(config, "vocab_size"),
            tied=flag(config, "tie_word_embeddings"),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            rope_theta=theta,
            rope_scaling_factor=factor,
            norm_eps=positive(config, "rms_norm_eps"),
            max_position=whole(config, "max_position_embeddings"),
            **self._experts(config),
        )

    def _refuse(self, config: dict) -> None:
        if config.get("model_type", self.model_type) != self.model_type:
            raise ConversionError(
                f"config.json says architectures[0]={self.architecture!r} but model_type={config['model_type']!r}; "
                f"expected {self.model_type!r}"
            )
        required = {"hidden_act": "silu", "partial_rotary_factor": 1.0} | self.requires
        for key, value in required.items():
            if config.get(key) is not None and config[key] != value:
                raise ConversionError(
                    f"config.json has {key}={config[key]!r}; {self.architecture} is supported with {value!r} only"
                )
        window = config.get("sliding_window")
        if window is not None and config.get("use_sliding_window", True):
            raise ConversionError(f"config.json has sliding_window={window}: sliding window attention is not supported")
        if any(kind != "full_attention" for kind in group(config, "layer_types", list)):
            raise ConversionError(f"config.json has layer_types={config['layer_types']}: only 'full_attention' is supported")

    def _rope(self, config: dict) -> tuple[float, Optional[float]]:
        """RoPE base and Llama 3 factor from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
        scaling, parameters = group(config, "rope_scaling", dict), group(config, "rope_parameters", dict)
        differing = [key for key in scaling.keys() & parameters.keys() if scaling[key] != parameters[key]]
        if scaling and parameters and (differing or _rope_type(scaling) != _rope_type(parameters)):
            raise ConversionError(
                f"config.json describes RoPE twice, and differently: rope_scaling={scaling}, rope_parameters={parameters}; remove one"
            )
        rope = {**scaling, **parameters}
        if config.get("rope_theta") is None and rope.get("rope_theta") is None:
            raise ConversionError("config.json has neither rope_theta nor rope_parameters.rope_theta")
        theta = positive(config if rope.get("rope_theta") is None else rope, "rope_theta")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConversionError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
        kind = _rope_type(rope)
        if kind == "default":
            return theta, None
        if kind != "llama3" or not self.llama3_rope:
            raise ConversionError(f"RoPE scaling of type {kind!r} is not supported for {self.architecture}")
        for key, value in MEGATRON_LLAMA3_ROPE.items():
            if rope.get(key) != value:
                raise ConversionError(
                    f"rope_scaling has {key}={rope.get(key)!r}, but Megatron-Core fixes it to {value} for Llama 3 RoPE"
                )
        return theta, positive(rope, "factor")

    def _experts(self, config: dict) -> dict:
        if not self.moe:
            return {}
        # transformers 5 writes num_experts under another name
        experts = whole(config, "num_experts" if config.get("num_local_experts") is None else "num_local_experts", most=MOST_EXPERTS)
        chosen = whole(config, "num_experts_per_tok")
        if chosen > experts:
            raise ConversionError(f"config.json has num_experts_per_tok={chosen}, but {experts} experts")
        return {
            "experts": experts,
            "experts_per_token": chosen,
            "expert_ffn": whole(config, "moe_intermediate_size"),
            "normalise_experts": flag(config, "norm_topk_prob"),
        }


def _rope_type(rope: dict) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
