"""What torch puts around the bytes of a Megatron distributed checkpoint: an archive for every chunk, objects, and `.metadata`."""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy
import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dist_plan import FRAME_BYTES, Chunk
from checkpoints_conv.formats.row_blocks import BlockFile
from checkpoints_conv.formats.tensors import torch_dtype

COMMON = "common.pt"
NO_STATE = [torch.empty(0, dtype=torch.uint8)]  # what a model without FP8 keeps under `_extra_state`


def complete(folder: Path, units: Sequence[Sequence[Chunk]], objects: Sequence[str]) -> None:
    """Complete the checkpoint in `folder`, whose chunks have their bytes in place.

    Args:
        units: chunks by file.
        objects: keys of the `_extra_state` objects.
    """
    results: list[tuple[str, tuple[int, ...] | None, str, int, int]] = []
    for unit in units:
        end, after = 0, b""  # of the last chunk's bytes, and what follows them
        with BlockFile(folder / unit[0].file) as file:
            for chunk in unit:
                before, following = frame(chunk)
                start = chunk.start - len(before)
                file.put(after.ljust(start - end, b"\0") + before, end)
                results.append((chunk.key, chunk.offsets, chunk.file, start, len(before) + chunk.bytes + len(following)))
                end, after = chunk.end, following
            if unit is units[-1]:
                state = _saved(NO_STATE)
                results += [(key, None, unit[0].file, end + len(after), len(state)) for key in objects]
                after += state
            file.put(after, end)
            file.truncate(end + len(after))
    _write_metadata(folder, [chunk for unit in units for chunk in unit], objects, results)
    (folder / COMMON).write_bytes(_saved({}))


class _Frame(io.RawIOBase):
    """Keeps what torch.save writes before and after the bytes of one tensor."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self._tensor = tensor
        self.before, self.after, self.seen = bytearray(), bytearray(), False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(data) == self._tensor.nbytes and numpy.frombuffer(data, numpy.uint8).ctypes.data == self._tensor.data_ptr():
            self.seen = True
        elif self.seen:
            self.after += data
        else:
            self.before += data
        return len(data)


def frame(chunk: Chunk) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of a chunk.

    Raises:
        ConversionError: this version of torch writes more than there is room for.
    """
    tensor = torch.empty(chunk.sizes, dtype=torch_dtype(chunk.dtype))  # its memory is never used
    file = _Frame(tensor)
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch.load ignores them, and computing them takes as long as the copy
    try:
        torch.save(tensor, cast(IO[bytes], file))
    finally:
        torch.serialization.set_crc32_options(checksums)
    longest = max(len(file.before), len(file.after))
    if not file.seen or longest > FRAME_BYTES:
        raise ConversionError(
            f"torch {torch.__version__} saves a tensor with {longest} bytes around its data; {FRAME_BYTES} are reserved"
        )
    return bytes(file.before), bytes(file.after)


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _write_metadata(folder: Path, chunks: Sequence[Chunk], objects: Sequence[str], results: Sequence[tuple]) -> None:
    tensors: dict[str, TensorStorageMetadata] = {}
    for chunk in chunks:
        properties = TensorProperties(dtype=torch_dtype(chunk.dtype))
        whole = tensors.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(chunk.size), []))
        whole.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    numbers: Counter[str] = Counter()  # chunks of each key
    written = []
    for key, offsets, file, start, length in results:
        index = MetadataIndex(key) if offsets is None else MetadataIndex(key, torch.Size(offsets), numbers[key])
        numbers[key] += 1
        written.append(WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(file, start, length)))
    FileSystemWriter(folder, sync_files=False).finish(
        Metadata({**dict.fromkeys(objects, BytesStorageMetadata()), **tensors}), [written]
    )
