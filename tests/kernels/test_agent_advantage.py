"""Statistics per cell, their merge over shards and ranks, and the operations on segments below them."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.kernels.agent_advantage import (
    agent_advantages,
    cell_statistics,
    merge_over_ranks,
    merge_statistics,
    normalize,
)
from megatron_drmas.kernels.segments import dense_index, expand_rows, segment_mean
from tests.forked import run_on_ranks

samples = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0, -1e6, 1e6]), st.integers(0, 3)), min_size=1, max_size=30)


def assert_same(merged, whole):
    torch.testing.assert_close(merged.count, whole.count, rtol=0, atol=0)
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(merged.std, whole.std, rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None)
@given(samples=samples, shards=st.integers(1, 5), seed=st.integers(0, 9))
def test_merging_shards_is_the_whole(samples, shards, seed):
    scores, cell = torch.tensor([s for s, _ in samples]), torch.tensor([c for _, c in samples])
    owner = torch.randint(0, shards, (len(scores),), generator=torch.Generator().manual_seed(seed))
    parts = [cell_statistics(scores[owner == k], cell[owner == k], 4) for k in range(shards)]
    assert_same(merge_statistics(parts), cell_statistics(scores, cell, 4))


def shard_problem():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, generator=generator) * 2e6 - 1e6, torch.randint(0, 6, (40,), generator=generator)


def merging_rank(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    scores, cell = (column[rank::size] for column in shard_problem())
    merged = merge_over_ranks(cell_statistics(scores, cell, 7))
    torch.save((merged, normalize(scores, cell, merged, cell, merged, 1e-6)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_sharded_ranks_give_the_gathered_answer(tmp_path):
    """Cell 6 has no sample anywhere."""
    run_on_ranks(merging_rank, 2, 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    scores, cell = shard_problem()
    whole = cell_statistics(scores, cell, 7)
    expected = normalize(scores, cell, whole, cell, whole, 1e-6)
    for rank, (merged, advantages) in enumerate(ranks):
        assert torch.equal(merged.m2, ranks[0][0].m2), "every rank has the same bits"
        assert_same(merged, whole)
        torch.testing.assert_close(advantages, expected[rank::2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", [0.1, 1e6, -1e6, 1e-20])
@pytest.mark.parametrize("count", [2, 3, 7, 1000])
def test_equal_scores_have_no_spread(score, count):
    statistics = cell_statistics(torch.full((count,), score), torch.zeros(count, dtype=torch.int64), 1)
    assert statistics.m2.item() == 0 and statistics.std.item() == 0


@given(
    parts=st.lists(
        st.lists(st.integers(0, 40), min_size=4, max_size=4).map(lambda part: [*part, 200 - sum(part)]), min_size=2, max_size=8
    ),
    mean=st.sampled_from(["group", "agent"]),
    std=st.sampled_from(["group", "agent"]),
)
def test_sums_that_differ_by_rounding_are_equal(parts, mean, std):
    """Rewards of several levels that add up to the same, in whatever order: no contrast, also against another cell's mean."""
    scores = (torch.tensor(parts) / 40).sum(1, dtype=torch.float32)
    rows = len(scores)
    scores, agent = torch.cat([scores, torch.tensor([0.0, 1.0])]), torch.tensor([0] * rows + [1, 1])
    advantages = agent_advantages(scores, torch.zeros_like(agent), agent, torch.arange(rows + 3), mean, std)
    assert advantages[:rows].abs().max() < (1e-6 if "agent" in std else 10)
    if mean == std == "agent":
        torch.testing.assert_close(advantages[rows:], torch.tensor([-1.0, 1.0]) * 0.5**0.5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [2, 3, 100_000])
