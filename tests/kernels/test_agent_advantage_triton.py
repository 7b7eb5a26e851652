"""The Triton kernel against the torch reference, under Triton's interpreter.

The interpreter must be chosen before Triton is imported, so these tests run in a pytest process of their own, which
`test_under_the_interpreter` starts.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.kernels.agent_advantage import agent_advantages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")
VARIANTS = [(mean, std) for mean in ("group", "agent") for std in ("group", "agent", "none")]


@pytest.mark.skipif(INTERPRETED, reason="is the process that this test starts")
def test_under_the_interpreter(repository):
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.algorithm.conftest", __file__],
        cwd=repository,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.skipif(INTERPRETED, reason="compiles instead")
@pytest.mark.parametrize("mean,std", [(1, 1), (2, 2)])
def test_compiles_for_hopper_without_a_gpu(mean, std, tmp_path, monkeypatch):
    """Down to machine code; only running it needs the GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_drmas.kernels.agent_advantage_triton import STAT_ROWS, WRITE_ROWS, WRITE_TOKENS, _advantage_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    columns = {
        "scores": "*bf16",
        "magnitude": "*fp32",
        "agent": "*i32",
        "order": "*i64",
        "bounds": "*i64",
        "offsets": "*i64",
        "out": "*fp32",
    }
    constants = {"MEAN": mean, "STD": std, "AGENTS": 4}
    constants |= {"STAT_ROWS": STAT_ROWS, "WRITE_ROWS": WRITE_ROWS, "WRITE_TOKENS": WRITE_TOKENS}
    signature = {**columns, "epsilon": "fp32", "rounding": "fp32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(_advantage_kernel, signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert kernel.asm["cubin"] and "atom" not in kernel.asm["ptx"], "no atomics: the result does not depend on timing"


EQUAL_SUMS = torch.tensor([0.1, 0.3, 0.2, 0.4, 0.0, 1.0]) + torch.tensor([0.6, 0.4, 0.5, 0.3, 0.0, 0.0])  # four times 0.7, almost


def assert_matches_reference(scores, group, agent, lengths, tolerance=1e-5, magnitude=None):
    from megatron_drmas.kernels.agent_advantage_triton import agent_advantages_triton

    scores, group, agent = torch.as_tensor(scores), torch.as_tensor(group), torch.as_tensor(agent)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)])
    for mean, std in VARIANTS:
        expected = agent_advantages(scores, group, agent, offsets, mean, std, magnitude=magnitude)
        got = agent_advantages_triton(scores, group, agent, offsets, mean, std, magnitude=magnitude)
        scale = max(1.0, float(expected.abs().max())) if len(expected) else 1.0
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale, msg=f"{mean} {std}: {{}}".format)


@inside
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 1.0, -1e6, 1e6]), st.integers(0, 5)),
        min_size=1,
        max_size=12,
    )
)
def test_any_structure(rows):
    group, agent, scores, lengths = zip(*rows)
    assert_matches_reference(torch.tensor(scores), group, agent, lengths)


@inside
def test_more_rows_than_a_block_and_longer_than_a_tile():
    generator = torch.Generator().manual_seed(0)
    rows = 100
    assert_matches_reference(
        torch.rand(rows, generator=generator) + 1000,
        torch.randint(0, 2, (rows,), generator=generator) * 7 - 3,
        torch.randint(0, 5, (rows,), generator=generator),
        torch.randint(0, 150, (rows,), generator=generator),
        tolerance=3e-4,  # float32 scores near 1000 leave four digits of their differences
    )


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_input_types(dtype):
    scores = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 0.25]).to(dtype)
    assert_matches_reference(scores, [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 0], [3, 1, 2, 1, 1, 4])


