"""The policy that the run began with, for a KL to it."""

from collections.abc import Callable

import torch
from torch import Tensor


class ReferencePolicy:
    """A copy of a model's parameters on the CPU, lent to the model for a pass."""

    def __init__(self, model: torch.nn.Module):
        self._parameters = [parameter.detach().cpu().clone() for parameter in model.parameters()]

    def under(self, model: torch.nn.Module, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns while `model` has the reference's parameters; its own are back afterwards."""
        own = [parameter.detach().clone() for parameter in model.parameters()]
        _set_parameters(model, self._parameters)
        try:
            return compute()
        finally:
            _set_parameters(model, own)


def _set_parameters(model: torch.nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
