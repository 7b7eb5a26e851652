"""The gated tiny team trained by the project itself: a conditional role, agent-wise statistics against the group's, rate by rate.

Runs are variant x rate x precision x seed, seed by seed.  Interrupted, the same command continues where it was; further seeds
or rates add to it.  Writes DIR/gated.md, DIR/gated.png, DIR/gated.svg and DIR/gated.json after every run; `--report` does
that alone.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.progress import Progress

from megatron_drmas.observability.history import write_atomically
from tools.ablation.command import (
    PRECISIONS,
    command_parser,
    count,
    keep_arguments,
    number,
    prepare,
    progress_bars,
    steps_done,
    train_run,
)
from tools.ablation.figures import curve_figure
from tools.ablation.results import Run, read_run
from tools.ablation.tables import interval, table
from tools.ablation.variants import VARIANTS
from tools.ablation.warm_starts import warm_start

REFERENCE = "group_step"
LAST_STEPS = 4  # whose calls make the exact match when called: about 240


def parse(argv: list[str]) -> argparse.Namespace:
    """The command's arguments."""
    parser = command_parser("--gated", __doc__)
    parser.add_argument("--seeds", nargs="+", type=count(0), default=[0, 1, 2])
    parser.add_argument("--warm-start", type=count(0), default=0, metavar="SEED", help="made if it is not there")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[REFERENCE, "agent"],
        choices=list(VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)}",
    )
    parser.add_argument("--rates", nargs="+", type=number(1e-8, 1), default=[5e-4, 1e-3])
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=PRECISIONS)
    parser.add_argument("--steps", type=count(1), default=24)
    parser.add_argument("--override", nargs="*", default=[], metavar="key=value", help="further settings of the training runs")
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args(argv)


@dataclass
class GatedRun:
    """A finished run: its steps, and how its Answer policy answers held-out questions when it is called."""

    steps: Run
    match: dict[str, float]  # sampled, greedy

    @property
    def batch_match(self) -> float:
        """Exact match of the calls of the last steps' batches."""
        return fmean(self.steps.returns["answer"][-LAST_STEPS:])


def run_name(precision: str, variant: str, rate: float, seed: int) -> str:
    """The run's folder below DIR/gated."""
    return f"{precision}_{variant}_{rate:g}_{seed}"


def settings(args: argparse.Namespace, answer: Path, precision: str, variant: str, rate: float, seed: int) -> list[str]:
    """The arguments of one training run."""
    return [
        "--config-name",
        "search_gated",
        f"variables.tiny_team={args.tiny_team}",
        f"variables.answer={answer}",
        f"seed={seed}",
        f"steps={args.steps}",
        f"precision={precision}",
        f"policies.answer.optimizer.lr={rate:g}",
        "evaluation.before=false",
        "evaluation.after=false",
        "checkpoint.keep=1",
        *VARIANTS[variant].overrides,
        *args.override,
    ]


