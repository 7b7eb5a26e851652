"""Policies get disjoint GPUs, groups stay within nodes, and an allocation that is too small is refused with its sums."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.cluster.placement import place
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import ClusterConfig, EngineConfig, ParallelConfig, PolicyConfig, RunConfig


def run_config(policies, gpus, nodes=1, colocate=True):
    return RunConfig(policies=policies, cluster=ClusterConfig(gpus_per_node=gpus, nodes=nodes, colocate=colocate))


def policy(tensor=1, pipeline=1, data=1, engine=1, replicas=1, trainable=True):
    return PolicyConfig(
        model="m",
        trainable=trainable,
        parallel=ParallelConfig(tensor, pipeline, data),
        engine=EngineConfig(replicas=replicas, tensor=engine),
    )


def gpus(slots):
    return [(slot.node, device) for slot in slots for device in slot.devices]


def test_the_papers_assignment_fills_eight_gpus():
    config = compose_config("search_hetero_8xh100", [])
    placement = place(config, "cuda")
    used = [gpu for slots in placement.actors.values() for gpu in gpus(slots)]
    assert sorted(used) == [(0, device) for device in range(8)]


def test_colocated_engines_share_their_actors_gpus():
    placement = place(run_config({"a": policy(tensor=2, data=2, engine=2, replicas=2), "b": policy()}, 8), "cuda")
    assert gpus(placement.engines["a"]) == gpus(placement.actors["a"]) and len(placement.engines["a"]) == 2
    assert set(gpus(placement.actors["a"])).isdisjoint(gpus(placement.actors["b"]))


def test_a_small_allocation_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match=r"4 \(a\) \+ 2 \(b\) = 6 GPUs.*1 x 4 = 4"):
        place(run_config({"a": policy(tensor=4), "b": policy(tensor=2)}, 4), "cuda")


def test_engines_that_do_not_fit_on_their_actor_are_refused():
    with pytest.raises(ConfigError, match=r"policies.a.engine.replicas"):
        place(run_config({"a": policy(tensor=2, engine=2, replicas=2)}, 8), "cuda")


layouts = st.builds(
    policy,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2]),
    engine=st.just(1),
    trainable=st.booleans(),
)


@given(
    policies=st.lists(layouts, min_size=1, max_size=4),
    per_node=st.sampled_from([4, 8]),
    nodes=st.integers(1, 4),
    colocate=st.booleans(),
)
def test_no_gpu_is_given_twice_and_tensor_groups_stay_within_nodes(policies, per_node, nodes, colocate):
    config = run_config({str(index): each for index, each in enumerate(policies)}, per_node, nodes, colocate)
    try:
        placement = place(config, "cuda")
    except ConfigError:
        return
    taken = [gpus(slots) for slots in placement.actors.values()]
    taken += [gpus(slots) for name, slots in placement.engines.items() if not (colocate and config.policies[name].trainable)]
    flat = list(itertools.chain(*taken))
    assert len(flat) == len(set(flat)) and all(0 <= node < nodes and 0 <= device < per_node for node, device in flat)
    for name, each in config.policies.items():
        slots = placement.actors[name]
        for start in range(0, len(slots), each.parallel.tensor):
            assert len({slot.node for slot in slots[start : start + each.parallel.tensor]}) == 1
