"""`Family`: a model family as a declarative table, and the rules that decoder-only families share."""

from dataclasses import dataclass, field, fields
from typing import Any

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families.config_class import config_class, transformers_config
from checkpoints_conv.families.keys import check_unread_keys
from checkpoints_conv.families.rules import QKV, GateUp, Replicated, Row, Rule, Vocabulary
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.families.values import flag, group, positive, shown, whole

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def layer_rule(kind: type[Rule], megatron: str, hf: dict[str, tuple[str, ...]]) -> Rule:
    """A rule inside a layer: `hf` maps HF names to shapes, both sides relative to the layer."""
    return kind(LAYER + megatron, tuple(HF_LAYER + name for name in hf), tuple(hf.values()))


EMBEDDING = Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),))
FINAL_NORM = Replicated("decoder.final_layernorm.weight", ("model.norm.weight",), (("hidden",),))
OUTPUT = Vocabulary("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),))  # untied only

ATTENTION = (
    layer_rule(Replicated, "self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": ("hidden",)}),
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
        {"self_attn.q_proj.bias": ("q_size",), "self_attn.k_proj.bias": ("kv_size",), "self_attn.v_proj.bias": ("kv_size",)},
    ),
)
QK_NORM = (
    layer_rule(Replicated, "self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}),
    layer_rule(Replicated, "self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}),
)
MLP = (
    layer_rule(Replicated, "mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": ("hidden",)}),
    layer_rule(
        GateUp, "mlp.linear_fc1.weight", {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")}
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

# Keys of checkpoints that are not plain text decoders, and how the error describes those.
FOREIGN = {
    "quantization_config": "a quantized checkpoint; convert the original bf16 or fp32 weights",
    "compression_config": "a quantized checkpoint; convert the original bf16 or fp32 weights",
    "vision_config": "a multimodal checkpoint; only text decoders are supported",
    "audio_config": "a multimodal checkpoint; only text decoders are supported",
    "text_config": "a multimodal checkpoint; only text decoders are supported",
}

SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
MAX_LAYERS, MAX_EXPERTS = 1000, 1024  # far more than any model has; each becomes names of tensors before one is read

# What megatron.core's RotaryEmbedding._apply_scaling fixes.
MEGATRON_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_KEYS = {
    "default": {"rope_type", "type", "rope_theta", "partial_rotary_factor"},
    "llama3": {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *MEGATRON_LLAMA3_ROPE},
}


@dataclass(frozen=True)
class Family:
    """One model family: its HF architecture, its table, and what its configs may contain.

    transformers' config class decides what a key or its absence means: `model_spec` reads the attributes of that class.  The
    raw config.json only shows which keys contradict each other or mean something else to other programs.
    """

    architecture: str  # HF architectures[0]
    model_type: str  # HF model_type
    config_class: str  # in transformers.models.<model_type>
    layer: tuple[Rule, ...]  # rules in {layer} (and {expert})
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False  # every layer is a mixture of experts
    llama3_rope: bool = False  # the family comes with Llama 3 RoPE scaling
    fixed: dict[str, Any] = field(default_factory=dict)  # attributes that must have this value
    also_read: tuple[
        str, ...
    ] = ()  # keys with a meaning in this family, in addition to `SIZES`, `keys.READ` and those of `fixed`
    neutral: dict[str, tuple] = field(default_factory=dict)  # exceptions from `keys.NEUTRAL`

    def model_spec(self, config: dict) -> ModelSpec:
        """The sizes and switches that an HF config states, as transformers understands it.

        Args:
            config: the contents of config.json, as transformers 4 or 5 write it.

        Raises:
            ConversionError: names the key that makes no sense, contradicts another, or asks for what is not supported.
        """
        if config.get("model_type") != self.model_type:
            raise ConversionError(
                f"config.json says architectures[0]={self.architecture!r} but model_type={shown(config.get('model_type'))}; "
                f"expected {self.model_type!r}"
            )
        _check_sizes(config)
        self._check_keys(config)
        understood = transformers_config(self.model_type, self.config_class, config)
        values = {key: getattr(understood, key) for key in (*SIZES, "rms_norm_eps", "tie_word_embeddings")}
        hidden, heads, groups = (whole(values, key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        if heads % groups:
            raise ConversionError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
        # Where the class has no such field, its models take this default, and nothing else for null.
        head_dim = whole({"head_dim": getattr(understood, "head_dim", hidden // heads)}, "head_dim")
        if head_dim % 2:
            sizes = f"hidden_size={hidden}, num_attention_heads={heads}"
            raise ConversionError(f"head_dim={head_dim} is odd ({sizes}): RoPE needs pairs")
        for key, value in {"hidden_act": "silu", **self.fixed}.items():
            if (has := getattr(understood, key)) != value:
                raise ConversionError(f"config.json has {key}={shown(has)}; {self.architecture} is supported with {value!r} only")
        max_position = whole(values, "max_position_embeddings")
        self._check_window(config, understood, max_position)
        theta, factor = self._rope(config, understood.rope_parameters)
        return ModelSpec(
            architecture=self.architecture,
            layers=whole(values, "num_hidden_layers", most=MAX_LAYERS),
            hidden=hidden,
            heads=heads,
            kv_groups=groups,
            head_dim=head_dim,
            ffn=whole(values, "intermediate_size"),
            vocab=whole(values, "vocab_size"),
            tied=flag(values, "tie_word_embeddings"),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            rope_theta=theta,
            rope_scaling_factor=factor,
            norm_eps=positive(values, "rms_norm_eps"),
            max_position=max_position,
            **self._experts(config, understood),
        )

    def _check_keys(self, config: dict) -> None:
        defaults = {each.name: each.default for each in fields(config_class(self.model_type, self.config_class))}
        check_unread_keys(config, self.architecture, (*SIZES, *self.fixed, *self.also_read), self.neutral, defaults)
        _check_layer_types(group(config, "layer_types", list))  # vLLM reads them for families for which transformers does not

    def _check_window(self, config: dict, understood: Any, max_position: int) -> None:
        """No position may see less than all before it."""
        _check_layer_types(getattr(understood, "layer_types", None) or [])
        window = getattr(understood, "sliding_window", None)
        if window is not None and not window >= max_position:
            absent = f"no sliding_window, for which transformers takes {window}"
            given = f"sliding_window={window}" if "sliding_window" in config else absent
            raise ConversionError(
                f"config.json has {given}: attention within a window smaller than max_position_embeddings={max_position} is not "
                "supported; if the model has no window, write sliding_window: null"
            )

    def _rope(self, config: dict, rope: dict) -> tuple[float, float | None]:
        """RoPE base and Llama 3 factor of transformers' standardized `rope_parameters`."""
        self._check_one_rope(config, rope)
        kind = rope.get("rope_type")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConversionError(f"partial_rotary_factor={shown(rope['partial_rotary_factor'])} is not supported")
        if any(isinstance(value, dict) for value in rope.values()):
            raise ConversionError(f"rope_parameters={shown(rope)} differ from layer to layer, which is not supported")
        if not isinstance(kind, str) or kind not in ROPE_KEYS or (kind == "llama3" and not self.llama3_rope):
            raise ConversionError(f"RoPE scaling of type {shown(kind)} is not supported for {self.architecture}")
        theta = positive(rope, "rope_theta")
        strange = [key for key, value in rope.items() if key not in ROPE_KEYS[kind] and value is not None]
        if strange:
            raise ConversionError(f"RoPE of type {kind!r} has no use for {', '.join(map(shown, strange))}; remove it")
        if kind == "default":
            return theta, None
        for key, value in MEGATRON_LLAMA3_ROPE.items():
            if rope.get(key) != value:
                raise ConversionError(
                    f"rope_scaling has {key}={shown(rope.get(key))}, but Megatron-Core fixes it to {value} for Llama 3 RoPE"
                )
        return theta, positive(rope, "factor")

    def _check_one_rope(self, config: dict, rope: dict) -> None:
        """transformers and vLLM read the same RoPE, wherever it is in the config.json."""
        scaling, parameters = group(config, "rope_scaling", dict), group(config, "rope_parameters", dict)
        if scaling and parameters:
            alone = [
                transformers_config(self.model_type, self.config_class, {**config, other: None}).rope_parameters
                for other in ("rope_parameters", "rope_scaling")
            ]
            if _plain(alone[0]) != _plain(alone[1]):
                raise ConversionError(
                    f"config.json describes RoPE twice, and differently: rope_scaling={shown(scaling)}, "
                    f"rope_parameters={shown(parameters)}; remove one"
                )
        for described in (scaling, parameters):
            names = [described[key] for key in ("rope_type", "type") if described.get(key) is not None]
            if len(names) == 2 and names[0] != names[1]:
                both = f"rope_type={shown(names[0])} and type={shown(names[1])}"
                raise ConversionError(f"config.json gives RoPE two types, {both}; remove one")
            for key in ("rope_theta", "original_max_position_embeddings"):
                inside, outside = described.get(key), config.get(key)
                if None not in (inside, outside) and inside != outside:
                    raise ConversionError(
                        f"config.json has {key}={shown(outside)}, but {shown(inside)} inside rope_scaling or rope_parameters; "
                        "remove one"
                    )

    def _experts(self, config: dict, understood: Any) -> dict:
        if not self.moe:
            return {}
        values = {key: getattr(understood, key) for key in EXPERTS}
        given = {key: config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
        if len(set(given.values())) > 1:
            both = " and ".join(f"{key}={value}" for key, value in given.items())
            raise ConversionError(f"config.json has {both}; remove one")
        experts, chosen = whole(values, "num_experts", most=MAX_EXPERTS), whole(values, "num_experts_per_tok")
        normalize = flag(values, "norm_topk_prob")
        if chosen > experts:
            raise ConversionError(f"config.json has num_experts_per_tok={chosen}, but {experts} experts")
        if chosen == 1 and normalize:
            raise ConversionError(
                "config.json has num_experts_per_tok=1 with norm_topk_prob=true: Megatron-Core has no router that gives its one "
                "expert weight 1; only norm_topk_prob=false is supported with one expert a token"
            )
        return {
            "experts": experts,
            "experts_per_token": chosen,
            "expert_ffn": whole(values, "moe_intermediate_size"),
            "normalize_experts": normalize,
        }


def _check_layer_types(kinds: list) -> None:
    others = sorted({shown(kind) for kind in kinds if kind != "full_attention"})
    if others:
        raise ConversionError(
            f"config.json makes layer_types of {', '.join(others)} (keys layer_types, use_sliding_window, sliding_window, "
            "max_window_layers): only 'full_attention' is supported"
        )


def _check_sizes(config: dict) -> None:
    """Check the sizes in a config.json before transformers makes lists of that length or divides by them."""
    most = {"num_hidden_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS, "num_local_experts": MAX_EXPERTS}
    for key in (*SIZES, "head_dim", *EXPERTS, "num_local_experts"):
        if config.get(key) is not None and key != "norm_topk_prob":
            whole(config, key, most=most.get(key, 2**31))


def _plain(rope: dict) -> dict:
    return {key: value for key, value in rope.items() if key != "type" and value is not None}
