"""What is left to the machine: no core idle, none taken twice, and memory that suffices."""

import joblib
import psutil
import pytest

from checkpoints_conv.families.spec import ModelSpec
from megatron_drmas.cluster import machine
from megatron_drmas.cluster.machine import CPU_SHARE, GPU_SHARE, Actor, fit_to_machine, object_store_bytes, usable_memory
from megatron_drmas.cluster.ray_start import OBJECT_STORE_BYTES
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config

SPEC = ModelSpec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, True, False, False, 1e4, None, 1e-5, 8192)


def config_with(monkeypatch, cores: int, gib: float, *overrides: str):
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores)
    for name in ("SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "usable_memory", lambda: int(gib * 2**30))
    monkeypatch.setattr(machine, "model_spec", lambda policy: SPEC)
    open_ = [f"policies.{name}.micro_batch_tokens=null" for name in ("qwen2", "llama")]
    return fit_to_machine(compose_config("search_hetero", [*open_, *overrides]))


@pytest.mark.parametrize("cores", [1, 2, 4, 7, 64])
def test_processes_that_compute_together_share_the_cores(monkeypatch, cores):
    """search_hetero has four actor ranks and two engines."""
    config, text = config_with(monkeypatch, cores, 100)
    assert config.cluster.actor_threads == max(1, cores // 4) and config.cluster.engine_threads == max(1, cores // 2)
    assert f"{cores} CPU cores" in text and f"{config.cluster.actor_threads} for each of 4 actor ranks" in text


def test_a_single_rank_takes_every_core(monkeypatch):
    one = ["policies.qwen2.parallel.tensor=1", "policies.llama.trainable=false", "policies.llama.engine.replicas=2"]
    config, _ = config_with(monkeypatch, 6, 100, *one)
    assert (config.cluster.actor_threads, config.cluster.engine_threads) == (6, 2)


def test_a_node_s_cores_are_shared_by_its_gpus(monkeypatch):
    config, _ = config_with(monkeypatch, 24, 100, "cluster.gpus_per_node=8", "cluster.device=cuda", "cluster.gpu_memory_gib=80")
    assert (config.cluster.actor_threads, config.cluster.engine_threads) == (3, 3)


def test_slurm_s_share_of_the_node_counts(monkeypatch):
    """Also where Slurm binds nothing, so that affinity shows every core."""
    monkeypatch.setattr(joblib, "cpu_count", lambda: 64)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    assert machine.usable_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    assert machine.usable_cores() == 64


@pytest.mark.parametrize("given_, threads", [("3", 3), ("5,2", 5), (" ", 8)])
def test_omp_num_threads_goes_first_and_is_named(monkeypatch, given_, threads):
    fitted = config_with(monkeypatch, 16, 100)[0]
    monkeypatch.setenv("OMP_NUM_THREADS", given_)
    fitted.cluster.actor_threads, fitted.cluster.engine_threads = 1, None
    config, text = fit_to_machine(fitted)
    assert (config.cluster.actor_threads, config.cluster.engine_threads) == (1, threads)
    assert ("OMP_NUM_THREADS" in text) == bool(given_.strip())


@pytest.mark.parametrize("given_", ["all", "0", "-1", "2.5"])
def test_omp_num_threads_that_is_no_number_is_refused(monkeypatch, given_):
    monkeypatch.setenv("OMP_NUM_THREADS", given_)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        machine.asked_threads()


def test_what_is_given_stays(monkeypatch):
    given_ = ["cluster.actor_threads=3", "policies.llama.recompute=false", "policies.qwen2.recompute=true"]
    tokens = [f"policies.{name}.micro_batch_tokens=4096" for name in ("qwen2", "llama")]
    config, text = config_with(monkeypatch, 16, 0.01, *given_, *tokens)
    assert config.cluster.actor_threads == 3 and config.cluster.engine_threads == 8
    assert (config.policies["llama"].recompute, config.policies["qwen2"].recompute) == (False, True)
    assert {policy.micro_batch_tokens for policy in config.policies.values()} == {4096}
    assert "activations" not in text


@pytest.mark.parametrize("device, gibs", [("cpu", (400, 60, 25, 1)), ("cuda", (80, 16, 5, 0.1))])
def test_the_most_that_memory_holds_is_kept(monkeypatch, device, gibs):
    """Less memory means smaller micro-batches, then activations computed again; what is chosen fits where anything does."""
    taken = []
    for gib in gibs:
        gpus = [f"cluster.gpu_memory_gib={gib}", "cluster.gpus_per_node=8"] if device == "cuda" else []
        config, text = config_with(monkeypatch, 2, gib, f"cluster.device={device}", *gpus)
        policy = config.policies["llama"]
        assert str(policy.micro_batch_tokens) in text and ("computed again" if policy.recompute else "kept") in text
        actors = {name: Actor(SPEC, config.precision.mode, device, config.longest_row(name)) for name in config.policies}
        if device == "cuda":
            needed = max(rank.total for rank in actors["llama"].rank_bytes(policy))
        else:
            needed = sum(actor.all_bytes(config.policies[name]) for name, actor in actors.items())
        fits = needed <= (GPU_SHARE if device == "cuda" else CPU_SHARE) * gib * 2**30
        assert fits or (policy.recompute and gib == gibs[-1])
        taken.append((not policy.recompute, policy.micro_batch_tokens))
    assert taken == sorted(taken, reverse=True) and taken[0] == (True, 16384) and not taken[-1][0] and len(set(taken)) > 2


def test_a_micro_batch_holds_the_longest_row(monkeypatch):
    config, _ = config_with(monkeypatch, 2, 0.5, "rollout.max_prompt_tokens=5000")
    assert config.policies["llama"].micro_batch_tokens == config.longest_row("llama") > 5000


@pytest.mark.parametrize(
    "groups, limits, expected",
    [
        ("0::/job", {"sys/fs/cgroup/job/memory.max": "300", "sys/fs/cgroup/memory.max": "200"}, 200),
        ("0::/job/step", {"sys/fs/cgroup/job/memory.max": "300", "sys/fs/cgroup/job/step/memory.max": "max"}, 300),
        ("4:cpu:/job\n3:memory:/job", {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "400"}, 400),
        ("3:memory:/outside", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "500"}, 500),
        ("3:memory:/", {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        (None, {}, None),
    ],
)
def test_a_container_s_limit_binds(tmp_path, groups, limits, expected):
    """cgroup v2 and v1, and limits of the groups above."""
    for path, text in ({"proc/self/cgroup": groups} if groups else {}).items() | limits.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert usable_memory(tmp_path) == (expected or psutil.virtual_memory().total)


def test_the_object_store_follows_the_batches_within_bounds(monkeypatch):
    sizes = []
    for gib, questions in ((0.5, 10_000), (64, 8), (64, 1000), (64, 10**7)):
        monkeypatch.setattr(machine, "usable_memory", lambda gib=gib: int(gib * 2**30))
        sizes.append(object_store_bytes(compose_config("search_hetero", [f"questions_per_step={questions}"])))
    assert sizes == sorted(sizes) and sizes[0] == sizes[1] == OBJECT_STORE_BYTES < sizes[2] < sizes[3] == 8 * 2**30
