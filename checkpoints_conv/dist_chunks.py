"""The chunks of a `torch_dist` checkpoint, as blocks of its files.

A chunk is one tensor as torch.save wrote it: a zip archive inside a larger file, the tensor's bytes stored in it
uncompressed.  Finding those bytes spares reading them into memory only to write them out again.
"""

import io
import mmap
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Optional

from checkpoints_conv.blocks import Block, FileBlock, FileMaps
from checkpoints_conv.dtypes import Dtype

# What reading a chunk may raise when its bytes, or what the metadata says of them, are not what a checkpoint holds.
DAMAGE = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)
LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name and its extra field
STORAGES = {"FloatStorage": Dtype.F32, "HalfStorage": Dtype.F16, "BFloat16Storage": Dtype.BF16}
MOST_DESCRIPTION = 2**16  # bytes of the pickle beside a tensor's storage


class ChunkFiles:
    """The data files of one checkpoint folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.maps = FileMaps()

    def block(self, file: str, offset: int, length: int) -> Block:
        """The tensor in bytes [offset, offset + length) of a file; a block of that file if its bytes lie there plainly.

        Raises:
            any of DAMAGE: missing or damaged.
        """
        mapped = self.maps.buffer(self._folder / file)
        if offset + length > len(mapped):
            raise EOFError(f"it has {len(mapped)} bytes, {offset + length} are needed")
        window = _Window(mapped, offset, length)
        plain = _plain_tensor(window)
        if plain is not None:
            dtype, shape, start = plain
            return FileBlock(shape, dtype, self._folder / file, offset + start)
        import torch

        from checkpoints_conv.tensors import block_of

        window.seek(0)
        return block_of(torch.load(window, map_location="cpu", weights_only=True))


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a mapping, as a file."""

    def __init__(self, mapped: mmap.mmap, offset: int, length: int):
        super().__init__()
        self._mapped, self._offset, self._length, self._at = mapped, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        start = self._offset + self._at
        buffer[:count] = self._mapped[start : start + count]
        self._at += count
        return count

    def content(self, start: int, length: int) -> bytes:
        """Raises:
        EOFError: it has fewer bytes.
        """
        if start + length > self._length:
            raise EOFError(f"it has {self._length} bytes, {start + length} are needed")
        return self._mapped[self._offset + start : self._offset + start + length]


def _plain_tensor(window: _Window) -> Optional[tuple[Dtype, tuple[int, ...], int]]:
    """Dtype and shape of the tensor that an archive holds, and where its bytes begin; None: torch must take it apart.

    Raises:
        any of DAMAGE: no such archive.
    """
    entries = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(window).infolist()}
    if {"data.pkl", "data/0"} - entries.keys() or any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
        return None
    if "byteorder" in entries and _entry(window, entries["byteorder"], 16) != b"little":
        return None
    described = _Description(io.BytesIO(_entry(window, entries["data.pkl"], MOST_DESCRIPTION))).load()
    if not isinstance(described, tuple) or len(described) != 4:
        return None
    dtype, first, shape, strides = described
    start = _start(window, entries["data/0"]) + first * dtype.bytes
    block = FileBlock(shape, dtype, Path(), start)
    if strides != _contiguous(shape):
        return None
    if first * dtype.bytes + block.bytes > entries["data/0"].file_size:
        raise EOFError(f"a tensor of {list(shape)} has a storage of {entries['data/0'].file_size} bytes")
    window.content(start + block.bytes, 0)
    return dtype, shape, start


def _start(window: _Window, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: zipfile tells where its header does."""
    header = window.content(info.header_offset, LOCAL_HEADER)
    return info.header_offset + LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _entry(window: _Window, info: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of a stored entry; zipfile would hold them against a checksum that torch may leave out."""
    if info.file_size > most:
        raise ValueError(f"{info.filename} has {info.file_size} bytes")
    return window.content(_start(window, info), info.file_size)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


class _Description(pickle.Unpickler):
    """What a tensor's pickle says of it: (dtype, first element, shape, strides); anything else than a plain tensor: another value."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch":
            return STORAGES.get(name, _other)
        return _other

    def persistent_load(self, identity: Any) -> Optional[Dtype]:
        kind, dtype, key, *_ = identity
        return dtype if kind == "storage" and key == "0" else None


def _described(dtype: Any, first: Any, shape: Any, strides: Any, *_: Any) -> Optional[tuple]:
    numbers = (first, *shape, *strides)
    if not isinstance(dtype, Dtype) or any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        return None
    return dtype, first, tuple(shape), tuple(strides)


def _other(*_: Any) -> None:
    return None
