"""Safetensors files: where their tensors lie, and a writer that takes them in any order, one in memory at a time.

The safetensors library writes a file from a dict of all its tensors, and does not tell offsets.  The format (https://github.com/huggingface/safetensors)
is a little-endian uint64 header length, a JSON header of dtypes, shapes and offsets, and the tensors' bytes.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Optional, Sequence

import torch
from torch import Tensor

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.file_maps import CopyingFile, FileMaps

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LENGTH_BYTES = 8  # of the header's length
METADATA = "__metadata__"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that a file will hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """One file, which gets its name when it is closed.

    Like `cp`, it leaves it to the operating system when the bytes reach the disk; a reader notices a truncated file.

    Raises:
        ConversionError: a tensor that is not of `entries`, or of another shape or dtype; a tensor that was never written.
        OSError: as the file system says it.
    """

    def __init__(self, path: Path, entries: Iterable[TensorEntry], maps: Optional[FileMaps] = None):
        """
        Args:
            maps: files that the tensors to write may lie in.
        """
        self.path = path
        self._beside = path.with_name(path.name + ".part")
        self._entries = {entry.name: entry for entry in entries}
        self._offsets: dict[str, int] = {}
        self.missing = set(self._entries)  # not written yet
        header = _header(self._entries.values())
        end = len(header)
        for entry in self._entries.values():
            self._offsets[entry.name] = end
            end += entry.bytes
        self._file = CopyingFile(self._beside, maps or FileMaps())
        self._file.write(header)

    def write(self, name: str, blocks: Sequence[Tensor]) -> None:
        """Write one tensor, given as blocks of its rows (a single block: the whole tensor)."""
        entry = self._entries.get(name)
        rows = sum(len(block) for block in blocks)
        if entry is None or any((rows, *block.shape[1:], block.dtype) != (*entry.shape, entry.dtype) for block in blocks):
            shapes = [(list(block.shape), block.dtype) for block in blocks]
            raise ConversionError(f"{self.path}: {name!r} in blocks {shapes} was not announced, but {entry}")
        self._file.seek(self._offsets[name])
        for block in blocks:
            self._file.write(block.contiguous().view(torch.uint8).numpy())
        self.missing.discard(name)

    def close(self) -> None:
        """Give the file its name."""
        if self.missing:
            raise ConversionError(f"{self.path}: never written: {', '.join(sorted(self.missing)[:5])}")
        self._file.close()
        os.replace(self._beside, self.path)


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; itself where that is its own.

    Raises:
        ConversionError: a finite value is too large for it.
    """
    result = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and bool((result.isinf() & tensor.isfinite()).any()):
        raise ConversionError(f"{name} holds values that float16 cannot; its largest is {torch.finfo(dtype).max:g}: use another --dtype")
    return result


def data_offsets(path: Path) -> dict[str, int]:
    """Where each tensor begins, in bytes from the start of a file that the safetensors library has found in order."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    return {name: LENGTH_BYTES + length + told["data_offsets"][0] for name, told in header.items() if name != METADATA}


def file_bytes(entries: Sequence[TensorEntry]) -> int:
    """Size of the finished file of these tensors."""
    return len(_header(entries)) + sum(entry.bytes for entry in entries)


def _header(entries: Iterable[TensorEntry]) -> bytes:
    header: dict = {METADATA: {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.bytes],
        }
        end += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
