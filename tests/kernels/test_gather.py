"""Rows by index: the values, and the sums of their gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.kernels.gather import sorted_sum, take_rows


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10), st.lists(st.integers(0, 9), max_size=40), st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 1000))
def test_gradients_of_a_row_are_summed(rows, index, shape, seed):
    index = torch.tensor(index, dtype=torch.int64) % rows
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(rows, *shape, generator=generator, dtype=torch.float64).requires_grad_()
    gradient = torch.randn(len(index), *shape, generator=generator, dtype=torch.float64)
    taken = take_rows(source, index)
    assert torch.equal(taken, source[index])
    (expected,) = torch.autograd.grad(source[index], source, gradient)
    torch.testing.assert_close(torch.autograd.grad(taken, source, gradient)[0], expected)
    torch.testing.assert_close(sorted_sum(gradient, index, rows), expected)


@pytest.mark.parametrize("way", ["as on CPUs", "as on GPUs"])
def test_many_small_gradients_in_bfloat16_are_not_lost(way):
    """1 + 256 x 2^-8 is 2; summed in bfloat16, 1 + 2^-8 is 1."""
    index = torch.zeros(257, dtype=torch.int64)
    gradient = torch.cat([torch.ones(1, 1), torch.full((256, 1), 2.0**-8)]).bfloat16()
    if way == "as on CPUs":
        source = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        (total,) = torch.autograd.grad(take_rows(source, index), source, gradient)
    else:
        total = sorted_sum(gradient.float(), index, 1)
    assert float(total) == 2
