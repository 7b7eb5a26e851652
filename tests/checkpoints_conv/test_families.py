"""What configs say: real models by their published sizes, both spellings of RoPE, and what is refused by name."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import FAMILIES, family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.mapping.model_mapping import ModelMapping
from tests.checkpoints_conv.family_models import ARCHITECTURES, LLAMA3_ROPE, VARIANTS, config_json, tiny_spec


def spec_of(config: dict) -> ModelSpec:
    return family_of(config).model_spec(config)


@pytest.fixture(scope="session")
def model_configs(repository: Path) -> dict[str, dict]:
    folder = repository / "tools" / "model_configs"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


# Parameters as published with the models; tensor-parallel sizes from their heads and KV groups.
REAL = {
    "llama-3.2-1b": (1_235_814_400, [1, 2, 4, 8]),
    "llama-3.2-3b": (3_212_749_824, [1, 2, 4, 8]),
    "qwen2.5-0.5b": (494_032_768, [1, 2]),
    "qwen2.5-3b": (3_085_938_688, [1, 2]),
    "qwen2.5-7b": (7_615_616_512, [1, 2, 4]),
    "qwen2.5-32b": (32_763_876_352, [1, 2, 4, 8]),
    "qwen2.5-72b": (72_706_203_648, [1, 2, 4, 8]),
    "qwen3-4b": (4_022_468_096, [1, 2, 4, 8]),
    "qwen3-8b": (8_190_735_360, [1, 2, 4, 8]),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_by_shape(model_configs, name):
    """Sizes add up to the published count, and every Megatron parameter divides under every layout that is offered."""
    parameters, tensor_sizes = REAL[name]
    spec = spec_of(model_configs[name])
    mapping = ModelMapping(spec)
    assert sum(math.prod(shape) for shape in mapping.hf_shapes().values()) == parameters
    assert spec.tensor_parallel_sizes() == tensor_sizes
    for entry in mapping.entries.values():
        rule = entry.rule
        whole, parts = rule.megatron_shape(spec), rule.shapes(spec)
        assert math.prod(whole) == sum(map(math.prod, parts))
        if rule.tp_dim is not None and not rule.vocab:
            assert all(part[rule.tp_dim] % tp == 0 for part in parts for tp in tensor_sizes)


def test_every_family_has_its_tiny_model():
    """So every law here, round trips and parity included, holds for a family that is added."""
    assert set(FAMILIES) == set(ARCHITECTURES.values())


def test_real_llama_keeps_its_rope_factor(model_configs):
    assert spec_of(model_configs["llama-3.2-3b"]).rope_scaling_factor == 32.0
    assert spec_of(model_configs["qwen3-4b"]).rope_scaling_factor is None


def test_smollm2_layouts():
    spec = tiny_spec("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=576, intermediate_size=1536)
    assert spec.tensor_parallel_sizes() == [1, 3]


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_both_spellings_of_rope_mean_the_same(family, tied):
    """transformers 5 writes rope_parameters, transformers 4 wrote rope_theta and rope_scaling."""
    new = config_json(family, tied)
    rope = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    assert spec_of(old) == spec_of(new)
    if old["rope_scaling"]:
        old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
        assert spec_of(old) == spec_of(new)


def test_head_dim_is_the_configs_own():
    assert tiny_spec("qwen3").head_dim == 32 != tiny_spec("qwen3").hidden // tiny_spec("qwen3").heads
    without = {key: value for key, value in config_json("qwen3").items() if key != "head_dim"}
    assert spec_of(without).head_dim == 128
    assert spec_of({**config_json("llama"), "head_dim": None}).head_dim == 8


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def test_an_absent_window_is_the_window_that_transformers_takes():
    """Mistral's default is 4096, whatever max_position_embeddings says; a window that covers all positions is none."""
    long, short = config_json("mistral"), config_json("mistral", max_position_embeddings=4096)
    with pytest.raises(
        ConversionError, match=r"no sliding_window, for which transformers takes 4096.*max_position_embeddings=16384"
    ):
        spec_of(without(long, "sliding_window"))
    assert spec_of(without(short, "sliding_window")) == spec_of(short)


def test_absent_rope_is_transformers_default():
    plain = spec_of(without(config_json("llama"), "rope_parameters"))
    assert (plain.rope_theta, plain.rope_scaling_factor) == (10_000.0, None)