class Examiner:
    """Evaluates exported Answer policies as the replica does, on the same contexts: a run's own evaluation would be gated too.

    Nothing is loaded before a policy must be evaluated.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._replica: Any = None

    def match(self, run: Path) -> dict[str, float]:
        """Exact match when called of a finished run, which is kept beside its steps."""
        kept = run / "answer_match.json"
        if not kept.exists():
            from megatron_drmas.rollout.tokenizer import ChatTokenizer
            from tools.ablation.contexts import load_contexts
            from tools.ablation.replica import Replica
            from tools.ablation.tiny_lm import TinyLlama

            if self._replica is None:
                contexts = load_contexts(self._args.tiny_team, self._args.out / "contexts.json")
                self._replica = Replica(contexts, ChatTokenizer(str(self._args.tiny_team / "llama"), {}))
            write_atomically(kept, json.dumps(self._replica.evaluate(TinyLlama(run / "hf" / "answer"), "eval")))
        return json.loads(kept.read_text())


def finished(folder: Path, steps: int) -> bool:
    """Whether the run has made its steps and exported its policies."""
    return steps_done(folder) >= steps and (folder / "hf" / "answer" / "config.json").exists()


def collect(args: argparse.Namespace, examiner: Examiner) -> dict[tuple[str, float, str], dict[int, GatedRun]]:
    """(precision, rate, variant) -> seed -> run, of the finished runs among those that the command names."""
    runs: dict[tuple[str, float, str], dict[int, GatedRun]] = {}
    for precision in args.precisions:
        for rate in args.rates:
            for variant in args.variants:
                for seed in args.seeds:
                    folder = args.out / "gated" / run_name(precision, variant, rate, seed)
                    if finished(folder, args.steps):
                        run = GatedRun(read_run(folder / "metrics.jsonl"), examiner.match(folder))
                        runs.setdefault((precision, rate, variant), {})[seed] = run
    return runs


def write_report(args: argparse.Namespace, examiner: Examiner) -> str:
    """Write table, figure and data of what is finished; the table."""
    runs = collect(args, examiner)
    text = "\n".join(
        [
            "# The gated tiny team, trained by the project",
            "",
            f"{args.steps} steps of 16 questions x 16 trajectories, of which at most a third calls the Answer agent. Exact match "
            f"is of its calls: on held-out questions at temperature 0.6 (sampled) and greedily, and in the last {LAST_STEPS} "
            "steps' batches. Means ± half of a 95 % interval over seeds (Student's t); differences are paired by seed.",
            "",
            *_table(args, runs),
            "",
        ]
    )
    write_atomically(args.out / "gated.md", text)
    data = {"/".join(map(str, key)): {seed: asdict(run) for seed, run in of.items()} for key, of in runs.items()}
    write_atomically(args.out / "gated.json", json.dumps(data, indent=1))
    if runs:
        curves = {
            "exact match when called": lambda run: run.returns.get("answer", []),
            "gradient norm": lambda run: run.grad_norms.get("answer", []),
            "factor": lambda run: run.inflation.get("answer", []),
        }
        panels = {
            f"{precision}, rate {rate:g}: {title}": {
                VARIANTS[variant].label: [pick(run.steps) for run in of.values()]
                for (*key, variant), of in runs.items()
                if key == [precision, rate]
            }
            for precision, rate in dict.fromkeys(key[:2] for key in runs)
            for title, pick in curves.items()
        }
        curve_figure(args.out / "gated.png", panels, columns=len(curves))
    return text


def _table(args: argparse.Namespace, runs: dict[tuple[str, float, str], dict[int, GatedRun]]) -> list[str]:
    rows = []
    for (precision, rate, variant), of in runs.items():
        norms = [norm for run in of.values() for norm in run.steps.grad_norms.get("answer", []) if math.isfinite(norm)]
        factors = [run.steps.inflation.get("answer", []) for run in of.values()]
        reference = runs.get((precision, rate, REFERENCE), {})
        gained = [run.match["sampled"] - reference[seed].match["sampled"] for seed, run in of.items() if seed in reference]
        rows.append(
            [
                precision,
                f"{rate:g}",
                VARIANTS[variant].label,
                str(len(of)),
                *(interval([run.match[mode] for run in of.values()]) for mode in ("sampled", "greedy")),
                interval([run.batch_match for run in of.values()]),
                "–" if variant == REFERENCE else interval(gained, signed=True),
                f"{median(norms):.2f} / {max(norms):.2f}" if norms else "–",
                " ".join(_at(factors, step) for step in (0, args.steps // 2 - 1, args.steps - 1)),
            ]
        )
    return table(
        [
            "precision",
            "rate",
            "variant",
            "seeds",
            "sampled",
            "greedy",
            "in the batches",
            f"sampled, minus {VARIANTS[REFERENCE].label}",
            "gradient norm, median / largest",
            "factor at the first, middle and last step",
        ],
        rows,
    )


def _at(series: list[list[float]], step: int) -> str:
    values = [of[step] for of in series if len(of) > step]
    return f"{fmean(values):.2f}" if values else "–"


def _run_all(args: argparse.Namespace, examiner: Examiner, bars: Progress) -> None:
    answer = warm_start(args.tiny_team, args.out, args.warm_start)
    plan = [(p, v, r, s) for s in args.seeds for p in args.precisions for r in args.rates for v in args.variants]
    task = bars.add_task("training", total=len(plan) * args.steps)

    def advance(done: int, steps: int) -> None:
        bars.update(task, completed=done + steps)

    for place, (precision, variant, rate, seed) in enumerate(plan):
        name = run_name(precision, variant, rate, seed)
        if finished(args.out / "gated" / name, args.steps):
            continue
        bars.update(task, description=name)
        arguments = settings(args, answer, precision, variant, rate, seed)
        train_run(args.out / "gated", name, arguments, partial(advance, place * args.steps))
        write_report(args, examiner)


def main(argv: list[str]) -> None:
    """Train what is missing, then report."""
    args = parse(argv)
    prepare(args)
    keep_arguments(args.out / "gated" / "arguments.json", args, ("tiny_team", "warm_start", "steps", "override"))
    examiner = Examiner(args)
    if not args.report:
        with progress_bars() as bars:
            _run_all(args, examiner, bars)
    print(write_report(args, examiner))
