"""Rows that begin alike: an order in which they are neighbors, and how much each shares with the one before it."""

import numpy as np
import torch
from torch import Tensor

from megatron_drmas.batch import TokenBatch


def sort_by_tokens(batch: TokenBatch, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows in the lexicographic order of their tokens.

    Walked in this order the rows are the paths of a trie, depth first: each row owns the tokens behind what it shares with
    the row before it, and the tokens that rows own are the trie's nodes.

    Args:
        rows: int64 [r], of the batch; default: all.

    Returns:
        The rows in order, int64 [r] (equal rows in ascending order), and how many first tokens each has in common with the
        one before it, int64 [r].
    """
    tokens = batch.tokens.numpy().astype(">u8")  # whose bytes compare as the numbers do
    offsets = batch.offsets.tolist()
    numbers = range(len(batch)) if rows is None else sorted(rows.tolist())
    order = sorted(numbers, key=lambda row: tokens[offsets[row] : offsets[row + 1]].tobytes())
    common = [0] * len(order)
    for place in range(1, len(order)):
        before, row = (tokens[offsets[r] : offsets[r + 1]] for r in order[place - 1 : place + 1])
        shorter = min(len(before), len(row))
        unequal = np.flatnonzero(before[:shorter] != row[:shorter])
        common[place] = int(unequal[0]) if len(unequal) else shorter
    return torch.tensor(order, dtype=torch.int64), torch.tensor(common, dtype=torch.int64)
