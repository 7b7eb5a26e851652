"""report.html: one run on one page that needs nothing else, built from the files in the run's folder.

    python -m megatron_drmas.observability.report RUN_DIR

rebuilds it at any time.  Prompts and responses are a model's: they are escaped, control and direction characters are
spelled out, and the page's policy lets nothing run or load.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_drmas.observability.alarms import Episodes
from megatron_drmas.observability.charts import Series, line_chart, short
from megatron_drmas.observability.health import share
from megatron_drmas.observability.history import read_json_lines, write_atomically
from megatron_drmas.observability.metric import Chart, Metric
from megatron_drmas.observability.metrics import FIGURES, HEALTH, LINE_KEYS, METRICS, metric_of, of_scope
from megatron_drmas.observability.progress import decimals, duration
from megatron_drmas.observability.records import GREEDY, SAMPLED, name_questions
from megatron_drmas.observability.summary import comparable
from megatron_drmas.observability.tensorboard import scalars

EVERYTHING = "all questions"
COLORS = 8  # classes c0 … c7 of the page; agents take them from the first, policies from the last
MAX_TEXT = 20_000  # characters of one prompt or response
MAX_ALARMS = 40
TO_READ = {  # title -> the files whose first and last are shown
    "step {}": "step_*.jsonl",
    "evaluation after step {}, greedy": f"evaluation_{GREEDY}_*.jsonl",
    "evaluation after step {}, sampled": f"evaluation_{SAMPLED}_*.jsonl",
}

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


@dataclass
class Run:
    """The files of a run's folder, read."""

    folder: Path
    summary: dict[str, Any]
    lines: list[dict[str, Any]]  # of metrics.jsonl
    config: str  # YAML text
    trajectories: list[tuple[str, list[dict[str, Any]]]]  # (title, those to read) of the first and the last step and evaluation

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def names(self, scope: str) -> list[str]:
        """Agents or policies in the order in which they were first logged."""
        return list(dict.fromkeys(name for line in self.of_kind("step") for name in line[scope]))


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        FileNotFoundError: it has no summary.json, metrics.jsonl or config.yaml.
    """
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; name the folder of a run, <output_dir>/<name>")
    return Run(
        folder=folder,
        summary=json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        lines=list(read_json_lines(folder / "metrics.jsonl")),
        config=(folder / "config.yaml").read_text(encoding="utf-8"),
        trajectories=[
            (title.format(int(path.stem.rpartition("_")[2])), choose(read_json_lines(path)))
            for title, pattern in TO_READ.items()
            for path in _ends(sorted((folder / "trajectories").glob(pattern)))
        ],
    )


def _ends(files: list[Path]) -> list[Path]:
    return list(dict.fromkeys(files[:1] + files[-1:]))


def write_report(folder: Path | str) -> Path:
    """Build report.html in a run's folder and return its path."""
    path = Path(folder) / "report.html"
    write_atomically(path, render(load_run(Path(folder))))
    return path


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron_drmas.observability", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "decimals": decimals, "seen": seen, "duration": duration}
    return environment.get_template("report.html")


def render(run: Run) -> str:
    """The page's HTML."""
    agents, policies = run.names("agents"), run.names("policies")
    agent_colors = {agent: index % COLORS for index, agent in enumerate(agents)}
    policy_colors = {policy: COLORS - 1 - index % COLORS for index, policy in enumerate(policies)}
    alarms = alarm_lines(run)
    return _template().render(
        summary=run.summary,
        started=next((line["time"] for line in run.of_kind("start")), ""),
        results=results(run),
        team_charts=team_charts(run),
        agent_colors=agent_colors,
        agent_charts=metric_charts(run, "agent", agent_colors),
        policy_colors=policy_colors,
        policy_charts=metric_charts(run, "policy", policy_colors),
        phases=phases(run),
        speed_charts=speed_charts(run),
        health=health_rows(run),
        alarms=alarms[-MAX_ALARMS:],
        alarm_count=len(alarms),
        glossary=glossary(run),
        trajectories=run.trajectories,
        changes=run.of_kind("change"),
        config=run.config,
    )


def alarm_lines(run: Run) -> list[tuple[str, str]]:
    """(metric, text) of every episode of alarms, in the order in which they began."""
    episodes, lines = Episodes(), []
    for line in run.lines:
        if line["kind"] == "evaluation":
            lines += [(line["step"], alarm["metric"], alarm["message"]) for alarm in line.get("alarms", ())]
        elif line["kind"] == "step":
            episodes.add(line["step"], line["alarms"])
    lines += [(episode.began, episode.metric, episode.text()) for episode in episodes.all]
    return [(metric, text) for _, metric, text in sorted(lines, key=lambda line: line[0])]


