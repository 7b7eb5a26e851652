"""Which GPUs each actor rank and each engine gets; pure arithmetic, done before anything starts.

The allocation is cut into named pools (`cluster.pools`; one of all GPUs unless it says otherwise), and a policy says in
which of them its actor and its engines live.  Within a pool a group of processes goes where the fewest of its kind are, so
that policies have GPUs of their own while there are enough, and share them where there are not.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import ParallelConfig, PolicyConfig, RunConfig
from megatron_drmas.devices import DEVICES
from megatron_drmas.weight_sync.transport import Route

WHOLE = "all"  # the pool where none is named


@dataclass(frozen=True)
class Slot:
    """Where a process runs: a node of the allocation and GPUs of that node (none on a CPU)."""

    node: int
    devices: tuple[int, ...]

    @property
    def gpus(self) -> tuple[tuple[int, int], ...]:
        """(node, device) of each."""
        return tuple((self.node, device) for device in self.devices)


@dataclass
class Placement:
    """Slots by policy: one per actor rank, one per engine replica."""

    actors: dict[str, list[Slot]] = field(default_factory=dict)
    engines: dict[str, list[Slot]] = field(default_factory=dict)

    def nodes(self, policy: str) -> int:
        """Number of nodes that hold a policy's processes."""
        return len({slot.node for slot in self.actors[policy] + self.engines[policy]})

    def route(self, name: str, policy: PolicyConfig, device: str) -> Route:
        """Between which processes a policy's weights travel."""
        engines, actor = set(gpus_of(self.engines[name])), self.actors[name]
        sending = {gpu for rank in sending_ranks(policy.parallel) for gpu in gpus_of(actor[rank : rank + 1])}
        return Route(
            device,
            shared=bool(engines) and engines <= set(gpus_of(actor)),
            pipeline=policy.parallel.pipeline,
            nodes=self.nodes(name),
            meets=bool(engines & sending),
        )

    def gpus_of_both(self) -> set[tuple[int, int]]:
        """(node, device) of the GPUs that an actor and an engine share, whosever they are."""
        actors, engines = (
            {gpu for slots in of_role.values() for gpu in gpus_of(slots)} for of_role in (self.actors, self.engines)
        )
        return actors & engines

    def crowded(self) -> dict[tuple[int, int], list[str]]:
        """The GPUs that several residents share, the actor and the engines of a policy being one each: GPU -> their policies."""
        residents: dict[tuple[int, int], list[str]] = {}
        for of_role in (self.actors, self.engines):
            for policy, slots in of_role.items():
                for gpu in dict.fromkeys(gpus_of(slots)):
                    residents.setdefault(gpu, []).append(policy)
        return {gpu: policies for gpu, policies in sorted(residents.items()) if len(policies) > 1}


def sending_ranks(parallel: ParallelConfig) -> list[int]:
    """Of each pipeline stage the rank that sends its weights: tensor rank 0 of data rank 0, in Megatron's order."""
    return [stage * parallel.tensor * parallel.data for stage in range(parallel.pipeline)]


def gpus_of(slots: Iterable[Slot]) -> list[tuple[int, int]]:
    """(node, device) of every GPU of slots, in their order."""
    return [gpu for slot in slots for gpu in slot.gpus]


