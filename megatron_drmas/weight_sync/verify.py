"""Are the engine's weights the actor's, bit for bit?  Both sides digest every tensor by its HF name; only digests travel."""

import hashlib

import torch
from torch import Tensor

from megatron_drmas.weight_sync.errors import WeightSyncError

SHOWN = 5  # names in an error


def digest(tensor: Tensor) -> str:
    """Of dtype, shape and every bit."""
    data = tensor.detach().cpu().contiguous()
    state = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)} ".encode(), digest_size=16)
    state.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def compare(sent: dict[str, str], loaded: dict[str, str], engine: str) -> None:
    """Compare digests by HF name.

    Args:
        sent: the actor's, of what it sent.
        loaded: the engine's, of what it computes with.
        engine: its name, for the error.

    Raises:
        WeightSyncError: names the tensors that differ or that only one side has.
    """
    differ = [name for name in sent if name in loaded and sent[name] != loaded[name]]
    problems = {
        "differ": differ,
        "are not in the engine": sorted(sent.keys() - loaded.keys()),
        "are not the actor's": sorted(loaded.keys() - sent.keys()),
    }
    total = len(sent)
    found = [f"{len(names)} of {total} tensors {what}: {', '.join(names[:SHOWN])}" for what, names in problems.items() if names]
    if found:
        raise WeightSyncError(f"the weights of {engine} are not those that were sent; {'; '.join(found)}")
