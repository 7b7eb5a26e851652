"""A Megatron distributed checkpoint (`torch_dist`), written unit by unit with one tensor in memory at a time.

The bytes are written by `torch.distributed.checkpoint`'s own FileSystemWriter, one file per unit; the items' tensors are
made when the writer asks for them.  The chunks of a key are independent of any layout: a reader picks what it needs.
"""

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from checkpoints_conv.dist_keys import LOCAL_MOE_NORM, STACKED_MOE_NORM, extra_state_keys, place_of
from checkpoints_conv.mapping import ModelMapping

CHUNK_BYTES = 256 * 2**20  # rows of a larger tensor are written as several chunks
UNIT_BYTES = 2**30  # what an interruption can cost


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + rows) of one Megatron parameter."""

    name: str
    start: int
    rows: int


class _LazyPlanner(DefaultSavePlanner):
    """Hands the writer each item's data when it is asked for."""

    def __init__(self, resolve: Callable[[WriteItem], "Tensor | io.BytesIO"]):
        super().__init__()
        self.resolve_data = resolve


class DistWriter:
    """Writes the checkpoint of one model into a folder that may hold units of an interrupted run."""

    def __init__(
        self,
        folder: Path,
        mapping: ModelMapping,
        dtype_of: Callable[[str], torch.dtype],
        read: Callable[[str], Tensor],
        written: Callable[[int], None],
    ):
        """
        Args:
            dtype_of: dtype of a Megatron parameter by its global name.
            read: the whole unpadded parameter by its global name, in that dtype.
            written: called with the bytes of each piece.
        """
        self.folder = folder
        self.mapping = mapping
        self.dtype_of = dtype_of
        self.read = read
        self.written = written
        self._metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._pieces: dict[MetadataIndex, Piece] = {}
        self._held: "tuple[str, Tensor] | None" = None
        self.units = list(self._plan())

    def write(self) -> None:
        """Write the units that are not there yet, then the checkpoint's metadata."""
        results: list[list[WriteResult]] = []
        for number, items in enumerate(self.units):
            done = self.folder / f"__{number}.written"
            if not done.is_file():
                beside = done.with_suffix(".part")
                beside.write_bytes(pickle.dumps(self._write_unit(number, items)))
                os.replace(beside, done)
            else:
                for item in items:
                    self.written(_bytes(item))
            results.append(pickle.loads(done.read_bytes()))  # our own file, of this conversion
        FileSystemWriter(self.folder).finish(Metadata(self._metadata), results)
        for number in range(len(self.units)):
            (self.folder / f"__{number}.written").unlink()

    def _write_unit(self, number: int, items: list[WriteItem]) -> list[WriteResult]:
        writer = FileSystemWriter(self.folder)
        # A rank of its own gives every unit a file of its own.
        writer.set_up_storage_writer(True, rank=number, use_collectives=False)
        plan = writer.prepare_local_plan(SavePlan(items))
        return writer.write_data(plan, _LazyPlanner(self._resolve)).value()

    def _resolve(self, item: WriteItem) -> "Tensor | io.BytesIO":
        if item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([torch.empty(0, dtype=torch.uint8)], buffer)
            return buffer
        piece = self._pieces[item.index]
        if self._held is None or self._held[0] != piece.name:
            self._held = None
            self._held = (piece.name, self.read(piece.name))
        self.written(_bytes(item))
        rows = self._held[1].narrow(0, piece.start, piece.rows)
        return rows.contiguous().view(item.tensor_data.chunk.sizes)

    def _plan(self) -> Iterator[list[WriteItem]]:
        unit: list[WriteItem] = []
        room = UNIT_BYTES
        for name, entry in self.mapping.entries.items():
            shape = entry.rule.megatron_shape(self.mapping.spec)
            dtype = self.dtype_of(name)
            row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
            rows = max(1, CHUNK_BYTES // row_bytes)
            for start in range(0, shape[0], rows):
                piece = Piece(name, start, min(rows, shape[0] - start))
                if room <= 0:
                    yield unit
                    unit, room = [], UNIT_BYTES
                items = list(self._items(piece, shape, dtype))
                room -= sum(map(_bytes, items))
                unit += items
        for key in extra_state_keys(self.mapping):
            self._metadata[key] = BytesStorageMetadata()
            unit.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0)))
        yield unit

    def _items(self, piece: Piece, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[WriteItem]:
        place = place_of(piece.name, self.mapping)
        size = torch.Size((*place.leading, *shape))
        offsets = torch.Size((*place.index, piece.start, *([0] * (len(shape) - 1))))
        chunk = ChunkStorageMetadata(offsets, torch.Size((*[1] * len(place.index), piece.rows, *shape[1:])))
        properties = TensorProperties(dtype=dtype)
        keys = [place.key] + ([LOCAL_MOE_NORM] if place.key == STACKED_MOE_NORM else [])
        for key in keys:
            stored = self._metadata.setdefault(key, TensorStorageMetadata(properties, size, []))
            index = MetadataIndex(key, offsets, len(stored.chunks))
            stored.chunks.append(chunk)
            self._pieces[index] = piece
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return torch.Size(item.tensor_data.chunk.sizes).numel() * item.tensor_data.properties.dtype.itemsize