def health_rows(run: Run) -> list[dict[str, Any]]:
    """Each share of `health` in the last and in its worst step, of the team and of the worst agent, beside its limits."""
    steps = [line for line in run.of_kind("step") if line.get("health")]
    limits = (yaml.safe_load(run.config) or {}).get("health") or {}
    rows = []
    for kind, what in HEALTH.items():
        if not any(line["health"][kind]["team"][1] for line in steps):
            continue
        shares = [(share(line["health"][kind]["team"]), line["step"]) for line in steps]
        worst, worst_step = max(shares, key=lambda found: (found[0], -found[1]))
        agents = [(share(count), -line["step"], name) for line in steps for name, count in line["health"][kind]["agents"].items()]
        row = {"what": what, "last": shares[-1][0], "worst": worst, "worst_step": worst_step, "warn": None, "stop": None}
        worst_agent, step, name = max(agents, default=(0.0, 0, ""))
        rows.append(row | (limits.get(kind) or {}) | {"agent": f"{name} {worst_agent:.2f} in {-step}" if worst_agent else ""})
    return rows


def results(run: Run) -> list[dict[str, Any]]:
    """Success and reward before and after, by mode: rows for all questions and for each source.

    `error` is one standard error of the change: of both means over their questions, as if the two evaluations were independent.
    What was evaluated with other settings than the last evaluation is no "before".
    """
    tables = []
    for mode in (SAMPLED, GREEDY):
        found = [line for line in run.of_kind("evaluation") if line["mode"] == mode]
        if not found:
            continue
        last = found[-1]
        before = next((line for line in found if line["step"] == 0 and comparable(line, last)), None)
        after = last if last["step"] > 0 else None
        values = [{EVERYTHING: line, **line["by_source"]} if line else {} for line in (before, after)]
        rows = [
            _row(name, *(value.get(name) for value in values)) for name in dict.fromkeys([EVERYTHING, *values[0], *values[1]])
        ]
        pass_at_k = [line and line["pass_at_k"] for line in (before, after)]
        compared = before is not None and after is not None
        tables.append({"mode": mode, "last": last, "rows": rows, "pass_at_k": pass_at_k, "compared": compared})
    return tables


def _row(name: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "questions": (after or before or {})["questions"]}
    for figure in ("success", "reward"):
        first, last = (part[figure] if part else None for part in (before, after))
        errors = [part[f"{figure}_stderr"] for part in (before, after) if part]
        row[figure] = {
            "before": first,
            "after": last,
            "change": None if first is None or last is None else last - first,
            "error": None if len(errors) < 2 or None in errors else math.hypot(*errors),
        }
    return row


def team_charts(run: Run) -> list[dict[str, Any]]:
    """Reward and success of the steps and of the evaluations, and what the workflow reports: the charts of the whole team."""
    steps, evaluations = run.of_kind("step"), run.of_kind("evaluation")
    charts = []
    for figure in FIGURES:
        metric = of_scope("team")[figure]
        if steps:
            charts.append(_chart(metric, [Series(figure, 0, [(line["step"], line[figure]) for line in steps])]))
        found = {
            mode: [(line["step"], line[figure]) for line in evaluations if line["mode"] == mode] for mode in (SAMPLED, GREEDY)
        }
        modes = [Series(mode, index, found[mode]) for index, mode in enumerate((SAMPLED, GREEDY)) if found[mode]]
        if any(len(mode.points) > 1 for mode in modes):
            legend = [(mode.name, mode.color) for mode in modes]
            on = name_questions(evaluations[-1]["questions"], evaluations[-1].get("trained_on"))
            charts.append(
                _chart(metric, modes) | {"title": f"{metric.title}, evaluated", "hint": f"mean over {on}", "legend": legend}
            )
    for key in dict.fromkeys(key for line in steps for key in line.get("workflow", {})):
        points = [(line["step"], line["workflow"][key]) for line in steps if key in line.get("workflow", {})]
        charts.append(_chart(of_scope("workflow")["{key}"], [Series(key, 0, points)]) | {"title": f"Workflow: {key}"})
    return charts


def speed_charts(run: Run) -> list[dict[str, Any]]:
    """Seconds per step and tokens per second of generation."""
    steps = [(line["step"], scalars(line)) for line in run.of_kind("step")]
    charts = []
    for tag in ("time/step", "throughput/tokens_per_second") if steps else ():
        metric = metric_of(tag)
        assert metric is not None, f"{tag} is in the table"
        points = [(step, values[tag]) for step, values in steps if tag in values]
        charts.append(_chart(metric, [Series(metric.title.lower(), 0, points)]))
    return charts


