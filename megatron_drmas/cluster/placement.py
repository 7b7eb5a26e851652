"""Which GPUs each actor rank and each engine gets; pure arithmetic, done before anything starts."""

from dataclasses import dataclass, field

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import PolicyConfig, RunConfig
from megatron_drmas.devices import DEVICES


@dataclass(frozen=True)
class Slot:
    """Where a process runs: a node of the allocation and GPUs of that node (none on a CPU)."""

    node: int
    devices: tuple[int, ...]


@dataclass
class Placement:
    """Slots by policy: one per actor rank, one per engine replica."""

    actors: dict[str, list[Slot]] = field(default_factory=dict)
    engines: dict[str, list[Slot]] = field(default_factory=dict)


def resolve_device(config: RunConfig) -> str:
    """cpu or cuda; `auto` takes the GPUs where the configuration counts on any."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if config.cluster.gpus_per_node else "cpu"


def place(config: RunConfig, device: str) -> Placement:
    """Lay the policies over the allocation, each on GPUs of its own.

    Ranks are placed in Megatron's order (tensor fastest), so a tensor-parallel group lies within a node.  With
    `cluster.colocate` a policy's engines share the GPUs of its actor and take turns with it; otherwise, and for frozen
    policies, engines have their own.

    Args:
        config: the run.
        device: cpu | cuda; on CPUs every process is placed on node 0 without devices.

    Raises:
        ConfigError: the allocation is too small (with the arithmetic), or a group does not fit within a node.
    """
    placement = Placement()
    if not DEVICES[device].placed:
        for name, policy in config.policies.items():
            placement.actors[name] = [Slot(0, ())] * (policy.parallel.world_size if policy.trainable else 0)
            placement.engines[name] = [Slot(0, ())] * policy.engine.replicas
        return placement
    per_node, total = config.cluster.gpus_per_node, config.cluster.gpus_per_node * config.cluster.nodes
    needs = {name: _gpus(name, policy, config) for name, policy in config.policies.items()}
    if sum(needs.values()) > total:
        sums = " + ".join(f"{count} ({name})" for name, count in needs.items())
        raise ConfigError(
            "cluster.gpus_per_node",
            per_node,
            f"the policies need {sums} = {sum(needs.values())} GPUs, the allocation has "
            f"{config.cluster.nodes} x {per_node} = {total}",
            "ask for more GPUs or use smaller layouts",
        )
    pool = _Pool(per_node, total)
    for name, policy in config.policies.items():
        world = policy.parallel.world_size if policy.trainable else 0
        actors = [
            gpu
            for _ in range(world // policy.parallel.tensor)
            for gpu in pool.take(policy.parallel.tensor, f"policies.{name}.parallel.tensor")
        ]
        placement.actors[name] = [Slot(gpu // per_node, (gpu % per_node,)) for gpu in actors]
        shared = actors if config.cluster.colocate and policy.trainable else None
        size = policy.engine.tensor
        placement.engines[name] = []
        for replica in range(policy.engine.replicas):
            gpus = (
                shared[replica * size : (replica + 1) * size]
                if shared is not None
                else pool.take(size, f"policies.{name}.engine.tensor")
            )
            if len({gpu // per_node for gpu in gpus}) > 1:
                raise ConfigError(
                    f"policies.{name}.engine.tensor",
                    size,
                    f"replica {replica} would span nodes",
                    "choose a size that divides the actor's GPUs on a node",
                )
            placement.engines[name].append(Slot(gpus[0] // per_node, tuple(gpu % per_node for gpu in gpus)))
    return placement


def _gpus(name: str, policy: PolicyConfig, config: RunConfig) -> int:
    engines = policy.engine.replicas * policy.engine.tensor
    if not policy.trainable:
        return engines
    world = policy.parallel.world_size
    if not config.cluster.colocate:
        return world + engines
    if engines > world:
        raise ConfigError(
            f"policies.{name}.engine.replicas",
            policy.engine.replicas,
            f"{policy.engine.replicas} replicas x {policy.engine.tensor} GPUs do not fit on the {world} GPUs of the actor",
            "use fewer replicas, or cluster.colocate=false",
        )
    return world


class _Pool:
    """Hands out consecutive GPUs, never across a node's border."""

    def __init__(self, per_node: int, total: int):
        self._per_node, self._total, self._next = per_node, total, 0

    def take(self, count: int, key: str) -> list[int]:
        if count > self._per_node:
            raise ConfigError(key, count, f"a group must fit into a node, which has {self._per_node} GPUs", "use a smaller size")
        if self._next // self._per_node != (self._next + count - 1) // self._per_node:
            self._next = (self._next // self._per_node + 1) * self._per_node
        taken = list(range(self._next, self._next + count))
        self._next += count
        if self._next > self._total:
            raise ConfigError(
                key,
                count,
                f"groups that fit into nodes of {self._per_node} GPUs need more than {self._total} GPUs",
                "use sizes that fill nodes",
            )
        return taken
