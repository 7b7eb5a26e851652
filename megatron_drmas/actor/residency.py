"""What an actor rank holds on its device, moved to host memory and back without changing a bit.

Megatron-Core's own helpers leave part of it behind (the parameters where the optimizer is not distributed, the gradients of
fp32 main parameters) and copy through pageable memory, so the storages are moved here: emptied in place, so that every view
of them (parameters in a buffer, shards of it) is whole again when they return.
"""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

CHUNK_BYTES = 1 << 30  # of pinned memory: an allocation is rounded up to a power of two


@dataclass(frozen=True)
class ActorBytes:
    """Bytes on the device."""

    parameters: int
    gradients: int
    optimizer: int  # main parameters and moments that are not views of the parameters

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


class NotResident(RuntimeError):
    """What was asked for needs a part of the actor that is not on its device."""


class Residency:
    """The storages of one rank's model and optimizer, by kind, each on the device or on the host.

    Gradients are not copied: a step begins by setting them to zero.

    Args:
        model, optimizer: whole and on the device.
        pinned: keep the host's copies in page-locked memory, which a GPU copies from and to without a detour.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: MegatronOptimizer, pinned: bool):
        self._optimizer = optimizer
        self._pinned = pinned
        buffers = [*model.buffers, *model.expert_parallel_buffers]
        self._gradients = _distinct(buffer.grad_data for buffer in buffers)
        self._parameters = _distinct(parameter.data for parameter in model.parameters())
        seen = {storage._cdata for storage in (*self._gradients, *self._parameters)}
        self._states = [storage for storage in _distinct(_optimizer_tensors(optimizer)) if storage._cdata not in seen]
        self._sizes = {storage._cdata: storage.nbytes() for storage in (*self._gradients, *self._parameters, *self._states)}
        self._host: dict[int, list[Tensor]] = {}
        self._away: set[int] = set()

    @property
    def bytes(self) -> ActorBytes:
        """What each kind takes on the device when it is there."""
        kinds = (self._parameters, self._gradients, self._states)
        return ActorBytes(*(sum(self._sizes[storage._cdata] for storage in kind) for kind in kinds))

    @property
    def on_device(self) -> int:
        """Bytes that this process holds on the device: on a GPU what its allocator has reserved, activations included."""
        if self._pinned:
            return torch.cuda.memory_reserved()
        return sum(size for storage, size in self._sizes.items() if storage not in self._away)

    def hold(self, parameters: bool, rest: bool) -> None:
        """Have on the device what is asked for, and the other parts on the host; gradients that come back are zero."""
        kinds = ((self._parameters, parameters), (self._states, rest))
        leaving = [storage for kind, stays in kinds if not stays for storage in kind if storage._cdata not in self._away]
        if not rest:
            self._optimizer.zero_grad(set_to_none=True)  # fp32 main parameters keep a gradient of their own after a step
            self._free(storage for storage in self._gradients if storage._cdata not in self._away)
        for storage in leaving:
            self._copy(storage, to_host=True)
        _synchronize()
        self._free(leaving)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for storage in (storage for kind, wanted in kinds if wanted for storage in kind if storage._cdata in self._away):
            self._take(storage)
            self._copy(storage, to_host=False)
        for storage in self._gradients if rest else ():
            if storage._cdata in self._away:
                self._take(storage)
                storage.fill_(0)  # type: ignore[attr-defined]
        _synchronize()

    def require_whole(self, what: str) -> None:
        """Raises NotResident unless everything is on the device."""
        if self._away:
            raise NotResident(f"{what} needs the whole actor on its device, and part of it is on the host")

    def require_parameters(self, what: str) -> None:
        """Raises NotResident unless the parameters are on the device."""
        if any(storage._cdata in self._away for storage in self._parameters):
            raise NotResident(f"{what} needs the actor's parameters on its device, and they are on the host")

    def _free(self, storages: Iterable[UntypedStorage]) -> None:
        for storage in storages:
            self._away.add(storage._cdata)
            if storage.resizable():
                storage.resize_(0)
            else:  # on a CPU, saving has moved it into shared memory: what it held is not to be used either
                storage.fill_(0xFF)  # type: ignore[attr-defined]

    def _take(self, storage: UntypedStorage) -> None:
        self._away.discard(storage._cdata)
        if storage.resizable():
            storage.resize_(self._sizes[storage._cdata])

    def _copy(self, storage: UntypedStorage, to_host: bool) -> None:
        size = self._sizes[storage._cdata]
        if storage._cdata not in self._host:
            starts = range(0, size, CHUNK_BYTES)
            self._host[storage._cdata] = [
                torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8, pin_memory=self._pinned) for start in starts
            ]
        on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = 0
        for chunk in self._host[storage._cdata]:
            part = on_device[start : start + len(chunk)]
            source, target = (part, chunk) if to_host else (chunk, part)
            target.copy_(source, non_blocking=True)
            start += len(chunk)


def _distinct(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages under tensors, each once."""
    return list({storage._cdata: storage for tensor in tensors for storage in [tensor.untyped_storage()]}.values())


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Main parameters and per-parameter states, step counters and other scalars excepted."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
