"""Safetensors files: the positions of their tensors, and a writer that takes them in any order, block by block.

The safetensors library writes a file from a dict of all its tensors, and does not expose offsets.  The format
(https://github.com/huggingface/safetensors) is a little-endian uint64 header length, a JSON header of dtypes, shapes and
offsets, and the tensors' bytes.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.row_blocks import Block, BlockFile, FileBlock

LENGTH_BYTES = 8  # of the header's length
METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that a file will hold."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bytes


class SafetensorsWriter:
    """One file, which gets its final name when it is closed.

    What an interrupted run left of it is compared, and only what differs is written.  Like `cp`, it leaves it to the
    operating system when the bytes reach the disk; a reader notices a truncated file.

    Raises:
        ConversionError: a tensor that is not of `entries`, or of another shape or dtype; one that was never written;
                `Block.read`.
        OSError: the file system's error.
    """

    def __init__(self, path: Path, entries: Iterable[TensorEntry]):
        self.path = path
        self._temp_path = path.with_name(path.name + ".part")
        self._entries = {entry.name: entry for entry in entries}
        self._offsets: dict[str, int] = {}
        self.missing = set(self._entries)  # not written yet
        header = _header(self._entries.values())
        self._end = len(header)
        for entry in self._entries.values():
            self._offsets[entry.name] = self._end
            self._end += entry.bytes
        if path.is_file():
            os.replace(path, self._temp_path)
        self._file = BlockFile(self._temp_path)
        self._file.put(header, 0)

    def write(self, name: str, blocks: Iterable[Block]) -> None:
        """Write one tensor, given as blocks of its rows (a single block: the whole tensor)."""
        entry = self._entries.get(name)
        if entry is None:
            raise ConversionError(f"{self.path}: {name!r} is not one of the file's entries")
        at = self._offsets[name]
        end = at + entry.bytes
        for block in blocks:
            if (block.shape[1:], block.dtype) != (entry.shape[1:], entry.dtype) or at + block.bytes > end:
                raise ConversionError(f"{self.path}: rows {list(block.shape)} of {block.dtype} are not part of {entry}")
            if not self._file.holds(block, at):
                self._file.copy(block, at)
            at += block.bytes
        if at != end:
            raise ConversionError(f"{self.path}: {entry} lacks its last {end - at} bytes")
        self.missing.discard(name)

    def close(self) -> None:
        """Give the file its name."""
        if self.missing:
            raise ConversionError(f"{self.path}: never written: {', '.join(sorted(self.missing)[:5])}")
        self._file.truncate(self._end)
        self._file.close()
        os.replace(self._temp_path, self.path)


def read_blocks(path: Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, Dtype]) -> dict[str, FileBlock]:
    """The tensors of a file that the safetensors library has checked, as blocks of it.

    Args:
        shapes, dtypes: of those tensors, as the library reports them.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    start = LENGTH_BYTES + length
    return {
        name: FileBlock(shapes[name], dtypes[name], path, start + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != METADATA
    }


def _header(entries: Iterable[TensorEntry]) -> bytes:
    header: dict = {METADATA: {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype.name, "shape": list(entry.shape), "data_offsets": [end, end + entry.bytes]}
        end += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
