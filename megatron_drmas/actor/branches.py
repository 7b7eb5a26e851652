"""Which packed tokens attend to which: branches of a trie, and their attention in a few batched calls."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_drmas.kernels.gather import take_rows

SIMILAR = 0.75  # paths at least this share of a bucket's longest are padded to it


@dataclass
class Bucket:
    """`rows` branches whose paths are of similar length, padded to `queries` and `keys`."""

    rows: int
    queries: int
    keys: int
    mask: Tensor | None  # bool [rows, 1, queries, keys], what each query attends to; None: causal


@dataclass
class Branches:
    """Branch i's queries are the packed tokens query_offsets[i]:query_offsets[i + 1], one branch after the other.

    They attend, causally, to the path path[path_offsets[i]:path_offsets[i + 1]], whose last tokens they are: what a kernel
    of ragged sequences with a bottom-right causal mask takes.  `buckets` are the same, padded for batched attention;
    `query_slots` and `key_slots` are the packed tokens in their places, bucket after bucket, and `outputs` each packed
    token's place among the queries.
    """

    query_offsets: Tensor  # int32 [s + 1]
    path_offsets: Tensor  # int32 [s + 1]
    path: Tensor  # int64, packed tokens
    buckets: list[Bucket]
    query_slots: Tensor  # int64 [sum of rows · queries]
    key_slots: Tensor  # int64 [sum of rows · keys]
    outputs: Tensor  # int64 [t]

    @classmethod
    def of(cls, queries: list[int], paths: list[np.ndarray]) -> "Branches":
        """Lay out branches whose last queries[i] tokens of paths[i], packed tokens each, are queries."""
        begins = np.cumsum([0, *queries])
        lengths = [len(path) for path in paths]
        # A bucket's branches have queries of the same power of two and similar paths, or are whole rows, which need no mask.
        kinds = [0 if own == length else own.bit_length() for own, length in zip(queries, lengths, strict=True)]
        order = sorted(range(len(paths)), key=lambda i: (kinds[i], -lengths[i], -queries[i]))
        buckets, query_slots, key_slots = [], [], []
        outputs = np.empty(begins[-1], dtype=np.int64)
        placed, at = 0, 0
        while at < len(order):
            kind, keys, end = kinds[order[at]], lengths[order[at]], at
            while end < len(order) and kinds[order[end]] == kind and lengths[order[end]] >= SIMILAR * keys:
                end += 1
            members, at = order[at:end], end
            most = max(queries[i] for i in members)
            for i in members:
                outputs[begins[i] : begins[i + 1]] = np.arange(placed, placed + queries[i])
                placed += most
                query_slots.append(_padded(np.arange(begins[i], begins[i + 1]), most))
                key_slots.append(_padded(paths[i], keys))
            mask = None if kind == 0 else _mask([lengths[i] for i in members], [queries[i] for i in members], keys)
            buckets.append(Bucket(len(members), most, keys, mask))
        return cls(
            torch.from_numpy(begins).int(),
            torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
            torch.from_numpy(np.concatenate(paths)),
            buckets,
            torch.from_numpy(np.concatenate(query_slots)),
            torch.from_numpy(np.concatenate(key_slots)),
            torch.from_numpy(outputs),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention output [t, heads · size] of query [t, heads, size], key and value [t, groups, size]."""
        queries = [bucket.rows * bucket.queries for bucket in self.buckets]
        keys = [bucket.rows * bucket.keys for bucket in self.buckets]
        parts = (
            take_rows(query, self.query_slots).split(queries),
            take_rows(key, self.key_slots).split(keys),
            take_rows(value, self.key_slots).split(keys),
        )
        outputs = []
        for bucket, *qkv in zip(self.buckets, *parts, strict=True):
            q, k, v = (part.view(bucket.rows, -1, *part.shape[1:]).transpose(1, 2) for part in qkv)
            context = F.scaled_dot_product_attention(
                q, k, v, bucket.mask, is_causal=bucket.mask is None, scale=scale, enable_gqa=True
            )
            outputs.append(context.transpose(1, 2).reshape(bucket.rows * bucket.queries, -1))
        return take_rows(torch.cat(outputs), self.outputs)


def _padded(places: np.ndarray, length: int) -> np.ndarray:
    """Padding repeats the first place: a real token, which nothing attends to or which nothing reads."""
    return np.pad(places, (0, length - len(places)), constant_values=places[0])


def _mask(lengths: list[int], queries: list[int], keys: int) -> Tensor:
    length, own = (torch.tensor(column)[:, None, None] for column in (lengths, queries))
    query = torch.arange(max(queries))[None, :, None].minimum(own - 1)
    return (torch.arange(keys)[None, None] <= length - own + query)[:, None]
