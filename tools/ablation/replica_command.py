"""The gated tiny team's training, replicated in plain torch: every variant, rate, batch size and number of updates, seed by seed.

Each seed runs on every warm start, and runs that differ in variant or rate alone see the same questions and random numbers.
Each variant's rate is chosen on dev and reported on eval.  Results are JSON lines in DIR/replica.jsonl; finished runs are not
repeated, so the same command continues where it was stopped, and further seeds or rates add to it.
Writes DIR/replica.md, DIR/replica.png and DIR/replica.svg after all runs; `--report` does that alone.
"""

import argparse

from tools.ablation.command import command_parser, count, keep_arguments, number, prepare, progress_bars
from tools.ablation.variants import VARIANTS


def size(text: str) -> tuple[int, int]:
    """QUESTIONSxSAMPLES, such as 16x64."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) < 1 or int(parts[1]) < 2:
        raise argparse.ArgumentTypeError(
            f"{text} is not QUESTIONSxSAMPLES with at least one question and two samples, such as 16x64"
        )
    return int(parts[0]), int(parts[1])


def parse(argv: list[str]) -> argparse.Namespace:
    """The command's arguments; the defaults are the whole experiment."""
    parser = command_parser("--replica", __doc__)
    parser.add_argument("--seeds", nargs="+", type=count(0), default=list(range(10)))
    parser.add_argument(
        "--warm-starts", nargs="+", type=count(0), default=[0, 1, 2], metavar="SEED", help="made if they are not there"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        choices=list(VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)}",
    )
    parser.add_argument("--rates", nargs="+", type=number(1e-8, 1), default=[1.25e-4, 2.5e-4, 5e-4, 1e-3])
    parser.add_argument("--sizes", nargs="+", type=size, default=[(16, 16), (16, 64)], metavar="QUESTIONSxSAMPLES")
    parser.add_argument("--updates", nargs="+", type=count(1), default=[1, 5], help="optimizer steps on one batch")
    parser.add_argument("--steps", type=count(4), default=64)
    parser.add_argument(
        "--keep", type=number(0, 1), default=1 / 3, help="share of trajectories in which retrieval keeps the answer"
    )
    parser.add_argument(
        "--otherwise", type=number(-1, 1), default=0.0, help="return of a trajectory that does not call the Answer agent"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run what is missing, then report."""
    args = parse(argv)
    prepare(args)
    keep_arguments(args.out / "replica.json", args, ("tiny_team",))
    if not args.report:
        from tools.ablation.sweep import run_sweep

        with progress_bars() as bars:
            run_sweep(args, bars)
    from tools.ablation.replica_report import write_report

    print(write_report(args))
