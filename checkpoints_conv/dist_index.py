"""The pickled `.metadata` of a `torch_dist` checkpoint, read without executing or importing anything that it names."""

import pickle
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from checkpoints_conv.errors import ConversionError

# What a pickle of checkpoint metadata names; anything else is refused.  Instances become `_Record`s.
RECORDS = {
    "torch": {"device"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "pathlib": {"PosixPath"},
}
VALUES = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "set"): set,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
}
DTYPE = re.compile(r"^(?:bfloat|complex|float|qint|quint|u?int)\d\w*$|^bool$")


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
    where: Optional[Where]  # None: the metadata does not say


@dataclass(frozen=True)
class StoredTensor:
    """The tensor under one key."""

    size: tuple[int, ...]
    dtype: str  # torch's name
    chunks: list[StoredChunk] = field(default_factory=list)


def read_index(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key.

    Raises:
        ConversionError: the file is missing, damaged, or names what no checkpoint metadata needs.
    """
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        return dict(_tensors(metadata))
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist: the checkpoint is incomplete") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, LookupError, MemoryError, OverflowError) as error:
        raise ConversionError(f"{path} cannot be read as checkpoint metadata: {error}") from error


class _Record:
    """An instance of one of RECORDS: what it was made from and its state, whatever that means to its class."""

    kind = ""
    state: Any = None

    def __init__(self, *values: Any):
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and DTYPE.match(name):
            return name
        if (module, name) in VALUES:
            return VALUES[module, name]
        if name in RECORDS.get(module, ()):
            return type(name, (_Record,), {"kind": name})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint metadata needs")


def _tensors(metadata: Any):
    _expect(metadata, "Metadata", "MCoreMetadata")
    where = {}
    for index, info in metadata["storage_data"].items():
        _expect(index, "MetadataIndex")
        _expect(info, "_StorageInfo")
        offset = index.state.get("offset")  # what is None is left out
        if offset is not None:
            place = Where(info["relative_path"], info["offset"], info["length"], bool(info.state.get("transform_descriptors")))
            _check(place.start, place.length)
            if type(place.file) is not str or Path(place.file).name != place.file:
                raise ValueError(f"it names a data file {place.file!r}, which is none in its folder")
            where[index["fqn"], offset] = place
    for key, told in metadata["state_dict_metadata"].items():
        _expect(told, "TensorStorageMetadata", "BytesStorageMetadata")
        if told.kind != "TensorStorageMetadata":
            continue
        _expect(told["properties"], "TensorProperties")
        state = told["properties"].state
        dtype = state["dtype"] if isinstance(state, dict) else state[0]
        _check(*told["size"])
        tensor = StoredTensor(told["size"], str(dtype))
        for chunk in told["chunks"]:
            _expect(chunk, "ChunkStorageMetadata")
            offsets, sizes = chunk["offsets"], chunk["sizes"]
            _check(*offsets, *sizes)
            if not len(offsets) == len(sizes) == len(tensor.size):
                raise ValueError(f"{key} is {list(tensor.size)}, and has a chunk of {list(sizes)} at {list(offsets)}")
            tensor.chunks.append(StoredChunk(offsets, sizes, where.get((key, offsets))))
        yield key, tensor


def _expect(value: Any, *kinds: str) -> None:
    if not isinstance(value, _Record) or value.kind not in kinds:
        raise ValueError(f"it holds {getattr(value, 'kind', type(value).__name__)} where {' or '.join(kinds)} belongs")


def _check(*numbers: Any) -> None:
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"it holds {numbers} where numbers from 0 on belong")