def test_keys_that_nobody_reads_are_named_once(caplog):
    config = {**config_json("llama"), "my_scale": 2.0, "another": None}
    for _ in range(2):
        assert spec_of(config) == tiny_spec("llama")
    assert [record.getMessage().endswith("they are ignored here too: 'my_scale'") for record in caplog.records] == [True]


@pytest.mark.parametrize("key", ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor"])
def test_rope_constants_that_megatron_cannot_express_are_refused(key):
    value = 0 if key == "factor" else 2.0
    config = {**config_json("llama"), "rope_parameters": {**LLAMA3_ROPE, key: value}}
    with pytest.raises(ConversionError, match=key):
        spec_of(config)


WINDOWED = {"use_sliding_window": True, "layer_types": None}


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("mistral", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None, "rope_theta": 1e6}, "yarn"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
        ("qwen3", {"rope_parameters": LLAMA3_ROPE}, "llama3"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("llama", {"vision_config": {"depth": 2}}, "multimodal"),
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ("llama", {"architectures": []}, "architectures"),
        ("llama", {"model_type": "qwen2"}, "model_type='qwen2'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; it must be a whole number from 1 to 1000"),
        ("qwen3_moe", {"num_experts": 10**9, "num_local_experts": None}, "num_experts=1000000000"),
        ("qwen3_moe", {"num_experts_per_tok": 10**4}, "num_experts_per_tok=10000, but"),
        ("qwen3_moe", {"norm_topk_prob": "4"}, "norm_topk_prob.*value: '4'"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
        ("qwen3_moe", {"num_experts": 8}, "num_experts=8 and num_local_experts=4"),
        ("llama", {"layer_types": ["chunked_attention"]}, "layer_types"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE twice, and differently"),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "factor": 2.0}}, "RoPE twice, and differently"),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "rope_theta": None}}, "RoPE twice, and differently"),
        ("llama", {"rope_theta": 5e5}, r"rope_theta=500000.0, but 10000.0 inside"),
        ("llama", {"original_max_position_embeddings": 4096}, "original_max_position_embeddings=4096, but 8192 inside"),
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "type": "linear"}}, "two types, rope_type='llama3' and type='linear'"),
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "attention_factor": 2.0}}, "has no use for 'attention_factor'"),
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "from layer to layer"),
        ("llama", {"model_type": None}, "model_type=None"),
        ("llama", {"hidden_size": 24, "head_dim": None}, "head_dim=3 is odd"),
        ("qwen3", {"head_dim": None}, "head_dim"),
        ("qwen2", {"head_dim": None}, "head_dim"),
        ("mistral", {"sliding_window": 4096, "use_sliding_window": False}, "sliding_window=4096"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096, which LlamaForCausalLM"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
        ("qwen2", {**WINDOWED, "sliding_window": 64, "max_window_layers": 4}, "sliding_window=64"),
        ("qwen2", {**WINDOWED, "sliding_window": 2**20, "max_window_layers": 2}, "max_window_layers"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier=0.2"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 64}}, "dual_chunk_attention_config"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ("llama", {"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config"),
        ("llama", {"num_experts": 4}, "num_experts=4"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ("llama", {"quantization_config": {}}, "quantized"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_by_name(family, change, named):
    with pytest.raises(ConversionError, match=named):
        spec_of({**config_json(family), **change})


def test_switched_off_sliding_window_is_no_reason_to_refuse():
    config = {**config_json("qwen2"), "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}
    assert spec_of(config) == tiny_spec("qwen2")


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ((3,), "tensor parallel size 3 .*4 KV groups.*possible: 1, 2, 4"),
        ((8,), "tensor parallel size 8"),
        ((1, 3), "pipeline size 3 does not divide 4 layers; possible: 1, 2, 4"),
        ((1, 1, 2), "expert parallel size 2 does not divide 0 experts"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_before_anything_starts(layout, named):
    with pytest.raises(ConversionError, match=named):
        tiny_spec("llama").check_layout(*layout)
    tiny_spec("llama").check_layout(4, 2)
    tiny_spec("qwen3_moe").check_layout(2, 2, 2)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**12) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
@given(data=st.data(), value=JSON_VALUES)
@settings(max_examples=100, deadline=None)
def test_a_config_is_a_model_or_is_refused_whatever_stands_in_it(family, tied, data, value):
    config = config_json(family, tied)
    config[data.draw(st.sampled_from(sorted(config)), label="key")] = value
    try:
        spec = spec_of(config)
    except ConversionError as error:
        assert str(error)
    else:
        assert ModelMapping(spec).hf_shapes() and 1 in spec.tensor_parallel_sizes()
