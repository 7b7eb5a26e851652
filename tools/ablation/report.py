"""The ablation's table (Markdown) and figure (PNG)."""

import math
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from megatron_drmas.observability.history import write_atomically
from tools.ablation.figures import curve
from tools.ablation.results import Run, mean_and_error
from tools.ablation.tables import number, table
from tools.ablation.variants import VARIANTS


def write_table(path: Path, task: dict, frozen: dict[str, dict], trained: dict[str, dict[str, dict]]) -> None:
    """Write the table.

    Args:
        task: max_turns, and factors {agent: statistics} on the frozen policies.
        frozen: `FrozenStudy.compare`'s result.
        trained: precision -> variant -> `results.summarize`'s; may be empty.
    """
    lines = ["# Normalization of advantages: the paper's variants on the tiny search team", ""]
    lines += [
        f"At most {task['max_turns']} turns. Frozen policies, factor by which a group baseline multiplies the second moment:",
        "",
    ]
    lines += table(
        ["agent", "factor", "calls a batch", "alone on their question"],
        (
            [agent, number(values.get("baseline_inflation")), f"{values['calls']:.1f}", f"{values['single_calls']:.1f}"]
            for agent, values in task["factors"].items()
        ),
    )
    lines += ["", "## Identical rollouts of frozen policies", "", *_frozen_table(frozen)]
    for precision, variants in trained.items():
        lines += ["", f"## Training, {precision}", "", *_trained_table(variants)]
    lines += [
        "",
        "Means over seeds ± standard error. A spike is a step whose gradient norm, before clipping, is over 5 × its running "
        "median (a running median under a quarter of its largest value counts as that).",
        "The paper's column is Dr. MAS's Table 3, Qwen2.5-3B/7B on seven search sets: another task, to compare the order only.",
        "",
    ]
    write_atomically(path, "\n".join(lines))


def _frozen_table(frozen: dict[str, dict]) -> list[str]:
    policies = sorted({policy for values in frozen.values() for policy in values["grad_norm"]})
    agents = sorted({agent for values in frozen.values() for agent in values["squared_advantage"]})
    rows = []
    for name, values in frozen.items():
        norms = (values["grad_norm"].get(policy, {"mean": None, "max": None}) for policy in policies)
        rows.append(
            [
                VARIANTS[name].label,
                *(f"{number(norm['mean'])} ({number(norm['max'])})" for norm in norms),
                *(number(values["squared_advantage"].get(agent)) for agent in agents),
            ]
        )
    return table(["variant", *(f"gradient norm {p}, mean (max)" for p in policies), *(f"E[A²] {a}" for a in agents)], rows)


def _trained_table(variants: dict[str, dict]) -> list[str]:
    policies = sorted({policy for values in variants.values() for policy in values["spikes"]})
    header = [
        "variant",
        "seeds",
        "exact match, sampled",
        "greedy",
        *(f"spikes {p}" for p in policies),
        *(f"largest gradient norm {p}" for p in policies),
        "non-finite steps",
        "paper: avg@16 / pass@16",
    ]
    rows = []
    for name, values in variants.items():
        paper = VARIANTS[name].paper
        rows.append(
            [
                VARIANTS[name].label,
                str(values["runs"]),
                _plus_minus(values["exact_match"]),
                _plus_minus(values["greedy"]),
                *(_plus_minus(values["spikes"][policy]) for policy in policies),
                *(_plus_minus(values["grad_norm_max"][policy]) for policy in policies),
                str(values["nonfinite_steps"]),
                f"{paper[0]} / {paper[1]}" if paper else "–",
            ]
        )
    return table(header, rows)


def write_figure(path: Path, runs: dict[str, dict[str, list[Run]]]) -> None:
    """Write the figure: reward, each policy's gradient norm on a log axis, and spikes; one row of panels per precision.

    Args:
        runs: precision -> variant -> runs over seeds.
    """
    policies = sorted(
        {policy for variants in runs.values() for of in variants.values() for run in of for policy in run.grad_norms}
    )
    columns = 2 + len(policies)
    figure, axes = plt.subplots(len(runs), columns, figsize=(5 * columns, 3.5 * len(runs)), squeeze=False, layout="constrained")
    for row, (precision, variants) in zip(axes, runs.items()):
        for name, of_variant in variants.items():
            curve(row[0], [run.rewards for run in of_variant], VARIANTS[name].label)
            for axis, policy in zip(row[1:], policies):
                curve(axis, [run.grad_norms.get(policy, []) for run in of_variant], VARIANTS[name].label)
        row[0].set(title=f"{precision}: reward", xlabel="step")
        row[0].legend(fontsize="small")
        for axis, policy in zip(row[1:], policies):
            axis.set(title=f"{precision}: gradient norm, {policy}", xlabel="step", yscale="log")
        _spike_bars(row[-1], variants, policies)
        row[-1].set(title=f"{precision}: spikes a run, and non-finite steps")
    temp_path = path.with_suffix(".part.png")
    figure.savefig(temp_path, dpi=120)
    plt.close(figure)
    temp_path.replace(path)


def _spike_bars(axis: Axes, variants: dict[str, list[Run]], policies: list[str]) -> None:
    """Mean over seeds with its standard error; one group of bars per variant, one bar per policy and one for non-finite steps."""
    kinds = [*policies, "non-finite"]
    for place, kind in enumerate(kinds):
        counts = [
            [run.nonfinite if kind == "non-finite" else run.spikes.get(kind, 0) for run in of_variant]
            for of_variant in variants.values()
        ]
        means, errors = zip(*(mean_and_error([float(count) for count in of]) for of in counts))
        axis.bar(
            np.arange(len(counts)) + (place - len(kinds) / 2 + 0.5) / (len(kinds) + 1),
            means,
            0.9 / (len(kinds) + 1),
            yerr=errors,
            label=kind,
        )
    axis.set_xticks(range(len(variants)), [VARIANTS[name].label for name in variants], rotation=20, fontsize="small")
    axis.legend(fontsize="small")


def _plus_minus(value: dict[str, float]) -> str:
    return "–" if math.isnan(value["mean"]) else f"{value['mean']:.3g} ± {value['standard_error']:.2g}"
