"""CPUs: gloo, Megatron's local layers, vLLM's CPU kernels."""

from typing import Any

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.devices.base import Device

BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes: short prompts share prefixes
PREFILL_TOKENS = 2048  # of one engine step, unless the model's length asks for more


class Cpu(Device):
    """A laptop, or a node without GPUs."""

    name = "cpu"
    collectives = "gloo"
    accelerated = False
    placed = False
    sleeps = False
    forks = True

    def activate(self, rank: int) -> None:
        from checkpoints_conv.megatron import cpu

        cpu.install()

    def environment(self, devices: tuple[int, ...], threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TORCHDYNAMO_DISABLE": "1"}

    def engine_environment(self, threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def engine_arguments(self, engine: EngineConfig, deterministic: bool, sleep: bool) -> dict[str, Any]:
        """Prompts are computed whole: vLLM 0.32 cannot rewind a CPU random stream after a partial prefill, so chunked
        prefill and per-request seeds exclude each other here."""
        return {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(engine.max_model_len, engine.max_num_seqs, PREFILL_TOKENS),
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": engine.kv_cache_mib << 20,
        }

    def cache_bytes(self, engine: EngineConfig, weights: int) -> int:
        return engine.kv_cache_mib << 20
