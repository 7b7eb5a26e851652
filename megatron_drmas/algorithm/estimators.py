"""Advantage estimators: functions from row scores to row advantages, registered by name.

Every estimator sees all rows of all agents, trainable or not, before anything is split or dropped.  The cells whose
rows are compared come from `AdvantageConfig`: `group_key` says what a group is, and `mean` and `std` whether a cell
is a whole group or one agent's share of it.
"""

from typing import Callable

import torch
from torch import Tensor

from megatron_drmas.algorithm.scores import required_column
from megatron_drmas.config.algorithm import AdvantageConfig, AlgorithmConfig
from megatron_drmas.kernels.agent_advantage import CellStatistics, cell_statistics, normalise
from megatron_drmas.kernels.segments import dense_index, segment_mean, segment_sum
from megatron_drmas.batch import TurnBatch

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
    (AT-GRPO, Stronger-MAS: what was sampled from the same state).
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


def sample_statistics(scores: Tensor, cell: Tensor, cells: int, trajectory: Tensor, weighting: str) -> CellStatistics:
    """Statistics of each cell's samples: its rows (step), or the means of its trajectories' rows (trajectory)."""
    if weighting == "step":
        return cell_statistics(scores, cell, cells)
    unit, units = dense_index(cell, trajectory)
    cell_of_unit = torch.full((units,), -1, dtype=torch.int64, device=cell.device).scatter_(0, unit, cell)
    means = segment_mean(scores, unit, units)
    present = cell_of_unit >= 0
    return cell_statistics(means[present], cell_of_unit[present], cells)


@register_estimator("normalised")
def normalised(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = (s - mean) / (std + epsilon), with the unbiased std.

    | mean, std      | method                                                              |
    |----------------|---------------------------------------------------------------------|
    | agent, agent   | Dr. MAS, arXiv 2602.08847, equation (5)                             |
    | group, group   | GRPO over all calls of a question, ibid. equation (2)               |
    | agent, group and group, agent | the two mixed variants of its Table 3                |
    | group, none    | Dr. GRPO, arXiv 2503.20783 (with loss.aggregation = fixed_length)   |

    With group_key = question_agent_turn and rewards alpha x team + local it is AT-GRPO (Stronger-MAS).
    Cells of one sample and cells without spread have advantage 0; see `kernels.agent_advantage`.
    """
    advantage = config.advantage
    mean_cell, cells = cell_index(batch, advantage, advantage.mean)
    mean = sample_statistics(scores, mean_cell, cells, batch.trajectory, advantage.weighting)
    if advantage.std == "none":
        return normalise(scores, mean_cell, mean, None, None, advantage.epsilon)
    if advantage.std == advantage.mean:
        return normalise(scores, mean_cell, mean, mean_cell, mean, advantage.epsilon)
    std_cell, cells = cell_index(batch, advantage, advantage.std)
    std = sample_statistics(scores, std_cell, cells, batch.trajectory, advantage.weighting)
    return normalise(scores, mean_cell, mean, std_cell, std, advantage.epsilon)


@register_estimator("rloo")
def rloo(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = s - mean of the cell's samples from *other* trajectories (RLOO, arXiv 2402.14740).

    Calls of the row's own trajectory share its return, so they are left out of its baseline together with it.
    With trajectory weighting the baseline is the mean over the other trajectories' means.  0 where no other
    trajectory reached the cell.
    """
    advantage = config.advantage
    cell, cells = cell_index(batch, advantage, advantage.mean)
    unit, units = dense_index(cell, batch.trajectory)
    low = scores.double().min() if len(scores) else 0.0  # sums of small numbers keep their digits
    shifted = scores.double() - low
    if advantage.weighting == "step":
        size, total = torch.bincount(unit, minlength=units).double(), segment_sum(shifted, unit, units)
        others = torch.bincount(cell, minlength=cells).double()[cell] - size[unit]
        others_total = segment_sum(shifted, cell, cells)[cell] - total[unit]
    else:
        means = segment_mean(shifted, unit, units)
        cell_of_unit = torch.full((units,), cells, dtype=torch.int64, device=cell.device).scatter_(0, unit, cell)
        others = torch.bincount(cell_of_unit, minlength=cells + 1).double()[cell] - 1
        others_total = segment_sum(means, cell_of_unit, cells + 1)[cell] - means[unit]
    return torch.where(others > 0, shifted - others_total / others.clamp(min=1), 0.0).float()


@register_estimator("reinforce_pp_baseline")
def reinforce_pp_baseline(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = (d - mean(d)) / (std(d) + epsilon), d = s - mean of the row's cell (REINFORCE++ with baseline, arXiv 2501.03262).

    The second normalisation runs over the whole batch: over all its rows (std = group), over its rows of the same
    agent (std = agent), or not at all (std = none).
    """
    advantage = config.advantage
    cell, cells = cell_index(batch, advantage, advantage.mean)
    baseline = sample_statistics(scores, cell, cells, batch.trajectory, advantage.weighting)
    centred = normalise(scores, cell, baseline, None, None, advantage.epsilon)
    if advantage.std == "none":
        return centred
    scope, scopes = dense_index(batch.agent if advantage.std == "agent" else torch.zeros_like(batch.agent))
    whole = sample_statistics(centred, scope, scopes, batch.trajectory, advantage.weighting)
    return normalise(centred, scope, whole, scope, whole, advantage.epsilon)


@register_estimator("gigpo")
def gigpo(scores: Tensor, batch: TurnBatch, config: AlgorithmConfig) -> Tensor:
    """A = A_episode + w A_step (GiGPO, arXiv 2505.10978, equations 3, 7 and 8).

    A_episode is `normalised`.  A_step normalises the discounted return from each call on among the calls of a group
    that started from the same state (the anchor, column `state`), of the same agent where mean or std is agent.
    A call's reward is what its score has beyond the trajectory's return, which is paid once, at the last call.
    """
    advantage = config.advantage
    state = required_column(batch, "state", "algorithm.advantage.estimator = gigpo")
    episode = normalised(scores, batch, config)
    team = config.reward.trajectory * batch.reward
    returns = discounted_returns(scores - team, team, batch, advantage.gigpo_discount)
    mean_cell, cells = cell_index(batch, advantage, advantage.mean, state)
    mean = cell_statistics(returns, mean_cell, cells)
    std_cell, std = None, None
    if advantage.std != "none":
        std_cell, cells = cell_index(batch, advantage, advantage.std, state)
        std = cell_statistics(returns, std_cell, cells)
    step = normalise(returns, mean_cell, mean, std_cell, std, advantage.epsilon)
    return episode + advantage.gigpo_weight * step


def discounted_returns(call_rewards: Tensor, team_rewards: Tensor, batch: TurnBatch, discount: float) -> Tensor:
    """G_t = r_t + discount x G_(t+1) along each trajectory, float32 [R].

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
