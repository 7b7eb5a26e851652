"""CPU seconds that the tiny search team takes to start, of this tree against an old commit.

    python -m tools.bench.startup [--commit 4ab5158] [--tiny-team FOLDER] [--turns 3]

Both start by turns, with this environment's packages and the same models, and run one step; what counts is up to the moment
when the first step begins.  Cores are few and the start is their work, so that `ratio` is of the CPU seconds of all processes
together, whatever else the machine does; the wall seconds are shown beside them.  Medians.  The last line is JSON.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.bench.training_runs import ROOT, source_of

TARGET = 0.7  # of the old commit's CPU seconds, at most
POLL_S = 0.05
SETTINGS = ("steps=1", "questions_per_step=2", "group_size=2", "evaluation.before=false", "evaluation.after=false")


def kind_of(process: psutil.Process) -> str:
    """What a process of a run is."""
    words, title = process.cmdline(), process.name()
    text = " ".join(words)
    for kind, sign in (
        ("retrieval server", "retrieval_server"),
        ("imports for all", "cluster.forking serve"),
        ("engine", "ray::AsyncWorker"),
        ("actor rank", "ray::Worker"),
        ("training command", "megatron_drmas.train"),
    ):
        if sign in text or sign in title:
            return kind
    return "Ray"


def cpu_seconds(root: psutil.Process) -> Counter[str]:
    """Of a process and all that it has started, by what they are; a process that has ended counts with who waited for it."""
    found: Counter[str] = Counter()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[kind_of(process)] += sum(process.cpu_times()[:4])
    return found


def start(source: Path, out: Path, settings: list[str]) -> tuple[Counter[str], float]:
    """Start the team and let it run its step; CPU seconds by process, and wall seconds.

    Raises:
        SystemExit: the run failed; says what it said last.
    """
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "megatron_drmas.train", *settings, "name=run", f"output_dir={out}"]
    metrics, log = out / "run" / "metrics.jsonl", out / "train.log"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    began, figures = time.monotonic(), None
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=source, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if figures is None and metrics.exists() and '"start"' in metrics.read_text():
                seconds = time.monotonic() - began
                figures = cpu_seconds(psutil.Process(process.pid)), seconds
            time.sleep(POLL_S)
    if process.returncode or figures is None:
        last = (log.read_text().splitlines() or [""])[-1]
        sys.exit(f"startup: training from {source} ended with exit code {process.returncode}: {last}")
    return figures


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--commit", default="4ab5158", help="to compare with (default: %(default)s)")
    parser.add_argument("--tiny-team", type=Path, help="folder that tools/make_tiny_team.sh made (default: made for the bench)")
    parser.add_argument("--turns", type=count(1), default=3, help="starts of each (default: %(default)s)")
    args = parser.parse_args()
    if args.tiny_team and not (args.tiny_team / "corpus.jsonl").is_file():
        parser.error(f"--tiny-team {args.tiny_team}: has no corpus.jsonl; give a folder that tools/make_tiny_team.sh made")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            old = source_of(args.commit, folder / "old")
        except ValueError as error:
            parser.error(f"--commit {error}")
        if not args.tiny_team:
            from tools.tiny_team.__main__ import copy_team

            copy_team(folder / "team", seed=0)
        settings = [*SETTINGS, f"variables.tiny_team={(args.tiny_team or folder / 'team').resolve()}"]
        figures: dict[str, list[tuple[Counter[str], float]]] = {"old": [], "new": []}
        for turn in range(args.turns):
            for name, source in (("old", old), ("new", ROOT)):
                figures[name].append(start(source, folder / f"{name}{turn}", settings))
    cpu = {}
    for name, starts in figures.items():
        cpu[name] = statistics.median(found.total() for found, _ in starts)
        wall = statistics.median(seconds for _, seconds in starts)
        kinds = {kind: statistics.median(found[kind] for found, _ in starts) for kind in starts[0][0]}
        parts = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in sorted(kinds.items(), key=lambda each: -each[1]))
        print(f"{name}: {cpu[name]:.1f} CPU s, {wall:.1f} s; {parts}")
    ratio = cpu["new"] / cpu["old"]
    print(
        json.dumps({"name": "startup", "ratio": round(ratio, 3), "target": TARGET, "ok": ratio <= TARGET, "commit": args.commit})
    )
    sys.exit(ratio > TARGET)


if __name__ == "__main__":
    main()
