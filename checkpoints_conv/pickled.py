"""Pickled weights (pytorch_model.bin), on explicit request."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_conv.errors import ConversionError


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, mapped into memory; nothing but tensors is unpickled (`weights_only`).

    Raises:
        ConversionError: the file is damaged, or holds more than tensors by name.
    """
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConversionError(f"{path} is damaged, or holds more than tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConversionError(f"{path} is no state dict: it must hold tensors by name")
    return tensors
