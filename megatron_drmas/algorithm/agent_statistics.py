"""What each agent's returns say about the baseline: the statistics that Dr. MAS's lemma watches.

`observability.alarms` holds them, and the actors' metrics, against their limits and running medians.
"""

import torch

from megatron_drmas.batch import TurnBatch
from megatron_drmas.kernels.agent_advantage import cell_statistics
from megatron_drmas.kernels.segments import dense_index, segment_mean, segment_sum


def agent_statistics(batch: TurnBatch) -> list[dict[str, float]]:
    """Statistics of every agent's calls, by agent index; an agent that was not called has only `calls` = 0.

    calls: rows.
    return_mean, return_std: over its rows (1/n).
    single_calls: rows that are their agent's only one on their question: Dr. MAS gives them advantage 0.
    baseline_inflation: (sigma_k^2 + (mu_k - mu)^2) / sigma^2, the factor by which a group baseline multiplies the
        second moment of the agent's gradient (Dr. MAS, lemma 4.2; 1 under the agent's own baseline).  mu and sigma^2 are
        over a question's N trajectories, mu_k and sigma_k^2 over the agent's calls, all 1/n; averaged over the
        agent's calls on questions whose returns differ, left out where there is none.
    baseline_inflation_max: the largest of any question; at most N - 1.
    """
    rows = len(batch)
    if rows == 0:
        return [{"calls": 0} for _ in batch.agents]
    returns, agents = batch.reward.double(), len(batch.agents)
    group, groups = dense_index(batch.group)
    trajectory, trajectories = dense_index(group, batch.trajectory)
    group_of = torch.full((trajectories,), groups).scatter_(0, trajectory, group)
    over_trajectories = cell_statistics(segment_mean(returns, trajectory, trajectories), group_of, groups + 1)
    spread = over_trajectories.spread
    variance = over_trajectories.m2 / over_trajectories.count.clamp(min=1)
    squared = torch.where(
        spread[group], (returns - over_trajectories.mean[group]).square() / torch.where(spread, variance, 1.0)[group], 0.0
    )

    cell, cells = dense_index(group, batch.agent)
    calls = torch.bincount(cell, minlength=cells)
    factor = segment_sum(squared, cell, cells) / calls.clamp(min=1)
    agent_of = torch.zeros(cells, dtype=torch.int64).scatter_(0, cell, batch.agent)
    largest = torch.zeros(agents, dtype=torch.float64).scatter_reduce_(0, agent_of, factor, "amax")
    single = segment_sum((calls[cell] == 1).double(), batch.agent, agents)
    watched = segment_sum(spread[group].double(), batch.agent, agents)
    inflation = segment_sum(squared, batch.agent, agents) / watched
    own = cell_statistics(returns, batch.agent, agents)

    statistics: list[dict[str, float]] = []
    for index in range(agents):
        if own.count[index] == 0:
            statistics.append({"calls": 0})
            continue
        values = {
            "calls": int(own.count[index]),
            "return_mean": float(own.mean[index]),
            "return_std": float((own.m2[index] / own.count[index]).sqrt()),
            "single_calls": int(single[index]),
        }
        if watched[index]:
            values |= {"baseline_inflation": float(inflation[index]), "baseline_inflation_max": float(largest[index])}
        statistics.append(values)
    return statistics
