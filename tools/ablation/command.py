"""What the ablation's commands share: options, the tiny team, progress bars, and training runs in processes of their own."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_drmas.observability.history import read_json_lines, write_atomically

PROG = "python -m tools.reproduce_ablation"
PRECISIONS = ("fp32", "bf16", "fp8_emulated")


def command_parser(mode: str, description: str, out: str = "outputs/ablation") -> argparse.ArgumentParser:
    """A parser with the options of every command that uses the tiny team."""
    parser = argparse.ArgumentParser(
        prog=f"{PROG} {mode}".strip(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--tiny-team", type=Path, default=Path("outputs/tiny_team"), help="made if it is not there (default: %(default)s)"
    )
    return parser


def count(minimum: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """The type of an option that is a number in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number in [{low:g}, {high:g}]")
        return value

    return parse


def prepare(args: argparse.Namespace) -> None:
    """Make the folders that the command needs, and the tiny team if it is missing."""
    args.out, args.tiny_team = args.out.resolve(), args.tiny_team.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.tiny_team / "corpus.jsonl").exists():
        subprocess.run([sys.executable, "-m", "tools.tiny_team", "--out", str(args.tiny_team)], check=True)


def keep_arguments(saved: Path, args: argparse.Namespace, names: Iterable[str]) -> None:
    """Write down what the results of a folder depend on and their names do not say.

    Args:
        saved: JSON file of the folder, made by the first command.
        names: attributes of `args`.

    Raises:
        SystemExit: the folder's results were made with other arguments.
    """
    arguments = {name: str(getattr(args, name)) for name in names}
    if not saved.exists():
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(saved, json.dumps(arguments))
    made = json.loads(saved.read_text())
    for name, value in arguments.items():
        if made[name] != value:
            option = f"--{name.replace('_', '-')}"
            sys.exit(f"reproduce_ablation: {saved.parent} was made with {option} {made[name]}, not {value}; choose another --out")


def progress_bars() -> Progress:
    """Bars that show what runs, how far it is, and how long it will take."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )


def steps_done(folder: Path) -> int:
    """Training steps that a run's metrics.jsonl holds."""
    metrics = folder / "metrics.jsonl"
    return sum(line["kind"] == "step" for line in read_json_lines(metrics)) if metrics.exists() else 0


def train_run(runs: Path, name: str, settings: list[str], advance: Callable[[int], None]) -> None:
    """One training run in a process of its own, which continues where an earlier one stopped.

    Args:
        runs: folder of the runs; the output goes to NAME.log beside the run.
        settings: the command's arguments.
        advance: called with the steps done, every second.

    Raises:
        SystemExit: the run failed; names its log.
    """
    log = runs / f"{name}.log"
    runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_drmas.train", *settings, f"name={name}", f"output_dir={runs}"]
    with open(log, "a") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None:
                time.sleep(1)
                advance(steps_done(runs / name))
        except BaseException:
            process.terminate()  # it finishes its step and saves; `with` waits for that
            raise
    if process.returncode:
        sys.exit(f"reproduce_ablation: run {name} ended with exit code {process.returncode}; see {log}")
