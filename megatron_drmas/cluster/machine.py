"""What a configuration leaves to the machine: CPU threads, the size of micro-batches, what is computed again, Ray's store."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.hf_folder import read_config
from megatron_drmas.cluster.memory import GIB, ActorShape, Bytes, Packed, checkpoint_bytes, context_bytes, update_bytes
from megatron_drmas.cluster.placement import Slot, place, resolve_device
from megatron_drmas.cluster.ray_start import OBJECT_STORE_BYTES
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import PolicyConfig, RunConfig
from megatron_drmas.devices import DEVICES

MAX_THREADS = 8  # of a process whose model is on a GPU
CPU_SHARE = 0.5  # of the machine's memory, for the actors: engines, page cache and the driver need the rest
GPU_SHARE = 0.9  # of a GPU's, for all that is on it: what fragments take, and an estimate's error
TOKENS = (16384, 8192, 4096, 2048, 1024)  # of a micro-batch, where memory decides; more are no faster
STORE_SHARE = 8  # Ray's objects take at most this fraction of the memory; what does not fit goes to its folder
TOKEN_BYTES = 8 + 4 * 4  # of a batch's token: its id, and the float32 columns of a response


def fit_to_machine(config: RunConfig) -> tuple[RunConfig, str]:
    """Replace each null of cluster.actor_threads, cluster.engine_threads, policies.X.recompute and .micro_batch_tokens.

    Actors of all policies compute at the same time, and so do all engines; actors and engines take turns, but for
    algorithm.staleness.  On CPUs a group shares the cores that this process may use; with GPUs each node's cores are shared by
    as many processes as it has GPUs.
    OMP_NUM_THREADS goes before both.  Activations are kept, and micro-batches as large, as memory allows: half of the
    machine's for all actors, or 0.9 of a GPU for each; smaller micro-batches come before computing again.  Nothing depends
    on what else runs, so that a run that is resumed on the same machine computes the same bits.

    Returns:
        The configuration, and one line that says what was chosen and from what.

    Raises:
        ConfigError: OMP_NUM_THREADS is no number.
    """
    cores, device = usable_cores(), DEVICES[resolve_device(config)]
    placement = place(config, resolve_device(config))
    actors, engines = _on_fullest_node(placement.actors.values()), _on_fullest_node(placement.engines.values())
    overlap, asked = config.algorithm.staleness > 0, asked_threads()

    def threads(processes: int) -> int:
        if asked is not None:
            return asked
        if device.placed:
            return max(1, min(MAX_THREADS, cores // config.cluster.gpus_per_node))
        return max(1, cores // max(1, processes))

    cluster = replace(
        config.cluster,
        actor_threads=config.cluster.actor_threads or threads(actors + (overlap and engines)),
        engine_threads=config.cluster.engine_threads or threads(engines + (overlap and actors)),
    )
    words = [
        f"{cluster.actor_threads} for each of {actors} actor ranks",
        f"{cluster.engine_threads} for each of {engines} engines",
    ]
    said = f" (OMP_NUM_THREADS={asked} in the environment)" if asked is not None else ""
    policies, chosen = fit_policies(config)
    text = "; ".join([f"{cores} CPU cores; threads: {', '.join(words)}{said}", *chosen])
    return replace(config, cluster=cluster, policies=policies), text


@dataclass(frozen=True)
class Actor:
    """What the bytes of a policy's actor follow from, besides its settings."""

    spec: ModelSpec
    precision: str  # mode
    device: str
    longest: int  # tokens of a row, at most
    reference: bool = False

    def rank_bytes(self, policy: PolicyConfig) -> list[Bytes]:
        """What a rank of each pipeline stage needs at the peak of an update; micro_batch_tokens must be set."""
        assert policy.micro_batch_tokens is not None, "chosen by `fit_actors`"
        shape = ActorShape.of(self.spec, policy, self.precision, self.device, self.reference)
        shared = policy.shares_beginnings(DEVICES[self.device].accelerated)
        packed = Packed.largest(policy.micro_batch_tokens, self.longest, shared)
        context = Bytes(context=context_bytes(self.device, policy.parallel.world_size > 1))
        return [update_bytes(shape, packed, stage) + context for stage in range(policy.parallel.pipeline)]

    def all_bytes(self, policy: PolicyConfig) -> int:
        """What all ranks need together, with the copy that a checkpoint is written from while the next step runs."""
        ranks = policy.parallel.tensor * policy.parallel.data
        shape = ActorShape.of(self.spec, policy, self.precision, self.device)
        return ranks * sum(rank.total for rank in self.rank_bytes(policy)) + checkpoint_bytes(shape)


def fit_policies(config: RunConfig) -> tuple[dict[str, PolicyConfig], list[str]]:
    """The policies with their micro_batch_tokens and recompute, and what was chosen for which.

    A frozen policy, which has no actor, gets the largest and false.
    """
    device, mode = resolve_device(config), config.precision.mode
    policies = dict(config.policies)
    longest = {name: config.longest_row(name) for name in policies}
    for name, policy in policies.items():
        if not policy.trainable:
            policies |= next(_choices({name: policy}, longest))
    trained = {name: policy for name, policy in policies.items() if policy.trainable}
    if not any(_is_open(policy) for policy in trained.values()):
        return policies, []
    reference = bool(config.algorithm.loss.kl_coef)
    actors = {name: Actor(model_spec(policy), mode, device, longest[name], reference) for name, policy in trained.items()}
    chosen, texts = fit_actors(trained, actors, gpu_memory(config.cluster.gpu_memory_gib) if DEVICES[device].placed else None)
    return policies | chosen, texts


