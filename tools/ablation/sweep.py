"""The replica's runs: which, in which order, and where their results are.

Results are JSON lines, one a finished run.  A run whose settings are there is not repeated, so the same command continues where
it was stopped, and another one adds to it.
"""

import argparse
import fcntl
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from megatron_drmas.observability.history import read_json_lines, to_json
from tools.ablation.replica import Settings

RESULTS = "replica.jsonl"


def plan(args: argparse.Namespace) -> Iterator[Settings]:
    """All runs, seed by seed: on every warm start all that is compared with one update a batch, then with more.

    So whatever is finished when the command is stopped is paired, apart from the warm start that it was at.
    """
    for seed in args.seeds:
        for updates in sorted(args.updates):
            for warm_start in args.warm_starts:
                for questions, samples in args.sizes:
                    for rate in args.rates:
                        for variant in args.variants:
                            yield Settings(
                                warm_start,
                                seed,
                                questions,
                                samples,
                                updates,
                                variant,
                                rate,
                                args.steps,
                                args.keep,
                                args.otherwise,
                            )


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of a folder, in the order in which they ended."""
    path = folder / RESULTS
    return list(read_json_lines(path)) if path.exists() else []


def append_result(folder: Path, result: dict[str, Any]) -> None:
    """Add a finished run; on disk when this returns.  Several commands may write to one folder.

    A line that a crash cut off is removed first: it would swallow this one.
    """
    with open(folder / RESULTS, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write((to_json(result) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def run_sweep(args: argparse.Namespace, bars: Progress) -> None:
    """Run what is not finished yet."""
    import torch

    from megatron_drmas.rollout.tokenizer import ChatTokenizer
    from tools.ablation.contexts import load_contexts
    from tools.ablation.replica import Replica
    from tools.ablation.warm_starts import warm_start

    torch.set_num_threads(1)
    runs = list(plan(args))
    finished = {_key(result["settings"]) for result in read_results(args.out)}
    left = [settings for settings in runs if _key(asdict(settings)) not in finished]
    task = bars.add_task("replica", total=len(runs), completed=len(runs) - len(left))
    if not left:
        return
    folders = {}
    for seed in args.warm_starts:
        bars.update(task, description=f"warm start {seed}")
        folders[seed] = warm_start(args.tiny_team, args.out, seed)
    bars.update(task, description="the Search agent's trajectories")
    replica = Replica(load_contexts(args.tiny_team, args.out / "contexts.json"), ChatTokenizer(str(args.tiny_team / "llama"), {}))
    for settings in left:
        size = f"{settings.questions}x{settings.samples}"
        bars.update(
            task,
            description=f"warm start {settings.warm_start} seed {settings.seed} {size} {settings.variant} lr {settings.rate:g}",
        )
        append_result(args.out, replica.run(folders[settings.warm_start], settings))
        bars.advance(task)


def _key(settings: dict[str, Any]) -> str:
    return to_json(dict(sorted(settings.items())))
