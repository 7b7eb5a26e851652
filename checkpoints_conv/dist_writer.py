"""A Megatron distributed checkpoint (`torch_dist`), written unit by unit with one tensor in memory at a time.

Each chunk is one tensor as `torch.save` writes it, one file per unit: what `torch.distributed.checkpoint`'s
FileSystemWriter makes of a rank's part.
"""

import importlib
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Callable, Mapping

import torch
from torch import Tensor

from checkpoints_conv.dist_chunks import DAMAGE, ChunkFiles
from checkpoints_conv.dist_keys import extra_state_keys
from checkpoints_conv.dist_plan import Chunk, Stored, plan_units
from checkpoints_conv.file_maps import CopyingFile, FileMaps
from checkpoints_conv.mapping import ModelMapping
from checkpoints_conv.progress import run_parallel
from checkpoints_conv.safetensors_file import cast


NO_STATE = torch.empty(0, dtype=torch.uint8)  # in a list: what a model without FP8 keeps under `_extra_state`


class DistWriter:
    """Writes the checkpoint of one model into a folder that may hold units of an interrupted run."""

    def __init__(
        self,
        folder: Path,
        mapping: ModelMapping,
        dtypes: Mapping[str, torch.dtype],
        get_hf: Callable[[str], Tensor],
        maps: FileMaps,
        written: Callable[[int], None],
    ):
        """
        Args:
            dtypes: of the Megatron parameters by their global names.
            get_hf: an HF tensor by its name.
            maps: the files that such tensors may lie in.
            written: called with the bytes of each chunk.
        """
        self.folder = folder
        self.get_hf = get_hf
        self.maps = maps
        self.written = written
        self.units = plan_units(mapping, dtypes)
        self.objects = list(extra_state_keys(mapping))  # in the last unit's file

    def write(self) -> None:
        """Write the units that are not there yet, two at a time, then the checkpoint's metadata."""
        with ThreadPoolExecutor(1) as aside:
            # Importing torch.distributed.checkpoint takes a second, in which the system can copy already.
            metadata = aside.submit(importlib.import_module, "checkpoints_conv.dist_metadata")
            stored = run_parallel(self._write_unit, range(len(self.units)))
        chunks = [chunk for unit in self.units for chunk in unit]
        metadata.result().write_metadata(self.folder, chunks, self.objects, [at for unit in stored for at in unit])
        for number in range(len(self.units)):
            self._record(number).unlink()

    def _record(self, number: int) -> Path:
        """Where it is kept for the metadata what a finished unit's file holds."""
        return self.folder / f"__{number}.written"

    def _write_unit(self, number: int) -> list[Stored]:
        # torch.load never looks at checksums, and they take as long as the copy.  The setting is the thread's own.
        torch.serialization.set_crc32_options(False)
        chunks, record = self.units[number], self._record(number)
        stored = _read_record(record) if record.is_file() else []
        if self._is_whole(number, stored):
            self.written(sum(chunk.bytes for chunk in chunks))
            return stored
        stored = self._write_chunks(number, chunks)
        beside = record.with_suffix(".part")
        beside.write_text(json.dumps([astuple(at) for at in stored]), encoding="utf-8")
        os.replace(beside, record)
        return stored

    def _is_whole(self, number: int, stored: list[Stored]) -> bool:
        """Whether an interrupted run wrote this unit, and every byte of it has reached the disk: a power failure may undo some."""
        wanted = {(chunk.key, chunk.offsets, chunk.number): chunk for chunk in self.units[number]}
        identities = {(at.key, at.offsets, at.number): at for at in stored}
        if identities.keys() != wanted.keys() | {(key, None, None) for key in self._objects_of(number)}:
            return False
        if any(at.file != self._file(number) for at in stored):
            return False
        files = ChunkFiles(self.folder)
        try:
            for identity, at in identities.items():
                if identity in wanted:
                    found, expected = files.tensor(at.file, at.start, at.length), self._tensor(wanted[identity])
                else:
                    buffer = files.maps.buffer(self.folder / at.file)
                    (found,), expected = torch.load(io.BytesIO(buffer[at.start:at.start + at.length]), weights_only=True), NO_STATE
                if found.dtype != expected.dtype or not torch.equal(found, expected):
                    return False
        except DAMAGE:
            return False
        return (self.folder / self._file(number)).stat().st_size == max(at.start + at.length for at in stored)

    def _file(self, number: int) -> str:
        return f"__{number}_0.distcp"

    def _objects_of(self, number: int) -> list[str]:
        return self.objects if number == len(self.units) - 1 else []

    def _write_chunks(self, number: int, chunks: list[Chunk]) -> list[Stored]:
        name = self._file(number)
        stored = []
        with CopyingFile(self.folder / name, self.maps) as file:

            def save(value, *identity) -> None:
                start = file.tell()
                try:
                    torch.save(value, file)
                except RuntimeError as error:
                    if isinstance(error.__context__, OSError):  # torch.save, closing its archive on a full disk
                        raise error.__context__ from error
                    raise
                stored.append(Stored(*identity, name, start, file.tell() - start))

            for chunk in chunks:
                save(self._tensor(chunk), chunk.key, chunk.offsets, chunk.number)
                self.written(chunk.bytes)
            for key in self._objects_of(number):
                save([NO_STATE], key, None, None)
        return stored

    def _tensor(self, chunk: Chunk) -> Tensor:
        piece = chunk.piece
        tensor = _own_storage(self.get_hf(piece.hf_name).narrow(0, piece.first, piece.rows))
        return cast(piece.hf_name, tensor, chunk.dtype).view(chunk.sizes)


def _read_record(record: Path) -> list[Stored]:
    """What a finished unit's file holds; nothing if the record is damaged: the unit is written again."""
    try:
        entries = json.loads(record.read_text(encoding="utf-8"))
        return [Stored(key, None if offsets is None else tuple(offsets), *rest) for key, offsets, *rest in entries]
    except (ValueError, TypeError):
        return []


def _own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself: torch.save writes whole storages."""
    return torch.from_numpy(tensor.contiguous().view(torch.uint8).numpy()).view(tensor.dtype)
