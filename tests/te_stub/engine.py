"""Transformer Engine's Python half without a GPU: `install()` before any Megatron import.

The compiled extension is replaced by a stub whose names exist and whose functions refuse to run.  So models can be built
and recipes made, and what Megatron tells Transformer Engine can be read back; nothing can be computed.
The plain wheel must not be importable elsewhere, for Megatron's import fails with it: it lies in .venv/te
(tools/test.sh), and tests of it run in processes of their own with that folder on PYTHONPATH.
"""

import enum
import functools
import importlib.util
import os
import sys
import types
import warnings

import torch

DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
FORWARD = [f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")]
BACKWARD = [f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT")]


class _AnyMember(type):
    """A class that has every attribute: its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Extension(types.ModuleType):
    """`transformer_engine_torch`: enumerations as they are, everything else made up when asked for."""

    def __init__(self):
        super().__init__("transformer_engine_torch")
        self.__file__ = "<stub>"
        self.DType = enum.IntEnum("DType", DTYPES)
        self.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", FORWARD, start=0)
        self.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", BACKWARD, start=0)
        self.FP8TensorMeta = type("FP8TensorMeta", (), {"scale": None, "scale_inv": None, "amax_history": None})
        for name in ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P"):
            setattr(self, name, type(name, (), {}))
        self.get_cublasLt_version = lambda: 130000
        self.get_cudnn_version = lambda: 91300
        self.get_num_cublas_streams = lambda: 4

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = _AnyMember(name, (), {})
        else:

            def value(*args, **kwargs):
                raise RuntimeError(f"{name} needs Transformer Engine's compiled extension and a GPU")

        setattr(self, name, value)
        return value


def install() -> None:
    """Make `transformer_engine.pytorch` importable, and let its modules be built on the CPU."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no check of the core wheel, no shared library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common as common
    sys.modules["transformer_engine_torch"] = _Extension()
    common.load_framework_extension = lambda framework: None
    if importlib.util.find_spec("onnxscript") is None:
        export = types.ModuleType("transformer_engine.pytorch.onnx_extensions")
        export.__getattr__ = lambda name: _refuse(name)
        sys.modules[export.__name__] = export
    import transformer_engine
    import transformer_engine.pytorch as pytorch
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    transformer_engine.pytorch = pytorch
    initialize = TransformerEngineBaseModule.__init__

    @functools.wraps(initialize)
    def with_cuda_claimed(self, *args, **kwargs):
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            initialize(self, *args, **kwargs)
        finally:
            torch.cuda.is_available = available

    TransformerEngineBaseModule.__init__ = with_cuda_claimed


def _refuse(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("onnxscript is not installed"))
