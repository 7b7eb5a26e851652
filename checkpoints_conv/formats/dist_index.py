"""The pickled `.metadata` of a `torch_dist` checkpoint, read without executing or importing anything that it names.

torch's FileSystemReader unpickles this file with `pickle.load`, which runs whatever code a foreign checkpoint names.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats import plain_pickle
from checkpoints_conv.formats.plain_pickle import Made, Named


@dataclass(frozen=True)
class Where:
    """Bytes [start, start + length) of a data file."""

    file: str
    start: int
    length: int
    transformed: bool  # compressed or otherwise encoded


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: Where | None  # None: not in the metadata


@dataclass(frozen=True)
class StoredTensor:
    """The tensor under one key."""

    size: tuple[int, ...]
    dtype: str  # torch's name
    chunks: list[StoredChunk] = field(default_factory=list)

    def by_index(self, dimensions: int) -> dict[tuple[int, ...], list[StoredChunk]]:
        """The chunks that reach into each index of the first dimensions (layers, experts)."""
        found: dict[tuple[int, ...], list[StoredChunk]] = {}
        for chunk in self.chunks:
            reach = (range(a, min(a + n, most)) for a, n, most in zip(chunk.offsets, chunk.sizes, self.size[:dimensions]))
            for index in product(*reach):
                found.setdefault(index, []).append(chunk)
        return found


def read_index(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key.

    Raises:
        ConversionError: the file is missing, damaged, or describes something else.
    """
    try:
        return dict(_tensors(plain_pickle.load(path.read_bytes())))
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist: the checkpoint is incomplete") from None
    except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConversionError(f"{path} cannot be read as checkpoint metadata: {error}") from error


def _tensors(metadata: Any) -> Iterator[tuple[str, StoredTensor]]:
    stored_index = _state(metadata, "Metadata", "MCoreMetadata")
    where: dict[tuple[str, tuple[int, ...]], Where] = {}
    for index, info in stored_index["storage_data"].items():
        index, info = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if index.get("offset") is not None:  # a tensor's; pickled state may omit fields that are None
            key, file = index["fqn"], info["relative_path"]
            start, length = _numbers([info["offset"], info["length"]])
            if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
                raise ValueError("it names a data file outside its folder")
            transformed = bool(info.get("transform_descriptors"))
            where[_text(key), _numbers(index["offset"])] = Where(file, start, length, transformed)
    for key, stored in stored_index["state_dict_metadata"].items():
        if isinstance(stored, Made) and stored.name == "BytesStorageMetadata":
            continue
        stored = _state(stored, "TensorStorageMetadata")
        properties = stored["properties"]
        state = properties.state if isinstance(properties.state, dict) else {"dtype": properties.state[0]}
        if not isinstance(state["dtype"], Named):
            raise ValueError("a tensor has no dtype")
        tensor = StoredTensor(_numbers(stored["size"]), state["dtype"].name)
        for chunk in stored["chunks"]:
            chunk = _state(chunk, "ChunkStorageMetadata")
            offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
            if not len(offsets) == len(sizes) == len(tensor.size):
                raise ValueError(f"{key} has {len(tensor.size)} dimensions, one of its chunks has another number")
            if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, tensor.size)):
                raise ValueError(f"{key} is {list(tensor.size)}, its chunk of {list(sizes)} at {list(offsets)} is not within")
            tensor.chunks.append(StoredChunk(offsets, sizes, where.get((key, offsets))))
        yield _text(key), tensor


def _state(value: Any, *names: str) -> dict:
    if not isinstance(value, Made) or value.name not in names or not isinstance(value.state, dict):
        found = f"{value.by.module}.{value.name}" if isinstance(value, Made) and value.name else type(value).__name__
        raise ValueError(f"it holds {found} where {' or '.join(names)} belongs")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    """A torch.Size, tuple or list."""
    if isinstance(value, Made) and value.name == "Size":
        (value,) = value.arguments
    if not isinstance(value, (tuple, list)) or any(type(number) is not int or not 0 <= number < 2**62 for number in value):
        raise ValueError("it holds something else where sizes or offsets belong")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a key is not text")
    return value
