"""Vocabulary-parallel log-probs and entropy against the plain softmax, and their gradients against autograd's."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_drmas.kernels.token_logprob import linear_token_logprobs, token_logprobs
from tests.forked import run_on_ranks

N, HIDDEN, VOCAB, PADDED = 37, 16, 101, 128
TEMPERATURES = [1.0, 0.6]


def problem(dtype=torch.float64, n=N):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight = normal(n, HIDDEN).requires_grad_(), normal(PADDED, HIDDEN).requires_grad_()
    targets = torch.randint(0, VOCAB, (n,), generator=generator)
    return hidden, weight, targets, normal(n), normal(n)


def reference(hidden, weight, targets, temperature, vocab=VOCAB):
    logp = ((hidden @ weight.t())[:, :vocab] / temperature).log_softmax(1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def from_logits(hidden, weight, targets, temperature, group=None, vocab=VOCAB):
    return token_logprobs(hidden @ weight.t(), targets, group, temperature, vocab)


def fused(hidden, weight, targets, temperature, group=None, vocab=VOCAB):
    return linear_token_logprobs(hidden, weight, targets, group, temperature, vocab, chunk=10)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("function", [from_logits, fused])
@pytest.mark.parametrize("n", [1, 15, N])
def test_values_and_gradients_equal_autograd(function, temperature, n):
    hidden, weight, targets, a, b = problem(n=n)
    expected, got = reference(hidden, weight, targets, temperature), function(hidden, weight, targets, temperature)
    for x, y in zip(expected, got):
        torch.testing.assert_close(y, x, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((a * lp + b * h).sum(), (hidden, weight)) for lp, h in (expected, got)]
    for x, y in zip(*gradients):
        assert (x - y).abs().max() < 1e-6 * x.abs().max()


@pytest.mark.parametrize("function", [from_logits, fused])
def test_bfloat16_inputs_keep_float32_statistics(function):
    hidden, weight, targets, *_ = problem(torch.bfloat16)
    logits = (hidden @ weight.t()).float()[:, :VOCAB]
    logprobs, entropy = function(hidden, weight, targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.log_softmax(1).gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6)


def test_bfloat16_gradients_do_not_depend_on_the_chunks():
    """The sum over chunks is kept in float32, so many of them lose no more than one."""
    hidden, weight, targets, a, _ = problem(torch.bfloat16, n=500)
    leaf = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad((reference(hidden.double(), leaf, targets, 1.0)[0] * a).sum(), leaf)[0]

    def error(chunk):
        logprobs, _ = linear_token_logprobs(hidden, weight, targets, None, 1.0, VOCAB, chunk)
        gradient = torch.autograd.grad((logprobs * a).sum(), weight)[0]
        assert gradient.dtype == torch.bfloat16
        return float((gradient.double() - exact).norm() / exact.norm())

    once = error(500)
    assert once < 0.01
    assert error(1) < 1.1 * once and error(7) < 1.1 * once


def test_gradient_by_finite_differences():
    hidden, weight = torch.randn(3, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: linear_token_logprobs(h, w, torch.tensor([0, 4, 2]), None, 0.7, 5, chunk=2), inputs
    )


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == -2e4 and entropy.item() == 0 and logits.grad.isfinite().all()


def test_padding_has_probability_and_gradient_zero():
    logits = torch.zeros(2, 8, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 4]), vocab_size=5)
    torch.testing.assert_close(logprobs.exp(), torch.full((2,), 0.2))
    torch.testing.assert_close(entropy.exp(), torch.full((2,), 5.0))
    logprobs.sum().backward()
    assert logits.grad[:, 5:].eq(0).all()


def masked_problem():
    """Logits of which every third is -inf and of which one row has a single one left; targets that are not masked."""
    hidden, weight, targets, a, b = problem()
    logits = (hidden @ weight.t()).detach()
    logits[:, ::3] = logits[:, PADDED // 2 :] = logits[0, 2:] = float("-inf")
    return logits, (targets % 20 * 3 + 1).index_fill(0, torch.tensor(0), 1), a, b


def masked_reference(logits, targets):
    """Over the finite logits alone, row by row."""
    logprobs, entropies = [], []
    for row, target in zip(logits, targets.tolist()):
        kept = row.isfinite().nonzero().flatten()
        logp = row[kept].log_softmax(0)
        logprobs.append(logp[kept.tolist().index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_masked_logits_have_probability_and_gradient_zero(dtype, tolerance):
    logits, targets, a, b = masked_problem()
    exact = logits.to(dtype).double().requires_grad_()
    expected = masked_reference(exact, targets)
    (a * expected[0] + b * expected[1]).sum().backward()
    leaf = logits.to(dtype).requires_grad_()
    got = token_logprobs(leaf, targets)
    (a * got[0] + b * got[1]).sum().backward()
    for x, y in zip((*expected, exact.grad), (*got, leaf.grad)):
        torch.testing.assert_close(y.double(), x, rtol=0, atol=tolerance)
    assert leaf.grad[logits.isinf()].eq(0).all()


def test_logits_that_overflow_to_minus_infinity_have_no_gradient():
    """The fused path has no logits to mask: a row of the output layer so low that its logit leaves float32."""
    hidden, targets = torch.rand(5, 4) + 4, torch.tensor([0, 1, 2, 4, 1])
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    weight[3] = -3e38
    assert (hidden @ weight.t())[:, 3].isinf().all()
    weight.requires_grad_(), hidden.requires_grad_()
    logprobs, entropy = linear_token_logprobs(hidden, weight, targets, chunk=2)
    (logprobs + entropy).sum().backward()
    kept = torch.tensor([0, 1, 2, 4, 5])
    fewer = weight.detach()[kept].requires_grad_()
    expected = linear_token_logprobs(hidden.detach(), fewer, torch.tensor([0, 1, 2, 3, 1]), chunk=2)
    sum(x.sum() for x in expected).backward()
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad[kept], fewer.grad, rtol=1e-5, atol=1e-6)
    assert weight.grad[3].eq(0).all() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("target", [-1, -100, 5, 7, 8, 10**12])
def test_a_target_outside_the_vocabulary_is_impossible(target):
    """5 real ids in 8 columns: never the log-prob of another token."""
    logprobs, entropy = token_logprobs(torch.zeros(2, 8), torch.tensor([target, 1]), vocab_size=5)
    assert logprobs[0] == float("-inf") and logprobs[1].isfinite() and entropy.isfinite().all()
    assert token_logprobs(torch.tensor([[0.0, float("-inf")]]), torch.tensor([1]))[0] == float("-inf")


@pytest.mark.parametrize(
    "function", [token_logprobs, lambda rows, targets: linear_token_logprobs(rows, torch.zeros(3, 4), targets)]
)
def test_rows_without_a_target_are_refused(function):
    for targets in (
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int64),
    ):
        with pytest.raises(ValueError, match="targets"):
            function(torch.zeros(2, 4), targets)


@pytest.mark.parametrize("function", [from_logits, fused])
def test_strided_inputs(function):
    hidden, weight, targets, a, b = problem()
    spread = torch.zeros(HIDDEN, 2 * N, dtype=torch.float64).t()[::2].copy_(hidden.detach()).requires_grad_()
    results = []
    for rows, ids in ((hidden, targets), (spread, targets.repeat_interleave(2)[::2])):
        logprobs, entropy = function(rows, weight, ids, 1.0)
        results.append((logprobs, entropy, *torch.autograd.grad((a * logprobs + b * entropy).sum(), (rows, weight))))
    for x, y in zip(*results):
        torch.testing.assert_close(y, x, rtol=0, atol=1e-12)


def test_no_tokens():
    logits = torch.zeros(0, PADDED, requires_grad=True)
    sum(x.sum() for x in token_logprobs(logits, torch.zeros(0, dtype=torch.int64))).backward()
    assert logits.grad.shape == (0, PADDED)


def test_greedy_temperature_is_refused():
    for temperature in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature = {temperature}"):
            token_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), temperature=temperature)


CASES = [
    (function, temperature, vocab) for function in (from_logits, fused) for temperature in TEMPERATURES for vocab in (VOCAB, 60)
]


def case_problem(vocab):
    hidden, weight, targets, a, b = problem()
    return hidden, weight, targets % vocab, a, b


def tensor_parallel_rank(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    results = []
    for function, temperature, vocab in CASES:
        hidden, weight, targets, a, b = case_problem(vocab)
        shard = weight.detach().chunk(size)[rank].clone().requires_grad_()
        logprobs, entropy = function(hidden, shard, targets, temperature, dist.group.WORLD, vocab)
        (a * logprobs + b * entropy).sum().backward()
        if function is from_logits:  # what the output layer's own backward does
            dist.all_reduce(hidden.grad)
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, shard.grad))
    logits, targets, a, b = masked_problem()
    shard = logits.chunk(size, 1)[rank].clone().requires_grad_()
    logprobs, entropy = token_logprobs(shard, targets, dist.group.WORLD)
    (a * logprobs + b * entropy).sum().backward()
    results.append((logprobs.detach(), entropy.detach(), shard.grad))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_tensor_parallel_equals_one_rank(tmp_path):
    """The second rank's slice is in part padding, or all of it, or all masked."""
    run_on_ranks(tensor_parallel_rank, 2, 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for case, (_, temperature, vocab) in enumerate(CASES):
        hidden, weight, targets, a, b = case_problem(vocab)
        logprobs, entropy = reference(hidden, weight, targets, temperature, vocab)
        (a * logprobs + b * entropy).sum().backward()
        for rank in ranks:
            for got, expected in zip(rank[case], (logprobs, entropy, hidden.grad)):
                torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.cat([rank[case][3] for rank in ranks]), weight.grad, rtol=0, atol=1e-10)
    logits, targets, a, b = masked_problem()
    logprobs, entropy = masked_reference(logits.requires_grad_(), targets)
    (a * logprobs + b * entropy).sum().backward()
    for rank in ranks:
        for got, expected in zip(rank[-1], (logprobs, entropy)):
            torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat([rank[-1][2] for rank in ranks], 1), logits.grad, rtol=0, atol=1e-10)
