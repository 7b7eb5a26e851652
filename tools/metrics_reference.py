"""Write docs/metrics.md, the reference of every metric, from the table of metrics.

python -m tools.metrics_reference [--out docs/metrics.md]
"""

import argparse
from pathlib import Path

from megatron_drmas.observability.metric import Limit, Metric
from megatron_drmas.observability.metrics import METRICS

HEAD = """# Metrics

What a run logs, from the table in `megatron_drmas/observability/metrics.py`. A metric's name is its tag in TensorBoard;
`{policy}`, `{agent}` and the like are names of the run. metrics.jsonl has the same values: those of `team/…` at the
top of a step's line, `agent/…` and `policy/…` under `agents` and `policies` by name. The report shows a chart of each where
*chart* is listed here, of others under "more metrics" if they change, and a glossary of those that the run logged.
Made by `python -m tools.metrics_reference`.
"""
SECTIONS = {
    "team": "The team's step",
    "workflow": "What the workflow reports",
    "agent": "Agents",
    "policy": "Policies",
    "health": "Health: shares of a step, judged against `health.*`",
    "alarm": "Alarms, and what was lost",
    "time": "Time and memory",
    "evaluation": "Evaluation, by mode: sampled or greedy",
}
JOINED = {"masked": "alarm", "skipped": "alarm", "throughput": "time", "memory": "time"}


def reference() -> str:
    """The page's text."""
    lines = [HEAD]
    for scope, title in SECTIONS.items():
        lines += [f"\n## {title}\n", "| metric | unit | reduction | meaning | shown |", "|---|---|---|---|---|"]
        lines += [row(metric) for metric in METRICS if JOINED.get(metric.scope, metric.scope) == scope]
    return "\n".join(lines) + "\n"


def row(metric: Metric) -> str:
    """One metric as a line of a table."""
    meaning = metric.description + (f". Logged {metric.when}" if metric.when else "")
    cells = (f"`{metric.name}`", metric.unit, metric.reduction, meaning, ", ".join(shown(metric)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shown(metric: Metric) -> list[str]:
    """Where a person sees it."""
    places = ["console"] * metric.console + ["TensorBoard"] * metric.tensorboard + ["chart"] * metric.chart.front
    if metric.event:
        places += ["console", "health table"]
    if metric.scope == "evaluation":
        places.append("evaluation table")
    if metric.summary:
        places.append(f"summary.json as `{metric.summary}`")
    if metric.limit:
        places.append(f"alarm {limit_text(metric.limit)}")
    if not metric.tensorboard:
        places += ["summary.json", "report"]
    return places


def limit_text(limit: Limit) -> str:
    """A limit in words."""
    words = []
    if limit.most is not None:
        words.append(f"over {limit.most:g}")
    for above, below, reference in (
        (limit.above, limit.below, "the running median"),
        (limit.far_above, limit.far_below, "the start"),
    ):
        bounds = [f"{word} {times:.3g}" for word, times in (("over", above), ("under", below)) if times is not None]
        if bounds:
            words.append(f"{' or '.join(bounds)} × {reference}")
    return ", ".join(words)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.metrics_reference", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/metrics.md"))
    args = parser.parse_args()
    args.out.write_text(reference())


if __name__ == "__main__":
    main()
