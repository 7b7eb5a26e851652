"""What is left to the machine: no core idle, none taken twice, and memory that suffices."""

from dataclasses import replace

import joblib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_conv.families.spec import ModelSpec
from megatron_drmas.cluster import machine
from megatron_drmas.cluster.machine import actor_bytes, checkpoint_bytes, fit_to_machine
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import ParallelConfig, PolicyConfig

SPEC = ModelSpec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, True, False, False, 1e4, None, 1e-5, 8192)


def config_with(monkeypatch, cores: int, gib: float, *overrides: str):
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores)
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    monkeypatch.setattr(machine, "usable_memory", lambda: int(gib * 2**30))
    monkeypatch.setattr(machine, "read_config", lambda folder: None)
    monkeypatch.setattr(machine, "family_of", lambda config: type("Family", (), {"model_spec": lambda config: SPEC}))
    return fit_to_machine(compose_config("search_hetero", list(overrides)))


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
    config, _ = config_with(monkeypatch, 24, 100, "cluster.gpus_per_node=8", "cluster.device=cuda")
    assert (config.cluster.actor_threads, config.cluster.engine_threads) == (3, 3)
    assert not any(policy.recompute for policy in config.policies.values())


def test_slurm_s_share_of_the_node_counts(monkeypatch):
    """Also where Slurm binds nothing, so that affinity shows every core."""
    monkeypatch.setattr(joblib, "cpu_count", lambda: 64)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    assert machine.usable_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    assert machine.usable_cores() == 64


def test_what_is_given_stays(monkeypatch):
    given_ = ["cluster.actor_threads=3", "policies.llama.recompute=false", "policies.qwen2.recompute=true"]
    config, text = config_with(monkeypatch, 16, 0.01, *given_)
    assert config.cluster.actor_threads == 3 and config.cluster.engine_threads == 8
    assert (config.policies["llama"].recompute, config.policies["qwen2"].recompute) == (False, True)
    assert "activations" not in text


def test_activations_are_kept_where_memory_holds_them(monkeypatch):
    for gib, recompute in ((200, False), (1, True)):
        config, text = config_with(monkeypatch, 2, gib)
        assert {policy.recompute for policy in config.policies.values()} == {recompute}
        assert ("are computed again" if recompute else "are kept") in text


@settings(max_examples=50)
@given(st.integers(1, 64), st.integers(1, 8))
def test_the_estimate_grows_with_tokens_and_replicas(thousands, data):
    policy = PolicyConfig(model="", micro_batch_tokens=1000 * thousands)
    smaller, larger = actor_bytes(SPEC, policy, "fp32"), actor_bytes(SPEC, replace(policy, micro_batch_tokens=128_000), "fp32")
    assert smaller < larger and actor_bytes(SPEC, policy, "bf16") < smaller
    assert actor_bytes(SPEC, replace(policy, parallel=ParallelConfig(data=data)), "fp32") == data * smaller


def test_the_copy_that_a_checkpoint_is_written_from_counts(monkeypatch):
    """SmolLM2-135M: 134.5 million parameters of 4 + 8 bytes in fp32, of 2 + 4 + 8 in bf16; two such policies."""
    assert checkpoint_bytes(SPEC, "fp32") == 12 * checkpoint_bytes(SPEC, "bf16") // 14 == pytest.approx(12 * 134.5e6, rel=1e-3)
    policies = compose_config("search_hetero", []).policies.values()
    needed = sum(actor_bytes(SPEC, policy, "fp32") + checkpoint_bytes(SPEC, "fp32") for policy in policies)
    for gib, recompute in ((2.01 * needed / 2**30, False), (1.99 * needed / 2**30, True)):
        config, _ = config_with(monkeypatch, 2, gib)
        assert {policy.recompute for policy in config.policies.values()} == {recompute}
