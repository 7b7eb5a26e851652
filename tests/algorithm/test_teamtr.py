"""TeamTR's pieces, on a team small enough to compute everything exactly."""

import math

import pytest
import torch

from megatron_drmas.algorithm.teamtr import TrustRegion, certificate, certify, measure_update, message_kl, penalty_constant
from megatron_drmas.config.algorithm import LossConfig

STATES, ACTIONS, AGENTS = 5, 3, 2


def random_team(seed):
    """Agents act in turn (agent t mod AGENTS at call t): policies [agents, states, actions], transitions, rewards."""
    generator = torch.Generator().manual_seed(seed)

    def logits(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policies = logits(AGENTS, STATES, ACTIONS).softmax(-1)
    transitions = logits(STATES, ACTIONS, STATES).mul(2).softmax(-1)
    rewards = torch.rand(STATES, ACTIONS, generator=generator, dtype=torch.float64)
    start = torch.zeros(STATES, dtype=torch.float64).index_fill(0, torch.tensor(0), 1.0)
    return policies, transitions, rewards, start, generator


def perturbed(policies, agent, size, generator):
    new = policies.clone()
    new[agent] = (policies[agent].log() + size * torch.randn(STATES, ACTIONS, generator=generator, dtype=torch.float64)).softmax(
        -1
    )
    return new


def max_kl(old, new, agent):
    return float((old[agent] * (old[agent] / new[agent]).log()).sum(-1).max())


def occupancies(policies, transitions, start, horizon):
    """Distribution over states at each call, [horizon, states]."""
    state, result = start, []
    for call in range(horizon):
        result.append(state)
        state = torch.einsum("s,sa,sat->t", state, policies[call % AGENTS], transitions)
    return torch.stack(result)


def advantages(policies, transitions, rewards, horizon, discount):
    """A_t(s, a) for each call, [horizon, states, actions]."""
    value, result = torch.zeros(STATES, dtype=torch.float64), []
    for call in reversed(range(horizon)):
        q = rewards + discount * transitions @ value
        value = (policies[call % AGENTS] * q).sum(-1)
        result.append(q - value[:, None])
    return torch.stack(result[::-1]), value


@pytest.mark.parametrize("seed", range(10))
def test_occupancy_bound(seed):
    """||d_new - d_old||_1 <= sqrt(2) g / (1 - g) sum_i sqrt(delta_i), d the normalized discounted state distribution."""
    policies, transitions, _, start, generator = random_team(seed)
    discount, horizon = 0.8, 200
    new, bound = policies, 0.0
    for agent in range(AGENTS):
        updated = perturbed(new, agent, 0.3, generator)
        bound += math.sqrt(2) * discount / (1 - discount) * math.sqrt(max_kl(new, updated, agent))
        new = updated
    weights = (1 - discount) * discount ** torch.arange(horizon, dtype=torch.float64)
    old_d, new_d = (weights @ occupancies(p, transitions, start, horizon) for p in (policies, new))
    assert 0 < (new_d - old_d).abs().sum() <= bound


@pytest.mark.parametrize("discount,horizon", [(1.0, 5), (0.9, 8)])
@pytest.mark.parametrize("seed", range(10))
def test_certificate_is_a_lower_bound(seed, discount, horizon):
    """Exact surrogates and KLs of a stage of sequential updates, each on the team as already updated."""
    policies, transitions, rewards, start, generator = random_team(seed)
    new, surrogates, kls, a_max = policies, [], [], 0.0
    for agent in range(AGENTS):
        updated = perturbed(new, agent, 0.2, generator)
        advantage, _ = advantages(new, transitions, rewards, horizon, discount)
        states = occupancies(new, transitions, start, horizon)
        gained = torch.stack([(updated[call % AGENTS] * advantage[call]).sum(-1) for call in range(horizon)])
        weights = discount ** torch.arange(horizon, dtype=torch.float64)
        surrogates.append(float((weights[:, None] * states * gained).sum()))
        kls.append(max_kl(new, updated, agent))
        a_max = max(a_max, float(advantage.abs().max()))
        new = updated
    start_value, end_value = (float(start @ advantages(p, transitions, rewards, horizon, discount)[1]) for p in (policies, new))
    bound = certificate(surrogates, kls, a_max, horizon, discount)
    assert end_value - start_value >= bound
    assert certificate(surrogates, kls, a_max, horizon, discount, fresh=False) < bound


def test_penalty_constant_becomes_the_papers():
    discount = 0.9
    assert penalty_constant(2.0, 2000, discount) == pytest.approx(math.sqrt(2) * discount * 2.0 / (1 - discount) ** 2)
    assert penalty_constant(1.0, 4) == pytest.approx(math.sqrt(2) * (0 + 1 + 2 + 3))


def test_token_sum_estimates_the_exact_kl():
    """All messages of two tokens, each as often as the sampling policy produces it."""
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(3, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    old2, new2 = (torch.randn(3, 3, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    exact = (old.exp() * (old - new)).sum() + (old.exp()[:, None] * old2.exp() * (old2 - new2)).sum()
    estimate = 0.0
    for first in range(3):
        for second in range(3):
            sampled, current = torch.stack([old[first], old2[first, second]]), torch.stack([new[first], new2[first, second]])
            estimate += float(sampled.sum().exp()) * message_kl(sampled, current, torch.zeros(2, dtype=torch.int64), 1)
    assert estimate == pytest.approx(float(exact))


def test_message_kl_averages_over_messages_not_tokens():
    sampled, current = torch.zeros(4), torch.tensor([-1.0, -1.0, -1.0, -5.0])
    assert message_kl(sampled, current, torch.tensor([0, 0, 0, 1]), 2) == pytest.approx(4.0)
    assert message_kl(sampled[:0], current[:0], torch.zeros(0, dtype=torch.int64), 0) == 0


def test_beta_follows_the_kl_and_delta_ends_the_update():
    region = TrustRegion(delta=0.01, beta=1.0)
    assert not region.observe(0.001) and region.beta == 0.5
    assert not region.observe(0.008) and region.beta == 0.5
    assert region.observe(0.012) and region.beta == 0.5
    assert region.observe(0.1) and region.beta == 1.0
    for _ in range(100):
        region.observe(-1.0)
    assert region.beta == region.min_beta


def test_update_is_measured_by_message(make_batch):
    """Ratios 2 (A = 1, clipped to 1.2), 1/2 (A = -1, clipped to 0.8), 1 (A = 3)."""
    batch = make_batch([0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], lengths=[2, 1, 1])
    batch.advantages = torch.tensor([1.0, 1.0, -1.0, 3.0])
    sampled, half = torch.zeros(4), math.log(2) / 2
    measured = measure_update(batch, sampled, torch.tensor([half, half, -math.log(2), 0.0]), LossConfig())
    assert measured["message_kl"] == pytest.approx(0.0, abs=1e-6)
    assert measured["message_kl_bound"] == pytest.approx((2 + 0.5 + 1 - 3) / 3)
    assert measured["surrogate"] == pytest.approx(0.2 + (-0.8 + 1.0) + 0.0)


@pytest.mark.parametrize("shift", [-1e5, -30.0, 30.0, 1e5])
def test_a_large_update_is_not_measured_as_a_small_one(shift, make_batch):
    batch = make_batch([0], [0], [0], [0], lengths=[2])
    batch.advantages = torch.tensor([-1.0, -1.0])
    measured = measure_update(batch, torch.zeros(2), torch.full((2,), shift), LossConfig())
    assert measured["message_kl"] == -2 * shift
    assert measured["message_kl_bound"] == pytest.approx(math.exp(min(2 * shift, 300)) - 1 - 2 * shift)
    assert math.isfinite(measured["surrogate"]) and math.copysign(1, measured["surrogate"]) == (1 if shift < 0 else -1)


def test_the_certificate_counts_the_trajectories_without_the_agent(make_batch):
    """Agent 1 speaks in one of eight trajectories."""
    batch = make_batch([0] * 8 + [1], [0] * 9, [*range(8), 7], [1.0] * 9)
    batch.advantages = torch.linspace(-2, 1, int(batch.response_lengths.sum()))
    region = {"message_kl": 0.01, "message_kl_bound": 0.02, "beta": 0.5, "surrogate": 0.8}
    reported = {"grad_norm": 3.0, "grad_norm_max": 3.0, "agents": {1: {"entropy": 0.1}}, "trust_region": region}
    values = certify({"writer": reported}, batch)["writer"]
    expected = certificate([0.1], [0.02], 2.0, 2)
    assert values["agents"] == {
        1: {
            "entropy": 0.1,
            "grad_norm": 3.0,
            "grad_norm_max": 3.0,
            "message_kl": 0.01,
            "message_kl_bound": 0.02,
            "beta": 0.5,
            "surrogate_gain": pytest.approx(0.1),
            "certificate": pytest.approx(expected),
        }
    }
    assert values["certificate"] == pytest.approx(expected) and set(values) == {
        "grad_norm",
        "grad_norm_max",
        "agents",
        "certificate",
    }, "what is one agent's is not its policy's"
