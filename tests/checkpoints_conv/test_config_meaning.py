"""A config.json means what transformers makes of it, or is refused: random configs against its own classes and models."""

import copy
import importlib
import json
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import FAMILIES, family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.mapping.model_mapping import ModelMapping
from tests.checkpoints_conv.family_models import ARCHITECTURES, LLAMA3_ROPE

ABSENT = object()
ROPE = st.sampled_from([
    {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 5e5}, {"type": "default"}, {"rope_theta": 1e6}, {},
    LLAMA3_ROPE, {**LLAMA3_ROPE, "factor": 8}, {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
    {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"},
    {"type": "llama3", **{key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"}},
    {"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default", "mrope_section": [1, 1, 2]},
])  # fmt: skip
# Values of every key that a config may have, lack, or have as null; the odd ones are wrong for some family.
VALUES: dict[str, st.SearchStrategy] = {
    "hidden_size": st.sampled_from([32, 64, 40]),
    "intermediate_size": st.sampled_from([48, 96]),
    "num_hidden_layers": st.sampled_from([1, 2, 4]),
    "num_attention_heads": st.sampled_from([4, 8]),
    "num_key_value_heads": st.sampled_from([2, 4, 8, 3]),
    "head_dim": st.sampled_from([8, 16, 5]),
    "vocab_size": st.sampled_from([64, 131]),
    "max_position_embeddings": st.sampled_from([512, 8192, 32768]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6, 0]),
    "tie_word_embeddings": st.booleans(),
    "hidden_act": st.sampled_from(["silu", "silu", "gelu"]),
    "rope_theta": st.sampled_from([1e4, 5e5, 0]),
    "rope_scaling": ROPE,
    "rope_parameters": ROPE,
    "original_max_position_embeddings": st.sampled_from([4096, 8192]),
    "partial_rotary_factor": st.sampled_from([1.0, 0.25]),
    "sliding_window": st.sampled_from([64, 4096, 2**17]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.sampled_from([0, 2, 28]),
    "layer_types": st.sampled_from([["full_attention"] * 2, ["full_attention", "sliding_attention"], ["full_attention"]]),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "num_experts": st.sampled_from([4, 8, 0]),
    "num_local_experts": st.sampled_from([4, 8]),
    "num_experts_per_tok": st.sampled_from([1, 2, 9]),
    "moe_intermediate_size": st.sampled_from([32, 48]),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.sampled_from([1, 2]),
    "mlp_only_layers": st.sampled_from([[], [0]]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "torch_dtype": st.sampled_from(["bfloat16", "float32"]),
    "dtype": st.just("float16"),
    "logits_scaling": st.sampled_from([1.0, 8.0]),
    "quantization_config": st.just({"quant_method": "fp8"}),
}
# Most configs must get through: what a key is in most of them.
USUAL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 131,
    "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "sliding_window": None,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "rope_theta": 1e4,
}  # fmt: skip
MOE_ONLY = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers",
}  # fmt: skip


@st.composite
def configs(draw, family: str) -> dict:
    """The usual config with one to four keys taken out, set to null or to another value."""
    config = {key: value for key, value in USUAL.items() if family == "qwen3_moe" or key not in MOE_ONLY}
    if family == "llama":
        del config["sliding_window"]
    config |= {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    for key in draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4, unique=True)):
        value = draw(st.sampled_from([ABSENT, None]) | VALUES[key] | VALUES[key])
        if value is ABSENT:
            config.pop(key, None)
        else:
            config[key] = copy.deepcopy(value)
    return config


def rotary_frequencies(config, family: str) -> torch.Tensor:
    """What transformers' model of the family rotates by, [head_dim / 2]."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = next(name for name in vars(module) if name.endswith("RotaryEmbedding"))
    rotary = getattr(module, name)(config)
    assert rotary.attention_scaling == 1.0
    return rotary.inv_freq


def megatron_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Megatron-Core's RotaryEmbedding for a spec, [head_dim / 2]; Llama 3.1's scaling as published with the model."""
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    if spec.rope_scaling_factor is None:
        return frequencies
    wavelength = 2 * torch.pi / frequencies
    smooth = ((8192 / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return (1 - smooth) * frequencies / spec.rope_scaling_factor + smooth * frequencies


def check_means_the_same(spec: ModelSpec, config: dict, family: str) -> None:
    understood = CONFIG_MAPPING[family](**copy.deepcopy(config))
    assert spec.layers == understood.num_hidden_layers and spec.hidden == understood.hidden_size
    assert spec.heads == understood.num_attention_heads and spec.kv_groups == understood.num_key_value_heads
    assert spec.head_dim == getattr(understood, "head_dim", understood.hidden_size // understood.num_attention_heads)
    assert spec.vocab == understood.vocab_size and spec.tied is understood.tie_word_embeddings
    assert spec.norm_eps == understood.rms_norm_eps and spec.max_position == understood.max_position_embeddings
    assert understood.hidden_act == "silu"
    window = getattr(understood, "sliding_window", None)
    assert window is None or window >= understood.max_position_embeddings
    assert set(getattr(understood, "layer_types", None) or []) <= {"full_attention"}
    torch.testing.assert_close(rotary_frequencies(understood, family), megatron_frequencies(spec), rtol=1e-5, atol=0)
    if family == "qwen3_moe":
        assert spec.experts == understood.num_experts and spec.experts_per_token == understood.num_experts_per_tok
        assert spec.normalize_experts is understood.norm_topk_prob
        assert spec.experts_per_token > 1 or not spec.normalize_experts
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(understood)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".experts." not in name}
    if spec.tied:
        del expected["lm_head.weight"]
    assert {name: shape for name, shape in ModelMapping(spec).hf_shapes().items() if ".experts." not in name} == expected


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_config_means_what_transformers_says_or_is_refused_by_a_key(family):
    outcomes = Counter()

    @given(config=configs(family))
    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(config):
        try:
            spec = family_of(config).model_spec(config)
        except ConversionError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error)
            assert any(re.search(rf"\b{key}\b", str(error)) for key in [*VALUES, *LLAMA3_ROPE, "RoPE", "mrope_section"]), error
        else:
            outcomes["converted"] += 1
            check_means_the_same(spec, config, family)

    check()
    assert min(outcomes["converted"], outcomes["refused"]) > 20, outcomes


def test_the_class_is_the_one_that_AutoConfig_takes():
    for family in FAMILIES.values():
        assert CONFIG_MAPPING[family.model_type].__name__ == family.config_class
        assert AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family.model_type]].__name__ == family.architecture


def test_the_dtype_that_a_config_names_is_of_its_weights_and_no_meaning(tmp_path):
    config = {**AutoConfig.for_model("llama").to_dict(), "architectures": ["LlamaForCausalLM"]}
    family = family_of(config)
    assert family.model_spec({**config, "dtype": "float16", "torch_dtype": "bfloat16"}) == family.model_spec(config)


SCRIPT = """
import logging, sys
from checkpoints_conv.families import family_of
from checkpoints_conv.formats.hf_folder import read_config
config = read_config(sys.argv[1])
family_of(config).model_spec(config)
assert not {"torch", "sklearn", "transformers"} & set(sys.modules)
assert not logging.getLogger("transformers").handlers
import torch, transformers
assert transformers.LlamaForCausalLM and len(logging.getLogger("transformers").handlers) == 1
family_of(config).model_spec(config)
"""


def test_a_config_is_read_without_torch_and_leaves_transformers_whole(tmp_path, repository):
    """Importing torch and model code would take longer than converting a small model, or finding a mistake in a configuration."""
    config = {**AutoConfig.for_model("qwen3").to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", SCRIPT, tmp_path]
    process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