@pytest.mark.parametrize("level", [1.0, -1000.0, 1e6])
def test_spread_is_a_range_beyond_rounding_however_many_samples_are_equal(rows, level):
    scores, cell = torch.full((rows,), level, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
    for share, differs in ((2.0**-22, False), (2.0**-18, True)):
        scores[-1] = level * (1 + share)
        statistics = cell_statistics(scores, cell, 1)
        assert statistics.spread.tolist() == [differs] and (statistics.std.item() > 0) == differs
    assert not cell_statistics(scores, cell, 1, torch.full((rows,), 100 * abs(level))).spread.item()


def test_statistics_keep_small_differences_of_large_scores():
    scores = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])
    statistics = cell_statistics(scores, torch.zeros(3, dtype=torch.int64), 1)
    assert statistics.std.item() == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_left_as_they_are(dtype):
    scores = torch.tensor([0.25, 1.0, 0.5], dtype=dtype)
    kept, cell = scores.clone(), torch.zeros(3, dtype=torch.int64)
    statistics = cell_statistics(scores, cell, 1)
    normalize(scores, cell, statistics, cell, statistics, 1e-6)
    assert torch.equal(scores, kept)


def test_step_weighted_tokens_by_hand():
    advantages = agent_advantages(
        torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 0]), torch.tensor([2, 2, 0]), torch.tensor([0, 2, 2, 3])
    )
    torch.testing.assert_close(advantages, torch.tensor([0.5**0.5, 0.5**0.5, 0.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("scores", torch.tensor([1, 0, 5])),
        ("scores", torch.zeros(3, 1)),
        ("scores", torch.zeros(3, device="meta")),
        ("group", torch.zeros(2, dtype=torch.int64)),
        ("group", torch.zeros(3, dtype=torch.int32)),
        ("agent", torch.zeros(1, dtype=torch.int64)),
        ("agent", torch.zeros(3)),
        ("offsets", torch.tensor([0, 2, 2, 3], dtype=torch.int32)),
        ("offsets", torch.tensor([0, 2, 3])),
        ("offsets", torch.tensor([1, 2, 2, 3])),
        ("offsets", torch.tensor([0, 2, 1, 3])),
        ("magnitude", torch.zeros(4)),
        ("magnitude", torch.zeros(3, dtype=torch.int64)),
        ("mean", "none"),
        ("mean", "team"),
        ("std", "trajectory"),
    ],
)
def test_what_is_no_column_is_refused_by_name(argument, value):
    triton = pytest.importorskip("megatron_drmas.kernels.agent_advantage_triton")
    columns = {"scores": torch.tensor([1.0, 0.0, 5.0]), "group": torch.zeros(3, dtype=torch.int64)}
    columns |= {"agent": torch.tensor([2, 2, 0]), "offsets": torch.tensor([0, 2, 2, 3])}
    name = "group" if argument == "scores" and value.device.type == "meta" else argument
    for function in (agent_advantages, triton.agent_advantages_triton):
        with pytest.raises(ValueError, match=f"^{name} "):
            function(**columns | {argument: value})


@pytest.mark.parametrize(
    "columns",
    [
        (torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(3),),
        (torch.zeros(3, dtype=torch.int32),),
        (torch.zeros(3, 1, dtype=torch.int64),),
    ],
)
def test_an_index_is_of_int64_columns_of_one_length(columns):
    with pytest.raises(ValueError, match="needs int64"):
        dense_index(*columns)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(-(10**15), 10**15) | st.integers(-2, 2), st.integers(0, 3)), min_size=1, max_size=30))
def test_dense_index_separates_exactly_the_different_rows(rows):
    columns = [torch.tensor(column) for column in zip(*rows)]
    index, slots = dense_index(*columns)
    assert index.min() >= 0 and index.max() < slots <= 4 * len(rows) + 1024
    numbers = {}
    for row, number in zip(rows, index.tolist()):
        assert numbers.setdefault(row, number) == number
    assert len(set(numbers.values())) == len(numbers)


def test_segment_mean_of_a_slot_without_rows_is_zero():
    assert segment_mean(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), 3).tolist() == [1.5, 0, 0]


def test_expand_rows_of_bools_and_empty_rows():
    assert expand_rows(torch.tensor([True, False, True]), torch.tensor([2, 1, 0])).tolist() == [True, True, False]


def test_a_row_without_a_length_is_refused():
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="one length each"):
            expand_rows(torch.zeros(3, device=device), torch.ones(1, dtype=torch.int64, device=device))
