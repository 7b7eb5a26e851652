"""Advantage estimators: functions from row scores to row advantages, registered by name.

Every estimator sees all rows of all agents, trainable or not, before anything is split or dropped.  The cells whose
rows are compared come from `AdvantageConfig`: `group_key` says what a group is, and `mean` and `std` whether a cell
is a whole group or one agent's share of it.

`weighting` says what a sample is.  step: a call, with its own score.  trajectory: a trajectory.  Then the scores of a
trajectory's calls in the cell are first *replaced* by their mean, and mean and std run over the cell's trajectories; with
mean = std = group that is equation (2) of Dr. MAS (arXiv 2602.08847) for all calls of a question, and a trajectory's calls
have the same advantage.  A cell of one agent sees that agent's calls alone, here as there: with mean = agent a trajectory's
value is the mean of that agent's scores in it, and with std = agent the scale is the std of those means.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_drmas.algorithm.scores import required_column, score_magnitudes
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig
from megatron_drmas.kernels.agent_advantage import CellStatistics, cell_statistics, normalize
from megatron_drmas.kernels.segments import dense_index, segment_mean

Estimator = Callable[[Tensor, TurnBatch, AlgorithmConfig], Tensor]
ESTIMATORS: dict[str, Estimator] = {}


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register `estimator(scores [R], batch, config) -> row advantages float32 [R]` as `algorithm.advantage.estimator`."""

    def add(estimator: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise ValueError(f"estimator {name!r} is registered twice; choose another name")
        ESTIMATORS[name] = estimator
        return estimator

    return add


def group_columns(batch: TurnBatch, group_key: str) -> tuple[Tensor, ...]:
    """The columns in which rows of one group agree.

    question: all calls on one question.  question_agent: one agent's.  question_agent_turn: one agent's at one turn
    (AT-GRPO, Stronger-MAS; there the calls of a group start from the same state, here only at turn 0).
    """
    columns = {"question": ("group",), "question_agent": ("group", "agent"), "question_agent_turn": ("group", "agent", "turn")}
    return tuple(getattr(batch, name) for name in columns[group_key])


def cell_index(batch: TurnBatch, config: AdvantageConfig, scope: str, *within: Tensor) -> tuple[Tensor, int]:
    """The cell of every row, int64 [R], and the number of cells.

    Args:
        scope: group, or agent for one agent's share of a group.
        within: int64 [R] each; rows of a cell agree in these too.
    """
    columns = group_columns(batch, config.group_key) + within
    if scope == "agent" and config.group_key == "question":
        columns += (batch.agent,)
    return dense_index(*columns)


def sample_statistics(
    scores: Tensor, magnitude: Tensor, cell: Tensor, cells: int, trajectory: Tensor, weighting: str
) -> tuple[Tensor, CellStatistics]:
    """The score that represents each row in its cell, [R], and the statistics of the cells' samples.

    step: its own; every row is a sample.  trajectory: the mean over its trajectory's rows in the cell; every trajectory that
    has any is one sample.

    Args:
        scores, magnitude: [R]; see `kernels.agent_advantage.cell_statistics`.
    """
    if weighting == "step":
        return scores, cell_statistics(scores, cell, cells, magnitude)
    unit, units = dense_index(cell, trajectory)
    means = segment_mean(scores, unit, units)
    rows = torch.arange(len(cell), device=cell.device)
    row = rows.new_full((units,), -1).scatter_(0, unit, rows)
    row = row[row >= 0]  # one of each unit that has any
    size = segment_mean(magnitude, unit, units)
    return means[unit], cell_statistics(means[unit[row]], cell[row], cells, size[unit[row]])


@register_estimator("normalized")
def normalized(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = (s - mean) / (std + epsilon), with the unbiased std and s as `weighting` has it in the mean's cell.

    | mean, std, weighting         | method                                                                |
    |------------------------------|-----------------------------------------------------------------------|
    | agent, agent, step           | Dr. MAS, arXiv 2602.08847, equation (5)                               |
    | group, group, trajectory     | GRPO over a question's trajectories, ibid. equation (2)               |
    | agent, group or group, agent | the two mixed variants of its Table 3                                 |
    | group, none, trajectory      | Dr. GRPO, arXiv 2503.20783 (with loss.aggregation = fixed_length)     |

    With group_key = question_agent_turn and rewards alpha x team + local it has AT-GRPO's groups (Stronger-MAS), but not
    its branching rollouts.
    Cells of one sample and cells without spread have advantage 0; see `kernels.agent_advantage`.
    """
    advantage, magnitude = config.advantage, score_magnitudes(batch, config)
    mean_cell, cells = cell_index(batch, advantage, advantage.mean)
    values, mean = sample_statistics(scores, magnitude, mean_cell, cells, batch.trajectory, advantage.weighting)
    if advantage.std == "none":
        return normalize(values, mean_cell, mean, None, None, advantage.epsilon)
    if advantage.std == advantage.mean:
        return normalize(values, mean_cell, mean, mean_cell, mean, advantage.epsilon)
    std_cell, cells = cell_index(batch, advantage, advantage.std)
    _, std = sample_statistics(scores, magnitude, std_cell, cells, batch.trajectory, advantage.weighting)
    return normalize(values, mean_cell, mean, std_cell, std, advantage.epsilon)


@register_estimator("rloo")
def rloo(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = s - mean of the cell's samples from *other* trajectories (RLOO, arXiv 2402.14740).

    Calls of the row's own trajectory share its return, so they are left out of its baseline together with it.
    With trajectory weighting s is the mean over the trajectory's rows of the cell, and the baseline the mean over the other
    trajectories.  0 where no other trajectory reached the cell, and in a cell without spread.
    """
    advantage, magnitude = config.advantage, score_magnitudes(batch, config)
    cell, cells = cell_index(batch, advantage, advantage.mean)
    values, samples = sample_statistics(scores, magnitude, cell, cells, batch.trajectory, advantage.weighting)
    # Sums of distances to the cell's mean keep their digits; those of a whole cell are 0.
    distance = values.double() - samples.mean[cell]
    unit, units = dense_index(cell, batch.trajectory)
    own = torch.ones(units, dtype=torch.float64, device=cell.device)
    own = own if advantage.weighting == "trajectory" else torch.bincount(unit, minlength=units).double()
    others = samples.count[cell] - own[unit]
    baseline = -(segment_mean(distance, unit, units) * own)[unit] / others.clamp(min=1)
    return torch.where((others > 0) & samples.spread[cell], distance - baseline, 0.0).float()


@register_estimator("reinforce_pp_baseline")
def reinforce_pp_baseline(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = (d - mean(d)) / (std(d) + epsilon), d = s - mean of the row's cell (REINFORCE++ with baseline, arXiv 2501.03262).

    The second normalization runs over the whole batch: over all its rows (std = group), over its rows of the same
    agent (std = agent), or not at all (std = none).  With trajectory weighting it is d that is replaced by its trajectory's
    mean over these.  Its spread is judged against the magnitude of the scores, not of what the first step left of them.
    """
    advantage, magnitude = config.advantage, score_magnitudes(batch, config)
    cell, cells = cell_index(batch, advantage, advantage.mean)
    values, baseline = sample_statistics(scores, magnitude, cell, cells, batch.trajectory, advantage.weighting)
    centred = normalize(values, cell, baseline, None, None, advantage.epsilon)
    if advantage.std == "none":
        return centred
    scope, scopes = dense_index(batch.agent if advantage.std == "agent" else torch.zeros_like(batch.agent))
    trajectory, _ = dense_index(batch.group, batch.trajectory)
    values, whole = sample_statistics(centred, magnitude, scope, scopes, trajectory, advantage.weighting)
    return normalize(values, scope, whole, scope, whole, advantage.epsilon)


@register_estimator("gigpo")
def gigpo(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = A_episode + w A_step (GiGPO, arXiv 2505.10978, equations 3, 7 and 8).

    A_episode is `normalized`.  A_step normalizes the discounted return from each call on among the calls of a group
    that started from the same state (the anchor, column `state`), of the same agent where mean or std is agent; whatever
    `weighting` is, each of these calls is a sample of it.
    A call's reward is what its score has beyond the trajectory's return, which is paid once, at the last call.
    """
    advantage = config.advantage
    state = required_column(batch, "state", "algorithm.advantage.estimator = gigpo")
    episode = normalized(scores, batch, config)
    team = (config.reward.trajectory * batch.reward).double()
    returns = discounted_returns(scores - team, team, batch, advantage.gigpo_discount)
    size = score_magnitudes(batch, config) - team.abs()
    magnitude = discounted_returns(size, team.abs(), batch, advantage.gigpo_discount)
    mean_cell, cells = cell_index(batch, advantage, advantage.mean, state)
    mean = cell_statistics(returns, mean_cell, cells, magnitude)
    std_cell, std = None, None
    if advantage.std != "none":
        std_cell, cells = cell_index(batch, advantage, advantage.std, state)
        std = cell_statistics(returns, std_cell, cells, magnitude)
    step = normalize(returns, mean_cell, mean, std_cell, std, advantage.epsilon)
    return episode + advantage.gigpo_weight * step


def discounted_returns(call_rewards: Tensor, team_rewards: Tensor, batch: TurnBatch, discount: float) -> Tensor:
    """G_t = r_t + discount x G_(t+1) along each trajectory, float64 [R].

    r_t is the call's reward, plus the team's at the trajectory's last call.
    The loop is over positions within a trajectory, not over rows.
    """
    trajectory, count = dense_index(batch.group, batch.trajectory)
    last = torch.full((count,), -1, device=trajectory.device).scatter_reduce_(0, trajectory, batch.turn, "amax")
    returns = call_rewards + torch.where(batch.turn == last[trajectory], team_rewards, 0.0)
    carried = returns.new_zeros(count)
    for turn in batch.turn.unique().flip(0):
        rows = (batch.turn == turn).nonzero().flatten()
        returns[rows] += discount * carried[trajectory[rows]]
        carried[trajectory[rows]] = returns[rows]
    return returns