@inside
def test_equal_scores_one_row_and_none():
    assert_matches_reference(torch.full((7,), 0.1), [0] * 7, [0, 1, 0, 1, 0, 1, 1], [2] * 7)
    assert_matches_reference(EQUAL_SUMS, [0] * 6, [0, 0, 0, 0, 1, 1], [2] * 6)
    assert_matches_reference(
        torch.tensor([1.5e-8, 0.0, 0.0, 1.0, 1.0, 1.0]), [0] * 3 + [1] * 3, [0] * 6, [2] * 6, magnitude=torch.ones(6)
    )
    assert_matches_reference(torch.tensor([1.5e-8, 0.0, 0.5, 1.0]), [0] * 4, [0, 0, 1, 1], [2] * 4, magnitude=torch.ones(4))
    assert_matches_reference(torch.tensor([0.7]), [5], [9], [3])
    assert_matches_reference(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), [])


@inside
def test_the_same_bits_every_time():
    from megatron_drmas.kernels.agent_advantage_triton import agent_advantages_triton

    generator = torch.Generator().manual_seed(0)
    scores, group, agent = torch.rand(30, generator=generator), torch.arange(30) % 3, torch.arange(30) % 2
    first, second = (agent_advantages_triton(scores, group, agent, torch.arange(31)) for _ in range(2))
    assert torch.equal(first, second)


@inside
def test_agent_numbers_may_be_anything():
    assert_matches_reference(torch.tensor([0.0, 1.0, 1.0, 0.0]), [0, 0, 0, 0], [10**9, -5, 10**9, -5], [1, 2, 3, 4])


@inside
def test_one_small_difference_among_many_equal_scores_is_spread():
    scores = torch.full((70,), 1000.0)
    scores[7] -= 0.01
    assert_matches_reference(scores, [0] * 70, [0] * 70, [1] * 70, tolerance=1e-3)


@inside
@pytest.mark.parametrize("column", ["scores", "group", "agent", "offsets", "magnitude"])
def test_strided_columns(column):
    """Every argument, one after the other, as every second value of a longer column."""
    from megatron_drmas.kernels.agent_advantage_triton import agent_advantages_triton

    columns = {
        "scores": torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 0.25]),
        "group": torch.tensor([0, 0, 0, 1, 1, 1]),
        "agent": torch.tensor([0, 1, 0, 1, 1, 0]),
        "offsets": torch.tensor([0, 3, 4, 6, 7, 8, 12]),
        "magnitude": torch.ones(6),
    }
    strided = torch.stack([columns[column], torch.full_like(columns[column], 99)], 1)[:, 0]
    assert not strided.is_contiguous()
    for mean, std in VARIANTS:
        expected = agent_advantages(**columns, mean=mean, std=std)
        for function in (agent_advantages, agent_advantages_triton):
            torch.testing.assert_close(function(**columns | {column: strided}, mean=mean, std=std), expected)


@inside
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 1.0])), min_size=1, max_size=12)
)
def test_the_means_of_trajectories_have_trajectory_weightings_advantages(make_batch, rows):
    from megatron_drmas.algorithm.advantages import compute_advantages
    from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig, RewardConfig
    from megatron_drmas.kernels.agent_advantage_triton import agent_advantages_triton

    group, sample, scores = map(list, zip(*rows))
    trajectory = [g * 4 + s for g, s in zip(group, sample)]
    batch = make_batch(
        [row % 3 for row in range(len(rows))], group, trajectory, [0.0] * len(rows), turn_reward=torch.tensor(scores)
    )
    for std in ("group", "none"):
        config = AlgorithmConfig(RewardConfig(turn=1.0), AdvantageConfig(mean="group", std=std, weighting="trajectory"))
        expected = compute_advantages(batch, config)[batch.response_offsets[:-1]]
        units = sorted(set(trajectory))
        means = torch.stack([batch.turn_reward[batch.trajectory == unit].double().mean() for unit in units])
        of_group = torch.tensor([unit // 4 for unit in units])
        got = agent_advantages_triton(means, of_group, torch.zeros_like(of_group), torch.arange(len(units) + 1), "group", std)
        torch.testing.assert_close(got[[units.index(unit) for unit in trajectory]], expected, rtol=1e-4, atol=1e-5)
