"""A bandit with a conditional role: the smallest task on which it matters whose statistics normalize.

A frozen Gate lets a share of a question's trajectories pass; only in those does a Finisher choose one of several answers,
right with a probability of its own.  A trajectory that did not pass returns `otherwise`: 0 makes a call look good to the
group's baseline (mu_k > mu), 1 makes it look bad.  The Finisher's policy is a softmax over the answers of each question.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_drmas.config.algorithm import AdvantageConfig
from megatron_drmas.kernels.agent_advantage import cell_statistics, normalize

CELLS = {"μ, σ": ("group", "group"), "μ_k, σ": ("agent", "group"), "μ, σ_k": ("group", "agent"), "μ_k, σ_k": ("agent", "agent")}
EPSILON = AdvantageConfig().epsilon
GRAD_CLIP = 1.0


@dataclass(frozen=True)
class Task:
    """Sizes and probabilities."""

    questions: int = 4
    answers: int = 12
    samples: int = 8  # trajectories of each question
    gate: float = 0.35  # share of them that pass
    best: float = 0.95  # probability that a question's best answer is right; the others' is uniform in `others`
    others: tuple[float, float] = (0.3, 0.7)
    otherwise: float = 0.0  # return of a trajectory that does not pass
    steps: int = 400


@dataclass
class Learned:
    """What came out, one row for each seed.

    reward: float64 [seeds, steps], probability that the policy's answer is right, before each step.
    norm: float64 [seeds, steps], of the gradient before clipping; 0 where nothing could be learned.
    """

    reward: Tensor
    norm: Tensor


def accuracies(task: Task, seeds: int) -> Tensor:
    """How probably each answer is right, float64 [seeds, questions, answers]; the best one is anywhere."""
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        low, high = task.others
        of = low + (high - low) * torch.rand(task.questions, task.answers, generator=generator, dtype=torch.float64)
        best = torch.randint(task.answers, (task.questions, 1), generator=generator)
        rows.append(of.scatter_(1, best, task.best))
    return torch.stack(rows)


def call_advantages(returns: Tensor, called: Tensor, mean: str, std: str) -> Tensor:
    """Advantages of the Finisher's calls, float64 in the shape of `returns`; 0 where it was not called.

    Args:
        returns: [..., samples], of all trajectories of a question.
        called: bool, which of them passed.
        mean, std: "group", over all trajectories (Dr. MAS, arXiv 2602.08847, equation (2)), or "agent", over the calls (equation
            (5)).
    """
    samples = returns.shape[-1]
    cell = torch.arange(returns.numel()).div(samples, rounding_mode="floor")
    passed, cells = called.flatten(), returns.numel() // samples
    scores = returns.flatten()
    statistics = {"group": cell_statistics(scores, cell, cells), "agent": cell_statistics(scores[passed], cell[passed], cells)}
    advantages = torch.zeros_like(scores)
    place = cell[passed]
    advantages[passed] = normalize(scores[passed], place, statistics[mean], place, statistics[std], EPSILON).to(scores.dtype)
    return advantages.view_as(returns)


def learn(task: Task, mean: str, std: str, rate: float, seeds: int) -> Learned:
    """Train the Finisher for every seed at once: policy gradient, Adam, gradient norm clipped at 1.

    Random numbers depend on seed and step, so variants and rates are compared on the same gates and uniform numbers.
    """
    right = accuracies(task, seeds)
    logits = torch.zeros_like(right, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=rate)
    generators = [torch.Generator().manual_seed(10_000 + seed) for seed in range(seeds)]
    shape = (3, task.questions, task.samples)
    rewards, norms = [], []
    for _ in range(task.steps):
        gate, choice, luck = torch.stack([torch.rand(shape, generator=of, dtype=torch.float64) for of in generators], 1)
        policy = torch.softmax(logits.detach(), -1)
        rewards.append((policy * right).sum(-1).mean(-1))
        cumulative = policy.cumsum(-1)
        answer = torch.searchsorted(cumulative, choice * cumulative[..., -1:], right=True).clamp(max=task.answers - 1)
        called = gate < task.gate
        returns = torch.where(called, (luck < right.gather(-1, answer)).double(), task.otherwise)
        advantages = call_advantages(returns, called, mean, std)
        chosen = torch.zeros_like(right).scatter_add_(-1, answer, advantages)
        ascent = (chosen - advantages.sum(-1, keepdim=True) * policy) / called.sum((1, 2)).clamp(min=1)[:, None, None]
        norm = ascent.flatten(1).norm(dim=1)
        logits.grad = -ascent * (GRAD_CLIP / norm.clamp(min=GRAD_CLIP))[:, None, None]
        optimizer.step()
        norms.append(norm)
    return Learned(torch.stack(rewards, 1), torch.stack(norms, 1))


def lemma_factor(gate: float, accuracy: float, otherwise: float) -> float:
    """(sigma_k^2 + (mu_k - mu)^2) / sigma^2, the second moment of a call's advantage under the group's statistics.

    With `otherwise` 0 it is (1 - p + (1 - g)^2 p) / (g (1 - g p)).

    Args:
        gate: share g of trajectories that call the agent, in (0, 1).
        accuracy: mean return p of those, whose returns are 0 and 1.
        otherwise: return of the others.
    """
    mean = gate * accuracy + (1 - gate) * otherwise
    variance = gate * accuracy + (1 - gate) * otherwise**2 - mean**2
    return (accuracy * (1 - accuracy) + (accuracy - mean) ** 2) / variance


def baseline_growth(gate: float, accuracy: float, otherwise: float) -> float:
    """1 + ((mu_k - mu) / sigma_k)^2: what the group's mean, instead of the agent's, does to the squared norm of the gradient.

    The std divides both, so it cancels.
    """
    mean = gate * accuracy + (1 - gate) * otherwise
    return 1 + (accuracy - mean) ** 2 / (accuracy * (1 - accuracy))


@dataclass(frozen=True)
class Enumerated:
    """Expectations over every possible batch of one question.

    factor: second moment of a call's advantage, normalized with the true group statistics.
    growth: E|z (R - mu)|^2 / E|z (R - mu_k)|^2 over a call's answers and returns, z the uniform policy's score.
    bias: |E[z (R - mu)] - E[z (R - mu_k)]|, of the same.
    second_moment: (mean, std) cell -> E[A^2] of a call, normalized with the batch's own statistics.
    zero: the same -> share of calls with advantage 0.
    """

    factor: float
    growth: float
    bias: float
    second_moment: dict[str, float]
    zero: dict[str, float]


def enumerate_batches(gate: float, accuracy: float, otherwise: float, samples: int = 8, answers: int = 4) -> Enumerated:
    """`lemma_factor`, `baseline_growth` and what finite batches make of them, by enumeration instead of algebra.

    Args:
        gate, accuracy, otherwise: as in `lemma_factor`.
        samples: trajectories of a batch, each stopped at the gate, wrong or right: 3^samples batches.
        answers: of the Finisher, all alike; a batch's statistics do not depend on them.
    """
    value = torch.tensor([otherwise, 0.0, 1.0], dtype=torch.float64)
    chance = torch.tensor([1 - gate, gate * (1 - accuracy), gate * accuracy], dtype=torch.float64)
    outcome = torch.cartesian_prod(*[torch.arange(3)] * samples).view(-1, samples)
    probability = chance[outcome].prod(1, keepdim=True)
    returns, called = value[outcome], outcome > 0
    calls = float((probability * called).sum())
    mean = float((probability * returns).sum()) / samples
    variance = float((probability * (returns - mean).square()).sum()) / samples
    factor = float((probability * called * (returns - mean).square()).sum()) / calls / variance

    score = torch.eye(answers, dtype=torch.float64) - 1 / answers  # row a: z of answer a
    call = torch.tensor([1 - accuracy, accuracy], dtype=torch.float64)

    def gradients(baseline: float) -> Tensor:
        return (torch.tensor([0.0, 1.0], dtype=torch.float64) - baseline)[:, None, None] * score  # return, answer, logit

    squares = [float((call[:, None] / answers * gradients(baseline).square().sum(-1)).sum()) for baseline in (mean, accuracy)]
    means = [(call[:, None, None] / answers * gradients(baseline)).sum((0, 1)) for baseline in (mean, accuracy)]
    second_moment, zero = {}, {}
    for label, (of_mean, of_std) in CELLS.items():
        advantages = call_advantages(returns, called, of_mean, of_std)
        second_moment[label] = float((probability * advantages.square()).sum()) / calls
        zero[label] = float((probability * (called & (advantages == 0))).sum()) / calls
    return Enumerated(factor, squares[0] / squares[1], float((means[0] - means[1]).norm()), second_moment, zero)
