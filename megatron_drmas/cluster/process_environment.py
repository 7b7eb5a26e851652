"""The variables of an actor's or engine's process."""

import os

from megatron_drmas.actor.precision import environment
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.devices import DEVICES


def process_environment(role: str, config: RunConfig, device_name: str, devices: tuple[int, ...] = ()) -> dict[str, str]:
    """Variables of a process that must be set before torch, Megatron or vLLM are imported.

    Args:
        role: actor | engine.
        config: the run.
        device_name: cpu | cuda.
        devices: that the process may use, counted from 0 among those that its machine lets it see.
    """
    device, cluster = DEVICES[device_name], config.cluster
    threads = (cluster.actor_threads if role == "actor" else cluster.engine_threads) or 1  # `fit_to_machine` gives more
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
        **device.environment(devices, threads),
    }
    if not os.environ.get("RAY_ADDRESS"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if role == "engine":
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        variables |= device.engine_environment(threads)
    if role == "actor":
        variables |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment(config.precision)}
    return variables
