"""How a Megatron distributed checkpoint is cut into chunks and units, independent of any layout: a reader picks its part."""

from collections import Counter
from dataclasses import dataclass
from typing import Iterator, Mapping, Optional

import torch

from checkpoints_conv.dist_keys import local_spec_key, place_of
from checkpoints_conv.mapping import ModelMapping

CHUNK_BYTES = 256 * 2**20  # rows of a larger tensor are written as several chunks
UNIT_BYTES = 2**30  # what an interruption can cost


@dataclass(frozen=True)
class Piece:
    """Rows of one HF tensor."""

    name: str  # Megatron's
    hf_name: str
    first: int
    rows: int


@dataclass(frozen=True)
class Chunk:
    """A box of a key's tensor, and what fills it."""

    key: str
    size: tuple[int, ...]  # of the key's whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    number: int  # among the chunks of the key
    dtype: torch.dtype
    piece: Piece

    @property
    def bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """Bytes [start, start + length) of a data file hold a chunk, or an object."""

    key: str
    offsets: Optional[tuple[int, ...]]  # None: an object
    number: Optional[int]
    file: str
    start: int
    length: int


def plan_units(mapping: ModelMapping, dtypes: Mapping[str, torch.dtype]) -> list[list[Chunk]]:
    """All chunks of a model's checkpoint, in units of about `UNIT_BYTES`.

    Args:
        dtypes: of the Megatron parameters by their global names.
    """
    units: list[list[Chunk]] = [[]]
    room = UNIT_BYTES
    counts: Counter[str] = Counter()
    for name in mapping.megatron_names():
        start = 0  # row of the Megatron parameter
        for piece in _pieces(name, mapping, dtypes[name]):
            if room <= 0:
                units.append([])
                room = UNIT_BYTES
            for chunk in _chunks(piece, start, mapping, dtypes[name], counts):
                units[-1].append(chunk)
                room -= chunk.bytes
            start += piece.rows
    return units


def _pieces(name: str, mapping: ModelMapping, dtype: torch.dtype) -> Iterator[Piece]:
    entry, spec = mapping.entry(name), mapping.spec
    row_bytes = torch.Size(entry.rule.megatron_shape(spec)[1:]).numel() * dtype.itemsize
    most = max(1, CHUNK_BYTES // row_bytes)
    for number, start, rows in entry.rule.bands(spec):
        for first in range(start, start + rows, most):
            yield Piece(name, entry.hf[number], first, min(most, start + rows - first))


def _chunks(piece: Piece, start: int, mapping: ModelMapping, dtype: torch.dtype, counts: Counter) -> Iterator[Chunk]:
    """The chunk of a piece under each key that either layer spec files it under."""
    place = place_of(piece.name, mapping)
    shape = mapping.entry(piece.name).rule.megatron_shape(mapping.spec)
    size = (*place.leading, *shape)
    offsets = (*place.index, start, *[0] * (len(shape) - 1))
    sizes = (*[1] * len(place.index), piece.rows, *shape[1:])
    for key in dict.fromkeys((place.key, local_spec_key(place.key))):
        yield Chunk(key, size, offsets, sizes, counts[key], dtype, piece)
        counts[key] += 1
