"""Token log-probs and entropy of a vocabulary-parallel softmax, without holding the softmax.

Each tensor-parallel rank has a slice of the vocabulary; two small reductions (the maximum; then the sum of exponentials, the
expected logit, and the target's logit) give every rank the same [n] results.  Forward and backward work on blocks of
rows, so that besides the logits only a fraction of them is ever alive.  Statistics are float32, or float64 for
float64 logits.

With x = logits / temperature, Z = sum exp(x), p = exp(x) / Z:  log p_target = x_target - log Z,  H = log Z - sum p x,
d log p_target / dx = onehot - p,  dH / dx = -p (log p + H).

A logit of -inf has probability 0: it adds nothing to H (p log p -> 0), has no gradient, and as a target the log-prob -inf.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCKS = 32  # a scratch tensor is this fraction of the logits
LOWEST = -1e4  # exp of this is 0 in float64 too, and 0 x LOWEST is 0 where 0 x -inf is not


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Args:
        logits: [n, V / tp], this rank's slice of the (padded) vocabulary.
        targets: int64 [n], global token ids; one outside the vocabulary has the log-prob -inf.
        tp_group: None for one rank.
        temperature: divides the logits, as the engine's sampler does.
        vocab_size: ids from here on are padding and have probability 0; None: no padding.

    Returns:
        log-probs [n] and entropies [n], the same on every rank of `tp_group`.

    Raises:
        ValueError: temperature is not positive (greedy decoding has no log-probs), or logits and targets do not fit.
    """
    _check(temperature, logits, targets, logits.shape[-1])
    return _TokenLogprobs.apply(logits, targets, tp_group, temperature, _real_columns(logits.shape[1], tp_group, vocab_size))


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs(hidden @ weight.T, ...)` holding the logits of `chunk` tokens at a time, forward and backward.

    The gradient of `hidden` is summed over `tp_group`, as the output layer's would be.  Backward makes the logits
    again: one more matrix product for never holding [n, V].

    Args:
        hidden: [n, h], the same on every rank.
        weight: [V / tp, h], of the dtype of `hidden`.
    """
    _check(temperature, hidden, targets, weight.shape[-1])
    real = _real_columns(weight.shape[0], tp_group, vocab_size)
    return _LinearTokenLogprobs.apply(hidden, weight, targets, tp_group, temperature, real, chunk)


def _check(temperature: float, rows: Tensor, targets: Tensor, width: int) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature = {temperature}: log-probs need a positive one; greedy samples cannot be trained on")
    if targets.dtype != torch.int64 or rows.shape != (*targets.shape, width) or targets.dim() != 1:
        raise ValueError(
            f"targets are {targets.dtype} {list(targets.shape)}: needs int64 [n] with rows [n, {width}], not {list(rows.shape)}"
        )


def _real_columns(columns: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> tuple[int, int]:
    """The first vocabulary id of this rank's slice, and how many of its columns are not padding."""
    first = columns * (dist.get_rank(group) if group is not None else 0)
    real = columns if vocab_size is None else min(max(vocab_size - first, 0), columns)
    return first, real


def _reduce(values: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op, group=group)
    return values


def _blocks(rows: int) -> list[slice]:
    step = max(1, -(-rows // BLOCKS))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _forward(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, temperature: float, columns: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log Z, [n] each.  `logits` is left as it is."""
    first, real = columns
    n, dtype = len(targets), _statistics_dtype(logits.dtype)
    largest = logits.new_full((n,), float("-inf"), dtype=dtype)
    if real:
        largest = logits[:, :real].amax(1).to(dtype) / temperature
    _reduce(largest, group, dist.ReduceOp.MAX)
    sums = logits.new_zeros(4, n, dtype=dtype)  # exp(x - max), exp(x - max) (x - max), x_target - max, 1 on the target's rank
    for rows in _blocks(n):
        x = logits[rows, :real].to(dtype, copy=True).div_(temperature).sub_(largest[rows, None])
        local = targets[rows] - first
        mine = (local >= 0) & (local < real)
        if real:
            sums[2, rows] = torch.where(mine, x.gather(1, local.clamp(0, real - 1)[:, None])[:, 0], 0)
        sums[3, rows] = mine.to(dtype)
        weights = x.clamp_(min=LOWEST).exp()
        sums[0, rows] = weights.sum(1)
        sums[1, rows] = weights.mul_(x).sum(1)
    total, expected, target, found = _reduce(sums, group)
    log_total = total.log()
    return torch.where(found > 0, target - log_total, float("-inf")), log_total - expected / total, largest + log_total


def _backward_(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    columns: tuple[int, int],
    out: Tensor,
) -> Tensor:
    """The gradient of the logits into `out` [n, columns], which may be `logits` itself.  No communication."""
    first, real = columns
    dtype = _statistics_dtype(logits.dtype)
    for rows in _blocks(len(targets)):
        logp = logits[rows, :real].to(dtype, copy=True).div_(temperature).sub_(log_z[rows, None]).clamp_(min=LOWEST)
        p = logp.exp()
        # p (-g_logprob - g_entropy (log p + H)) / T, then + g_logprob / T at the target
        logp.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(grad_logprobs[rows, None]).mul_(p)
        local = targets[rows] - first
        mine = (local >= 0) & (local < real)
        if real:
            logp.scatter_add_(1, local.clamp(0, real - 1)[:, None], torch.where(mine, grad_logprobs[rows], 0)[:, None])
        out[rows, :real] = logp.div_(temperature)
    out[:, real:] = 0
    return out


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, temperature, columns):
        logprobs, entropy, log_z = _forward(logits, targets, group, temperature, columns)
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.temperature, ctx.columns = temperature, columns
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, targets, log_z, entropy = ctx.saved_tensors
        grad = _backward_(
            logits, targets, log_z, entropy, grad_logprobs, grad_entropy, ctx.temperature, ctx.columns, torch.empty_like(logits)
        )
        return grad, None, None, None, None


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, group, temperature, columns, chunk):
        results = hidden.new_empty(3, len(targets), dtype=_statistics_dtype(hidden.dtype))
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ weight.t()
            results[:, rows] = torch.stack(_forward(logits, targets[rows], group, temperature, columns))
            del logits  # before the next chunk's are made
        logprobs, entropy, log_z = results.unbind()
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.group, ctx.temperature, ctx.columns, ctx.chunk = group, temperature, columns, chunk
        return logprobs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=_statistics_dtype(weight.dtype)) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = hidden[rows] @ weight.t()
            grad = _backward_(
                logits,
                targets[rows],
                log_z[rows],
                entropy[rows],
                grad_logprobs[rows],
                grad_entropy[rows],
                ctx.temperature,
                ctx.columns,
                out=logits,
            )
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product_(grad_weight, grad, hidden[rows])
            del logits, grad
        if grad_hidden is not None:
            _reduce(grad_hidden, ctx.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _add_product_(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total += grad^T hidden, block by block where `total` is of a higher precision: chunk by chunk, bfloat16 would lose it."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden)
        return
    for columns in _blocks(len(total)):
        total[columns] += grad[:, columns].t() @ hidden
