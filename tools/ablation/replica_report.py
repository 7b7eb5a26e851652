"""The replica's table and figure: every variant and rate, and every variant at the rate that dev chose."""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from megatron_drmas.observability.history import write_atomically
from tools.ablation.figures import point_figure
from tools.ablation.results import count_spikes
from tools.ablation.sweep import read_results
from tools.ablation.tables import interval, number, table
from tools.ablation.variants import VARIANTS

REFERENCE = "agent"  # what the other variants are compared with
Pair = tuple[int, int]  # warm start and seed: what runs are paired by


@dataclass(frozen=True)
class Part:
    """The finished runs of one batch size and number of updates.

    runs: (variant, rate) -> pair -> result.
    """

    questions: int
    samples: int
    updates: int
    runs: dict[tuple[str, float], dict[Pair, dict[str, Any]]]

    @property
    def title(self) -> str:
        updates = "one update" if self.updates == 1 else f"{self.updates} updates"
        return f"{self.questions} x {self.samples}, {updates} a batch"

    @property
    def variants(self) -> list[str]:
        return [name for name in VARIANTS if any(variant == name for variant, _ in self.runs)]

    def rates(self, variant: str) -> list[float]:
        return sorted(rate for name, rate in self.runs if name == variant)

    def best_rate(self, variant: str) -> float:
        """The rate whose runs answer dev best on average; of those that every rate's runs have been finished for.

        A pair that lacks a rate is left out, or a rate could win for the seeds that it was given.
        """
        rates = self.rates(variant)
        common = set.intersection(*(set(self.runs[variant, rate]) for rate in rates))
        if not common:
            return rates[0]
        return max(rates, key=lambda rate: fmean(final(self.runs[variant, rate][pair], "dev", "sampled") for pair in common))


def final(result: dict[str, Any], split: str, mode: str) -> float:
    """A run's exact match when called, after its last step."""
    return result["evaluations"][split][mode]


def differences(one: dict[Pair, dict], other: dict[Pair, dict], mode: str = "sampled") -> dict[Pair, float]:
    """By pair that both have, how much better the first answers eval."""
    return {pair: final(one[pair], "eval", mode) - final(other[pair], "eval", mode) for pair in one if pair in other}


def read_parts(args: argparse.Namespace) -> list[Part]:
    """The finished runs that the command's options name, by batch size and updates."""
    parts: dict[tuple[int, int, int], dict] = {
        (questions, samples, updates): {} for updates in sorted(args.updates) for questions, samples in args.sizes
    }
    for result in read_results(args.out):
        of = result["settings"]
        key = (of["questions"], of["samples"], of["updates"])
        wanted = (
            key in parts
            and of["variant"] in args.variants
            and of["rate"] in args.rates
            and of["seed"] in args.seeds
            and of["warm_start"] in args.warm_starts
            and (of["steps"], of["keep"], of["otherwise"]) == (args.steps, args.keep, args.otherwise)
        )
        if wanted:
            parts[key].setdefault((of["variant"], of["rate"]), {})[of["warm_start"], of["seed"]] = result
    return [Part(*key, runs) for key, runs in parts.items() if runs]


def write_report(args: argparse.Namespace) -> str:
    """Write DIR/replica.md and DIR/replica.png from the finished runs; the table."""
    parts = read_parts(args)
    lines = [
        "# The gated tiny team, replicated",
        "",
        f"{args.steps} steps; retrieval keeps the answer in {args.keep:.3g} of the trajectories, the others return "
        f"{args.otherwise:g}. Exact match is of the Answer agent's calls on held-out questions after the last step, sampled at "
        "temperature 0.6. Means ± half of a 95 % interval over runs (Student's t); differences are paired by warm start and "
        "seed. Factor: of the lemma, at the first, middle and last step. Zero: share of Answer's rows with advantage 0. "
        "Signal to noise: |E g|²/tr Cov(g) of the gradient at the middle step, the same questions sampled again, median over "
        "runs. A spike is a step whose gradient norm is over 5 x its running median (one under a quarter of its largest value "
        "counts as that).",
        "",
    ]
    for part in parts:
        lines += [f"## {part.title}", "", "Each variant at the rate that is best on dev:", "", *_best_table(part), ""]
        lines += ["Every rate:", "", *_whole_table(part, args.steps), ""]
    if not parts:
        lines += ["No run is finished yet.", ""]
    text = "\n".join(lines)
    write_atomically(args.out / "replica.md", text)
    if parts:
        panels = {
            part.title: {
                VARIANTS[variant].label: [
                    (rate, [final(result, "eval", "sampled") for result in part.runs[variant, rate].values()])
                    for rate in part.rates(variant)
                ]
                for variant in part.variants
            }
            for part in parts
        }
        point_figure(args.out / "replica.png", panels, min(2, len(panels)), "learning rate", "exact match when called")
    return text


def _best_table(part: Part) -> list[str]:
    best = {variant: part.best_rate(variant) for variant in part.variants}
    rows = []
    for variant, rate in best.items():
        runs = part.runs[variant, rate]
        cells = [VARIANTS[variant].label, f"{rate:g}", str(len(runs)), *_matches(runs)]
        if variant == REFERENCE or REFERENCE not in best:
            rows.append([*cells, "–", "–"])
            continue
        gained = differences(part.runs[REFERENCE, best[REFERENCE]], runs)
        starts = sorted({warm_start for warm_start, _ in gained})
        by_start = ", ".join(f"{fmean(value for (start, _), value in gained.items() if start == of):+.3f}" for of in starts)
        rows.append([*cells, interval(list(gained.values()), True), by_start or "–"])
    label = VARIANTS[REFERENCE].label
    return table(
        ["variant", "rate", "runs", "exact match, sampled", "greedy", f"{label} minus it", "the same by warm start"], rows
    )


def _whole_table(part: Part, steps: int) -> list[str]:
    rows = []
    for variant in part.variants:
        for rate in part.rates(variant):
            runs = part.runs[variant, rate]
            of = list(runs.values())
            reference = part.runs.get((REFERENCE, rate), {})
            norms = [norm for run in of for norm in run["norm"]]
            signals = [run["signal"] for run in of if run["signal"] is not None]
            rows.append(
                [
                    VARIANTS[variant].label,
                    f"{rate:g}",
                    str(len(of)),
                    *_matches(runs),
                    "–" if variant == REFERENCE else interval(list(differences(reference, runs).values()), True),
                    number(_known(run["entropy"][-1] for run in of)),
                    " ".join(number(_known(run["factor"][step] for run in of)) for step in (0, steps // 2 - 1, steps - 1)),
                    f"{_known(value for run in of for value in run['zero']):.0%}",
                    f"{median(norms):.2f} / {max(norms):.2f}",
                    f"{fmean(count_spikes(run['norm']) for run in of):.2f}",
                    number(median(signals) if signals else None),
                ]
            )
    return table(
        [
            "variant",
            "rate",
            "runs",
            "exact match, sampled",
            "greedy",
            f"{VARIANTS[REFERENCE].label} minus it",
            "entropy at the end",
            "factor",
            "zero",
            "norm, median / largest",
            "spikes a run",
            "signal to noise",
        ],
        rows,
    )


def _matches(runs: dict[Pair, dict[str, Any]]) -> list[str]:
    return [interval([final(run, "eval", mode) for run in runs.values()]) for mode in ("sampled", "greedy")]


def _known(values: Iterable[float | None]) -> float:
    """The mean of the values that are there; nan of none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan
