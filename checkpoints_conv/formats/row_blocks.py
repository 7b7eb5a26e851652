"""Blocks of rows, in a file or in memory: bytes that are copied from checkpoint to checkpoint unchanged."""

import errno
import io
import math
import mmap
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dtypes import Dtype

COMPARED_BYTES = 2**22  # of two blocks at a time
NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # some network and overlay file systems


@dataclass(frozen=True)
class Block(ABC):
    """Rows of a tensor, one after the other."""

    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bytes

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.bytes

    @abstractmethod
    def rows(self, first: int, count: int) -> Self:
        """Rows [first, first + count)."""

    @abstractmethod
    def read(self, start: int = 0, count: "int | None" = None) -> "bytearray | memoryview":
        """Bytes [start, start + count); without arguments, all.

        Raises:
            OSError: its file cannot be read.
            ConversionError: its file has become shorter.
        """


@dataclass(frozen=True)
class FileBlock(Block):
    """Rows in a file, from byte `offset` on.  The file is open only while they are read."""

    path: Path
    offset: int

    def rows(self, first: int, count: int) -> "FileBlock":
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * self.row_bytes)

    def read(self, start: int = 0, count: "int | None" = None) -> bytearray:
        with self.path.open("rb", buffering=0) as file:
            try:
                return read_exactly(file.fileno(), self.offset + start, self.bytes - start if count is None else count)
            except EOFError:
                raise self.shortened() from None

    def mapped(self) -> memoryview:
        """All its bytes in mapped memory, writable without effect: pages are read on use, and are not anonymous memory.

        Raises:
            OSError: its file cannot be read.
            ConversionError: its file has become shorter.
        """
        if not self.bytes:
            return memoryview(bytearray())
        before = self.offset % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < self.offset + self.bytes:
                raise self.shortened()
            held = mmap.mmap(file.fileno(), before + self.bytes, access=mmap.ACCESS_COPY, offset=self.offset - before)
        return memoryview(held)[before:]

    def shortened(self) -> ConversionError:
        return ConversionError(f"{self.path} is shorter than its tensors; was it changed during the conversion?")


@dataclass(frozen=True)
class MemoryBlock(Block):
    """Rows in memory, given as their bytes."""

    data: memoryview

    def rows(self, first: int, count: int) -> "MemoryBlock":
        data = self.data[first * self.row_bytes : (first + count) * self.row_bytes]
        return replace(self, shape=(count, *self.shape[1:]), data=data)

    def read(self, start: int = 0, count: "int | None" = None) -> memoryview:
        return self.data[start : len(self.data) if count is None else start + count]


def read_exactly(descriptor: int, at: int, count: int) -> bytearray:
    """Bytes [at, at + count) of a file.

    Raises:
        EOFError: it has fewer.
    """
    data, done = bytearray(count), 0
    while done < count:
        got = os.preadv(descriptor, [memoryview(data)[done:]], at + done)
        if got == 0:
            raise EOFError(f"it has {at + done} bytes, {at + count} are needed")
        done += got
    return data


def same_bytes(a: Block, b: Block) -> bool:
    """Whether two blocks hold the same bytes.

    Raises:
        OSError, ConversionError: see `Block.read`.
    """
    steps = [(start, min(COMPARED_BYTES, a.bytes - start)) for start in range(0, a.bytes, COMPARED_BYTES)]
    return a.bytes == b.bytes and all(a.read(*step) == b.read(*step) for step in steps)


class BlockFile(io.FileIO):
    """A file that blocks are written to; what an earlier run left in it can be compared first.

    Blocks of files go straight from one file to the other, as with `cp`.
    """

    def __init__(self, path: Path):
        super().__init__(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))
        self._path = path
        self._left = os.fstat(self.fileno()).st_size  # bytes that were there before

    def holds(self, block: Block, at: int) -> bool:
        """Whether the bytes of a block are at byte `at` of what an earlier run left.

        Raises:
            OSError, ConversionError: see `Block.read`.
        """
        return at + block.bytes <= self._left and same_bytes(block, FileBlock(block.shape, block.dtype, self._path, at))

    def put(self, data: "bytes | bytearray | memoryview", at: int) -> None:
        """Write all of `data` at byte `at` of the file."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fileno(), view, at)
            view, at = view[done:], at + done

    def copy(self, block: Block, at: int) -> None:
        """Write a block to byte `at` of the file.

        Raises:
            OSError: the file system's error.
            ConversionError: the block's file has become shorter.
        """
        if not isinstance(block, FileBlock):
            self.put(block.read(), at)
            return
        with block.path.open("rb", buffering=0) as source:
            self.seek(at)
            done = 0
            while done < block.bytes:
                try:
                    sent = os.sendfile(self.fileno(), source.fileno(), block.offset + done, block.bytes - done)
                except OSError as error:
                    if error.errno not in NO_SENDFILE:
                        raise
                    sent = min(COMPARED_BYTES, block.bytes - done)
                    self.put(block.read(done, sent), at + done)
                    self.seek(at + done + sent)
                if sent == 0:
                    raise block.shortened()
                done += sent
