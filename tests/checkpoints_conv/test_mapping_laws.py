"""The mapping's laws, over random sizes and layouts, against definitions written out element by element."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import AutoModelForCausalLM

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import FAMILIES
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.tensors import hf_tensors, megatron_shard, merge
from checkpoints_conv.mapping.model_mapping import EMBEDDING_NAME, ModelMapping, canonical_name
from tests.checkpoints_conv.family_models import VARIANTS, family_config, tiny_spec

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@st.composite
def specs(draw) -> tuple[ModelSpec, int]:
    """A small model of any family, and a tensor-parallel size that fits it."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    groups = tp * draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 3))
    architecture = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[architecture]
    return (
        ModelSpec(
            architecture=architecture,
            layers=draw(st.integers(1, 2)),
            hidden=tp * draw(st.integers(1, 5)),
            heads=heads,
            kv_groups=groups,
            head_dim=draw(st.sampled_from([2, 4, 6])),
            ffn=tp * draw(st.integers(1, 5)),
            vocab=draw(st.integers(1, 700)),
            tied=draw(st.booleans()),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            rope_theta=1e4,
            rope_scaling_factor=None,
            norm_eps=1e-6,
            max_position=64,
            experts=3 if family.moe else 0,
            experts_per_token=1,
            expert_ffn=tp * draw(st.integers(1, 4)) if family.moe else 0,
        ),
        tp,
    )


def random_weights(mapping: ModelMapping) -> dict[str, torch.Tensor]:
    return {name: torch.rand(shape) for name, shape in mapping.hf_shapes().items()}


@given(specs())
def test_sharding_and_gathering_is_the_identity(case):
    spec, tp = case
    mapping = ModelMapping(spec)
    weights = random_weights(mapping)
    seen = set()
    for name in mapping.megatron_names():
        shards = [megatron_shard(mapping, name, weights.__getitem__, rank, tp) for rank in range(tp)]
        for hf_name, tensor in hf_tensors(mapping, name, shards):
            assert torch.equal(tensor, weights[hf_name])
            assert hf_name not in seen
            seen.add(hf_name)
    assert seen == set(weights)


@given(specs())
def test_qkv_shards_are_whole_query_groups(case):
    """Rank r holds groups [r g/tp, (r + 1) g/tp), each as its query heads, its key head, its value head."""
    spec, tp = case
    mapping = ModelMapping(spec)
    weights = random_weights(mapping)
    q, k, v = (weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    per_group, dim = spec.heads // spec.kv_groups, spec.head_dim
    rows = []
    for group in range(spec.kv_groups):
        for head in range(group * per_group, (group + 1) * per_group):
            rows.append(q[head * dim : (head + 1) * dim])
        rows += [k[group * dim : (group + 1) * dim], v[group * dim : (group + 1) * dim]]
    expected = torch.cat(rows).chunk(tp)
    for rank in range(tp):
        assert torch.equal(megatron_shard(mapping, QKV, weights.__getitem__, rank, tp), expected[rank])


@given(specs().filter(lambda case: case[0].experts == 0))
def test_gate_and_up_are_cut_separately(case):
    spec, tp = case
    mapping = ModelMapping(spec)
    weights = random_weights(mapping)
    gate, up = (weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for rank in range(tp):
        shard = megatron_shard(mapping, FC1, weights.__getitem__, rank, tp)
        assert torch.equal(shard, torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))
    if tp > 1:  # the silently wrong way: chunks of the concatenation
        assert not torch.equal(megatron_shard(mapping, FC1, weights.__getitem__, 0, tp), torch.cat([gate, up]).chunk(tp)[0])


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 4, 8]))
def test_vocabulary_padding_is_least_zero_and_cut_off_again(vocab, tp):
    spec = replace(tiny_spec(hidden_size=16), vocab=vocab)
    mapping = ModelMapping(spec)
    embedding = torch.ones(vocab, spec.hidden)
    shards = [megatron_shard(mapping, EMBEDDING_NAME, lambda name: embedding, rank, tp) for rank in range(tp)]
    whole = torch.cat(shards)
    assert len(whole) % (128 * tp) == 0 and 0 <= len(whole) - vocab < 128 * tp
    assert whole[:vocab].eq(1).all() and whole[vocab:].eq(0).all()
    assert torch.equal(hf_tensors(mapping, EMBEDDING_NAME, shards)[0][1], embedding)


