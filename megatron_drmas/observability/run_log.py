"""`RunLog`: the one object through which the training loop is seen.

with RunLog(run_dir, config, name, seed, steps, resume_step=None) as log:
    with log.phase("start engines"):
        ...
    log.started()
    log.log_evaluation(EvaluationRecord(step=0, ...))
    for step in ...:
        with log.phase("generate"):
            ...
        log.log_step(StepRecord(step=step, ...))
        log.log_trajectories(step, [...])
        (save the checkpoint of this step)
"""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from megatron_drmas.config.schema import HealthConfig
from megatron_drmas.observability.alarms import Episodes, Watch, likely_causes
from megatron_drmas.observability.health import HealthRule, evaluation_alarms
from megatron_drmas.observability.history import History, to_json, write_atomically
from megatron_drmas.observability.memory import MemorySampler
from megatron_drmas.observability.progress import Progress, closing_lines
from megatron_drmas.observability.records import EvaluationRecord, StepRecord, TrajectoryRecord, plain
from megatron_drmas.observability.report import write_report
from megatron_drmas.observability.summary import FINISHED, Summary
from megatron_drmas.observability.tensorboard import TensorBoard

REPORT_EVERY_S = 60.0  # minimum time between two reports of a running run
REPORT_SHARE = 0.02  # of the run's time, at most, for reports while it runs


