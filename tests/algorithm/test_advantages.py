"""Every estimator against a slow oracle, and the laws that hold for all of them."""

import itertools
import statistics
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.estimators import ESTIMATORS, register_estimator
from megatron_drmas.algorithm.scores import row_scores
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig
from megatron_drmas.config.errors import ConfigError

EPSILON = 1e-6
VARIANTS = [
    AdvantageConfig(estimator, mean, std, weighting, key)
    for estimator, mean, std, weighting, key in itertools.product(
        sorted(ESTIMATORS),
        ("group", "agent"),
        ("group", "agent", "none"),
        ("step", "trajectory"),
        ("question", "question_agent", "question_agent_turn"),
    )
    if estimator != "rloo" or std == "none"
]


class Oracle:
    """The estimators once more, in dictionaries and loops over rows."""

    def __init__(self, batch, config: AdvantageConfig):
        self.config = config
        self.scores = row_scores(batch, AlgorithmConfig(advantage=config)).tolist()
        self.rows = range(len(self.scores))
        self.agent, self.trajectory, self.turn = batch.agent.tolist(), batch.trajectory.tolist(), batch.turn.tolist()
        self.reward = batch.reward.tolist()
        self.state = batch.state.tolist() if batch.state is not None else None
        group = batch.group.tolist()
        self.group = [
            {
                "question": (group[i],),
                "question_agent": (group[i], self.agent[i]),
                "question_agent_turn": (group[i], self.agent[i], self.turn[i]),
            }[config.group_key]
            for i in self.rows
        ]

    def cell(self, scope, *extra):
        return [(self.group[i], self.agent[i] if scope == "agent" else None, *(column[i] for column in extra)) for i in self.rows]

    def samples(self, values, cell, weighting):
        members = defaultdict(lambda: defaultdict(list))
        for i in self.rows:
            members[cell[i]][self.trajectory[i] if weighting == "trajectory" else ("row", i)].append(values[i])
        return {key: [statistics.fmean(unit) for unit in units.values()] for key, units in members.items()}

    def normalise(self, values, mean_cell, std_cell, weighting):
        means = {key: statistics.fmean(unit) for key, unit in self.samples(values, mean_cell, weighting).items()}
        if std_cell is None:
            return [values[i] - means[mean_cell[i]] for i in self.rows]
        spread = {}
        for key, unit in self.samples(values, std_cell, weighting).items():
            equal = len(unit) < 2 or max(unit) - min(unit) < 1e-12
            spread[key] = None if equal else statistics.stdev(unit)
        return [
            0.0 if spread[std_cell[i]] is None else (values[i] - means[mean_cell[i]]) / (spread[std_cell[i]] + EPSILON)
            for i in self.rows
        ]

    def scope(self, name, *extra):
        return None if name == "none" else self.cell(name, *extra)

    def normalised(self):
        config = self.config
        return self.normalise(self.scores, self.cell(config.mean), self.scope(config.std), config.weighting)

    def rloo(self):
        cell, advantages = self.cell(self.config.mean), []
        for i in self.rows:
            others = defaultdict(list)
            for j in self.rows:
                if cell[j] == cell[i] and self.trajectory[j] != self.trajectory[i]:
                    others[self.trajectory[j] if self.config.weighting == "trajectory" else ("row", j)].append(self.scores[j])
            baseline = statistics.fmean(statistics.fmean(unit) for unit in others.values()) if others else self.scores[i]
            advantages.append(self.scores[i] - baseline)
        return advantages

    def reinforce_pp_baseline(self):
        config = self.config
        centred = self.normalise(self.scores, self.cell(config.mean), None, config.weighting)
        if config.std == "none":
            return centred
        whole = [self.agent[i] if config.std == "agent" else 0 for i in self.rows]
        return self.normalise(centred, whole, whole, config.weighting)

    def gigpo(self):
        config = self.config
        returns = []
        for i in self.rows:
            later = sorted(
                (self.turn[j], j) for j in self.rows if self.trajectory[j] == self.trajectory[i] and self.turn[j] >= self.turn[i]
            )
            rewards = [self.scores[j] - self.reward[j] for _, j in later]
            rewards[-1] += self.reward[i]
            returns.append(sum(config.gigpo_discount**k * reward for k, reward in enumerate(rewards)))
        step = self.normalise(returns, self.cell(config.mean, self.state), self.scope(config.std, self.state), "step")
        return [episode + config.gigpo_weight * local for episode, local in zip(self.normalised(), step)]

    def advantages(self):
        return getattr(self, self.config.estimator)()


