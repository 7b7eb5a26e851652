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

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from megatron_drmas.observability.records import EvaluationRecord, StepRecord, TrajectoryRecord


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
    """

    def __init__(
        self, run_dir: Path | str, config: dict[str, Any], name: str, seed: int, steps: int, resume_step: Optional[int] = None
    ): ...

    def __enter__(self) -> "RunLog": ...

    def __exit__(self, kind, error, traceback) -> None:
        """Finish: "finished", "interrupted" or "failed: <error>"."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the work and show it as what is going on.

        The seconds belong to the next thing logged: `started`, a step or an evaluation.
        """

    def started(self) -> None:
        """The processes are up: phases so far were start-up.  Start-up seconds count from the start of this process."""

    def log_step(self, record: StepRecord) -> None:
        """One training step: metrics.jsonl, TensorBoard, alarms, summary.json, the progress line."""

    def log_evaluation(self, record: EvaluationRecord) -> None:
        """One evaluation, in one mode."""

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` steps is in the log: a resumed run need not repeat it."""

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Whole trajectories to read, in trajectories/step_<step>.jsonl."""

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`: the run goes back to that checkpoint."""

    def finish(self, status: str) -> None:
        """Last summary and report, and the closing lines in the terminal.  Later calls do nothing."""
