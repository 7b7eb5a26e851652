"""The agent-wise advantage as one Triton kernel: statistics, normalization and expansion to tokens.

One program handles one group (or a share of its rows): it reads the group's scores, keeps float32 count, mean and
sum of squares per agent (Welford's update, block-wise, merged as Chan et al.), derives the group's from the agents',
and writes each row's advantage over its tokens.  There are no atomics, so the result is a function of the input
alone.  Distances to each agent's lowest score are what is summed; scores whose range is within `ROUNDING` of their
magnitude are equal, as in the reference.

Tested under Triton's interpreter on the CPU against `kernels.agent_advantage`, and compiled for Hopper without a GPU;
the compiled code has not run yet: `tools/gpu_check.sh advantage` is for a machine with one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_drmas.kernels.agent_advantage import ROUNDING, check_arguments
from megatron_drmas.kernels.segments import dense_index

STAT_ROWS = 64  # rows of one step of the statistics
WRITE_ROWS = 8  # rows x tokens of one step of the output
WRITE_TOKENS = 64
MIN_PROGRAMS = 2048  # enough to fill a large GPU; with fewer groups, several programs share a group
SCOPES = {"none": 0, "group": 1, "agent": 2}


@triton.jit
def _advantage_kernel(
    scores,  # [R]
    magnitude,  # [R], its absolute values
    agent,  # int32 [R] in [0, agents)
    order,  # int64 [R], rows sorted by group
    bounds,  # int64 [groups + 1], into order
    offsets,  # int64 [R + 1], into out
    out,  # float32 [tokens]
    epsilon,
    rounding,
    MEAN: tl.constexpr,
    STD: tl.constexpr,
    AGENTS: tl.constexpr,
    STAT_ROWS: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_TOKENS: tl.constexpr,
):
    group = tl.program_id(0)
    first = tl.load(bounds + group)
    stop = tl.load(bounds + group + 1)
    agents = tl.arange(0, AGENTS)

    low = tl.full([AGENTS], float("inf"), tl.float32)
    high = tl.full([AGENTS], float("-inf"), tl.float32)
    size = tl.zeros([AGENTS], tl.float32)
    for base in range(first, stop, STAT_ROWS):
        position = base + tl.arange(0, STAT_ROWS)
        row = tl.load(order + position, mask=position < stop, other=0)
        s = tl.load(scores + row, mask=position < stop, other=0.0).to(tl.float32)
        mine = (tl.load(agent + row, mask=position < stop, other=-1)[:, None] == agents[None, :]) & (position < stop)[:, None]
        low = tl.minimum(low, tl.min(tl.where(mine, s[:, None], float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(mine, s[:, None], float("-inf")), axis=0))
        m = tl.abs(tl.load(magnitude + row, mask=position < stop, other=0.0).to(tl.float32))
        size = tl.maximum(size, tl.max(tl.where(mine, m[:, None], 0.0), axis=0))
    group_low = tl.min(low, axis=0)
    group_spread = tl.max(high, axis=0) - group_low > rounding * tl.max(size, axis=0)
    agent_spread = high - low > rounding * size
    low = tl.where(low == float("inf"), 0.0, low)

    count = tl.zeros([AGENTS], tl.float32)
    mean = tl.zeros([AGENTS], tl.float32)  # of s - low
    m2 = tl.zeros([AGENTS], tl.float32)
    for base in range(first, stop, STAT_ROWS):
        position = base + tl.arange(0, STAT_ROWS)
        row = tl.load(order + position, mask=position < stop, other=0)
        s = tl.load(scores + row, mask=position < stop, other=0.0).to(tl.float32)
        mine = (tl.load(agent + row, mask=position < stop, other=-1)[:, None] == agents[None, :]) & (position < stop)[:, None]
        distance = tl.where(mine, s[:, None] - low[None, :], 0.0)
        block_count = tl.sum(mine.to(tl.float32), axis=0)
        block_mean = tl.sum(distance, axis=0) / tl.maximum(block_count, 1.0)
        deviation = tl.where(mine, distance - block_mean[None, :], 0.0)
        total = count + block_count
        delta = block_mean - mean
        share = block_count / tl.maximum(total, 1.0)
        m2 += tl.sum(deviation * deviation, axis=0) + delta * delta * count * share
        mean += delta * share
        count = total

    present = count > 0
    group_count = tl.sum(count, axis=0)
    apart = tl.where(present, low - group_low + mean, 0.0)
    group_mean = tl.sum(count * apart, axis=0) / group_count  # of s - group_low
    group_m2 = tl.sum(m2 + tl.where(present, count * (apart - group_mean) * (apart - group_mean), 0.0), axis=0)
    group_std = tl.sqrt(group_m2 / tl.maximum(group_count - 1.0, 1.0))
    agent_std = tl.sqrt(m2 / tl.maximum(count - 1.0, 1.0))
    agent_differs = agent_spread.to(tl.float32)

    step = WRITE_ROWS * tl.num_programs(1)
    for base in range(first + WRITE_ROWS * tl.program_id(1), stop, step):
        position = base + tl.arange(0, WRITE_ROWS)
        row = tl.load(order + position, mask=position < stop, other=0)
        s = tl.load(scores + row, mask=position < stop, other=0.0).to(tl.float32)
        mine = tl.load(agent + row, mask=position < stop, other=-1)[:, None] == agents[None, :]
        if MEAN == 2:
            centred = s - tl.sum(tl.where(mine, low[None, :], 0.0), axis=1)
            centred -= tl.sum(tl.where(mine, mean[None, :], 0.0), axis=1)
        else:
            centred = s - group_low - group_mean
        if STD == 2:
            centred /= tl.sum(tl.where(mine, agent_std[None, :], 0.0), axis=1) + epsilon
        elif STD == 1:
            centred /= group_std + epsilon
        if MEAN == 2 or STD == 2:
            centred = tl.where(tl.sum(tl.where(mine, agent_differs[None, :], 0.0), axis=1) > 0, centred, 0.0)
        if MEAN == 1 or STD == 1:
            centred = tl.where(group_spread, centred, 0.0)
        begin = tl.load(offsets + row, mask=position < stop, other=0)
        length = tl.load(offsets + row + 1, mask=position < stop, other=0) - begin
        values = tl.broadcast_to(centred[:, None], [WRITE_ROWS, WRITE_TOKENS])
        for token in range(0, tl.max(length, axis=0), WRITE_TOKENS):
            column = token + tl.arange(0, WRITE_TOKENS)
            tl.store(out + begin[:, None] + column[None, :], values, mask=column[None, :] < length[:, None])


def agent_advantages_triton(
    scores: Tensor,
    group: Tensor,
    agent: Tensor,
    offsets: Tensor,
    mean: str = "agent",
    std: str = "agent",
    epsilon: float = 1e-6,
    magnitude: Tensor | None = None,
) -> Tensor:
    """See `kernels.agent_advantage.agent_advantages`; all tensors on one CUDA device."""
    tokens = check_arguments(scores, group, agent, offsets, mean, std, magnitude)
    out = torch.empty(tokens, dtype=torch.float32, device=scores.device)
    if tokens == 0:
        return out
    agent, agents = dense_index(agent)
    if agents > 1024:  # scattered numbers: count only those that occur
        values, agent = agent.unique(return_inverse=True)
        agents = len(values)
    sorted_group, order = group.sort(stable=True)
    sizes = sorted_group.unique_consecutive(return_counts=True)[1]
    bounds = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    groups = len(sizes)
    shares = max(1, min(MIN_PROGRAMS // groups, -(-int(sizes.max()) // WRITE_ROWS)))
    _advantage_kernel[(groups, shares)](
        scores.contiguous(),
        (scores if magnitude is None else magnitude).contiguous(),
        agent.to(torch.int32),
        order,
        bounds,
        offsets.contiguous(),
        out,
        epsilon,
        ROUNDING,
        MEAN=SCOPES[mean],
        STD=SCOPES[std],
        AGENTS=triton.next_power_of_2(agents),
        STAT_ROWS=STAT_ROWS,
        WRITE_ROWS=WRITE_ROWS,
        WRITE_TOKENS=WRITE_TOKENS,
        num_warps=1,
    )
    return out