def fit_actors(
    policies: dict[str, PolicyConfig], actors: dict[str, Actor], gpu: int | None
) -> tuple[dict[str, PolicyConfig], list[str]]:
    """Actors that compute at the same time, with what they leave open.

    Args:
        gpu: bytes of a GPU; None where the actors share the machine's memory, or a GPU's is not known.
    """
    placed = any(DEVICES[actor.device].placed for actor in actors.values())
    longest = {name: actor.longest for name, actor in actors.items()}
    groups = [[name] for name, policy in policies.items() if _is_open(policy)] if placed else [list(policies)]
    memory = gpu if placed else usable_memory()
    limit = None if memory is None else int((GPU_SHARE if placed else CPU_SHARE) * memory)
    texts = []
    for names in groups:
        for choice in _choices({name: policies[name] for name in names}, longest):
            if placed:
                needed = max(rank.total for name in names for rank in actors[name].rank_bytes(choice[name]))
            else:
                needed = sum(actors[name].all_bytes(choice[name]) for name in names)
            if limit is None or needed <= limit:
                break  # where nothing fits, the last is taken: a layout that is too large is for `plan` to refuse
        policies = policies | choice
        words = dict.fromkeys(
            f"up to {policy.micro_batch_tokens} tokens, activations {'computed again' if policy.recompute else 'kept'}"
            for policy in choice.values()
        )
        if memory is None or limit is None:
            room = "the GPU's memory is not known"
        else:
            room = f"of {memory / GIB:.1f} GiB {'on the GPU' if placed else 'in all'}, of which they may have {limit / GIB:.1f}"
        texts.append(f"micro-batches of {', '.join(names)}: {' / '.join(words)} ({needed / GIB:.1f} GiB {room})")
    return policies, texts


def _is_open(policy: PolicyConfig) -> bool:
    return policy.recompute is None or policy.micro_batch_tokens is None


def _choices(policies: dict[str, PolicyConfig], longest: dict[str, int]) -> Iterator[dict[str, PolicyConfig]]:
    """The policies with all that is open set alike, from what is fastest to what takes least memory."""
    for recompute in (False, True):
        for tokens in TOKENS:
            yield {
                name: replace(
                    policy,
                    recompute=recompute if policy.recompute is None else policy.recompute,
                    micro_batch_tokens=policy.micro_batch_tokens or max(tokens, longest[name]),
                )
                for name, policy in policies.items()
            }


def model_spec(policy: PolicyConfig) -> ModelSpec:
    """The architecture of a policy's model folder."""
    found = read_config(policy.model)
    return family_of(found).model_spec(found)


def object_store_bytes(config: RunConfig) -> int:
    """Room for Ray's objects: two steps' batches, of the longest rows that every agent can have said.

    Weights do not pass through it; the shared-memory transport has segments of its own.  At least what Ray needs to work, at
    most an eighth of the machine's memory.
    """
    rows = config.questions_per_step * config.group_size * config.team.workflow.max_turns * len(config.team.agents)
    longest = max(map(config.longest_row, config.policies))
    wanted = 2 * rows * longest * TOKEN_BYTES
    return max(OBJECT_STORE_BYTES, min(wanted, usable_memory() // STORE_SHARE)) >> 20 << 20


def _on_fullest_node(slots: Iterable[Sequence[Slot]]) -> int:
    """How many processes the node has that has most of them."""
    return max(Counter(slot.node for of_policy in slots for slot in of_policy).values(), default=0)


def asked_threads() -> int | None:
    """The first number of OMP_NUM_THREADS, that of the outermost level; None where it is not set.

    Raises:
        ConfigError: it is no number above 0.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not given:
        return None
    first = given.split(",")[0].strip()
    if not first.isdigit() or not int(first):
        raise ConfigError("OMP_NUM_THREADS", given, "is not a number of threads", "set it to one, or unset it")
    return int(first)


def usable_cores() -> int:
    """CPU cores that this process and its children may use: affinity, a container's quota, and Slurm's share of the node."""
    from joblib import cpu_count  # affinity and quota

    return min(cpu_count(), int(os.environ.get("SLURM_CPUS_ON_NODE", cpu_count())))


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process and its children may take, a container's or Slurm's limit included (cgroup v1 and v2).

    Args:
        root: where proc and sys are mounted.
    """
    memory = psutil.virtual_memory().total
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, file = ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("sys/fs/cgroup", "memory.max")
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # a limit above binds too; inside a container only the last may be visible
            limit = root / mount / folder / file
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                memory = min(memory, int(text))
    return memory


def gpu_memory(gib: float | None = None) -> int | None:
    """Bytes of a GPU: those configured (`cluster.gpu_memory_gib`), or of this machine's smallest; None where it has none."""
    if gib is not None:
        return int(gib * GIB)
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if sizes and not done.returncode else None
