"""How one Megatron parameter is made of Hugging Face tensors: the vocabulary that a family's table is written in.

A rule names one Megatron parameter and its HF tensors.  All of them obey one law: cut every HF tensor along the rule's
tensor-parallel dimension, merge the r-th pieces group by group, and the result is rank r's shard of the Megatron parameter
(`tensors.merge`).  So a rule never sees the layout, and gate/up are cut separately by construction.
"""

from dataclasses import dataclass
from typing import ClassVar

from checkpoints_conv.families.spec import ModelSpec


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF tensors that it is made of; here one, the same tensor on both sides.

    `megatron` and `hf` are templates in {layer} and {expert}; `dims` is the HF shape in names of ModelSpec attributes.
    Megatron names are those of the Transformer Engine layer spec (see `mapping.canonical_name` for the local spec).
    """

    megatron: str
    hf: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]

    tp_dim: ClassVar[int | None] = None  # dimension that tensor parallelism cuts
    vocab: ClassVar[bool] = False  # dimension 0 is the padded vocabulary

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """Shapes of the HF tensors, in the order of `hf`."""
        return [tuple(getattr(spec, dim) for dim in dims) for dims in self.dims]

    def megatron_shape(self, spec: ModelSpec) -> tuple[int, ...]:
        """Shape of the whole Megatron parameter (unpadded, TP 1)."""
        shapes = self.shapes(spec)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def groups(self, spec: ModelSpec) -> int:
        """The whole Megatron parameter is this many groups of rows, each with the same number of rows of every HF tensor."""
        return 1

    def bands(self, spec: ModelSpec) -> list[tuple[int, int, int]]:
        """The whole Megatron parameter as consecutive rows of HF tensors: (HF tensor, first row, rows).

        The bands of one HF tensor are in the order of its rows.
        """
        groups = self.groups(spec)
        rows = [shape[0] // groups for shape in self.shapes(spec)]
        return [(number, group * of, of) for group in range(groups) for number, of in enumerate(rows)]


@dataclass(frozen=True)
class Replicated(Rule):
    """Norms, routers: the same on every rank."""


@dataclass(frozen=True)
class Column(Rule):
    """A column-parallel linear: output features (dim 0) are cut."""

    tp_dim: ClassVar[int | None] = 0


@dataclass(frozen=True)
class Row(Rule):
    """A row-parallel linear: input features (dim 1) are cut."""

    tp_dim: ClassVar[int | None] = 1


@dataclass(frozen=True)
class Vocabulary(Column):
    """Embedding or output layer: dim 0 is the vocabulary, padded with zero rows to what the layout needs."""

    vocab: ClassVar[bool] = True


@dataclass(frozen=True)
class QKV(Column):
    """Query, key and value projections, interleaved by query group along dim 0.

    Each group holds heads / kv_groups query heads, then its key head, then its value head.
    """

    def groups(self, spec: ModelSpec) -> int:
        return spec.kv_groups


@dataclass(frozen=True)
class GateUp(Column):
    """Gate projection above up projection; each is cut on its own, so every rank holds its [gate; up]."""
