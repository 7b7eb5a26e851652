"""What every vLLM worker of ours carries: the `shm` back end, weights that stay where they are, and their digests.

vLLM imports this module in each worker before the model is built (`worker_extension_cls`).
"""

import torch
import vllm.model_executor.layers.utils as layer_utils
from vllm.platforms import current_platform

import megatron_drmas.weight_sync.shm  # noqa: F401  (registers the back end)
from megatron_drmas.config.plugins import import_plugins_of_process
from megatron_drmas.weight_sync.engine_weights import iter_loaded_tensors
from megatron_drmas.weight_sync.verify import digest

import_plugins_of_process()  # a transport of a plug-in has its back end in every worker


def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stand-in for vLLM's choice of a CPU matrix product.

    That one moves the weight into a packed oneDNN handle and empties the parameter, or, for tied embeddings, leaves the
    handle with the old values when the parameter is updated.  This one computes with the parameter itself, so an update
    in place is seen.
    """
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = plain_linear


class WeightSyncExtension:
    """Methods that `collective_rpc` finds on the workers."""

    def weight_digests(self) -> dict[str, str]:
        """Digest of every tensor the model computes with, by HF name; whole tensors, whatever the engine's layout."""
        return {name: digest(tensor) for name, tensor in iter_loaded_tensors(self.model_runner.get_model())}
