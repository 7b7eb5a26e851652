"""Policies get GPUs of their own while there are enough and share them evenly where not; groups stay within nodes and pools."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.cluster.placement import gpus_of, place
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import ClusterConfig, EngineConfig, ParallelConfig, PolicyConfig, RunConfig
from megatron_drmas.weight_sync.transport import TRANSPORTS, choose_transport


def run_config(policies, gpus, nodes=1, pools=None):
    return RunConfig(policies=policies, cluster=ClusterConfig(gpus_per_node=gpus, nodes=nodes, pools=pools or {}))


def policy(tensor=1, pipeline=1, data=1, engine=1, replicas=1, trainable=True, pools=(None, None)):
    return PolicyConfig(
        model="m",
        trainable=trainable,
        actor_pool=pools[0],
        engine_pool=pools[1],
        parallel=ParallelConfig(tensor, pipeline, data),
        engine=EngineConfig(replicas=replicas, tensor=engine),
    )


def test_the_papers_assignment_fills_eight_gpus_of():
    config = compose_config("search_hetero_8xh100", [])
    placement = place(config, "cuda")
    used = [gpu for slots in placement.actors.values() for gpu in gpus_of(slots)]
    assert sorted(used) == [(0, device) for device in range(8)]


def test_colocated_engines_share_their_actors_gpus_of():
    placement = place(run_config({"a": policy(tensor=2, data=2, engine=2, replicas=2), "b": policy()}, 8), "cuda")
    assert gpus_of(placement.engines["a"]) == gpus_of(placement.actors["a"]) and len(placement.engines["a"]) == 2
    assert set(gpus_of(placement.actors["a"])).isdisjoint(gpus_of(placement.actors["b"]))


def test_three_policies_share_the_gpus_of_one():
    team = {name: policy(tensor=4, data=2, engine=2, replicas=4) for name in "abc"}
    placement = place(run_config(team, 8), "cuda")
    for name in "abc":
        assert gpus_of(placement.actors[name]) == gpus_of(placement.engines[name]) == [(0, gpu) for gpu in range(8)]
        assert placement.route(name, team[name], "cuda").shared
    assert all(policies == ["a", "b", "c"] * 2 for policies in placement.crowded().values())


def test_pools_for_actors_and_for_engines_are_disjoint():
    team = {name: policy(tensor=4, engine=2, replicas=2, pools=("train", "serve")) for name in "ab"}
    placement = place(run_config(team, 8, pools={"train": 4, "serve": 4}), "cuda")
    assert {gpu for slots in placement.actors.values() for _, gpu in gpus_of(slots)} == {0, 1, 2, 3}
    assert {gpu for slots in placement.engines.values() for _, gpu in gpus_of(slots)} == {4, 5, 6, 7}


@pytest.mark.parametrize(
    "layout, pools, chosen",
    [
        ({"tensor": 2, "data": 2, "engine": 2, "replicas": 2}, None, "ipc"),
        ({"tensor": 4, "engine": 1, "replicas": 4}, None, "ipc"),
        ({"tensor": 2, "engine": 2, "replicas": None}, {"train": 2, "serve": 6}, "nccl"),
        ({"tensor": 2, "pipeline": 2, "engine": 2, "replicas": None}, {"train": 4, "serve": 4}, "nccl_stages"),
        ({"pipeline": 4, "engine": 4}, None, "shm"),
        ({"tensor": 2, "engine": 4}, None, "shm"),
    ],
)
def test_the_transport_follows_from_the_placement(layout, pools, chosen):
    one = policy(**layout, pools=("train", "serve") if pools else (None, None))
    placement = place(run_config({"a": one}, sum(pools.values()) if pools else 4, pools=pools), "cuda")
    assert choose_transport("auto", placement.route("a", one, "cuda"), "a") is TRANSPORTS[chosen]


def test_stages_that_share_gpus_with_engines_on_several_nodes_are_refused_with_each_transports_reason():
    one = policy(tensor=4, pipeline=2, engine=4, replicas=2)
    route = place(run_config({"a": one}, 4, nodes=2), "cuda").route("a", one, "cuda")
    with pytest.raises(ConfigError, match="one pipeline stage only; nccl: NCCL has no two ranks.*shm: .* several nodes"):
        choose_transport("auto", route, "a")


@pytest.mark.parametrize("size, replicas", [(1, 6), (2, 3), (3, 2), (4, 1)])
def test_engines_fill_their_pool(size, replicas):
    team = {"a": policy(engine=size, replicas=None, pools=("train", "serve"))}
    placement = place(run_config(team, 8, pools={"train": 2, "serve": 6}), "cuda")
    assert len(placement.engines["a"]) == replicas and len(set(gpus_of(placement.engines["a"]))) == size * replicas


def test_engines_of_a_frozen_policy_go_where_the_least_is():
    placement = place(run_config({"a": policy(tensor=2, engine=2), "judge": policy(trainable=False)}, 4), "cuda")
    assert gpus_of(placement.engines["judge"]) == [(0, 2)]


def test_an_evaluation_has_engines_only():
    placement = place(run_config({"a": policy(tensor=2, engine=1, replicas=4)}, 4), "cuda", actors=False)
    assert placement.actors["a"] == [] and not placement.crowded() and len(placement.engines["a"]) == 4


def test_virtual_devices_of_a_cpu_are_placed_like_gpus():
    team = {"a": policy(tensor=2), "b": policy(tensor=2, data=2)}
    assert place(run_config(team, 4), "cpu") == place(run_config(team, 4), "cuda")
    assert place(run_config(team, 0), "cpu").crowded() == {}


@pytest.mark.parametrize(
    "policies, pools, message",
    [
        (
            {"a": policy(tensor=8)},
            {},
            r"policies.a.parallel = 'tensor 8 x pipeline 1 x data 1': does not fit into pool 'all' of 4 GPUs on nodes of 4",
        ),
        ({"a": policy(engine=8)}, {}, r"policies.a.engine.replicas = '1 of tensor 8': does not fit into pool 'all'"),
        ({"a": policy()}, {"train": 3, "serve": 2}, r"3 \(train\) \+ 2 \(serve\) = 5 GPUs, the allocation has 1 x 4 = 4"),
        ({"a": policy()}, {"train": 2, "serve": 2}, r"policies.a.actor_pool: must name a pool.*train, serve"),
        ({"a": policy(pools=("tarin", None))}, {}, r"policies.a.actor_pool = .*tarin.*: names no pool; choose one of: all"),
        ({"a": policy()}, {"train": 0}, r"cluster.pools.train = 0: a pool has at least one GPU"),
    ],
)
def test_what_cannot_be_placed_is_refused(policies, pools, message):
    with pytest.raises(ConfigError, match=message):
        place(run_config(policies, 4, pools=pools), "cuda")


layouts = st.builds(
    policy,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2]),
    engine=st.sampled_from([1, 2]),
    replicas=st.integers(1, 3),
    trainable=st.booleans(),
)


@given(policies=st.lists(layouts, min_size=1, max_size=4), per_node=st.sampled_from([4, 8]), nodes=st.integers(1, 4))
def test_a_group_has_distinct_gpus_of_one_node_and_nobody_shares_before_all_are_taken(policies, per_node, nodes):
    config = run_config({str(index): each for index, each in enumerate(policies)}, per_node, nodes)
    try:
        placement = place(config, "cuda")
    except ConfigError as refused:
        assert "does not fit" in str(refused)
        return
    for name, each in config.policies.items():
        ranks, engines = placement.actors[name], placement.engines[name]
        used = gpus_of(ranks)
        assert len(set(used)) == len(used) == (each.parallel.world_size if each.trainable else 0)
        for start in range(0, len(ranks), each.parallel.tensor):
            assert len({slot.node for slot in ranks[start : start + each.parallel.tensor]}) == 1
        assert all(len(set(slot.devices)) == each.engine.tensor for slot in engines)
        assert len(set(gpus_of(engines))) == len(gpus_of(engines))
        assert all(0 <= node < nodes and 0 <= gpu < per_node for node, gpu in [*used, *gpus_of(engines)])
    for of_role in (placement.actors, placement.engines):
        taken = Counter(gpu for slots in of_role.values() for gpu in gpus_of(slots))
        largest = max((slot_count(each, of_role is placement.actors) for each in policies), default=1)
        if taken and max(taken.values()) > 1:  # the last group found no free GPUs in a row
            assert per_node * nodes - len(taken) < largest * 2


def slot_count(each, actors):
    return each.parallel.world_size if actors else each.engine.tensor
