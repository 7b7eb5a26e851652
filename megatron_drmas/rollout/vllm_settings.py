"""How an engine's settings become vLLM's arguments."""

import os
from typing import TYPE_CHECKING

from megatron_drmas.rollout.requests import EngineSettings

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

CPU_BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes: short prompts share prefixes
PREFILL_TOKENS = 2048  # of one step, unless the model's length asks for more


def check_environment(settings: EngineSettings) -> None:
    """Variables that vLLM and OpenMP read once, at import.

    Raises:
        ValueError: names the variable, its value and the one needed.
    """
    needed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if settings.device == "cpu":
        needed |= {"OMP_NUM_THREADS": str(settings.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in needed.items():
        if os.environ.get(name) != value:
            raise ValueError(
                f"engine {settings.name!r}: environment variable {name} is {os.environ.get(name)!r}; "
                f"set it to {value!r} before the process starts"
            )


def engine_args(settings: EngineSettings) -> "EngineArgs":
    """Arguments of a `LLMEngine` that takes token ids and gives processed log-probs.

    On CPUs prompts are computed whole: vLLM 0.32 cannot rewind a CPU random stream after a partial prefill, so chunked
    prefill and per-request seeds exclude each other there.  Asynchronous scheduling is off so that every token belongs
    to the weight version that was in force when it was sampled.  The GPU branch is written to vLLM's documentation and
    untested here.
    """
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    size = settings.engine
    common = dict(
        model=settings.model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=size.max_model_len,
        max_num_seqs=size.max_num_seqs,
        tensor_parallel_size=size.tensor,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=settings.transfer),
        worker_extension_cls="megatron_drmas.weight_sync.extension.WeightSyncExtension",
    )
    if settings.device == "cuda":
        return EngineArgs(
            **common,
            gpu_memory_utilization=size.gpu_memory_utilization,
            enable_chunked_prefill=True,
            enable_sleep_mode=settings.sleep,
            disable_custom_all_reduce=settings.deterministic,
            moe_backend="triton",  # keeps experts as they are loaded, so that updates in place and digests of them are right
        )
    return EngineArgs(
        **common,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(size.max_model_len, size.max_num_seqs, PREFILL_TOKENS),
        block_size=CPU_BLOCK_TOKENS,
        kv_cache_memory_bytes=size.kv_cache_mib << 20,
    )
