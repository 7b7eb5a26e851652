"""NVIDIA GPUs: NCCL, Transformer Engine, vLLM's CUDA kernels.  Written to the libraries' documentation, untested here."""

from typing import Any

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.devices.base import Device

PREFILL_TOKENS = 16384  # of one engine step, vLLM's own choice for its offline `LLM`: `LLMEngine` alone takes 2,048


class Cuda(Device):
    """The GPUs of an allocation."""

    name = "cuda"
    collectives = "nccl"
    accelerated = True
    placed = True
    sleeps = True
    forks = False

    def activate(self, rank: int) -> None:
        import torch

        torch.cuda.set_device(rank % torch.cuda.device_count())

    def environment(self, devices: tuple[int, ...], threads: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        }

    def engine_environment(self, threads: int) -> dict[str, str]:
        return {}

    def engine_arguments(self, engine: EngineConfig, deterministic: bool, sleep: bool) -> dict[str, Any]:
        return {
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": max(PREFILL_TOKENS, engine.max_num_seqs),
            "enable_sleep_mode": sleep,
            "disable_custom_all_reduce": deterministic,
            "moe_backend": "triton",  # keeps experts as they are loaded, so that updates in place and digests of them are right
        }

    def cache_bytes(self, engine: EngineConfig, weights: int) -> int:
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory * engine.gpu_memory_utilization) - weights
