"""A Megatron distributed checkpoint (`torch_dist`), written unit by unit with one tensor in memory at a time.

The bytes are written by `torch.distributed.checkpoint`'s own FileSystemWriter, one file per unit; the items' tensors are
made when the writer asks for them.  The chunks of a key are independent of any layout: a reader picks what it needs.
"""

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Mapping, Optional

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

from checkpoints_conv.dist_keys import extra_state_keys, local_spec_key, place_of
from checkpoints_conv.mapping import ModelMapping
from checkpoints_conv.progress import run_parallel

CHUNK_BYTES = 256 * 2**20  # rows of a larger tensor are written as several chunks
UNIT_BYTES = 2**30  # what an interruption can cost


@dataclass(frozen=True)
class Piece:
    """Rows of one HF tensor, or a whole Megatron parameter whose HF tensors must be merged first."""

    name: str  # Megatron's
    hf_name: Optional[str]  # None: all of them, merged
    first: int  # row of the HF tensor
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
        dtypes: Mapping[str, torch.dtype],
        get_hf: Callable[[str], Tensor],
        written: Callable[[int], None],
    ):
        """
        Args:
            dtypes: of the Megatron parameters by their global names.
            get_hf: an HF tensor by its name.
            written: called with the bytes of each piece.
        """
        self.folder = folder
        self.mapping = mapping
        self.dtypes = dtypes
        self.get_hf = get_hf
        self.written = written
        self._metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._pieces: dict[MetadataIndex, Piece] = {}
        self.units = list(self._plan())

    def write(self) -> None:
        """Write the units that are not there yet, two at a time, then the checkpoint's metadata."""
        results = run_parallel(self._write_unit, range(len(self.units)))
        FileSystemWriter(self.folder, sync_files=False).finish(Metadata(self._metadata), results)
        for number in range(len(self.units)):
            self._record(number).unlink()

    def _record(self, number: int) -> Path:
        """Where the results of a finished unit are kept for the metadata."""
        return self.folder / f"__{number}.written"

    def _write_unit(self, number: int) -> list[WriteResult]:
        # torch.load never looks at checksums, and they take as long as the copy.  The setting is the thread's own.
        torch.serialization.set_crc32_options(False)
        items, record = self.units[number], self._record(number)
        if record.is_file():
            results = pickle.loads(record.read_bytes())
            if self._is_whole(items, results):
                self.written(sum(map(_bytes, items)))
                return results
        results = self._write_items(number, items)
        beside = record.with_suffix(".part")
        beside.write_bytes(pickle.dumps(results))
        os.replace(beside, record)
        return results

    def _is_whole(self, items: list[WriteItem], results: list[WriteResult]) -> bool:
        """Whether an interrupted run wrote these items, and the file has its full size: a power failure may truncate it."""
        if {result.index for result in results} != {item.index for item in items}:
            return False
        file = self.folder / results[0].storage_data.relative_path
        end = max(result.storage_data.offset + result.storage_data.length for result in results)
        return file.is_file() and file.stat().st_size == end

    def _write_items(self, number: int, items: list[WriteItem]) -> list[WriteResult]:
        writer = FileSystemWriter(self.folder, sync_files=False)
        # A rank of its own gives every unit a file of its own.
        writer.set_up_storage_writer(True, rank=number, use_collectives=False)
        plan = writer.prepare_local_plan(SavePlan(items))
        try:
            return writer.write_data(plan, _LazyPlanner(self._resolve)).value()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save, closing its archive on a full disk
                raise error.__context__ from error
            raise

    def _resolve(self, item: WriteItem) -> "Tensor | io.BytesIO":
        if item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([torch.empty(0, dtype=torch.uint8)], buffer)
            return buffer
        piece = self._pieces[item.index]
        if piece.hf_name is None:
            tensor = self.mapping.to_megatron(piece.name, self.get_hf, padded_vocab=self.mapping.spec.vocab)
        else:
            tensor = _own_storage(self.get_hf(piece.hf_name).narrow(0, piece.first, piece.rows))
        self.written(_bytes(item))
        return tensor.to(self.dtypes[piece.name]).view(item.tensor_data.chunk.sizes)

    def _plan(self) -> Iterator[list[WriteItem]]:
        """The items of each unit; the checkpoint's metadata is collected on the way."""
        unit: list[WriteItem] = []
        room = UNIT_BYTES
        for name in self.mapping.megatron_names():
            start = 0  # row of the Megatron parameter
            for piece in self._pieces_of(name):
                if room <= 0:
                    yield unit
                    unit, room = [], UNIT_BYTES
                items = list(self._items(piece, start))
                room -= sum(map(_bytes, items))
                unit += items
                start += piece.rows
        for key in extra_state_keys(self.mapping):
            self._metadata[key] = BytesStorageMetadata()
            unit.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0)))
        yield unit

    def _pieces_of(self, name: str) -> Iterator[Piece]:
        entry, spec = self.mapping.entry(name), self.mapping.spec
        if not entry.rule.stacked:
            yield Piece(name, None, 0, entry.rule.megatron_shape(spec)[0])
            return
        for hf_name, shape in zip(entry.hf, entry.rule.shapes(spec), strict=True):
            rows = max(1, CHUNK_BYTES // (torch.Size(shape[1:]).numel() * self.dtypes[name].itemsize))
            for first in range(0, shape[0], rows):
                yield Piece(name, hf_name, first, min(rows, shape[0] - first))

    def _items(self, piece: Piece, start: int) -> Iterator[WriteItem]:
        place = place_of(piece.name, self.mapping)
        shape = self.mapping.entry(piece.name).rule.megatron_shape(self.mapping.spec)
        size = torch.Size((*place.leading, *shape))
        offsets = torch.Size((*place.index, start, *([0] * (len(shape) - 1))))
        chunk = ChunkStorageMetadata(offsets, torch.Size((*[1] * len(place.index), piece.rows, *shape[1:])))
        properties = TensorProperties(dtype=self.dtypes[piece.name])
        for key in dict.fromkeys((place.key, local_spec_key(place.key))):
            stored = self._metadata.setdefault(key, TensorStorageMetadata(properties, size, []))
            index = MetadataIndex(key, offsets, len(stored.chunks))
            stored.chunks.append(chunk)
            self._pieces[index] = piece
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))


def _own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself: torch.save writes whole storages."""
    return torch.from_numpy(tensor.contiguous().view(torch.uint8).numpy()).view(tensor.dtype)


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return torch.Size(item.tensor_data.chunk.sizes).numel() * item.tensor_data.properties.dtype.itemsize
