"""What a person sees in the terminal while a run works: one live line, or plain lines now and then in a log file."""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from megatron_drmas.observability.charts import short
from megatron_drmas.observability.health import in_short
from megatron_drmas.observability.metrics import FIGURES
from megatron_drmas.observability.records import name_questions

PLAIN_EVERY_S = 30.0  # at most one line of routine news in this time when there is no terminal
STEPS_FOR_ETA = 10


class Progress:
    """The progress of one run.

    On a terminal: one live line (the phase; steps done, reward, success, what is unhealthy, time left) and a printed line for
    what stays of interest: start-up phases, evaluations, alarms.  Elsewhere (a Slurm log): the same printed lines, and
    one about steps or the current phase every `PLAIN_EVERY_S` seconds.
    """

    def __init__(self, name: str, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._name, self._steps = name, steps
        self._console = console or Console()
        self._clock = clock
        self._said = clock()
        self._started = False
        self._news: dict[str, str] = {}
        self._step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.fields[news]}", markup=False),
        )
        self._bars = Bars(*columns, console=self._console, transient=True, refresh_per_second=4)
        self._task = self._bars.add_task("", total=None, news="")
        if self._console.is_interactive:
            self._bars.start()

    def phase(self, name: str) -> None:
        """A phase begins.  In a log file, those of the start-up are worth a line each."""
        self._bars.update(self._task, description=f"{self._name} · {name}")
        if not self._console.is_interactive and not self._started:
            self.note(f"{name} …")

    def started(self, seconds: float, phases: dict[str, float]) -> None:
        """The start-up is over."""
        self._started = True
        parts = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in phases.items() if spent >= 0.1)
        self.note(f"started in {seconds:.0f} s ({parts})")

    def within(self, name: str, text: str) -> None:
        """How far a phase is."""
        self._bars.update(self._task, description=f"{self._name} · {name} {text}")
        if self._plain_line_due():
            self.note(f"{name} {text}")

    def step(self, line: dict[str, Any], step_seconds: float) -> None:
        """A step is done.

        Args:
            line: the step's line of metrics.jsonl.
            step_seconds: its wall-clock time.
        """
        done = line["step"]
        self._step_seconds.append(step_seconds)
        self._news["reward"] = figures(line)
        self._news["health"] = in_short(line.get("alarms", ()))
        left = (self._steps - done) * sum(self._step_seconds) / len(self._step_seconds)
        self._news["left"] = f"{step_seconds:.1f} s/step · {duration(left)} left"
        order = ("reward", "health", "evaluation", "left")
        news = " · ".join(self._news[key] for key in order if self._news.get(key))
        self._bars.update(self._task, completed=done, total=self._steps, news=f"{done}/{self._steps} · {news}")
        if self._plain_line_due() or (done == self._steps and not self._console.is_interactive):
            self.note(f"step {done}/{self._steps} · {news}")

    def evaluation(self, line: dict[str, Any]) -> None:
        """An evaluation is done: `line` as in metrics.jsonl."""
        self._news["evaluation"] = f"evaluated after {line['step']}: {figures(line)} {line['mode']}"
        questions = name_questions(line["questions"], line.get("trained_on"))
        text = f"after {line['step']} steps: {figures(line)} {line['mode']} on {questions}"
        if line["masked"]:
            lost = ", ".join(f"{count} {cause}" for cause, count in line["masked"].items())
            text += f"; trajectories that could not be run to their end: {sum(line['masked'].values())} ({lost})"
        self.note(text)

    def note(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        self._said = self._clock()
        self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        if self._console.is_interactive:
            self._bars.stop()

    def _plain_line_due(self) -> bool:
        return not self._console.is_interactive and self._clock() - self._said >= PLAIN_EVERY_S


def duration(seconds: float) -> str:
    """As h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))


def figures(values: dict[str, Any]) -> str:
    """Reward and success in a few words."""
    return ", ".join(f"{figure} {decimals(values[figure])}" for figure in FIGURES)


def decimals(value: float | None) -> str:
    """A reward, or a share, to three decimals where that says something; "–" for none."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value == 0 or 5e-4 <= abs(value) < 1e5 else short(value)


def closing_lines(summary: dict[str, Any], places: dict[str, str]) -> list[str]:
    """What a finished run says last: what was learned, and where things are.

    Args:
        summary: as in summary.json.
        places: what -> path.
    """
    lines = [f"{summary['name']}: {summary['status']} after {summary['step']} of {summary['steps']} steps"]
    for mode, found in summary.get("evaluation", {}).items():
        changes: dict[tuple[float, float], list[str]] = {}  # (before, after) -> figures: those that are the same share a line
        for figure in FIGURES if found else ():
            before, after = found[figure]["before"], found[figure]["after"]
            if before is not None and after is not None:
                changes.setdefault((before, after), []).append(figure)
        for (before, after), of in changes.items():
            change = f"{decimals(before)} → {decimals(after)} ({'+' if after >= before else ''}{decimals(after - before)})"
            on = name_questions(found["questions"], found.get("trained_on"))
            lines.append(f"{' and '.join(of)}, {mode}: {change} on {on}")
    width = max(map(len, places), default=0)
    return lines + [f"{what:<{width}}  {path}" for what, path in places.items()]
