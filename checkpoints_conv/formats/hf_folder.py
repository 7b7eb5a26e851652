"""Hugging Face folders: config, and tensors of (sharded) safetensors read lazily."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dtypes import NAMES, Dtype
from checkpoints_conv.formats.row_blocks import Block, same_bytes
from checkpoints_conv.formats.safetensors_file import read_blocks
from checkpoints_conv.mapping.model_mapping import EMBEDDING_HF, OUTPUT_HF, ModelMapping

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def read_config(folder: str | Path) -> dict:
    """The contents of config.json.

    Raises:
        ConversionError: the folder has none, or it is not JSON.
    """
    return read_json(Path(folder) / "config.json")


def read_json(path: Path) -> dict:
    """A JSON object in a file of a checkpoint folder.

    Raises:
        ConversionError: names the file that is missing or broken.
    """
    if not path.parent.is_dir():
        raise ConversionError(f"{path.parent} is not a directory")
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} is not a JSON object")
    return value


class HfFolder:
    """The tensors of a folder, mapped into memory and read only where they are used.

    Raises (on construction):
        ConversionError: no weights, a truncated shard, an index that disagrees with its shards, or a dtype other than
            float32, float16 and bfloat16 (quantized weights); the message names file and tensor.
    """

    def __init__(self, folder: str | Path, allow_pickle: bool = False):
        """
        Args:
            allow_pickle: where there are no safetensors, read pytorch_model.bin (torch.load with weights_only).
        """
        self.folder = Path(folder)
        self.file_of: dict[str, str] = {}  # tensor -> shard
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, Dtype] = {}
        self._block: dict[str, Callable[[str], Block]] = {}  # by shard
        pickled = not any((self.folder / name).is_file() for name in (WEIGHTS, INDEX))
        if pickled and not allow_pickle:
            found = [name for name in (PICKLED_WEIGHTS, PICKLED_INDEX) if (self.folder / name).is_file()]
            remedy = f"; {found[0]} is read only on request (to-megatron --allow-pickle)" if found else ""
            raise ConversionError(f"{self.folder} has neither {WEIGHTS} nor {INDEX}{remedy}")
        whole, index_name = (PICKLED_WEIGHTS, PICKLED_INDEX) if pickled else (WEIGHTS, INDEX)
        if (self.folder / whole).is_file() and (self.folder / index_name).is_file():
            raise ConversionError(f"{self.folder} has both {whole} and {index_name}; remove one of them")
        index = self._read_index(index_name)
        for shard in sorted(set(index.values())) if index is not None else [whole]:
            self._add_pickled(shard) if pickled else self._add_safetensors(shard)
        if index is not None:
            self._check_index(index, index_name)

    def names(self) -> list[str]:
        return list(self.file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def block(self, name: str) -> Block:
        """All rows of a tensor, without reading them.

        Raises:
            ConversionError: no such tensor.
        """
        if name not in self.file_of:
            raise ConversionError(f"{self.folder} has no tensor {name!r}")
        return self._block[self.file_of[name]](name)

    def tensor(self, name: str) -> Tensor:
        """A tensor, mapped from its file: pages are read on use and are not anonymous memory.

        Raises:
            ConversionError: no such tensor.
            OSError, ConversionError: its file cannot be read, or has become shorter.
        """
        from checkpoints_conv.formats.tensors import mapped_tensor

        return mapped_tensor(self.block(name))

    def check(self, mapping: ModelMapping) -> None:
        """Compare the tensors with what the config asks for.

        A tied checkpoint may store its output layer too, if it equals the embedding.

        Raises:
            ConversionError: names the missing, unknown, wrong-shaped or differing tensors.
        """
        mapping.check_hf(self.shapes)
        stored_twice = mapping.spec.tied and OUTPUT_HF in self
        same_shape = stored_twice and self.shapes[OUTPUT_HF] == self.shapes[EMBEDDING_HF]
        if stored_twice and not (same_shape and same_bytes(self.block(OUTPUT_HF), self.block(EMBEDDING_HF))):
            raise ConversionError(
                f"{self.folder}: config.json says tie_word_embeddings, but {OUTPUT_HF} differs from {EMBEDDING_HF}"
            )

    def _read_index(self, name: str) -> dict[str, str] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        index = read_json(path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ConversionError(f"{path} has no weight_map")
        for tensor, shard in index.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not (self.folder / shard).is_file():
                raise ConversionError(f"{path} puts {tensor!r} in {shard!r}, which is not in the same folder")
        return index

    def _add_safetensors(self, shard: str) -> None:
        path = self.folder / shard
        try:
            handle = safe_open(path, "np")  # only its header is read
        except SafetensorError as error:
            raise ConversionError(f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {error}") from error
        for name in handle.keys():  # noqa: SIM118  a file handle, not a dictionary
            info = handle.get_slice(name)
            self._add(shard, name, info.get_shape(), info.get_dtype())
        self._block[shard] = read_blocks(path, self.shapes, self.dtypes).__getitem__

    def _add_pickled(self, shard: str) -> None:
        from checkpoints_conv.formats.pytorch_bin import load_pickled
        from checkpoints_conv.formats.tensors import block_of

        tensors = load_pickled(self.folder / shard)
        for name, tensor in tensors.items():
            self._add(shard, name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
        self._block[shard] = lambda name: block_of(tensors[name])

    def _add(self, shard: str, name: str, shape: Sequence[int], dtype: str) -> None:
        if name in self.file_of:
            raise ConversionError(f"{self.folder}: tensor {name!r} is in both {self.file_of[name]!r} and {shard!r}")
        known = [each for each in Dtype if dtype in (each.name, each.value)]
        if not known:
            raise ConversionError(
                f"{self.folder / shard}: tensor {name!r} has dtype {dtype}; only {NAMES} are converted, quantized weights are not"
            )
        self.file_of[name] = shard
        self.shapes[name] = tuple(shape)
        (self.dtypes[name],) = known

    def _check_index(self, index: dict[str, str], index_name: str) -> None:
        for name in sorted(index.keys() | self.file_of.keys()):
            if index.get(name) != self.file_of.get(name):
                raise ConversionError(
                    f"{self.folder / index_name} is wrong about {name!r}: it says {index.get(name)!r}, "
                    f"the tensor is in {self.file_of.get(name)!r}"
                )
