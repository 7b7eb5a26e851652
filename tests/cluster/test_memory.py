"""The arithmetic of memory: what a layout divides it divides, and it counts what Megatron and autograd hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.mapping.model_mapping import ModelMapping
from megatron_drmas.cluster.memory import (
    SIZES,
    ActorShape,
    Packed,
    activation_bytes,
    checkpoint_bytes,
    engine_weight_bytes,
    layer_activation_bytes,
    logit_bytes,
    offloaded_bytes,
    stage_parameters,
    state_bytes,
    token_cache_bytes,
    update_bytes,
)
from megatron_drmas.config.schema import ParallelConfig
from tools.make_random_checkpoint import CONFIGS, shapes

DENSE = ModelSpec("LlamaForCausalLM", 8, 512, 8, 4, 64, 1536, 50000, True, False, False, 1e4, None, 1e-5, 8192)
EXPERTS = replace(DENSE, tied=False, qk_norm=True, experts=8, experts_per_token=2, expert_ffn=256)
PACKED = Packed(4096, 4096, 8192, 2048)

specs = st.sampled_from([DENSE, EXPERTS, replace(DENSE, tied=False, qkv_bias=True)])
precisions = st.sampled_from(list(SIZES))
actors = st.builds(ActorShape, specs, st.just(ParallelConfig()), precisions, st.booleans(), st.booleans(), st.booleans())


@pytest.mark.parametrize("shape", shapes())
def test_parameters_are_those_of_the_checkpoint(shape):
    """Over all stages and ranks, and but for the padding of the vocabulary and what ranks hold copies of."""
    import json
    import math

    config = json.loads((CONFIGS / f"{shape}.json").read_text())
    spec = family_of(config).model_spec(config)
    hf = sum(math.prod(size) for size in ModelMapping(spec).hf_shapes().values())
    padding = (spec.padded_vocab(1) - spec.vocab) * spec.hidden * (1 if spec.tied else 2)
    assert stage_parameters(spec, ParallelConfig(), 0) == hf + padding == engine_weight_bytes(spec, 1, 1)
    stages = sum(stage_parameters(spec, ParallelConfig(pipeline=spec.layers), stage) for stage in range(spec.layers))
    assert stages == hf + padding + (spec.padded_vocab(1) * spec.hidden if spec.tied else 0)


@settings(max_examples=60)
@given(actors, st.sampled_from([2, 4]))
def test_tensor_parallelism_divides_what_belongs_to_heads_and_widths(shape, tensor):
    """Norms and routers stay, and a little padding of the vocabulary; sequence parallelism divides what is left of a token."""
    cut = replace(shape, parallel=ParallelConfig(tensor=tensor))
    spread = replace(shape, parallel=ParallelConfig(tensor=tensor, sequence=True))
    whole, part = state_bytes(shape), state_bytes(cut)
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(whole, kind) / tensor <= getattr(part, kind) < 1.03 * getattr(whole, kind) / tensor
    most = layer_activation_bytes(shape, PACKED)
    assert most / tensor < layer_activation_bytes(cut, PACKED) < most
    assert layer_activation_bytes(spread, PACKED) < layer_activation_bytes(cut, PACKED)


@settings(max_examples=60)
@given(actors, st.sampled_from([1, 2, 4, 8]))
def test_stages_hold_the_whole_model(shape, pipeline):
    """Layers once over all stages; the first stage has as many micro-batches in flight as there are stages."""
    cut = replace(shape, parallel=ParallelConfig(pipeline=pipeline))
    copies = SIZES[shape.precision] * DENSE.hidden * shape.spec.padded_vocab(1) if shape.spec.tied and pipeline > 1 else 0
    assert sum(state_bytes(cut, stage).weights for stage in range(pipeline)) == state_bytes(shape).weights + copies
    held = [activation_bytes(cut, PACKED, stage) for stage in range(pipeline)]
    assert held == sorted(held, reverse=True)
    whole = replace(PACKED, predicted=PACKED.tokens)
    assert activation_bytes(cut, whole, 0, micro_batches=1) == activation_bytes(cut, whole, pipeline - 1)
    assert [logit_bytes(cut, PACKED, stage) > 0 for stage in range(pipeline)] == [False] * (pipeline - 1) + [True]


@settings(max_examples=60)
@given(actors, st.integers(2, 8))
def test_less_is_less(shape, times):
    more = Packed(*(times * getattr(PACKED, name) for name in ("tokens", "queries", "keys", "predicted")))
    kept, again = replace(shape, recompute=False), replace(shape, recompute=True)
    assert activation_bytes(again, PACKED) < activation_bytes(kept, PACKED) < activation_bytes(kept, more)
    assert update_bytes(shape, PACKED).total < update_bytes(replace(shape, reference=True), PACKED).total
    many = replace(shape, distributed=True, parallel=ParallelConfig(data=times))
    one = replace(many, parallel=ParallelConfig())
    assert state_bytes(many).optimizer == -(-state_bytes(one).optimizer // times)
    assert state_bytes(many).weights + state_bytes(many).gradients == state_bytes(one).weights + state_bytes(one).gradients
    assert offloaded_bytes(one) == state_bytes(one).total - state_bytes(one).gradients == checkpoint_bytes(many)


def test_the_usual_count_of_a_bf16_model():
    """18 bytes a parameter; 2 layers · 2 · kv elements a token of cache."""
    shape = ActorShape(DENSE, ParallelConfig(), "bf16")
    assert state_bytes(shape).total == 18 * stage_parameters(DENSE, ParallelConfig(), 0)
    assert token_cache_bytes(DENSE, 2, 2) == 8 * 2 * 256 * 2 // 2
