"""A Megatron distributed checkpoint (`torch_dist`), read one parameter at a time, whatever layout wrote it."""

import pickle
import re
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from checkpoints_conv.dist_chunks import DAMAGE, ChunkFiles
from checkpoints_conv.dist_keys import Place, local_spec_key, place_of
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.hf_folder import read_json
from checkpoints_conv.mapping import ModelMapping
from checkpoints_conv.safetensors_file import DTYPES

MODEL_KEYS = re.compile(r"^(embedding|decoder|output_layer)\.")
# The classes that the pickled metadata of a checkpoint is made of; torch's dtypes come on top, anything else is refused.
METADATA_CLASSES = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
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
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"PosixPath"},
    "builtins": {"set", "dict", "list"},
}

def is_dist_checkpoint(folder: "str | Path") -> bool:
    """Whether the folder holds a (complete) distributed checkpoint."""
    return (Path(folder) / "metadata.json").is_file() and (Path(folder) / ".metadata").is_file()


class DistReader:
    """The model parameters of a checkpoint; optimizer and other state in it is left alone.

    Raises (on construction):
        ConversionError: not such a checkpoint; a parameter that is missing, unknown or of another shape than the config
            says, by its key; a data file that is missing or truncated.
    """

    def __init__(self, folder: "str | Path", mapping: ModelMapping):
        self.folder = Path(folder)
        self.mapping = mapping
        backend = read_json(self.folder / "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise ConversionError(f"{self.folder} is of the format {backend!r}; only 'torch_dist' is read")
        self._metadata = _read_metadata(self.folder / ".metadata")
        self._files = ChunkFiles(self.folder)
        self.maps = self._files.maps
        keys = self._metadata.state_dict_metadata
        self._per_layer = any(re.match(r"^decoder\.layers\.\d+\.", key) for key in keys)
        self.places = {name: self._place(name) for name in mapping.megatron_names()}
        self._check_keys()
        self._check_files()

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a parameter by its global Megatron name."""
        return self._stored(name).properties.dtype

    def read(self, name: str) -> Iterator[tuple[str, list[Tensor]]]:
        """The HF tensors of a parameter by its global Megatron name, without vocabulary padding, as blocks of rows.

        Where the checkpoint holds whole rows in one chunk, the block is backed by the mapped file.

        Raises:
            ConversionError: a file that is damaged, or that does not hold all of the parameter.
        """
        entry = self.mapping.entry(name)
        bands = entry.rule.bands(self.mapping.spec)
        blocks: list[list[Tensor]] = [[] for _ in entry.hf]
        for (number, _, _), cut in zip(bands, _cut(self._rows(name), [rows for _, _, rows in bands]), strict=True):
            blocks[number] += cut
        yield from zip(entry.hf, blocks, strict=True)

    def _rows(self, name: str) -> list[Tensor]:
        """A whole parameter, without vocabulary padding, as blocks of rows one below the other."""
        place, stored = self.places[name], self._stored(name)
        shape = self.mapping.entry(name).rule.megatron_shape(self.mapping.spec)
        leading = len(place.index)
        offsets = torch.Size((*place.index, *[0] * len(shape)))
        sizes = torch.Size((*[1] * leading, *shape))
        items = create_read_items_for_chunk_list(place.key, stored, [ChunkStorageMetadata(offsets, sizes)])
        held = sum(item.lengths.numel() for item in items)
        if held != sizes.numel():
            raise ConversionError(f"{self.folder} holds {held} of {sizes.numel()} elements of {name!r}")
        if all(item.lengths[leading + 1 :] == sizes[leading + 1 :] for item in items):  # whole rows
            items.sort(key=lambda item: item.dest_offsets[leading])
            return [self._part(item).reshape(-1, *shape[1:]) for item in items]
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        for item in items:
            _box(target, item.dest_offsets, item.lengths).copy_(self._part(item))
        return [target.view(shape)]

    def _part(self, item: ReadItem) -> Tensor:
        return _box(self._chunk(item), item.storage_offsets, item.lengths)

    def _chunk(self, item: ReadItem) -> Tensor:
        """The stored chunk that an item reads from."""
        at = self._metadata.storage_data.get(item.storage_index)
        if at is None:
            raise ConversionError(f"{self.folder / '.metadata'} does not say where {item.storage_index} lies")
        where = f"{item.storage_index.fqn!r} {list(item.storage_index.offset)}"
        if getattr(at, "transform_descriptors", None):
            raise ConversionError(f"{self.folder / at.relative_path} is transformed at {where}: {at.transform_descriptors}")
        try:
            chunk = self._files.tensor(at.relative_path, at.offset, at.length)
        except DAMAGE as error:
            what = str(error).partition("\n")[0]
            raise ConversionError(f"{self.folder / at.relative_path} is damaged at {where}: {what}") from error
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        reaches = [offset + length for offset, length in zip(item.storage_offsets, item.lengths)]
        if chunk.dtype != stored.properties.dtype or chunk.dim() != len(reaches) or any(map(int.__gt__, reaches, chunk.shape)):
            raise ConversionError(f"{self.folder / at.relative_path} holds {chunk.dtype} {list(chunk.shape)} at {where}, which is not it")
        return chunk

    def _stored(self, name: str) -> TensorStorageMetadata:
        return self._metadata.state_dict_metadata[self.places[name].key]

    def _place(self, name: str) -> Place:
        place = place_of(name, self.mapping, self._per_layer)
        if place.key in self._metadata.state_dict_metadata:
            return place
        return Place(local_spec_key(place.key), place.index, place.leading)

    def _check_keys(self) -> None:
        stored = self._metadata.state_dict_metadata
        expected = {place.key for place in self.places.values()}
        known = expected | set(map(local_spec_key, expected))
        unknown = [key for key in stored if MODEL_KEYS.match(key) and "._extra_state" not in key and key not in known]
        if unknown:
            raise ConversionError(f"{self.folder} holds parameters that its config does not know: {unknown[:5]}")
        missing = [key for key in expected if key not in stored]
        if missing:
            raise ConversionError(f"{self.folder} lacks parameters that its config asks for: {missing[:5]}")
        for name, place in self.places.items():
            rule = self.mapping.entry(name).rule
            wanted = (*place.leading, *rule.megatron_shape(self.mapping.spec))
            got = tuple(stored[place.key].size)
            padded = rule.vocab and len(got) == len(wanted) and got[0] >= wanted[0] and got[1:] == wanted[1:]
            dtype = stored[place.key].properties.dtype
            if dtype not in DTYPES.values():
                raise ConversionError(f"{self.folder}: {place.key} is {dtype}; only {', '.join(DTYPES)} are converted")
            if got != wanted and not padded:
                raise ConversionError(f"{self.folder}: {place.key} is {list(got)}, the config asks for {list(wanted)}")


    def _check_files(self) -> None:
        keys = {place.key for place in self.places.values()}
        needed: dict[str, int] = {}
        for index, at in self._metadata.storage_data.items():
            if index.fqn in keys:
                needed[at.relative_path] = max(needed.get(at.relative_path, 0), at.offset + at.length)
        for name, size in needed.items():
            path = self.folder / name
            if not path.is_file():
                raise ConversionError(f"{path} does not exist: the checkpoint is incomplete")
            if path.stat().st_size < size:
                raise ConversionError(f"{path} is truncated: it has {path.stat().st_size} bytes, its tensors reach to {size}")


def _cut(blocks: list[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    """The same rows, in lists of `sizes` rows."""
    blocks = blocks[::-1]
    for size in sizes:
        part = []
        while size:
            block = blocks.pop()
            if len(block) > size:
                blocks.append(block[size:])
                block = block[:size]
            part.append(block)
            size -= len(block)
        yield part


def _box(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _MetadataUnpickler(pickle.Unpickler):
    """Loads classes of checkpoint metadata only."""

    def find_class(self, module: str, name: str):
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint metadata needs")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}")
        if not all(isinstance(at, (TensorStorageMetadata, BytesStorageMetadata)) for at in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError("it describes something else than tensors and objects")
        return metadata
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist: the checkpoint is incomplete") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, LookupError, ImportError, RuntimeError) as error:
        raise ConversionError(f"{path} cannot be read as checkpoint metadata: {error}") from error
