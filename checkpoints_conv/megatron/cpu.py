"""The CUDA calls that Megatron-Core 0.16 makes unconditionally, redirected to the CPU.

`install()` is called once in a process, before Megatron's groups and models are made.  Where a CUDA device is
present it changes nothing.  Elsewhere it redirects, for this process only, the CUDA calls that Megatron makes
unconditionally: the current device, moves to the device, factory calls with `device="cuda"`, streams and
synchronization, the CUDA random state, and the `torch.cuda.*Tensor` type names that its optimizers compare.  Functions
that Megatron compiles for speed run as they are: on a CPU, compiling them takes longer than running them, and needs a compiler.
"""

import functools

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor", "zeros", "zeros_like")


class Idle:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def record(self, stream=None) -> None:
        pass

    def record_event(self, event=None) -> "Idle":
        return event or self

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *exception) -> None:
        pass


def install() -> bool:
    """Redirect CUDA calls to the CPU; returns whether anything was redirected.  A second call does nothing."""
    if torch.cuda.is_available():
        return False
    if torch.cuda.current_device is _current_device:
        return True
    torch.compiler.set_stance("force_eager")
    torch.cuda.current_device = _current_device
    for name in ("synchronize", "empty_cache", "set_device"):  # one function each: Dynamo has a rule for every one
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.stream = Idle
    torch.cuda.current_stream = torch.cuda.default_stream = Idle
    torch.cuda.get_rng_state = _rng_state
    torch.cuda.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = torch.manual_seed
    Tensor.cuda = nn.Module.cuda = _itself
    Tensor.type = _with_cuda_type_names(Tensor.type)
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _rng_state
    random._set_cuda_rng_state = _set_rng_state

    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        # The router compares it to None, but only Transformer Engine's import defines it.
        moe_utils.te_general_gemm = None
    return True


def _current_device() -> torch.device:
    return CPU


def _itself(value, *args, **kwargs):
    return value


def _rng_state(device=None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, device=None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _on_cpu(factory):
    @functools.wraps(factory)
    def create(*args, device=None, **kwargs):
        if device is not None:
            device = torch.device(device)
            kwargs["device"] = CPU if device.type == "cuda" else device
        return factory(*args, **kwargs)

    return create


def _with_cuda_type_names(type_of):
    @functools.wraps(type_of)
    def name_or_cast(self, *args, **kwargs):
        if args or kwargs:
            return type_of(self, *args, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else type_of(self)

    return name_or_cast
