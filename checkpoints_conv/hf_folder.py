"""Hugging Face folders: config, and tensors of (sharded) safetensors read lazily."""

import json
from pathlib import Path
from typing import Optional

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.safetensors_writer import DTYPES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: "str | Path") -> dict:
    """The contents of config.json.

    Raises:
        ConversionError: the folder has none, or it is not JSON.
    """
    return read_json(Path(folder) / "config.json")


def read_json(path: Path) -> dict:
    """A JSON file of a checkpoint folder.

    Raises:
        ConversionError: names the file that is missing or broken.
    """
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path} is not valid JSON: {error}") from error


class HfFolder:
    """The tensors of a folder, mapped into memory and read only where they are used.

    Raises (on construction):
        ConversionError: no safetensors, a truncated shard, an index that disagrees with its shards, or a dtype other
            than float32, float16 and bfloat16 (quantised weights); the message names file and tensor.
    """

    def __init__(self, folder: "str | Path"):
        self.folder = Path(folder)
        self.file_of: dict[str, str] = {}  # tensor -> shard
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._open: dict[str, safe_open] = {}
        index = self._read_index()
        for shard in sorted(set(index.values())) if index is not None else [WEIGHTS]:
            self._add_shard(shard)
        if index is not None:
            self._check_index(index)

    def names(self) -> list[str]:
        return list(self.file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def tensor(self, name: str) -> Tensor:
        """A tensor, backed by the mapped file: its pages are read on use and are not anonymous memory.

        Raises:
            ConversionError: no such tensor.
        """
        if name not in self.file_of:
            raise ConversionError(f"{self.folder} has no tensor {name!r}")
        return self._open[self.file_of[name]].get_tensor(name)

    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items()
        )

    def _read_index(self) -> Optional[dict[str, str]]:
        path = self.folder / INDEX
        if not path.is_file():
            if not (self.folder / WEIGHTS).is_file():
                raise ConversionError(f"{self.folder} has neither {WEIGHTS} nor {INDEX}; only safetensors are read")
            return None
        index = read_json(path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ConversionError(f"{path} has no weight_map")
        for name, shard in index.items():
            if not (self.folder / shard).is_file():
                raise ConversionError(f"{path} puts {name!r} in {shard!r}, which does not exist")
        return index

    def _add_shard(self, shard: str) -> None:
        path = self.folder / shard
        try:
            handle = safe_open(path, "pt")
        except SafetensorError as error:
            raise ConversionError(f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {error}") from error
        self._open[shard] = handle
        for name in handle.keys():
            if name in self.file_of:
                raise ConversionError(f"tensor {name!r} is in both {self.file_of[name]!r} and {shard!r}")
            info = handle.get_slice(name)
            if info.get_dtype() not in DTYPES:
                raise ConversionError(
                    f"{path}: tensor {name!r} has dtype {info.get_dtype()}; only {', '.join(DTYPES)} are converted"
                )
            self.file_of[name] = shard
            self.shapes[name] = tuple(info.get_shape())
            self.dtypes[name] = DTYPES[info.get_dtype()]

    def _check_index(self, index: dict[str, str]) -> None:
        for name in index.keys() | self.file_of.keys():
            if index.get(name) != self.file_of.get(name):
                raise ConversionError(
                    f"{self.folder / INDEX} is wrong about {name!r}: it says {index.get(name)!r}, "
                    f"the tensor is in {self.file_of.get(name)!r}"
                )
