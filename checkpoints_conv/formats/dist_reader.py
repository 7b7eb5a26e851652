"""A Megatron distributed checkpoint (`torch_dist`), read one parameter at a time, from any layout.

Not by torch's FileSystemReader, which takes 14 times the memory and 6 times as long (`tools/bench/dist_checkpoint.py`, 0.5B) and
unpickles the index.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from checkpoints_conv.errors import ConversionError
from checkpoints_conv.formats.dist_chunks import DAMAGE, stored_block
from checkpoints_conv.formats.dist_index import StoredChunk, StoredTensor, read_index
from checkpoints_conv.formats.dtypes import NAMES, Dtype
from checkpoints_conv.formats.hf_folder import read_json
from checkpoints_conv.formats.row_blocks import Block, MemoryBlock
from checkpoints_conv.mapping.dist_keys import Place, local_spec_key, place_of
from checkpoints_conv.mapping.model_mapping import ModelMapping

MODEL_KEYS = re.compile(r"^(embedding|decoder|output_layer)\.")


def is_dist_checkpoint(folder: "str | Path") -> bool:
    """Whether the folder holds a (complete) distributed checkpoint."""
    return (Path(folder) / "metadata.json").is_file() and (Path(folder) / ".metadata").is_file()


class DistReader:
    """The model parameters of a checkpoint; optimizer and other state is ignored.

    Raises (on construction):
        ConversionError: not such a checkpoint; a parameter that is missing, unknown or of another shape than the config
            asks for, by its key; a data file that is missing or truncated.
    """

    def __init__(self, folder: "str | Path", mapping: ModelMapping):
        self.folder = Path(folder)
        self.mapping = mapping
        backend = read_json(self.folder / "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise ConversionError(f"{self.folder} is of the format {backend!r}; only 'torch_dist' is read")
        self._tensors = read_index(self.folder / ".metadata")
        self._per_layer = any(re.match(r"^decoder\.layers\.\d+\.", key) for key in self._tensors)
        self.places = {name: self._place(name) for name in mapping.megatron_names()}
        self._check_keys()
        self._check_files()
        leading = {place.key: len(place.leading) for place in self.places.values()}
        self._by_index = {key: self._tensors[key].by_index(dimensions) for key, dimensions in leading.items()}

    def dtype(self, name: str) -> Dtype:
        """Dtype of a parameter by its global Megatron name."""
        return Dtype(self._stored(name).dtype)

    def read(self, name: str) -> Iterator[tuple[str, list[Block]]]:
        """The HF tensors of a parameter by its global Megatron name, without vocabulary padding, as blocks of rows.

        Where the checkpoint holds whole rows in one chunk, the block is of its file.

        Raises:
            ConversionError: a file that is damaged, or that does not hold all of the parameter.
        """
        entry = self.mapping.entry(name)
        bands = entry.rule.bands(self.mapping.spec)
        blocks: list[list[Block]] = [[] for _ in entry.hf]
        for (number, _, _), cut in zip(bands, _cut(self._rows(name), [rows for _, _, rows in bands]), strict=True):
            blocks[number] += cut
        yield from zip(entry.hf, blocks, strict=True)

    def _rows(self, name: str) -> list[Block]:
        """A whole parameter, without vocabulary padding, as blocks of rows in order."""
        place, dtype = self.places[name], self.dtype(name)
        shape = self.mapping.entry(name).rule.megatron_shape(self.mapping.spec)
        wanted = _Box((*place.index, *[0] * len(shape)), (*[1] * len(place.index), *shape))
        parts = [
            (chunk, box)
            for chunk in self._by_index[place.key].get(place.index, ())
            if (box := wanted.intersection(_Box(chunk.offsets, chunk.sizes))) is not None
        ]
        held = sum(math.prod(box.sizes) for _, box in parts)
        if held != math.prod(shape):
            raise ConversionError(f"{self.folder} holds {held} of {math.prod(shape)} elements of {name!r}")
        _check_disjoint([box for _, box in parts], f"{self.folder / '.metadata'}: {place.key}")
        rows = len(place.index)  # the dimension of them
        if all(box.sizes[rows + 1 :] == shape[1:] for _, box in parts):
            parts.sort(key=lambda part: part[1].offsets[rows])
            return [self._whole_rows(place.key, chunk, box, rows) for chunk, box in parts]
        target = numpy.empty(wanted.sizes, f"V{dtype.bytes}")
        for chunk, box in parts:
            data = self._block(place.key, chunk).read()
            target[box.within(wanted)] = numpy.frombuffer(data, target.dtype).reshape(chunk.sizes)[box.within(chunk)]
        return [MemoryBlock(shape, dtype, target.reshape(-1).view(numpy.uint8).data)]

    def _whole_rows(self, key: str, chunk: StoredChunk, box: "_Box", rows: int) -> Block:
        """A box whose rows are consecutive in its chunk."""
        block = self._block(key, chunk)
        first = 0  # row of the box in the chunk, with all layers and experts stacked
        for dim in range(rows + 1):
            first = first * chunk.sizes[dim] + box.offsets[dim] - chunk.offsets[dim]
        below = math.prod(chunk.sizes[: rows + 1])
        return replace(block, shape=(below, *chunk.sizes[rows + 1 :])).rows(first, box.sizes[rows])

    def _block(self, key: str, chunk: StoredChunk) -> Block:
        """All of a stored chunk."""
        at, where = chunk.where, f"{key!r} {list(chunk.offsets)}"
        if at is None:
            raise ConversionError(f"{self.folder / '.metadata'} does not say where {where} is stored")
        if at.transformed:
            raise ConversionError(
                f"{self.folder / at.file} is compressed or otherwise transformed at {where}; only plain files are read"
            )
        try:
            return stored_block(self.folder / at.file, at.start, at.length, Dtype(self._tensors[key].dtype), chunk.sizes)
        except DAMAGE as error:
            what = str(error).partition("\n")[0]
            raise ConversionError(f"{self.folder / at.file} is damaged at {where}: {what}") from error

    def _stored(self, name: str) -> StoredTensor:
        return self._tensors[self.places[name].key]

    def _place(self, name: str) -> Place:
        place = place_of(name, self.mapping, self._per_layer)
        if place.key in self._tensors:
            return place
        return Place(local_spec_key(place.key), place.index, place.leading)

    def _check_keys(self) -> None:
        stored = self._tensors
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
            got = stored[place.key].size
            padded = rule.vocab and len(got) == len(wanted) and got[0] >= wanted[0] and got[1:] == wanted[1:]
            dtype = stored[place.key].dtype
            if all(dtype != known.value for known in Dtype):
                raise ConversionError(f"{self.folder}: {place.key} is {dtype}; only {NAMES} are converted")
            if got != wanted and not padded:
                raise ConversionError(f"{self.folder}: {place.key} is {list(got)}, the config asks for {list(wanted)}")

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for key in {place.key for place in self.places.values()}:
            for at in (chunk.where for chunk in self._tensors[key].chunks if chunk.where is not None):
                needed[at.file] = max(needed.get(at.file, 0), at.start + at.length)
        for name, size in needed.items():
            path = self.folder / name
            if not path.is_file():
                raise ConversionError(f"{path} does not exist: the checkpoint is incomplete")
            if path.stat().st_size < size:
                raise ConversionError(f"{path} is truncated: it has {path.stat().st_size} bytes, its tensors reach to {size}")


@dataclass(frozen=True)
class _Box:
    """A part of a tensor by its position in the whole."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersection(self, other: "_Box") -> "_Box | None":
        """What two boxes of one tensor share; None: nothing."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        sizes = tuple(end - begin for begin, end in zip(begins, ends))
        return _Box(begins, sizes) if min(sizes) > 0 else None

    def within(self, other: "_Box | StoredChunk") -> tuple[slice, ...]:
        """This box as an index into another that contains it."""
        starts = (mine - theirs for mine, theirs in zip(self.offsets, other.offsets))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes))


def _check_disjoint(boxes: list[_Box], of: str) -> None:
    """Raises:
    ConversionError: two boxes share an element.
    """
    near: list[_Box] = []  # those that reach below the beginning of the next one
    dim = next((dim for dim, size in enumerate(boxes[0].sizes) if size > 1), 0) if boxes else 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        near = [other for other in near if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in near:
            if other.intersection(box):
                raise ConversionError(f"{of} has overlapping chunks at {list(other.offsets)} and {list(box.offsets)}")
        near.append(box)


def _cut(blocks: list[Block], sizes: list[int]) -> Iterator[list[Block]]:
    """The same rows, in lists of `sizes` rows."""
    blocks = blocks[::-1]
    for size in sizes:
        part = []
        while size:
            block = blocks.pop()
            rows = block.shape[0]
            if rows > size:
                blocks.append(block.rows(size, rows - size))
                block, rows = block.rows(0, size), size
            part.append(block)
            size -= rows
        yield part
