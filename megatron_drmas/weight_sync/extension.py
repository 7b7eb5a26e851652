"""What every vLLM worker of ours carries: the back ends of the transports, weights that stay where they are, and their digests.

vLLM imports this module in each worker before the model is built (`worker_extension_cls`).
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

import megatron_drmas.weight_sync  # noqa: F401  registers
from megatron_drmas.config.plugins import import_plugins_of_process
from megatron_drmas.weight_sync.engine_weights import iter_loaded_tensors
from megatron_drmas.weight_sync.transport import TRANSPORTS
from megatron_drmas.weight_sync.verify import digest


def register_back_ends() -> None:
    """Make the transports known to vLLM, those of the process's plug-ins included; again where this module came first."""
    import_plugins_of_process()
    for name, transport in TRANSPORTS.items():
        engine_class = transport.engine_class()
        if engine_class is not None and name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine_class)


def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stand-in for vLLM's choice of a CPU matrix product.

    That one moves the weight into a packed oneDNN handle and empties the parameter, or, for tied embeddings, leaves the
    handle with the old values when the parameter is updated.  This one computes with the parameter itself, so an update
    in place is seen.
    """
    layer.cpu_linear = torch.nn.functional.linear


class PlainExperts(cpu_moe.CPUUnquantizedExperts):
    """Stand-in for vLLM's experts on a CPU, which pack their weights when a model is loaded.

    These compute with the parameters themselves, in the layout in which they are loaded: `w1` is [expert, gate rows above
    up rows, hidden], `w2` [expert, hidden, ffn].
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they were loaded."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None  # any size: there is no kernel

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_, **__
    ) -> None:
        """The chosen experts' outputs, weighted and summed, into `output` [t, hidden]; vLLM's interface."""
        total = torch.zeros(output.shape, dtype=torch.float32)
        for expert in range(w1.shape[0]):
            token, place = (topk_ids == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
                down = linear(silu(gate) * up, w2[expert])
                total.index_add_(0, token, down.float() * topk_weights[token, place, None].float())
        output.copy_(total)


register_back_ends()
if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = plain_linear
    cpu_moe.X86CPUUnquantizedExperts = PlainExperts  # of the candidates, the first


class WeightSyncExtension:
    """Methods that `collective_rpc` finds on the workers."""

    def weight_digests(self) -> dict[str, str]:
        """Digest of every tensor the model computes with, by HF name; whole tensors, whatever the engine's layout."""
        return {name: digest(tensor) for name, tensor in iter_loaded_tensors(self.model_runner.get_model())}
