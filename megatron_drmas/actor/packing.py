"""Rows of a `TokenBatch` as packed micro-batches, without padding; tokens that rows begin with can be packed once.

The packed tokens are the nodes of a trie.  A causal model's state at a token depends on the tokens before it in its row only,
so it is the same in every row that shares them, and the gradients of those rows add up in it.  Not shared, each row is a
branch of its own.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_drmas.actor.branches import Branches
from megatron_drmas.batch import TokenBatch, gather_segments
from megatron_drmas.kernels.prefixes import sort_by_tokens


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, and what its local layers need besides.

    Where tokens are shared, Megatron sees one sequence of all tokens, whose rotary angles `positions` chooses.
    """

    branches: Branches | None = None
    positions: Tensor | None = None  # int64 [t]; None: counted within each sequence
    chosen: Tensor | None = None  # int64, places of the tokens that are predicted from, ascending
    sources: Tensor | None = None  # int64 [e], each edge's place in `chosen`; None: they are the same
    edges: Tensor | None = None  # int64 [n], each predicted token's edge; None: they are the same


@dataclass
class MicroBatch:
    """`t` packed tokens, of which rows predict `n` tokens over `e` edges.

    An edge leads from a token to one that follows it.  Several edges leave the last token of a shared beginning, and several
    rows may predict over one edge.  Where nothing is shared e = n.
    """

    tokens: Tensor  # int64 [1, t]
    positions: Tensor  # int64 [1, t], within each row
    labels: Tensor  # int64 [e], the token that each edge leads to
    predict: Tensor  # bool [1, t], an edge leaves the token
    packed: PackedSequences
    rows: Tensor  # int64 [r], rows of the batch in packing order
    lengths: Tensor  # int64 [r], predicted tokens of each row; their sum is n
    places: Tensor  # int64 [n], the predicted tokens' places in the batch's token columns
    row_tokens: int  # of all rows, shared or not

    @property
    def sequence(self) -> Tensor:
        """Row of the batch that each predicted token belongs to, int64 [n]."""
        return torch.repeat_interleave(self.rows, self.lengths)

    def to(self, device: str) -> "MicroBatch":
        """The micro-batch with the model's inputs on a device; the row columns stay where they are."""
        if device == "cpu":
            return self
        names = ("tokens", "positions", "labels", "predict", "packed")
        return replace(self, **{name: _moved(getattr(self, name), device) for name in names})


def pack_rows(
    batch: TokenBatch, rows: Tensor, multiple: int = 1, wanted: Tensor | None = None, share: bool = False
) -> MicroBatch:
    """Pack rows of a batch: longest first, or, sharing what they begin with, in the order of their tokens.

    Args:
        batch: where the rows are.
        rows: int64 [r]; may be empty, which gives a micro-batch of padding only.
        multiple: the packed length is made a multiple of this (sequence parallelism, FP8) by one extra sequence.
        wanted: bool [T] by batch.tokens, the tokens whose log-prob is wanted, first tokens of rows excepted;
            default: the response tokens.
        share: pack a token that several rows begin with once.

    Raises:
        ValueError: a row whose prompt is empty, so that nothing predicts its first response token.
    """
    empty = batch.prompt_lengths[rows] < 1
    if wanted is None and bool(empty.any()):
        raise ValueError(f"{batch.row_name(int(rows[empty][0]))} has an empty prompt: nothing predicts its first token")
    if share:
        rows, common = sort_by_tokens(batch, rows)
    else:
        rows = rows[torch.argsort(batch.lengths[rows], descending=True, stable=True)]
        common = torch.zeros_like(rows)

    tokens, positions, paths, queries = [], [], [], []
    children, parents, places, counts = [], [], [], []
    path, total = np.zeros(0, dtype=np.int64), 0
    all_tokens = batch.tokens.numpy()
    for row, shared in zip(rows.tolist(), common.tolist()):
        begin, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        own = end - begin - shared
        path = np.concatenate([path[:shared], np.arange(total, total + own)])
        total += own
        tokens.append(all_tokens[begin + shared : end])
        positions.append(np.arange(shared, shared + own))
        if own:
            paths.append(path)
            queries.append(own)
        if wanted is None:
            predicted = np.arange(int(batch.prompt_lengths[row]), end - begin)
        else:
            predicted = wanted[begin + 1 : end].nonzero().flatten().numpy() + 1
        children.append(path[predicted])
        parents.append(path[predicted - 1])
        places.append(begin + predicted)
        counts.append(len(predicted))
    extra = -total % multiple if total else multiple
    if extra:
        tokens.append(np.zeros(extra, dtype=np.int64))
        positions.append(np.arange(extra))
        paths.append(np.arange(total, total + extra))
        queries.append(extra)

    packed_tokens, parent, child = _joined(tokens), _joined(parents), _joined(children)
    edges = None
    if share:
        _, first, edges = np.unique(child, return_index=True, return_inverse=True)
        parent, child = parent[first], child[first]
    chosen, sources = np.unique(parent, return_inverse=True)
    predict = torch.zeros(1, len(packed_tokens), dtype=torch.bool)
    predict[0, chosen] = True
    offsets = torch.tensor([0, len(packed_tokens)] if share else np.cumsum([0, *queries]), dtype=torch.int32)
    longest = max(map(len, paths))
    return MicroBatch(
        tokens=torch.from_numpy(packed_tokens)[None],
        positions=torch.from_numpy(_joined(positions))[None],
        labels=torch.from_numpy(packed_tokens[child]),
        predict=predict,
        packed=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            branches=Branches.of(queries, paths),
            positions=torch.from_numpy(_joined(positions)) if share else None,
            chosen=torch.from_numpy(chosen),
            sources=torch.from_numpy(sources) if share else None,
            edges=torch.from_numpy(edges) if share else None,
        ),
        rows=rows,
        lengths=torch.tensor(counts, dtype=torch.int64),
        places=torch.from_numpy(_joined(places)),
        row_tokens=int(batch.lengths[rows].sum()),
    )


def response_column(batch: TokenBatch, column: Tensor, rows: Tensor) -> Tensor:
    """A response column's values for the predicted tokens of a micro-batch that holds `rows` in this order."""
    return gather_segments(column, batch.response_offsets, rows)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _moved(value: Any, device: str) -> Any:
    """The value with every tensor in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    return value
