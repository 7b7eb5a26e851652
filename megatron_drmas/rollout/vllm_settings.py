"""How an engine's settings become vLLM's arguments."""

import os
from typing import TYPE_CHECKING

from megatron_drmas.devices import DEVICES
from megatron_drmas.rollout.engine_messages import EngineSettings

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def check_environment(settings: EngineSettings) -> None:
    """Variables that vLLM and OpenMP read once, at import.

    Raises:
        ValueError: names the variable, its value and the one needed.
    """
    needed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **DEVICES[settings.device].engine_environment(settings.threads)}
    for name, value in needed.items():
        if os.environ.get(name) != value:
            raise ValueError(
                f"engine {settings.name!r}: environment variable {name} is {os.environ.get(name)!r}; "
                f"set it to {value!r} before the process starts"
            )


def engine_args(settings: EngineSettings) -> "EngineArgs":
    """Arguments of a `LLMEngine` that takes token ids and gives processed log-probs.

    Asynchronous scheduling is off so that every token belongs to the weight version that was in force when it was sampled.
    """
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    size = settings.engine
    return EngineArgs(
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
        weight_transfer_config=WeightTransferConfig(backend=settings.transport),
        worker_extension_cls="megatron_drmas.weight_sync.extension.WeightSyncExtension",
        **DEVICES[settings.device].engine_arguments(size, settings.deterministic, settings.sleep),
    )
