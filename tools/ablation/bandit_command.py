"""A bandit with a conditional role, for each of the four pairs of mean and std: trained, and its lemma checked by enumeration.

A frozen Gate lets 35 % of the trajectories pass, where a Finisher learns to choose an answer; the other trajectories return 0,
or, with the sign turned, 1.  Writes DIR/bandit.md, DIR/bandit.png, DIR/bandit.svg and DIR/bandit.json.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from megatron_drmas.observability.history import write_atomically
from tools.ablation.bandit import CELLS, Learned, Task, baseline_growth, enumerate_batches, learn, lemma_factor
from tools.ablation.command import PROG, count, number
from tools.ablation.figures import curve_figure
from tools.ablation.results import count_spikes
from tools.ablation.tables import interval, table

SIGNS = {"the others return 0": 0.0, "the others return 1": 1.0}
REFERENCE = "μ, σ"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog=f"{PROG} --bandit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/ablation"), help="folder to write (default: %(default)s)")
    parser.add_argument("--seeds", type=count(1), default=20)
    parser.add_argument("--rates", nargs="+", type=number(1e-6, 10), default=[0.03, 0.1])
    parser.add_argument("--steps", type=count(1), default=Task.steps)
    return parser.parse_args(argv)


def lemma_table(task: Task) -> list[str]:
    """The lemma's factor by its formula and by enumeration, over accuracies of the Finisher."""
    rows = []
    for otherwise in SIGNS.values():
        for accuracy in (0.3, 0.55, 0.95):
            of = enumerate_batches(task.gate, accuracy, otherwise, task.samples)
            group, agent = "μ, σ", "μ_k, σ_k"
            rows.append(
                [
                    f"{otherwise:g}",
                    f"{accuracy:g}",
                    f"{lemma_factor(task.gate, accuracy, otherwise):.6f}",
                    f"{of.factor:.6f}",
                    f"{baseline_growth(task.gate, accuracy, otherwise):.6f}",
                    f"{of.growth:.6f}",
                    f"{of.bias:.1e}",
                    f"{of.second_moment[group]:.3f}",
                    f"{of.second_moment[agent]:.3f}",
                    f"{of.zero[group]:.0%} / {of.zero[agent]:.0%}",
                ]
            )
    return table(
        [
            "others return",
            "accuracy",
            "factor",
            "enumerated",
            "growth of the squared norm",
            "enumerated",
            "bias of the mean gradient",
            f"E[A²] in batches of {task.samples}, {group}",
            agent,
            "calls with A = 0",
        ],
        rows,
    )


def main(argv: list[str]) -> None:
    """Train, check, write and print."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    task = Task(steps=args.steps)
    learned: dict[tuple[str, float, str], Learned] = {}
    for sign, otherwise in SIGNS.items():
        for rate in args.rates:
            for label, (mean, std) in CELLS.items():
                learned[sign, rate, label] = learn(replace(task, otherwise=otherwise), mean, std, rate, args.seeds)
    lines = [
        "# A bandit with a conditional role",
        "",
        f"{args.seeds} seeds, {task.questions} questions, {task.samples} trajectories of each, of which {task.gate:.0%} call the "
        f"Finisher; {args.steps} steps of Adam, gradient norm clipped at 1. Reward: probability that the Finisher is right, "
        "after training. Means ± half of a 95 % interval over seeds (Student's t); differences are paired by seed. Spikes, over "
        "all seeds: steps whose gradient norm is over 5 x its running median (one under a quarter of its largest value "
        "counts as that).",
        "",
    ]
    data = {}
    for sign in SIGNS:
        rows = []
        for label in CELLS:
            cells = [label]
            for rate in args.rates:
                of, reference = learned[sign, rate, label], learned[sign, rate, REFERENCE]
                final = of.reward[:, -1]
                gained = "–" if label == REFERENCE else interval((final - reference.reward[:, -1]).tolist(), signed=True)
                spikes = [count_spikes(norms) for norms in of.norm.tolist()]
                cells += [interval(final.tolist()), gained, str(sum(spikes))]
                data[f"{sign}/{rate:g}/{label}"] = {
                    "reward": final.tolist(),
                    "spikes": spikes,
                    "largest_norm": of.norm.amax(1).tolist(),
                }
            rows.append(cells)
        header = [
            "variant",
            *(f"{what}, rate {rate:g}" for rate in args.rates for what in ("reward", f"minus {REFERENCE}", "spikes")),
        ]
        lines += [f"## {sign.capitalize()}", "", *table(header, rows), ""]
    lines += ["## The lemma, by formula and by enumeration", "", *lemma_table(task), ""]
    text = "\n".join(lines)
    write_atomically(args.out / "bandit.md", text)
    write_atomically(args.out / "bandit.json", json.dumps(data))
    panels = {
        f"{sign}, rate {rate:g}: {what}": {label: pick(learned[sign, rate, label]).tolist() for label in CELLS}
        for sign in SIGNS
        for rate in args.rates
        for what, pick in (("reward", lambda of: of.reward), ("gradient norm", lambda of: of.norm))
    }
    curve_figure(args.out / "bandit.png", panels, columns=2 * len(args.rates))
    print(text)