def row_advantages(batch, config: AdvantageConfig):
    tokens = compute_advantages(batch, AlgorithmConfig(advantage=config))
    firsts = tokens[batch.response_offsets[:-1]]
    assert torch.equal(tokens, firsts.repeat_interleave(batch.response_lengths)), "one value on all tokens of a row"
    return firsts


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.estimator}-{c.mean}-{c.std}-{c.weighting}-{c.group_key}")
def test_equals_the_oracle(config, random_batch):
    for seed in range(2):
        batch = random_batch(seed)
        torch.testing.assert_close(
            row_advantages(batch, config), torch.tensor(Oracle(batch, config).advantages()), rtol=2e-5, atol=2e-5
        )


rows_strategy = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 0.3, 1.0, -1e6, 1e6])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(rows=rows_strategy, config=st.sampled_from(VARIANTS))
def test_any_structure_equals_the_oracle(make_batch, rows, config):
    agent, group, sample, _ = zip(*rows)
    returns = {}
    reward = [returns.setdefault((g, s), r) for _, g, s, r in rows]
    trajectory = [g * 3 + s for g, s in zip(group, sample)]
    batch = make_batch(agent, group, trajectory, reward, state=torch.tensor(agent) % 2)
    expected = torch.tensor(Oracle(batch, config).advantages())
    scale = float(max(map(abs, reward))) if config.std == "none" else 1.0
    torch.testing.assert_close(row_advantages(batch, config), expected, rtol=1e-4, atol=1e-4 * max(scale, 1))


@pytest.mark.parametrize("config", VARIANTS[::5], ids=str)
def test_order_of_rows_is_irrelevant(config, random_batch):
    batch = random_batch(3)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        row_advantages(batch.select(order), config), row_advantages(batch, config)[order], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_shared_policies_change_no_statistic(estimator, random_batch):
    batch = random_batch(4)
    config = AdvantageConfig(estimator, std="none" if estimator == "rloo" else "agent")
    shared = replace(batch, policy=torch.zeros_like(batch.policy))
    assert torch.equal(row_advantages(batch, config), row_advantages(shared, config))


@pytest.mark.parametrize("config", VARIANTS[::3], ids=str)
def test_equal_scores_teach_nothing(config, make_batch):
    batch = make_batch(
        [0, 1, 2, 0, 1, 0], [0] * 6, [0, 0, 0, 1, 1, 2], [0.1] * 6, state=torch.zeros(6, dtype=torch.int64), turn=[0] * 6
    )
    if config.estimator != "gigpo":  # discounting makes returns differ along a trajectory
        assert row_advantages(batch, config).abs().max() < 1e-9


@pytest.mark.parametrize("config", VARIANTS[::3], ids=str)
def test_empty_batch(config, make_batch):
    batch = make_batch([], [], [], [], state=torch.zeros(0, dtype=torch.int64))
    assert compute_advantages(batch, AlgorithmConfig(advantage=config)).shape == (0,)


def test_paper_formula(make_batch):
    """Agent 1 is called in the only success of four: the group baseline gives it 1.5, its own cell is one sample."""
    batch = make_batch([0, 0, 0, 0, 1], [7] * 5, [0, 1, 2, 3, 3], [0, 0, 0, 1, 1])
    group = row_advantages(batch, AdvantageConfig(mean="group", std="group"))
    agent = row_advantages(batch, AdvantageConfig())
    torch.testing.assert_close(group, torch.tensor([-0.4] * 3 + [0.6] * 2) / (0.3**0.5 + EPSILON))
    torch.testing.assert_close(agent, torch.tensor([-0.25, -0.25, -0.25, 0.75, 0.0]) / torch.tensor([0.5 + EPSILON] * 5))


@pytest.mark.parametrize("std", ("group", "agent", "none"))
@pytest.mark.parametrize("mean", ("group", "agent"))
def test_agent_with_one_call_has_a_finite_advantage(mean, std, make_batch):
    batch = make_batch([0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 1, 1])
    advantages = row_advantages(batch, AdvantageConfig(mean=mean, std=std))
    assert advantages.isfinite().all()
    if mean == "agent" or std == "agent":
        assert advantages[2] == 0


def test_no_spread_is_zero_even_where_the_mean_is_apart(make_batch):
    """(group mean, agent std): agent 1 always succeeded, so its std is 0 while the group's mean is not its score."""
    batch = make_batch([0, 0, 0, 1, 1], [0] * 5, [0, 1, 2, 3, 4], [0, 0, 1, 1, 1])
    assert row_advantages(batch, AdvantageConfig(mean="group", std="agent"))[3:].eq(0).all()


