"""Speed of `collate`: trajectories to columns, against a loop over their tokens, and against copying ids and log-probs once.

    python -m tools.bench.collate [--trajectories 640] [--tokens 900] [--repeats 7]

Best of each by turns; the last line is JSON.
"""

import json
import time

import numpy as np
import torch

from megatron_drmas.data.questions import Question
from megatron_drmas.rollout.collate import collate
from megatron_drmas.team.trajectory import Trajectory, Turn
from tools.ablation.command import count
from tools.bench.command import BenchParser

TURNS = 8
TARGET = 0.5  # of the rate at which numpy copies the same arrays


def trajectories(count: int, tokens: int) -> list[Trajectory]:
    """Trajectories of `TURNS` calls of `tokens` prompt and tokens / 8 response ids."""
    made = []
    for number in range(count):
        turns = [
            Turn(
                agent="a",
                policy="p",
                index=index,
                messages=[],
                prompt_ids=np.arange(tokens, dtype=np.int32),
                token_ids=np.arange(tokens // 8, dtype=np.int32),
                logprobs=np.full(tokens // 8, -0.5, np.float32),
                limit=tokens,
                finish_reason="stop",
                weight_versions=[(0, tokens // 8)],
                text="",
                content="",
            )
            for index in range(TURNS)
        ]
        made.append(Trajectory(Question(str(number), "", ("",)), number // 5, number % 5, turns))
    return made


def loop_over_tokens(batch: list[Trajectory]) -> torch.Tensor:
    """The ids by a Python generator."""
    return torch.tensor(
        [token for t in batch for turn in t.turns for part in (turn.prompt_ids, turn.token_ids) for token in part]
    )


def copy_once(batch: list[Trajectory]) -> np.ndarray:
    """The ids and log-probs by numpy, and nothing else."""
    turns = [turn for trajectory in batch for turn in trajectory.turns]
    np.concatenate([turn.logprobs for turn in turns])
    return np.concatenate([part for turn in turns for part in (turn.prompt_ids, turn.token_ids)], dtype=np.int64)


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--trajectories", type=count(1), default=640, help="(default: 640, the paper's 128 x 5)")
    parser.add_argument("--tokens", type=count(8), default=900, help="of a prompt (default: 900)")
    parser.add_argument("--repeats", type=count(1), default=7)
    args = parser.parse_args()
    batch = trajectories(args.trajectories, args.tokens)
    work = {
        "collate": lambda: collate(batch, ("a",), ("p",), {"a"}),
        "loop over tokens": lambda: loop_over_tokens(batch),
        "numpy alone": lambda: copy_once(batch),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(args.repeats):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    tokens = args.trajectories * TURNS * (args.tokens + args.tokens // 8)
    for name, seconds in best.items():
        print(f"{name:18}{seconds:8.3f} s {tokens / seconds / 1e6:8.1f} M tokens/s")
    ratio = best["numpy alone"] / best["collate"]
    print(
        json.dumps(
            {
                "name": "collate",
                "ratio": round(ratio, 3),
                "target": TARGET,
                "ok": ratio >= TARGET,
                "loop_ratio": round(best["loop over tokens"] / best["collate"], 2),
                "tokens": tokens,
            }
        )
    )


if __name__ == "__main__":
    main()
