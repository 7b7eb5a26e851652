"""The chunks of a `torch_dist` checkpoint, as blocks of its files.

A chunk is one tensor as torch.save wrote it: a zip archive inside a larger file, the tensor's bytes stored in it
uncompressed.  Finding those bytes avoids reading them into memory only to write them out again.
"""

import io
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from checkpoints_conv.formats import plain_pickle
from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.plain_pickle import Made, Named, Persistent
from checkpoints_conv.formats.row_blocks import Block, FileBlock, MemoryBlock, read_exactly

# What reading a chunk may raise when its bytes are not what a checkpoint holds; RuntimeError is zipfile's for what it cannot do.
DAMAGE = (ValueError, EOFError, LookupError, TypeError, RuntimeError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError)
LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name and its extra field
STORAGES = {"FloatStorage": Dtype.F32, "HalfStorage": Dtype.F16, "BFloat16Storage": Dtype.BF16}
MAX_DESCRIPTION = 2**16  # bytes of the pickle that describes a tensor


def stored_block(path: Path, offset: int, length: int, dtype: Dtype, shape: tuple[int, ...]) -> Block:
    """The tensor in bytes [offset, offset + length) of a file; a block of that file if its elements are contiguous there.

    Raises:
        any of DAMAGE: damaged, or another tensor.
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        window = _Window(file.fileno(), offset, length)
        entries = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(window).infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise ValueError("its archive is compressed, which torch.save never does")
        if "byteorder" in entries and _entry(window, entries["byteorder"], 16) != b"little":
            raise ValueError("its numbers are not little-endian")
        description = _description(plain_pickle.load(_entry(window, entries["data.pkl"], MAX_DESCRIPTION)))
        if (description.dtype, description.shape) != (dtype, shape):
            raise ValueError(f"it holds {description.dtype} {list(description.shape)}, the metadata says {dtype} {list(shape)}")
        elements = entries["data/0"].file_size // dtype.bytes
        if description.last >= elements:
            raise EOFError(f"a tensor of {list(shape)} has a storage of {elements} elements")
        start = _start(window, entries["data/0"])
        window.content(start, 0, elements * dtype.bytes)
        if description.strides == _contiguous(shape):
            return FileBlock(shape, dtype, path, offset + start + description.first * dtype.bytes)
        count = description.last + 1 - description.first
        storage = window.content(start + description.first * dtype.bytes, count * dtype.bytes)
    flat = numpy.frombuffer(storage, f"V{dtype.bytes}")
    strides = [stride * dtype.bytes for stride in description.strides]
    tensor = numpy.ascontiguousarray(numpy.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False))
    return MemoryBlock(shape, dtype, tensor.reshape(-1).view(numpy.uint8).data)


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, as a file."""

    def __init__(self, descriptor: int, offset: int, length: int):
        super().__init__()
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError(f"byte {at} is before its beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        data = os.pread(self._descriptor, count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def content(self, start: int, length: int, beyond: int = 0) -> bytearray:
        """Bytes [start, start + length).

        Args:
            beyond: bytes after them that must be there too.

        Raises:
            EOFError: it has fewer.
        """
        if start < 0 or start + length + beyond > self._length:
            raise EOFError(f"it has {self._length} bytes, [{start}, {start + length + beyond}) are needed")
        return read_exactly(self._descriptor, self._offset + start, length)


def _start(window: _Window, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin; zipfile only gives its header's offset."""
    header = window.content(info.header_offset, LOCAL_HEADER)
    return info.header_offset + LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _entry(window: _Window, info: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of a stored entry; zipfile would check a checksum that torch may leave out."""
    if info.file_size > most:
        raise ValueError(f"{info.filename} has {info.file_size} bytes")
    return bytes(window.content(_start(window, info), info.file_size))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


@dataclass(frozen=True)
class _Description:
    """A tensor as its pickle describes it; strides are in elements, `first` and `last` are element numbers of its storage."""

    dtype: Dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.first + sum(stride * (length - 1) for stride, length in zip(self.strides, self.shape, strict=True))


def _description(value: Any) -> _Description:
    """Raises:
    ValueError: it is not a plain tensor.
    """
    if isinstance(value, Made) and value.name == "_rebuild_parameter":
        value = value.arguments[0]
    if not isinstance(value, Made) or value.name != "_rebuild_tensor_v2" or any(value.arguments[6:]):  # e.g. a negated view
        raise ValueError("it is not a plain tensor")
    storage, first, shape, strides = value.arguments[:4]
    numbers = [first, *shape, *strides]
    if any(type(number) is not int or not 0 <= number < 2**40 for number in numbers) or len(shape) != len(strides):
        raise ValueError("it is not a plain tensor")
    if not isinstance(storage, Persistent):
        raise ValueError("it holds a tensor without a storage")
    kind, dtype, key, *_ = storage.identity
    if kind != "storage" or key != "0" or not isinstance(dtype, Named) or dtype.name not in STORAGES:
        raise ValueError("it holds a tensor of another kind than float32, float16 and bfloat16")
    return _Description(STORAGES[dtype.name], first, tuple(shape), tuple(strides))
