"""Rows of a `TokenBatch` as packed micro-batches: one sequence after another, with no padding between them."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_drmas.batch import TokenBatch, gather_segments

SIMILAR = 0.75  # rows at least so long as this share of a group's longest row are padded to it for attention


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, and how its rows are grouped for batched attention.

    The padded layout is one group (rows, length) after another, a group's rows being padded to its length; `slots[i]` is
    token i's place in it, None when nothing is padded.  `chosen` are the places of the tokens that are predicted from;
    None: all.
    """

    groups: "list[tuple[int, int]] | None" = None
    slots: "Tensor | None" = None  # int64 [t]
    padded_tokens: int = 0
    chosen: "Tensor | None" = None  # int64 [n]


@dataclass
class MicroBatch:
    """`t` tokens of packed rows, of which `n` have a predicted successor that counts."""

    tokens: Tensor  # int64 [1, t]
    positions: Tensor  # int64 [1, t], within each row
    labels: Tensor  # int64 [1, t], the next token of the row
    predict: Tensor  # bool [1, t], the label's log-prob is wanted; n are set
    packed: PackedSequences
    rows: Tensor  # int64 [r], rows of the batch in packing order
    lengths: Tensor  # int64 [r], predicted tokens of each row; their sum is n

    @property
    def sequence(self) -> Tensor:
        """Row of the batch that each predicted token belongs to, int64 [n]."""
        return torch.repeat_interleave(self.rows, self.lengths)

    def to(self, device: str) -> "MicroBatch":
        """The micro-batch with the model's inputs on a device; the row columns stay where they are."""
        if device == "cpu":
            return self
        for name in ("tokens", "positions", "labels", "predict"):
            setattr(self, name, getattr(self, name).to(device, non_blocking=True))
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "slots", "chosen"):
            value = getattr(self.packed, name)
            setattr(self.packed, name, None if value is None else value.to(device, non_blocking=True))
        return self


def pack_rows(batch: TokenBatch, rows: Tensor, multiple: int = 1, wanted: "Tensor | None" = None) -> MicroBatch:
    """Pack rows of a batch, longest first.

    Args:
        batch: where the rows are.
        rows: int64 [r]; may be empty, which gives a micro-batch of padding only.
        multiple: the packed length is made a multiple of this (sequence parallelism, FP8) by one extra sequence.
        wanted: bool [T] by batch.tokens, the tokens whose log-prob is wanted, first tokens of rows excepted;
            default: the response tokens.

    Raises:
        ValueError: a row whose prompt is empty, so that nothing predicts its first response token.
    """
    lengths = batch.lengths[rows]
    order = torch.argsort(lengths, descending=True, stable=True)
    rows, lengths = rows[order], lengths[order]
    prompts = batch.prompt_lengths[rows]
    if wanted is None and bool((prompts < 1).any()):
        raise ValueError(f"row {int(rows[prompts < 1][0])} has an empty prompt: nothing predicts its first token")
    tokens = gather_segments(batch.tokens, batch.offsets, rows)
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.arange(len(tokens)) - starts
    last = positions == torch.repeat_interleave(lengths - 1, lengths)
    if wanted is None:
        next_wanted = positions + 1 >= torch.repeat_interleave(prompts, lengths)
    else:
        next_wanted = gather_segments(wanted, batch.offsets, rows).roll(-1)
    predict = next_wanted & ~last
    counts = torch.zeros(len(rows), dtype=torch.int64)
    counts.index_add_(0, torch.repeat_interleave(torch.arange(len(rows)), lengths), predict.long())

    extra = -len(tokens) % multiple if len(tokens) else multiple
    tokens, positions, predict = (_extended(x, extra) for x in (tokens, positions, predict))
    positions[len(tokens) - extra :] = torch.arange(extra)
    packed = pack_sequences(lengths.tolist() + ([extra] if extra else []))
    packed.chosen = predict.nonzero().flatten()
    return MicroBatch(
        tokens=tokens[None],
        positions=positions[None],
        labels=tokens.roll(-1)[None],
        predict=predict[None],
        packed=packed,
        rows=rows,
        lengths=counts,
    )


def pack_sequences(lengths: list[int]) -> PackedSequences:
    """Describe sequences of these lengths, packed in this order (descending lengths give the best groups)."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    groups, slots, start = [], [], 0
    for first, last in _similar_runs(lengths):
        longest, rows = lengths[first], last - first
        groups.append((rows, longest))
        for row in range(first, last):
            slots.append((start + (row - first) * longest, lengths[row]))
        start += rows * longest
    padded = start > sum(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets.int(),
        cu_seqlens_kv=offsets.int(),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        groups=groups,
        slots=torch.cat([torch.arange(begin, begin + length) for begin, length in slots]) if padded else None,
        padded_tokens=start,
    )


def response_column(batch: TokenBatch, column: Tensor, rows: Tensor) -> Tensor:
    """A response column's values for the predicted tokens of a micro-batch that holds `rows` in this order."""
    return gather_segments(column, batch.response_offsets, rows)


def _similar_runs(lengths: list[int]) -> list[tuple[int, int]]:
    runs, first = [], 0
    for index in range(1, len(lengths) + 1):
        if index == len(lengths) or not SIMILAR * lengths[first] <= lengths[index] <= lengths[first]:
            runs.append((first, index))
            first = index
    return runs


def _extended(values: Tensor, extra: int) -> Tensor:
    return torch.cat([values, values.new_zeros(extra)])
