"""Tensors that lie in files: seen through mapped memory, and copied from file to file by the operating system."""

import errno
import io
import mmap
import os
from pathlib import Path
from typing import Optional

import numpy
import torch
from torch import Tensor

COPY_BYTES = 2**16  # below it, one write costs less than finding out where the bytes lie


class FileMaps:
    """Files opened and mapped into memory, once each.

    The pages of a tensor are read where they are used, and belong to the file: they are not anonymous memory.
    """

    def __init__(self):
        self._maps: dict[Path, _FileMap] = {}

    def buffer(self, path: Path) -> mmap.mmap:
        """All bytes of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty.
        """
        return self._open(path).buffer

    def tensor(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        """The tensor whose elements lie one after the other from byte `offset` of a file.

        Raises:
            OSError: it cannot be read, or has fewer bytes.
        """
        count = torch.Size(shape).numel()
        if path.stat().st_size < offset + count * dtype.itemsize:
            raise OSError(errno.EIO, "the file is shorter than its tensors", str(path))
        return torch.frombuffer(self.buffer(path), dtype=dtype, count=count, offset=offset).view(shape)

    def find(self, address: int, length: int) -> Optional[tuple[int, int]]:
        """File descriptor and offset of bytes in memory that are a file's; None: they are in none of these files."""
        for held in list(self._maps.values()):
            if held.address <= address and address + length <= held.address + len(held.buffer):
                return held.file.fileno(), address - held.address
        return None

    def _open(self, path: Path) -> "_FileMap":
        if path not in self._maps:
            self._maps.setdefault(path, _FileMap(path))
        return self._maps[path]


class _FileMap:
    def __init__(self, path: Path):
        self.file = path.open("rb", buffering=0)
        # Private, copy-on-write: torch wants a writable buffer, and nothing is ever written to it.
        self.buffer = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.address = _address(memoryview(self.buffer))


class CopyingFile(io.FileIO):
    """A new file; what is written from mapped memory goes straight from one file to the other.

    That is what `cp` does; a write that reads its source through the mapping has a page fault for every few pages besides.
    """

    def __init__(self, path: Path, maps: FileMaps):
        super().__init__(path, "wb")
        self._sources = maps

    def write(self, data) -> int:
        """Write all of a buffer, whatever its length.

        Raises:
            OSError: as the file system says it; the source file has been shortened meanwhile.
        """
        view = memoryview(data).cast("B")
        source = self._sources.find(_address(view), len(view)) if len(view) >= COPY_BYTES else None
        done = 0
        while done < len(view):
            if source is None:
                done += super().write(view[done:])
                continue
            sent = os.sendfile(self.fileno(), source[0], source[1] + done, len(view) - done)
            if sent == 0:
                raise OSError(errno.EIO, "a file that it is copied from was shortened meanwhile", str(self.name))
            done += sent
        return done


def _address(view: memoryview) -> int:
    return numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data
