"""A Megatron distributed checkpoint (`torch_dist`), read one parameter at a time, whatever layout wrote it."""

import pickle
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, Metadata, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from checkpoints_conv.dist_keys import LOCAL_MOE_NORM, STACKED_MOE_NORM, Place, place_of
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.hf_folder import read_json
from checkpoints_conv.mapping import ModelMapping

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
            says, by its key.
    """

    def __init__(self, folder: "str | Path", mapping: ModelMapping):
        self.folder = Path(folder)
        self.mapping = mapping
        backend = read_json(self.folder / "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise ConversionError(f"{self.folder} is of the format {backend!r}; only 'torch_dist' is read")
        self._metadata = _read_metadata(self.folder / ".metadata")
        self._reader = FileSystemReader(self.folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        keys = self._metadata.state_dict_metadata
        self._per_layer = any(re.match(r"^decoder\.layers\.\d+\.", key) for key in keys)
        self.places = {name: self._place(name) for name in mapping.megatron_names()}
        self._check_keys()

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a parameter by its global Megatron name."""
        return self._stored(name).properties.dtype

    def read(self, name: str) -> Tensor:
        """A whole parameter (TP 1, without vocabulary padding) by its global Megatron name.

        Raises:
            ConversionError: a file that is missing or truncated, or that does not hold all of the parameter.
        """
        place, stored = self.places[name], self._stored(name)
        shape = self.mapping.entry(name).rule.megatron_shape(self.mapping.spec)
        target = torch.empty((*[1] * len(place.index), *shape), dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size((*place.index, *[0] * len(shape))), target.shape)
        items = create_read_items_for_chunk_list(place.key, stored, [chunk])
        held = sum(item.lengths.numel() for item in items)
        if held != target.numel():
            raise ConversionError(f"{self.folder} holds {held} of the {target.numel()} elements of {name!r}")
        try:
            self._reader.read_data(LoadPlan(items), _IntoTensor(target))
        except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            file = self._metadata.storage_data[items[0].storage_index].relative_path
            raise ConversionError(
                f"{self.folder / file} is missing or damaged at {place.key!r} {list(place.index)}: {error}"
            ) from error
        return target.view(shape)

    def _stored(self, name: str) -> TensorStorageMetadata:
        return self._metadata.state_dict_metadata[self.places[name].key]

    def _place(self, name: str) -> Place:
        place = place_of(name, self.mapping, self._per_layer)
        if place.key == STACKED_MOE_NORM and place.key not in self._metadata.state_dict_metadata:
            place = Place(LOCAL_MOE_NORM, place.index, place.leading)
        return place

    def _check_keys(self) -> None:
        stored = self._metadata.state_dict_metadata
        expected = {place.key for place in self.places.values()}
        allowed = expected | {LOCAL_MOE_NORM if self.mapping.spec.experts else ""}
        unknown = [k for k in stored if MODEL_KEYS.match(k) and "._extra_state" not in k and k not in allowed]
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
            if got != wanted and not padded:
                raise ConversionError(f"{self.folder}: {place.key} is {list(got)}, the config asks for {list(wanted)}")


class _IntoTensor(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: Tensor):
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


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
            return _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist: the checkpoint is incomplete") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as checkpoint metadata: {error}") from error
