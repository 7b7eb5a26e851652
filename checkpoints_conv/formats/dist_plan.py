"""How a Megatron distributed checkpoint is cut into chunks and files, independent of any layout.

A chunk is one tensor as torch.save writes it: an archive with a frame before and after the tensor's bytes.  Where the
bytes go is planned; the frames follow from them (`dist_archive`) and get `FRAME_BYTES` on either side.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.mapping.dist_keys import local_spec_key, place_of
from checkpoints_conv.mapping.model_mapping import ModelMapping

CHUNK_BYTES = 256 * 2**20  # rows of a larger tensor are written as several chunks
UNIT_BYTES = 2**30  # of a file; files are written side by side
FRAME_BYTES = 2048
PAGE = 4096  # tensors begin on pages, which the operating system copies whole


@dataclass(frozen=True)
class Piece:
    """Rows of one HF tensor."""

    hf_name: str
    first: int
    rows: int


@dataclass(frozen=True)
class Chunk:
    """A box of a key's tensor, what fills it, and where it goes."""

    key: str
    size: tuple[int, ...]  # of the key's whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: Dtype
    pieces: tuple[Piece, ...]  # stacked along the rows
    file: str
    start: int  # of its bytes in the file

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.bytes

    @property
    def end(self) -> int:
        return self.start + self.bytes


def plan_units(mapping: ModelMapping, dtypes: Mapping[str, Dtype]) -> list[list[Chunk]]:
    """All chunks of a model's checkpoint, grouped by file, in file order.

    Args:
        dtypes: of the Megatron parameters by their global names.
    """
    units: list[list[Chunk]] = [[]]
    end = 0
    for name in mapping.megatron_names():
        place, dtype = place_of(name, mapping), dtypes[name]
        shape = mapping.entry(name).rule.megatron_shape(mapping.spec)
        for row, pieces in _cuts(name, mapping, dtype):
            offsets = (*place.index, row, *[0] * (len(shape) - 1))
            sizes = (*[1] * len(place.index), sum(piece.rows for piece in pieces), *shape[1:])
            for key in dict.fromkeys((place.key, local_spec_key(place.key))):  # either layer spec may file it under its own
                if end >= UNIT_BYTES:
                    units.append([])
                    end = 0
                start = -(-(end + 2 * FRAME_BYTES) // PAGE) * PAGE
                file = f"__{len(units) - 1}_0.distcp"
                chunk = Chunk(key, (*place.leading, *shape), offsets, sizes, dtype, pieces, file, start)
                units[-1].append(chunk)
                end = chunk.end
    return units


def _cuts(name: str, mapping: ModelMapping, dtype: Dtype) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """The rows of a Megatron parameter, cut to `CHUNK_BYTES`: the first row of each cut, and its pieces."""
    entry, spec = mapping.entry(name), mapping.spec
    row_bytes = math.prod(entry.rule.megatron_shape(spec)[1:]) * dtype.bytes
    most = max(1, CHUNK_BYTES // row_bytes)
    row, held, pieces = 0, 0, []
    for number, first, rows in entry.rule.bands(spec):
        while rows:
            taken = min(rows, most - held)
            pieces.append(Piece(entry.hf[number], first, taken))
            first, rows, held = first + taken, rows - taken, held + taken
            if held == most:
                yield row, tuple(pieces)
                row, held, pieces = row + held, 0, []
    if pieces:
        yield row, tuple(pieces)
