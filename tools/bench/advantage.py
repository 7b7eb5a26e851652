"""Speed of the advantage path on the CPU: a million rows of 64 tokens.

Compares `compute_advantages` (Dr. MAS: agent mean, agent std) with the row loop that trainers ship (one dictionary
entry per group, tensors indexed row by row) and with the time to write the output once.

    python -m tools.bench.advantage [--rows 1000000] [--tokens 64] [--threads 1]
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable

import numpy
import torch

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import AlgorithmConfig
from tools.ablation.command import count
from tools.bench.command import BenchParser

AGENTS, SAMPLES, TURNS = 3, 5, 4


def make_batch(rows: int, tokens: int) -> TurnBatch:
    generator = torch.Generator().manual_seed(0)
    trajectory = torch.arange(rows) // TURNS
    count = rows * tokens
    return TurnBatch(
        tokens=torch.zeros(0, dtype=torch.int64),
        offsets=torch.arange(rows + 1) * tokens,
        prompt_lengths=torch.zeros(rows, dtype=torch.int64),
        engine_logprobs=torch.zeros(1).expand(count),
        agent=torch.randint(0, AGENTS, (rows,), generator=generator),
        policy=torch.zeros(rows, dtype=torch.int64),
        group=trajectory // SAMPLES,
        trajectory=trajectory,
        sample=trajectory % SAMPLES,
        turn=torch.arange(rows) % TURNS,
        reward=torch.randint(0, 2, (-(-rows // TURNS),), generator=generator).float()[trajectory],
        valid=torch.rand(rows, generator=generator) > 0.05,
        trainable=torch.ones(rows, dtype=torch.bool),
        weight_versions=torch.zeros(1, dtype=torch.int32).expand(count),
        agents=tuple(f"agent{k}" for k in range(AGENTS)),
        policies=("policy",),
        questions=tuple(map(str, range(-(-rows // (TURNS * SAMPLES))))),
    )


def row_loop(batch: TurnBatch, penalty: float, tokens: int, epsilon: float = 1e-6) -> torch.Tensor:
    """The same advantages, a Python statement at a time."""
    scores = batch.reward - penalty * (~batch.valid).float()
    keys = list(zip(batch.group.tolist(), batch.agent.tolist()))
    members = defaultdict(list)
    for row in range(len(keys)):
        members[keys[row]].append(scores[row])
    mean, std = {}, {}
    for key, values in members.items():
        stacked = torch.stack(values)
        mean[key] = stacked.mean()
        std[key] = stacked.std() if len(values) > 1 else torch.tensor(0.0)
    advantages = torch.zeros_like(scores)
    for row in range(len(keys)):
        if std[keys[row]] > 0:
            advantages[row] = (scores[row] - mean[keys[row]]) / (std[keys[row]] + epsilon)
    mask = torch.ones(len(keys), tokens)
    return (advantages.unsqueeze(-1) * mask).flatten()


def best_seconds(functions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Best time of each, measured in turns so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--rows", type=count(4), default=1_000_000)
    parser.add_argument("--tokens", type=count(1), default=64)
    parser.add_argument("--threads", type=count(1), default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch, config = make_batch(args.rows, args.tokens), AlgorithmConfig()

    tokens = args.rows * args.tokens
    times = best_seconds(
        {
            "ours": lambda: compute_advantages(batch, config),
            "torch": lambda: torch.full((tokens,), 1.0),
            "numpy": lambda: numpy.full(tokens, 1.0, dtype=numpy.float32),
        },
        repeat=15,
    )
    start = time.perf_counter()
    expected = row_loop(batch, config.invalid_penalty, args.tokens)
    loop = time.perf_counter() - start
    torch.testing.assert_close(compute_advantages(batch, config), expected, rtol=1e-4, atol=1e-4)
    ours, write = times["ours"], min(times["torch"], times["numpy"])
    print(f"rows {args.rows}  tokens {args.tokens}  threads {args.threads}")
    print(
        f"row loop {loop:.2f} s   compute_advantages {ours:.3f} s   "
        f"write once {times['torch']:.3f} s torch, {times['numpy']:.3f} s numpy"
    )
    for name, ratio, target, at_most in (
        ("advantage_times_row_loop", loop / ours, 100.0, False),
        ("advantage_times_write_once", ours / write, 2.0, True),
    ):
        ok = ratio <= target if at_most else ratio >= target
        print(json.dumps({"name": name, "ratio": round(ratio, 2), "target": target, "ok": ok, "at_most": at_most}))


if __name__ == "__main__":
    main()
