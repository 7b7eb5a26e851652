"""What a configuration leaves to the machine: CPU threads, and whether activations are kept or computed again."""

import os
from dataclasses import replace
from pathlib import Path

import psutil

from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.hf_folder import read_config
from megatron_drmas.actor.precision import DTYPES
from megatron_drmas.cluster.placement import resolve_device
from megatron_drmas.config.schema import PolicyConfig, RunConfig
from megatron_drmas.devices import DEVICES

MAX_THREADS = 8  # of a process whose model is on a GPU
MEMORY_SHARE = 0.5  # of the machine's, for the actors: engines, page cache and the driver need the rest
GRADIENT_BYTES = 4  # a parameter, in fp32
MOMENT_BYTES = 8  # Adam's two
MASTER_BYTES = 4  # and its fp32 copy where it is not fp32 itself


def fit_to_machine(config: RunConfig) -> tuple[RunConfig, str]:
    """Replace each null of cluster.actor_threads, cluster.engine_threads and policies.X.recompute.

    Actors of all policies compute at the same time, and so do all engines; actors and engines take turns.  On CPUs a group
    shares the cores that this process may use; with GPUs each node's cores are shared by as many processes as it has GPUs.
    A trainable policy's activations are kept if all actors then fit into half of the memory; with GPUs they are kept.  Nothing
    depends on what else runs, so that a run that is resumed on the same machine computes the same bits.

    Returns:
        The configuration, and one line that says what was chosen and from what.
    """
    cores, device = usable_cores(), DEVICES[resolve_device(config)]
    actors = sum(policy.parallel.world_size for policy in config.policies.values() if policy.trainable)
    engines = sum(policy.engine.replicas for policy in config.policies.values())

    def threads(processes: int) -> int:
        if device.placed:
            return max(1, min(MAX_THREADS, cores // config.cluster.gpus_per_node))
        return max(1, cores // max(1, processes))

    cluster = replace(
        config.cluster,
        actor_threads=config.cluster.actor_threads or threads(actors),
        engine_threads=config.cluster.engine_threads or threads(engines),
    )
    words = [
        f"{cluster.actor_threads} for each of {actors} actor ranks",
        f"{cluster.engine_threads} for each of {engines} engines",
    ]
    text = f"{cores} CPU cores; threads: {', '.join(words)}"
    policies = dict(config.policies)
    open_ = [name for name, policy in policies.items() if policy.recompute is None]
    if open_ and not device.accelerated:
        specs = {name: family_of(found).model_spec(found) for name in policies for found in [read_config(policies[name].model)]}
        needed = sum(
            actor_bytes(specs[name], policy, config.precision.mode) + checkpoint_bytes(specs[name], config.precision.mode)
            for name, policy in policies.items()
            if policy.trainable
        )
        memory = usable_memory()
        recompute = needed > MEMORY_SHARE * memory
        does = "are computed again in the backward pass" if recompute else "are kept"
        text += f"; activations {does} (to keep them, actors need {needed / 2**30:.1f} GiB, a checkpoint's copy included; "
        text += f"there are {memory / 2**30:.1f} GiB)"
    else:
        recompute = False
    for name in open_:
        policies[name] = replace(policies[name], recompute=recompute)
    return replace(config, cluster=cluster, policies=policies), text


def actor_bytes(spec: ModelSpec, policy: PolicyConfig, precision: str) -> int:
    """About what all ranks of a policy's actor need at once in an update that keeps its activations.

    Weights, gradients, optimizer and, for each token of a micro-batch, what a layer's backward pass needs: the inputs of norms,
    of linear layers and of attention, and both halves of the gated MLP.
    """
    size = DTYPES[precision].itemsize
    width = spec.ffn if not spec.experts else spec.experts_per_token * spec.expert_ffn
    state = (checkpoint_bytes(spec, precision) + _parameters(spec) * GRADIENT_BYTES) * policy.parallel.data
    elements = 10 * spec.hidden + 4 * (spec.q_size + 2 * spec.kv_size) + 5 * width
    return state + policy.parallel.data * policy.micro_batch_tokens * spec.layers * elements * size


def checkpoint_bytes(spec: ModelSpec, precision: str) -> int:
    """About what a policy's checkpoint holds: weights and optimizer.  Its ranks keep a copy of it, each of what it writes, from
    the moment of saving until that is on the disk, while the next step runs."""
    size = DTYPES[precision].itemsize
    return _parameters(spec) * (size + MOMENT_BYTES + (MASTER_BYTES if size < 4 else 0))


def _parameters(spec: ModelSpec) -> int:
    layer = spec.hidden * (2 * spec.q_size + 2 * spec.kv_size) + 3 * spec.hidden * (
        spec.expert_ffn * spec.experts if spec.experts else spec.ffn
    )
    return spec.layers * layer + spec.vocab * spec.hidden * (1 if spec.tied else 2)


def usable_cores() -> int:
    """CPU cores that this process and its children may use: affinity, a container's quota, and Slurm's share of the node."""
    from joblib import cpu_count  # affinity and quota

    return min(cpu_count(), int(os.environ.get("SLURM_CPUS_ON_NODE", cpu_count())))


def usable_memory() -> int:
    """Bytes of memory that this process and its children may take, a container's or Slurm's limit included (cgroup v2)."""
    memory = psutil.virtual_memory().total
    group = Path("/proc/self/cgroup")
    path = next((line[3:] for line in group.read_text().splitlines() if line.startswith("0::")), "/") if group.exists() else "/"
    for folder in (Path("/sys/fs/cgroup") / path.lstrip("/"), Path("/sys/fs/cgroup")):
        limit = folder / "memory.max"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            memory = min(memory, int(text))
    return memory