def metric_charts(run: Run, scope: str, colors: dict[str, int]) -> list[dict[str, Any]]:
    """A chart for each metric that the table puts in front, then one (`more`) for every other metric that changes."""
    steps, known = run.of_kind("step"), of_scope(scope)
    logged = dict.fromkeys(key for line in steps for metrics in line[LINE_KEYS[scope]].values() for key in metrics)
    front = {key: metric for key, metric in known.items() if metric.chart.front}
    charts = []
    for key in [*front, *(key for key in logged if key not in front)]:
        metric = known.get(key) or Metric(key, key.replace("_", " ").capitalize(), "", "", "", Chart())
        lines = [Series(name, color, _points(steps, LINE_KEYS[scope], name, metric)) for name, color in colors.items()]
        changes = any(len({value for _, value in line.points}) > 1 for line in lines)
        if any(line.points for line in lines) and (key in front or changes):
            charts.append(_chart(metric, lines) | {"more": key not in front})
    return charts


def _chart(metric: Metric, lines: list[Series]) -> dict[str, Any]:
    chart = metric.chart
    svg = line_chart(lines, log=chart.log, bounds=chart.bounds, bins=chart.bins)
    return {"title": metric.title, "hint": metric.hint, "svg": svg}


def _points(steps: list[dict[str, Any]], scope: str, name: str, metric: Metric) -> list[tuple[int, float | None]]:
    found = [(line["step"], line[scope].get(name, {})) for line in steps]
    values = [(step, metrics[metric.key]) for step, metrics in found if metric.key in metrics]
    return [(step, None if value is None else value - metric.chart.minus) for step, value in values]


def glossary(run: Run) -> list[Metric]:
    """The rows of the table that this run logged."""
    tags = {tag for line in run.lines if line["kind"] in ("step", "evaluation") for tag in scalars(line)}
    logged = {metric_of(tag) for tag in tags}
    return [metric for metric in METRICS if metric in logged]


def phases(run: Run) -> list[dict[str, Any]]:
    """Where the time went, at start-up and afterwards: seconds and shares of the phases, largest first; and of the work beside
    the training, in shares of its time."""
    order = list(dict.fromkeys(phase for line in run.lines for phase in line["seconds"] if phase != "other"))
    tables: list[dict[str, Any]] = []
    training = ("restart", "step", "evaluation", "end")
    for title, key, kinds in (
        ("Start-up", "seconds", ("start",)),
        ("Training", "seconds", training),
        ("In the background of it", "background", training),
    ):
        totals: dict[str, float] = {}
        for line in run.lines:
            for phase, seconds in line.get(key, {}).items() if line["kind"] in kinds else ():
                totals[phase] = totals.get(phase, 0.0) + seconds
        whole = sum(totals.values()) if key == "seconds" else tables[-1]["seconds"]
        rows = [
            {
                "name": phase,
                "color": order.index(phase) % COLORS if phase in order else None,
                "seconds": seconds,
                "share": seconds / whole,
            }
            for phase, seconds in sorted(totals.items(), key=lambda item: -item[1])
            if seconds > 0.001 * whole
        ]
        if rows:
            tables.append({"title": title, "seconds": whole if key == "seconds" else sum(totals.values()), "rows": rows})
    return tables


def choose(trajectories: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to four to read: the best, the worst, one with an invalid output, the longest.  Holds no more of them than that."""
    best = worst = invalid = longest = None
    for found in trajectories:
        if best is None or _reward(found) >= _reward(best):
            best = found
        if worst is None or _reward(found) < _reward(worst):
            worst = found
        if invalid is None and not all(turn["valid"] for turn in found["turns"]):
            invalid = found
        if longest is None or len(found["turns"]) > len(longest["turns"]):
            longest = found
    chosen: list[dict[str, Any]] = []
    for each in (best, worst, invalid, longest):
        if each is not None and not any(each is other for other in chosen):
            chosen.append(each)
    return chosen


def _reward(trajectory: dict[str, Any]) -> float:
    return -math.inf if trajectory["reward"] is None else trajectory["reward"]


def seen(text: str) -> str:
    """`text` with hidden characters, and those that turn its direction, spelled out; cut after `MAX_TEXT` characters."""
    shown = UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text[:MAX_TEXT])
    return shown + (f"\n… and {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_drmas.observability.report", description="Rebuild report.html of a run."
    )
    parser.add_argument("run_dir", type=Path, help="the run's folder, <output_dir>/<name>")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir))
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
