"""The chunks of a `torch_dist` checkpoint, as views of its mapped files.

A chunk is one tensor as torch.save wrote it: a zip archive inside a larger file, the tensor's bytes stored in it
uncompressed.  Finding those bytes spares reading them into memory only to write them out again.
"""

import io
import mmap
import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_conv.file_maps import FileMaps

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
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)
LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name and its extra field


class ChunkFiles:
    """The data files of one checkpoint folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.maps = FileMaps()

    def tensor(self, file: str, offset: int, length: int) -> Tensor:
        """The tensor in bytes [offset, offset + length) of a file, backed by the mapped file if its bytes lie there plainly.

        Raises:
            any of DAMAGE: missing or damaged.
        """
        mapped = self.maps.buffer(self._folder / file)
        if offset + length > len(mapped):
            raise EOFError(f"it has {len(mapped)} bytes, {offset + length} are needed")
        view = _View(mapped, offset, length)
        described = torch.load(view, map_location="meta", weights_only=True)  # reads no storage
        storages = [info for info in zipfile.ZipFile(view).infolist() if "/data/" in info.filename]
        if len(storages) == 1 and described.is_contiguous() and storages[0].compress_type == zipfile.ZIP_STORED:
            start = offset + storages[0].header_offset
            name, extra = (int.from_bytes(mapped[start + at : start + at + 2], "little") for at in (26, 28))
            start += LOCAL_HEADER + name + extra + described.storage_offset() * described.itemsize
            return self.maps.tensor(self._folder / file, described.dtype, described.shape, start)
        view.seek(0)
        return torch.load(view, map_location="cpu", weights_only=True)


class _View(io.RawIOBase):
    """A window of a mapping, as a file."""

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