def test_penalty_falls_on_the_row_that_earned_it(make_batch):
    batch = make_batch([0, 1, 0, 1], [0] * 4, [0, 0, 1, 1], [1, 1, 0, 0], valid=[True, False, True, True])
    assert row_scores(batch, AlgorithmConfig(invalid_penalty=0.25)).tolist() == [1, 0.75, 0, 0]


def test_step_and_trajectory_weighting_differ(make_batch):
    """A trajectory with three calls weighs three samples or one."""
    batch = make_batch([0] * 4, [0] * 4, [0, 0, 0, 1], [1, 1, 1, 0])
    step = row_advantages(batch, AdvantageConfig(std="none"))
    trajectory = row_advantages(batch, AdvantageConfig(std="none", weighting="trajectory"))
    torch.testing.assert_close(step, torch.tensor([0.25, 0.25, 0.25, -0.75]))
    torch.testing.assert_close(trajectory, torch.tensor([0.5, 0.5, 0.5, -0.5]))


def test_equal_call_counts_make_group_and_agent_coincide(make_batch):
    """Dr. MAS, lemma 4.2: with every agent called once in every trajectory the two baselines are the same."""
    reward = [0.0, 1.0, 1.0, 0.0, 0.0]
    batch = make_batch([0, 1, 2] * 5, [0] * 15, [i // 3 for i in range(15)], [r for r in reward for _ in range(3)])
    group = row_advantages(batch, AdvantageConfig(mean="group", std="group", weighting="trajectory"))
    torch.testing.assert_close(group, row_advantages(batch, AdvantageConfig()))


def test_million_rows_and_huge_scores(make_batch):
    rows = 1_000_000
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, 50_000, (rows,), generator=generator)
    agent = torch.randint(0, 3, (rows,), generator=generator)
    reward = torch.where(torch.rand(rows, generator=generator) < 0.5, 1e6, -1e6)
    batch = make_batch(
        agent, group, torch.arange(rows), reward, lengths=torch.ones(rows, dtype=torch.int64), turn=torch.zeros(rows)
    )
    advantages = compute_advantages(batch, AlgorithmConfig())
    assert advantages.isfinite().all() and advantages.abs().max() < 10
    cell = group * 3 + agent
    total = torch.zeros(150_000, dtype=torch.float64).index_add_(0, cell, advantages.double())
    squares = torch.zeros(150_000, dtype=torch.float64).index_add_(0, cell, advantages.double().square())
    count = torch.bincount(cell, minlength=150_000)
    assert total.abs().max() < 1e-4
    torch.testing.assert_close(squares[squares > 0], (count - 1.0)[squares > 0].double(), rtol=1e-4, atol=0)


def test_group_ids_may_be_anything(random_batch):
    batch = random_batch(5)
    strange = replace(batch, group=batch.group * 10**12 - 7, trajectory=batch.trajectory * 10**9)
    assert torch.equal(row_advantages(batch, AdvantageConfig()), row_advantages(strange, AdvantageConfig()))


def test_errors_name_the_key(random_batch):
    batch = random_batch(0)
    for config, key in (
        (AdvantageConfig(estimator="grpo"), "algorithm.advantage.estimator"),
        (AdvantageConfig(mean="none"), "algorithm.advantage.mean"),
        (AdvantageConfig(estimator="rloo"), "algorithm.advantage.std"),
        (AdvantageConfig(group_key="turn"), "algorithm.advantage.group_key"),
    ):
        with pytest.raises(ConfigError, match=key):
            compute_advantages(batch, AlgorithmConfig(advantage=config))
    with pytest.raises(ValueError, match="state"):
        compute_advantages(replace(batch, state=None), AlgorithmConfig(advantage=AdvantageConfig("gigpo")))
    with pytest.raises(ValueError, match="row 2 .agent"):
        compute_advantages(replace(batch, reward=batch.reward.index_fill(0, torch.tensor(2), float("nan"))), AlgorithmConfig())
    with pytest.raises(ValueError, match="twice"):
        register_estimator("rloo")(lambda *_: None)


def test_clip_bounds_the_advantages(random_batch):
    batch = random_batch(0)
    free, bounded = (row_advantages(batch, AdvantageConfig(clip=clip)) for clip in (0.0, 0.5))
    assert free.abs().max() > 0.5
    assert torch.equal(bounded, free.clamp(-0.5, 0.5))
