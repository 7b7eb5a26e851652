"""Pickled weights (pytorch_model.bin), on explicit request."""

import pickle
import struct
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_conv.errors import ConversionError


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, mapped into memory; nothing but tensors is unpickled (`weights_only`).

    Raises:
        ConversionError: the file is damaged, or holds more than dense tensors by name.
    """
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:  # torch's message advises turning weights_only off
        raise ConversionError(f"{path} holds more than tensors, which is never unpickled") from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConversionError(f"{path} is truncated or damaged: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) and isinstance(tensors[name], Tensor) for name in tensors):
        raise ConversionError(f"{path} is not a state dict: it must hold tensors by name")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ConversionError(
                f"{path}: {name!r} is a tensor of layout {tensor.layout} on {tensor.device}; only dense ones are read"
            )
    return {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