class RunLog:
    """Everything that a run writes for people to see, under its run folder.

    metrics.jsonl is the one durable source: the summary, the alarms and the report are computed from its lines, so
    nothing of a RunLog has to be in a checkpoint.  Log a step before saving its checkpoint.

    Args:
        run_dir: the run's folder, made if missing.
        config: the configuration as plain data; written to config.yaml.
        name, seed, steps: of the run.
        resume_step: steps of the checkpoint that the run continues from; what was logged after it is removed.
            None: a new run; everything that an earlier run of this folder logged is removed.
        clock: seconds, for timing phases.
        health: when a step is unhealthy.

    Raises:
        HistoryError: metrics.jsonl of the run to continue cannot be read.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: dict[str, Any],
        name: str,
        seed: int,
        steps: int,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        health: HealthConfig | None = None,
    ):
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._about = (name, seed, steps)
        self._agents_of, self._causes = agents_by_policy(config), likely_causes(config)
        self._health_config = health or HealthConfig()
        self._clock = clock
        self._finished = False
        write_atomically(self._run_dir / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
        self._history = History(self._run_dir / "metrics.jsonl")
        self._tensorboard: TensorBoard | None = None
        if resume_step is None:
            self._history.path.unlink(missing_ok=True)
        else:
            self._history.cut(resume_step)
        self._progress = Progress(name, steps, clock=clock)
        self._failures: set[str] = set()  # that were said
        if resume_step is None:
            for earlier in ("summary.json", "report.html", "tensorboard", "trajectories"):
                with self.contained(earlier):
                    _remove(self._run_dir / earlier)
        self._start_step = resume_step or 0
        self.rewind(self._start_step)
        self._report_due = clock() + REPORT_EVERY_S
        self._memory = MemorySampler()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Finish: "finished", "interrupted" or "failed: <error>"."""
        if error is None:
            self.finish(FINISHED)
        elif isinstance(error, (KeyboardInterrupt, SystemExit, asyncio.CancelledError)):
            self.finish("interrupted")
        else:
            first_line = f"{type(error).__name__}: {error}".split("\n")[0]
            self.finish(f"failed: {first_line}")

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a part of the work and show it as what is going on.

        The seconds belong to the next thing logged: `started`, a step or an evaluation.  Phases may overlap; each
        then counts in full.

        Yields:
            A function that shows how far the work is, given a text such as "120/300 questions".
        """
        self._progress.phase(name)
        began = self._clock()
        try:
            yield lambda text: self._progress.within(name, text)
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began

    @contextmanager
    def background(self, name: str) -> Iterator[None]:
        """Time work that goes on beside the phases.  The seconds belong to the next step's line, or to the last line, and are
        no part of its time."""
        began = self._clock()
        try:
            yield
        finally:
            self._background[name] = self._background.get(name, 0.0) + self._clock() - began

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Something that is only there to be looked at: its failure is a warning, said once a cause, and never the run's."""
        try:
            yield
        except Exception as error:
            message = f"warning: {what} could not be written: {type(error).__name__}: {error}".split("\n")[0]
            if message not in self._failures:
                self._failures.add(message)
                self.note(message, style="yellow")

    def note(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        self._progress.note(text, style)

    def started(self) -> None:
        """The processes are up: phases so far were start-up.  Start-up seconds count from the start of this process."""
        seconds = time.time() - psutil.Process().create_time()
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        line = self._write("start", self._start_step, time=now, startup_seconds=seconds)
        imports = seconds - sum(line["seconds"].values())  # before there was a log
        self._progress.started(seconds, {"imports": imports, **line["seconds"]})
        if self._start_step > 0:
            self.log_restart("resumed")

    def log_step(self, record: StepRecord) -> str | None:
        """One training step: metrics.jsonl, TensorBoard, alarms, summary.json, the progress line.

        Returns:
            Why the run must stop after this step; None if it may continue.
        """
        values = plain(record)
        alarms = self._judge(values)
        line = self._write("step", alarms=alarms, **values)
        self._to_tensorboard(line)
        # Every alarm is in metrics.jsonl; the beginning and the end of an episode are said.
        begun, ended = self._episodes.add(record.step, alarms)
        with self.contained("the step's line"):
            for episode in begun:
                self._progress.note(f"warning: {episode.text()}", style="yellow")
            for episode in ended:
                self._progress.note(episode.end_text())
            self._progress.step(line, sum(line["seconds"].values()))
        if self._clock() >= self._report_due:
            self._report()
        return self._health.stop

    def log_refused(self, step: int, problem: str, masked: dict[str, int], trajectories: Sequence[TrajectoryRecord]) -> None:
        """A step that was not trained on, and trajectories of it to read.

        Args:
            step: its number; it is not done.
            problem: why.
            masked: cause -> trajectories.
        """
        self.log_trajectories(step, trajectories)
        self._write("refused", step, problem=problem, masked=masked)

    def healthy(self, since: int) -> bool:
        """Whether every step after `since` was healthy (see `health.HealthRule`)."""
        return all(step <= since for step in self._unhealthy)

    def _judge(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        found = self._health.check(line)
        if not self._health.healthy:
            self._unhealthy.append(line["step"])
        return found + self._watch.check(line)

    def log_evaluation(
        self, record: EvaluationRecord, trajectories: Sequence[TrajectoryRecord] = (), beside: bool = False
    ) -> None:
        """One evaluation, in one mode, and trajectories of it to read, in trajectories/evaluation_<mode>_<step>.jsonl.

        Args:
            beside: it ran beside the next step, to which all the time belongs.
        """
        if trajectories:
            self._write_trajectories(f"evaluation_{record.mode}", record.step, trajectories)
        values = plain(record)
        values["alarms"] = evaluation_alarms(values, self._health_config)
        line = self._append({"kind": "evaluation", "seconds": {}, **values}) if beside else self._write("evaluation", **values)
        self._to_tensorboard(line)
        with self.contained("the evaluation's line"):
            for alarm in line["alarms"]:
                self._progress.note(f"warning: {alarm['message']}", style="yellow")
            self._progress.evaluation(line)
        self._report()

    def log_restart(self, cause: str, detail: str = "") -> None:
        """A part of the run (the run itself, the retrieval server) was started again.

        Args:
            cause: under which it is counted.
            detail: what had happened.
        """
        self._append(
            {"kind": "restart", "step": self._summary.as_dict()["step"], "seconds": {}, "cause": cause, "detail": detail}
        )
        self.note(f"restart: {cause}{f' ({detail})' if detail else ''}", style="yellow")

    def log_changes(self, changes: dict[str, tuple[Any, Any]]) -> None:
        """Settings that the run continues with other than before: key -> (old, new)."""
        if changes:
            self._write("change", self._start_step, changes=plain(changes))
        for key, (old, new) in changes.items():
            self.note(f"changed from step {self._start_step + 1} on: {key} = {new!r} (was {old!r})", style="yellow")

    def evaluated(self, step: int, mode: str) -> bool:
        """Whether the evaluation after `step` steps in this mode is in the log: a resumed run need not repeat it."""
        return any((line["kind"], line["step"], line.get("mode")) == ("evaluation", step, mode) for line in self._history)

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Whole trajectories of a training step to read, in trajectories/step_<step>.jsonl; no file for none."""
        if trajectories:
            self._write_trajectories("step", step, trajectories)

    def _write_trajectories(self, kind: str, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        with self.contained("trajectories"):
            folder = self._run_dir / "trajectories"
            folder.mkdir(exist_ok=True)
            lines = "".join(to_json(plain(trajectory)) + "\n" for trajectory in trajectories)
            write_atomically(folder / f"{kind}_{step:06d}.jsonl", lines)

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`: the run goes back to that checkpoint."""
        self._history.cut(step)
        self._seconds: dict[str, float] = {}  # by phase, since the last line
        self._background: dict[str, float] = {}  # likewise, beside the phases
        self._logged = self._clock()
        for path in (self._run_dir / "trajectories").glob("*_[0-9]*.jsonl"):
            if int(path.stem.rpartition("_")[2]) > step:
                with self.contained("trajectories"):
                    path.unlink()
        self._summary, self._watch = Summary(*self._about), Watch(self._agents_of, self._causes)
        self._health, self._episodes = HealthRule(self._health_config), Episodes()
        self._unhealthy: list[int] = []
        for line in self._history:
            with self.contained("the summary"):
                self._summary.add(line)
            if line["kind"] == "step":
                self._episodes.add(line["step"], self._judge(line))
        with self.contained("the summary"):
            self._summary.write(self._run_dir / "summary.json")
        with self.contained("TensorBoard's log"):
            if self._tensorboard is not None:
                self._tensorboard.close()
            self._tensorboard = None
            self._tensorboard = TensorBoard(self._run_dir / "tensorboard", step)

    def abandon(self) -> None:
        """End without another word in the run's folder."""
        if not self._finished:
            self._finished = True
            self._progress.close()
            self._memory.stop()

    def finish(self, status: str) -> None:
        """Last summary and report, and the closing lines in the terminal.  Later calls do nothing."""
        if self._finished:
            return
        self._finished = True
        self._progress.close()
        self._memory.stop()
        self._write("end", self._summary.as_dict()["step"], status=status)
        with self.contained("TensorBoard's log"):
            if self._tensorboard is not None:
                self._tensorboard.close()
        self._report()
        if status != "interrupted":  # the one who stopped it knows
            with self.contained("the closing lines"):
                for text in closing_summary(self._run_dir, self._summary.as_dict()):
                    self.note(text)

    def _write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Append a line of this kind with the time since the last one, and bring the summary up to date."""
        elapsed = self._clock() - self._logged
        self._logged += elapsed
        seconds = self._seconds | {"other": max(0.0, elapsed - sum(self._seconds.values()))}
        self._seconds = {}
        if kind in ("step", "end") and self._background:
            values["background"], self._background = self._background, {}
        return self._append({"kind": kind, "step": step, "seconds": seconds, **values})

    def _append(self, line: dict[str, Any]) -> dict[str, Any]:
        line["peak_memory_gib"] = self._memory.peak_gib
        self._history.append(line)
        with self.contained("the summary"):
            self._summary.add(line)
            self._summary.write(self._run_dir / "summary.json")
        return line

    def _to_tensorboard(self, line: dict[str, Any]) -> None:
        with self.contained("TensorBoard's log"):
            if self._tensorboard is not None:
                self._tensorboard.add(line)

    def _report(self) -> None:
        began = self._clock()
        with self.contained("the report"):
            write_report(self._run_dir)
        ended = self._clock()
        self._report_due = ended + max(REPORT_EVERY_S, (ended - began) / REPORT_SHARE)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def closing_summary(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """What a run says at its end: what was learned, and where things are.

    Args:
        run_dir: the run's folder.
        summary: as in its summary.json.
    """
    places = {
        "checkpoints": run_dir / "checkpoints",
        "exported models": run_dir / "hf",
        "TensorBoard log": run_dir / "tensorboard",
        "report": run_dir / "report.html",
        "summary": run_dir / "summary.json",
    }
    return closing_lines(summary, {what: str(path) for what, path in places.items() if path.exists()})


def finished_summary(run_dir: Path, steps: int) -> dict[str, Any] | None:
    """The summary of a run that has come to its end after `steps` steps; None if it has not, or cannot be read."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        return summary if summary["status"] == FINISHED and summary["step"] >= steps else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def agents_by_policy(config: dict[str, Any]) -> dict[str, list[str]]:
    """Policy -> the agents that it serves, from a run's configuration."""
    found: dict[str, list[str]] = {}
    for agent, settings in config.get("team", {}).get("agents", {}).items():
        found.setdefault(settings["policy"], []).append(agent)
    return found
