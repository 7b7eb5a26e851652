"""Every estimator against a slow oracle, and the laws that hold for all of them."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.estimators import ESTIMATORS, register_estimator
from megatron_drmas.algorithm.scores import row_scores
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig, RewardConfig
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config

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
    """The estimators once more, from their definitions: dictionaries, loops over rows, and fractions up to the square root.

    Scores are fractions, so that samples have spread exactly if they differ.
    """

    def __init__(self, batch, config: AdvantageConfig, scores=None, reward=None):
        self.config = config
        self.scores = [
            Fraction(score)
            for score in (row_scores(batch, AlgorithmConfig(advantage=config)).tolist() if scores is None else scores)
        ]
        self.rows = range(len(self.scores))
        self.agent, self.trajectory, self.turn = batch.agent.tolist(), batch.trajectory.tolist(), batch.turn.tolist()
        self.reward = [Fraction(value) for value in (batch.reward.tolist() if reward is None else reward)]
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

    def scope(self, name, *extra):
        return None if name == "none" else self.cell(name, *extra)

    def units(self, values, cell, weighting):
        """cell -> unit -> the value that stands for each row of the unit."""
        members = defaultdict(lambda: defaultdict(list))
        for i in self.rows:
            members[cell[i]][self.unit(i, weighting)].append(values[i])
        return {key: {unit: sum(rows) / len(rows) for unit, rows in of.items()} for key, of in members.items()}

    def unit(self, i, weighting):
        return self.trajectory[i] if weighting == "trajectory" else ("row", i)

    def normalize(self, values, mean_cell, std_cell, weighting):
        of_mean, advantages = self.units(values, mean_cell, weighting), []
        of_std = None if std_cell is None else self.units(values, std_cell, weighting)
        for i in self.rows:
            samples = of_mean[mean_cell[i]]
            centred = samples[self.unit(i, weighting)] - sum(samples.values()) / len(samples)
            if of_std is not None:
                scale = list(of_std[std_cell[i]].values())
                mean = sum(scale) / len(scale)
                squares = sum((x - mean) ** 2 for x in scale)
                centred = centred / (Fraction(math.sqrt(squares / (len(scale) - 1))) + Fraction(EPSILON)) if squares else 0
            advantages.append(Fraction(centred))
        return advantages

    def normalized(self):
        config = self.config
        return self.normalize(self.scores, self.cell(config.mean), self.scope(config.std), config.weighting)

    def rloo(self):
        cell, advantages = self.cell(self.config.mean), []
        units = self.units(self.scores, cell, self.config.weighting)
        owner = {self.unit(i, self.config.weighting): self.trajectory[i] for i in self.rows}
        for i in self.rows:
            own = units[cell[i]][self.unit(i, self.config.weighting)]
            others = [value for unit, value in units[cell[i]].items() if owner[unit] != self.trajectory[i]]
            advantages.append(own - sum(others) / len(others) if others else Fraction(0))
        return advantages

    def reinforce_pp_baseline(self):
        config = self.config
        centred = self.normalize(self.scores, self.cell(config.mean), None, config.weighting)
        if config.std == "none":
            return centred
        whole = [self.agent[i] if config.std == "agent" else 0 for i in self.rows]
        return self.normalize(centred, whole, whole, config.weighting)

    def gigpo(self):
        config = self.config
        returns = []
        for i in self.rows:
            later = sorted(
                (self.turn[j], j) for j in self.rows if self.trajectory[j] == self.trajectory[i] and self.turn[j] >= self.turn[i]
            )
            rewards = [self.scores[j] - self.reward[j] for _, j in later]
            rewards[-1] += self.reward[i]
            returns.append(sum(Fraction(str(config.gigpo_discount)) ** k * reward for k, reward in enumerate(rewards)))
        step = self.normalize(returns, self.cell(config.mean, self.state), self.scope(config.std, self.state), "step")
        return [episode + Fraction(config.gigpo_weight) * local for episode, local in zip(self.normalized(), step)]

    def advantages(self):
        return torch.tensor([float(value) for value in getattr(self, self.config.estimator)()])


def row_advantages(batch, config: AdvantageConfig, **settings):
    tokens = compute_advantages(batch, AlgorithmConfig(advantage=config, **settings))
    firsts = tokens[batch.response_offsets[:-1]]
    assert torch.equal(tokens, firsts.repeat_interleave(batch.response_lengths)), "one value on all tokens of a row"
    return firsts


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.estimator}-{c.mean}-{c.std}-{c.weighting}-{c.group_key}")
def test_equals_the_oracle(config, random_batch):
    for seed in range(2):
        batch = random_batch(seed)
        torch.testing.assert_close(row_advantages(batch, config), Oracle(batch, config).advantages(), rtol=2e-5, atol=2e-5)


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.sampled_from([1, 2, -3, 6]), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=400, deadline=None)
@given(
    rows=rows_strategy,
    config=st.sampled_from(VARIANTS),
    penalty=st.sampled_from([0, 1, 3]),
    unit=st.sampled_from([1, 10**6, 10**9]),
)
def test_any_structure_equals_the_oracle(make_batch, rows, config, penalty, unit):
    """Scores of tenths (of millions, of ten-millionths) that rewards of two levels and a penalty add up to: what is equal on
    paper is equal, whatever float32 makes of each sum."""
    agent, group, sample, trajectory_reward, turn_reward, valid = zip(*rows)
    returns = {}
    reward = [returns.setdefault((g, s), r) for g, s, r in zip(group, sample, trajectory_reward)]
    trajectory = [g * 3 + s for g, s in zip(group, sample)]
    scale = Fraction(unit, 10 if unit < 10**9 else 10**16)
    batch = make_batch(
        agent,
        group,
        trajectory,
        [float(r * scale) for r in reward],
        valid=valid,
        state=torch.tensor(agent) % 2,
        turn_reward=torch.tensor([float(r * scale) for r in turn_reward]),
    )
    scores = [(r + t - (0 if ok else penalty)) * scale for r, t, ok in zip(reward, turn_reward, valid)]
    got = row_advantages(batch, config, reward=RewardConfig(turn=1.0), invalid_penalty=float(penalty * scale))
    expected = Oracle(batch, config, scores, [r * scale for r in reward]).advantages()
    size = float(10 * scale) if config.std == "none" else 1.0
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize("penalty", [0.001, 0.01, 0.1, 1.0])
def test_an_invalid_call_counts_for_its_whole_trajectory(penalty, make_batch):
    """5 trajectories of 8 calls, all returns 0, one call invalid: its trajectory is one sample of five, whatever the penalty."""
    valid = [row != 19 for row in range(40)]
    batch = make_batch([row % 2 for row in range(40)], [0] * 40, [row // 8 for row in range(40)], [0.0] * 40, valid=valid)
    config = AdvantageConfig(mean="group", std="group", weighting="trajectory", epsilon=1e-12)
    advantages = row_advantages(batch, config, invalid_penalty=penalty)
    expected = torch.full((5, 8), 1 / 5**0.5).index_fill(0, torch.tensor(2), -4 / 5**0.5)
    torch.testing.assert_close(advantages, expected.flatten(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("recipe, scale", [("grpo", 0), ("dapo", 0), ("gspo", 0), ("teamtr", 0), ("gigpo", 0), ("dr_grpo", 1)])
def test_recipes_compare_trajectories(recipe, scale, make_batch):
    """Scores 1, 0.9, 0, 0 of four trajectories, the second by three calls of which one is invalid: eight rows."""
    config = compose_config("search_hetero", [f"algorithm={recipe}", "algorithm.invalid_penalty=0.3"]).algorithm
    trajectory, valid = [0, 1, 1, 1, 2, 2, 3, 3], [True, True, False, True, True, True, True, True]
    batch = make_batch(
        [0, 0, 1, 2, 0, 1, 0, 2],
        [0] * 8,
        trajectory,
        [1, 1, 1, 1, 0, 0, 0, 0],
        valid=valid,
        state=torch.arange(8),
        response_limits=torch.full((8,), 1000),
    )
    means = torch.tensor([1.0, 0.9, 0.0, 0.0])
    expected = (means - means.mean()) / (1 if scale else means.std())
    got = compute_advantages(batch, config)[batch.response_offsets[:-1]]
    torch.testing.assert_close(got, expected[trajectory], rtol=1e-4, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    rows=rows_strategy,
    config=st.sampled_from(
        [c for c in VARIANTS if c.weighting == "trajectory" and c.group_key == "question" and c.estimator != "gigpo"]
    ),
)
def test_trajectory_weighting_is_step_weighting_of_the_means(make_batch, rows, config):
    """Where every cell is of one scope: one row for each trajectory, with the mean score, has the advantage of all its calls."""
    if config.std not in (config.mean, "none"):
        config = replace(config, std="none" if config.estimator == "rloo" else config.mean)
    agent, group, sample, _, turn_reward, _ = zip(*rows)
    agent_of = agent if config.mean == "agent" else [0] * len(rows)
    members = defaultdict(list)
    for row, unit in enumerate(zip(agent_of, group, [g * 3 + s for g, s in zip(group, sample)])):
        members[unit].append(row)
    many = make_batch(
        agent, group, [g * 3 + s for g, s in zip(group, sample)], [0.0] * len(rows), turn_reward=torch.tensor(turn_reward) / 4
    )
    means = torch.tensor([sum(turn_reward[row] for row in of) / len(of) / 4 for of in members.values()])
    few = make_batch(*zip(*members), [0.0] * len(members), turn_reward=means)
    settings = {"reward": RewardConfig(turn=1.0)}
    expected = row_advantages(few, replace(config, weighting="step"), **settings)
    got = row_advantages(many, config, **settings)
    for value, of in zip(expected, members.values()):
        torch.testing.assert_close(got[of], value.repeat(len(of)), rtol=1e-4, atol=1e-5)


def test_rounding_is_no_spread_of_the_batch(make_batch):
    """Group 0 has one invalid row; group 1 is one trajectory of three invalid calls and a valid one: no group has a contrast."""
    batch = make_batch([0] * 5, [0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0.0] * 5, valid=[False, False, False, False, True])
    for config in (
        c for c in VARIANTS if c.weighting == "trajectory" and c.estimator in ("reinforce_pp_baseline", "normalized", "rloo")
    ):
        if config.group_key != "question_agent_turn":
            assert row_advantages(batch, config, invalid_penalty=0.1).eq(0).all()


@pytest.mark.parametrize("config", [c for c in VARIANTS if c.estimator != "gigpo"], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_scores_that_cancel_are_judged_by_what_cancelled(config, size, make_batch):
    """0.1 + 0.2 - 0.3 and 0 are equal; so are their distances to a group's mean, whatever the next group's rewards are."""
    reward = torch.tensor([0.1, 0.0, 0.7, 0.7]) * size
    turn_reward = torch.tensor([0.2, 0.0, 0.1, 0.1]) * size
    batch = make_batch([0] * 4, [0, 0, 1, 1], [0, 1, 2, 3], reward, valid=[False, True, True, True], turn_reward=turn_reward)
    advantages = row_advantages(batch, config, reward=RewardConfig(turn=1.0), invalid_penalty=0.3 * size)
    assert advantages.eq(0).all()


@pytest.mark.parametrize(
    "config", [AdvantageConfig("reinforce_pp_baseline", "group", "group"), AdvantageConfig(mean="group", std="group")], ids=str
)
def test_one_small_difference_among_many_equal_scores_is_spread(config, make_batch):
    rows = 10_000
    batch = make_batch([0] * rows, [0] * rows, range(rows), [1000.0] * rows, valid=[False] + [True] * (rows - 1), turn=[0] * rows)
    advantages = row_advantages(batch, config, invalid_penalty=0.01)
    assert advantages[0] < -90 and advantages[1:].gt(0).all()


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
    for config in VARIANTS[::7]:
        assert torch.equal(row_advantages(batch, config), row_advantages(strange, config))


@pytest.mark.parametrize("config", VARIANTS[::7], ids=str)
def test_trajectories_may_be_numbered_within_their_group(config, random_batch):
    batch = random_batch(6, samples=5)
    assert torch.equal(row_advantages(batch, config), row_advantages(replace(batch, trajectory=batch.trajectory % 5), config))


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
    with pytest.raises(ValueError, match=r"score of question q\d, sample \d+, call \d \(agent agent\d\) = nan"):
        compute_advantages(replace(batch, reward=batch.reward.index_fill(0, torch.tensor(2), float("nan"))), AlgorithmConfig())
    with pytest.raises(ValueError, match="twice"):
        register_estimator("rloo")(lambda *_: None)


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda scores: scores[:-1], r"'mine' returned \d+ advantages for \d+ rows"),
        (lambda scores: scores / 0 * 0, r"'mine' returned advantage nan of question q\d, sample \d+, call \d \(agent agent\d\)"),
    ],
)
def test_what_an_estimator_returns_is_checked(random_batch, monkeypatch, returned, message):
    monkeypatch.setitem(ESTIMATORS, "mine", lambda scores, *_: returned(scores))
    with pytest.raises(ValueError, match=message):
        compute_advantages(random_batch(0), AlgorithmConfig(advantage=AdvantageConfig("mine")))


def test_clip_bounds_the_advantages(random_batch):
    batch = random_batch(0)
    free, bounded = (row_advantages(batch, AdvantageConfig(clip=clip)) for clip in (0.0, 0.5))
    assert free.abs().max() > 0.5
    assert torch.equal(bounded, free.clamp(-0.5, 0.5))