def test_known_paddings():
    llama, qwen = (replace(tiny_spec(), vocab=vocab) for vocab in (128_256, 152_064))
    assert llama.padded_vocab(1) == 128_256 and llama.padded_vocab(4) == 128_512
    assert [qwen.padded_vocab(tp) for tp in (1, 2, 4)] == [152_064] * 3


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_names_and_shapes_are_those_of_transformers(family, tied):
    config = family_config(family, tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    shapes = ModelMapping(tiny_spec(family, tied)).hf_shapes()
    if family == "qwen3_moe":  # transformers fuses the experts in memory, and takes them apart when it saves
        expected = {name: shape for name, shape in expected.items() if ".experts." not in name}
        shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    assert shapes == expected


@pytest.mark.parametrize("layer_spec", ["local", "transformer_engine"])
@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (8, {"pipeline_model_parallel_size": 4}),
        (8, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (5, {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}),
        (7, {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 1}),
        (
            12,
            {
                "pipeline_model_parallel_size": 3,
                "virtual_pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 4,
                "num_layers_in_last_pipeline_stage": 2,
            },
        ),
    ],
    ids=str,
)
def test_global_names_are_a_bijection_over_stages(layer_spec, layers, layout):
    """Even, virtual and uneven pipelines: Megatron's own layer offsets give every global name exactly once."""
    config = TransformerConfig(num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, **layout)
    mapping = ModelMapping(replace(tiny_spec(), layers=layers, tied=True))
    inside = {name.split(".", 3)[3] for name in mapping.megatron_names() if name.startswith("decoder.layers.")}
    if layer_spec == "local":
        inside = {
            name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
                "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
            )
            for name in inside
        }
    names = []
    for stage in range(config.pipeline_model_parallel_size):
        for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
            vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
            offset = get_transformer_layer_offset(config, vp_stage, stage)
            count = get_num_layers_to_build(config, vp_stage, stage)
            names += [canonical_name(f"decoder.layers.{i}.{n}", offset) for i in range(count) for n in inside]
    assert sorted(names) == sorted(n for n in mapping.megatron_names() if n.startswith("decoder.layers."))


@pytest.mark.parametrize("local", ["experts.local_experts.{}.linear_fc1.weight", "experts.linear_fc1.weight{}"])
def test_expert_numbers_are_global(local):
    names = [canonical_name(f"decoder.layers.1.mlp.{local.format(e)}", 4, 2 * rank, True) for rank in (0, 1) for e in (0, 1)]
    assert names == [f"decoder.layers.5.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in range(4)]


def test_unknown_parameter_and_wrong_shape_are_named():
    mapping = ModelMapping(tiny_spec(hidden_size=16))
    with pytest.raises(ConversionError, match=r"output_layer.bias"):
        hf_tensors(mapping, "output_layer.bias", [torch.zeros(3)])
    with pytest.raises(ConversionError, match=r"model\.norm\.weight is \[17\], the config asks for \[16\]"):
        hf_tensors(mapping, "decoder.final_layernorm.weight", [torch.zeros(17)])


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_bands_are_the_merged_parameter(family, tied):
    """Row by row, so that a file's bytes can go into the other's as they are; every HF row once and in order."""
    spec = tiny_spec(family, tied)
    for entry in ModelMapping(spec).entries.values():
        shapes = entry.rule.shapes(spec)
        numbered = torch.arange(sum(math.prod(shape) for shape in shapes)).split([math.prod(shape) for shape in shapes])
        parts = [part.view(shape) for part, shape in zip(numbered, shapes)]
        bands = entry.rule.bands(spec)
        assert torch.equal(
            torch.cat([parts[number][first : first + rows] for number, first, rows in bands]), merge(parts, entry.rule, spec)
        )
        for number, shape in enumerate(shapes):
            assert [row for n, first, rows in bands if n == number for row in range(first, first + rows)] == list(range(shape[0]))
