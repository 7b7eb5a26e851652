"""Blocks of rows, in a file or in memory: what is copied from checkpoint to checkpoint without being looked at."""

import errno
import io
import math
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from checkpoints_conv.dtypes import Dtype

COMPARED_BYTES = 2**22  # of a file and a block at a time


@dataclass(frozen=True)
class Block:
    """Rows of a tensor, one after the other."""

    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bytes

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.bytes

    def rows(self, first: int, count: int) -> Self:
        """Some of its rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class FileBlock(Block):
    """Rows that lie in a file, from byte `offset` on."""

    path: Path
    offset: int

    def rows(self, first: int, count: int) -> "FileBlock":
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * self.row_bytes)


@dataclass(frozen=True)
class MemoryBlock(Block):
    """Rows in memory, given as their bytes."""

    data: memoryview

    def rows(self, first: int, count: int) -> "MemoryBlock":
        data = self.data[first * self.row_bytes : (first + count) * self.row_bytes]
        return replace(self, shape=(count, *self.shape[1:]), data=data)


class FileMaps:
    """Files opened once each, and mapped into memory where their bytes are looked at.

    Mapped pages are read where they are used, and belong to the file: they are not anonymous memory.
    """

    def __init__(self):
        self._files: dict[Path, io.FileIO] = {}
        self._buffers: dict[Path, mmap.mmap] = {}

    def file(self, path: Path) -> io.FileIO:
        """A file, open for reading.

        Raises:
            OSError: it cannot be read.
        """
        if path not in self._files:
            self._files.setdefault(path, io.FileIO(path))
        return self._files[path]

    def buffer(self, path: Path) -> mmap.mmap:
        """All bytes of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty.
        """
        if path not in self._buffers:
            # Private, copy-on-write: torch wants a writable buffer, and nothing is ever written to it.
            self._buffers.setdefault(path, mmap.mmap(self.file(path).fileno(), 0, access=mmap.ACCESS_COPY))
        return self._buffers[path]

    def view(self, block: Block) -> memoryview:
        """The bytes of a block.

        Raises:
            OSError: its file cannot be read, or is shorter.
        """
        if isinstance(block, MemoryBlock):
            return block.data
        if os.fstat(self.file(block.path).fileno()).st_size < block.offset + block.bytes:
            raise OSError(errno.EIO, "the file is shorter than its tensors", str(block.path))
        return memoryview(self.buffer(block.path))[block.offset : block.offset + block.bytes]

    def same(self, a: Block, b: Block) -> bool:
        """Whether two blocks hold the same bytes.

        Raises:
            OSError: see `view`.
        """
        left, right = self.view(a), self.view(b)
        return len(left) == len(right) and all(
            bytes(left[at : at + COMPARED_BYTES]) == bytes(right[at : at + COMPARED_BYTES])
            for at in range(0, len(left), COMPARED_BYTES)
        )


class BlockFile(io.FileIO):
    """A file that blocks are written to; what an earlier run left in it can be compared first.

    Blocks of files go straight from one file to the other, as with `cp`.
    """

    def __init__(self, path: Path, maps: FileMaps):
        """
        Args:
            maps: where the files of blocks are opened.
        """
        super().__init__(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))
        self._maps = maps
        self._left = os.fstat(self.fileno()).st_size  # bytes that were there before

    def holds(self, block: Block, at: int) -> bool:
        """Whether the bytes of a block are at byte `at` of what an earlier run left.

        Raises:
            OSError: see `FileMaps.view`.
        """
        if at + block.bytes > self._left:
            return False
        source = self._maps.view(block)
        return all(
            os.pread(self.fileno(), min(COMPARED_BYTES, len(source) - done), at + done)
            == bytes(source[done : done + COMPARED_BYTES])
            for done in range(0, len(source), COMPARED_BYTES)
        )

    def put(self, data: "bytes | memoryview", at: int) -> None:
        """Write all of some bytes to byte `at` of the file, whatever their length."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fileno(), view, at)
            view, at = view[done:], at + done

    def copy(self, block: Block, at: int) -> None:
        """Write a block to byte `at` of the file.

        Raises:
            OSError: as the file system says it; the block's file has been shortened meanwhile.
        """
        if isinstance(block, MemoryBlock):
            self.put(block.data, at)
            return
        self.seek(at)
        source, done = self._maps.file(block.path), 0
        while done < block.bytes:
            sent = os.sendfile(self.fileno(), source.fileno(), block.offset + done, block.bytes - done)
            if sent == 0:
                raise OSError(errno.EIO, "the file was shortened meanwhile", str(block.path))
            done += sent