def resolve_device(config: RunConfig) -> str:
    """cpu or cuda; `auto` takes the GPUs where the configuration counts on any."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if config.cluster.gpus_per_node else "cpu"


def place(config: RunConfig, device: str, actors: bool = True) -> Placement:
    """Lay the policies over the pools.

    Ranks are placed in Megatron's order (tensor fastest), and a tensor-parallel group is within a node.  A policy's
    engines go to the GPUs of its own actor where those are in the engines' pool and no busier than others.

    Args:
        config: the run.
        device: cpu | cuda; on CPUs with cluster.gpus_per_node=0 every process is placed on node 0 without devices, with
            more on as many virtual devices.
        actors: place them too; an evaluation has engines only.

    Raises:
        ConfigError: a pool is unknown, too large or too small (with the arithmetic), or a group does not fit within a node.
    """
    placement = Placement()
    if not DEVICES[device].placed and not config.cluster.gpus_per_node:
        if config.cluster.nodes > 1:
            problem = "on CPUs every process is on one node, unless virtual GPUs place them"
            remedy = "use one node, or say how many a node has: cluster.device=cpu cluster.gpus_per_node=2"
            raise ConfigError("cluster.nodes", config.cluster.nodes, problem, remedy)
        for name, policy in config.policies.items():
            placement.actors[name] = [Slot(0, ())] * (policy.parallel.world_size if actors and policy.trainable else 0)
            placement.engines[name] = [Slot(0, ())] * (policy.engine.replicas or 1)
        return placement
    if not config.cluster.gpus_per_node:
        problem = f"cluster.device={device} needs GPUs"
        raise ConfigError("cluster.gpus_per_node", 0, problem, "set it to the GPUs of each node, or use cluster.device=cpu")
    per_node, pools = config.cluster.gpus_per_node, _pools(config)
    ranks, engines = Counter[int](), Counter[int]()
    for name, policy in config.policies.items():
        gpus: list[int] = []
        if actors and policy.trainable:
            pool = _pool_of(name, "actor_pool", policy.actor_pool, pools)
            gpus = _take(pools[pool], policy.parallel.tensor, policy.parallel.world_size, per_node, ranks, ranks)
            if not gpus:
                raise _too_small(f"policies.{name}.parallel", _layout(policy), pool, pools, per_node)
            ranks.update(gpus)
        placement.actors[name] = [Slot(gpu // per_node, (gpu % per_node,)) for gpu in gpus]
    for name, policy in config.policies.items():
        pool = _pool_of(name, "engine_pool", policy.engine_pool, pools)
        own = [slot.node * per_node + slot.devices[0] for slot in placement.actors[name]]
        size, placement.engines[name] = policy.engine.tensor, []
        replicas = policy.engine.replicas or _fitting(pools[pool], size, per_node) or 1
        if replicas * size > len(pools[pool]):
            raise _too_small(f"policies.{name}.engine.replicas", f"{replicas} of tensor {size}", pool, pools, per_node)
        for _ in range(replicas):
            taken = {number * per_node + gpu for number, gpu in gpus_of(placement.engines[name])}
            gpus = _take([gpu for gpu in pools[pool] if gpu not in taken], size, size, per_node, engines, ranks, own)
            if not gpus:
                raise _too_small(f"policies.{name}.engine.tensor", f"{size}", pool, pools, per_node)
            engines.update(gpus)
            placement.engines[name].append(Slot(gpus[0] // per_node, tuple(gpu % per_node for gpu in gpus)))
    return placement


def _pools(config: RunConfig) -> dict[str, range]:
    """The GPUs of each pool, numbered over the whole allocation."""
    total = config.cluster.gpus_per_node * config.cluster.nodes
    if not config.cluster.pools:
        return {WHOLE: range(total)}
    pools, start = {}, 0
    for name, size in config.cluster.pools.items():
        if size < 1:
            raise ConfigError(f"cluster.pools.{name}", size, "a pool has at least one GPU", "give it some, or leave it out")
        pools[name] = range(start, start + size)
        start += size
    if start > total:
        sums = " + ".join(f"{len(gpus)} ({name})" for name, gpus in pools.items())
        arithmetic = (
            f"{sums} = {start} GPUs, the allocation has {config.cluster.nodes} x {config.cluster.gpus_per_node} = {total}"
        )
        raise ConfigError("cluster.pools", dict(config.cluster.pools), arithmetic, "make pools smaller, or ask for more GPUs")
    return pools


def _pool_of(policy: str, key: str, wanted: str | None, pools: dict[str, range]) -> str:
    if wanted is None and len(pools) == 1:
        return next(iter(pools))
    if wanted not in pools:
        problem = "names no pool" if wanted is not None else "must name a pool, since there are several"
        raise ConfigError(f"policies.{policy}.{key}", wanted, problem, f"choose one of: {', '.join(pools)}")
    return wanted


def _take(
    pool: Sequence[int],
    group: int,
    count: int,
    per_node: int,
    load: Counter[int],
    then: Counter[int],
    preferred: Sequence[int] = (),
) -> list[int]:
    """`count` GPUs of a pool, in groups within a node: those with the least `load`, then the least `then`.

    Args:
        preferred: win among equals, before the first GPUs of the pool do.

    Returns:
        Nothing if there are too few.
    """
    free = set(pool)
    best: tuple[tuple, list[int]] | None = None
    for start in pool:
        found: list[int] = []
        gpu = start
        while len(found) < count and gpu <= pool[-1]:
            members = range(gpu, gpu + group)
            if members[0] // per_node == members[-1] // per_node and free.issuperset(members):
                found += members
                gpu += group
            else:
                gpu += 1
        if len(found) < count:
            continue
        busiest, away = max(load[gpu] for gpu in found), sum(gpu not in preferred for gpu in found)
        others = sum(then[gpu] for gpu in found if gpu not in preferred)
        rank = (busiest, sum(load[gpu] for gpu in found), others, away, start)
        if best is None or rank < best[0]:
            best = rank, found
    return best[1] if best else []


def _fitting(pool: range, size: int, per_node: int) -> int:
    """How many groups of GPUs a pool holds, each within a node."""
    return sum(count // size for count in Counter(gpu // per_node for gpu in pool).values())


def _layout(policy: PolicyConfig) -> str:
    parallel = policy.parallel
    return f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data}"


def _too_small(key: str, value: str, pool: str, pools: dict[str, range], per_node: int) -> ConfigError:
    problem = f"does not fit into pool {pool!r} of {len(pools[pool])} GPUs on nodes of {per_node}"
    return ConfigError(key, value, problem, "use a smaller layout, or a larger pool")
