"""The `.metadata` file of a Megatron distributed checkpoint: which chunk of which key lies where."""

from pathlib import Path
from typing import Iterable

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

from checkpoints_conv.dist_plan import Chunk, Stored


def write_metadata(folder: Path, chunks: Iterable[Chunk], objects: Iterable[str], stored: Iterable[Stored]) -> None:
    """Complete the checkpoint in `folder`.

    Args:
        chunks: all of the checkpoint, those of one key in the order of their numbers.
        objects: keys of what is no tensor.
        stored: where each of them was written.
    """
    metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: BytesStorageMetadata() for key in objects}
    for chunk in chunks:
        properties = TensorProperties(dtype=chunk.dtype)
        whole = metadata.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(chunk.size), []))
        whole.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    results = [
        WriteResult(
            index=MetadataIndex(at.key, at.offsets, at.number),
            size_in_bytes=at.length,
            storage_data=_StorageInfo(at.file, at.start, at.length),
        )
        for at in stored
    ]
    FileSystemWriter(folder, sync_files=False).finish(Metadata(metadata), [results])
