"""The run that training steps happen in: its folder, what it resumes, its processes, log and checkpoints, and its end."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_drmas.batch import TurnBatch
from megatron_drmas.checkpointing import CheckpointError, Checkpoints, Saver
from megatron_drmas.cluster.cluster import Cluster
from megatron_drmas.cluster.machine import fit_to_machine
from megatron_drmas.cluster.process import ProcessFailure, ProcessLost
from megatron_drmas.cluster.signals import StopRequest
from megatron_drmas.config.load import to_dict
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.data.question_sets import QuestionSets, load_question_sets
from megatron_drmas.data.questions import Question
from megatron_drmas.data.sampler import QuestionSampler
from megatron_drmas.evaluate import evaluate_team
from megatron_drmas.observability.health import UnhealthyRun, count_causes, refusal
from megatron_drmas.observability.run_log import RunLog, closing_summary, finished_summary
from megatron_drmas.rollout.collector import Sampling
from megatron_drmas.rollout.tickets import Draw, Tickets
from megatron_drmas.run_lock import RunLock
from megatron_drmas.step_record import Stage, merge_stages, step_record, token_ages, trajectory_records
from megatron_drmas.team.trajectory import Trajectory
from megatron_drmas.weight_sync.errors import WeightSyncError

CollectTicket = Callable[["TrainingRun", int, Draw], Awaitable[list[Trajectory]]]


@asynccontextmanager
async def open_run(config: RunConfig, updates_per_step: int, collect: "CollectTicket") -> AsyncIterator["TrainingRun"]:
    """Start a validated configuration, or go on from its last checkpoint; alone in its folder, and until a signal stops it.

    Where the steps end without an error the policies are exported (`checkpoint.export`).

    Args:
        updates_per_step: weight updates that a step makes.
        collect: (run, update, draw) samples the trajectories of an update's ticket.

    Raises:
        SystemExit: there is nothing left to do, or it was asked to stop; says what it can continue from.
        ConfigError: another process has the folder, or its checkpoint belongs to a run that was configured differently.
        RunLockLost: another process took the folder.
        ProcessFailure: an actor, an engine or the retrieval server failed.
        UnhealthyRun: going on would waste the run's time or ruin what it has learned (`config.HealthConfig`).
    """
    run_dir = Path(config.output_dir) / config.name
    with RunLock(run_dir) as lock:
        checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)
        checkpoints.discard_partial()
        stop = StopRequest()
        try:
            async with (
                _start(config, run_dir, checkpoints, stop, lock.confirm, updates_per_step) as run,
                run.tickets.running(partial(collect, run)),
            ):
                yield run
        except asyncio.CancelledError:
            if not stop.aborted:
                raise
            checkpoints.discard_partial()
            saved = checkpoints.resumable()
            rest = f"{_continuing(config)} from {saved[-1]}" if saved else "nothing was saved yet"
            sys.exit(f"stopped at once by {stop.requested}; {rest}")


@asynccontextmanager
async def _start(
    config: RunConfig,
    run_dir: Path,
    checkpoints: Checkpoints,
    stop: StopRequest,
    confirm: Callable[[Callable[[], None]], None],
    updates_per_step: int,
) -> AsyncIterator["TrainingRun"]:
    config, fitted = fit_to_machine(config)
    sets = load_question_sets(config.data)
    resumed = checkpoints.latest(to_dict(config)) if config.resume == "auto" else None
    folder, state, changes = resumed if resumed else (None, {"step": 0}, {})
    done = state["step"]
    tickets = Tickets[list[Trajectory]](
        QuestionSampler(len(sets.train), config.seed, config.data.shuffle),
        done * updates_per_step,
        config.steps * updates_per_step,
        config.algorithm.staleness,
        config.deterministic,
    )
    finished = finished_summary(run_dir, config.steps) if done >= config.steps else None
    if finished:
        print("nothing left to do:", *closing_summary(run_dir, finished), sep="\n")
        sys.exit(0)

    resume_step = done if resumed else None
    with RunLog(run_dir, to_dict(config), config.name, config.seed, config.steps, resume_step, health=config.health) as log:
        log.note(fitted)
        healthy = checkpoints.resumable()[-1] if folder else None
        if healthy and healthy != checkpoints.complete()[-1]:
            log.note(f"the run had stopped itself for its health: continues from {healthy.name}, the newest healthy checkpoint")
        begun = tickets.state_dict()
        async with (
            Cluster(config, log.phase, log.note, log.log_restart) as cluster,
            Saver(checkpoints, cluster, log, tickets, to_dict(config), done, lambda: confirm(log.abandon)) as saver,
        ):
            if folder:
                with log.phase("load checkpoint"):
                    loaded, state = await load_newest(cluster, checkpoints, log.note)
                if loaded != done:
                    done = loaded
                    log.rewind(done)
                tickets.rewind(done * updates_per_step, state["sampler"])
                await saver.rewind(done)
            with log.phase("first weight sync"):
                await cluster.sync_weights(done * updates_per_step, verify=True)
            checkpoints.clear(after=done)  # only now: the run has come as far as starting
            log.started()
            log.log_changes(changes)
            saver.updated(done)
            run = TrainingRun(
                config, cluster, log, saver, checkpoints, sets, tickets, begun, done, updates_per_step, stop, confirm
            )
            try:
                await run.evaluate(done)
                stop.polite(log.note)
                yield run
            finally:
                await run.drop_evaluation()
            stop.polite(None)
            if config.checkpoint.export:
                with log.phase("export"):
                    await cluster.export(run_dir / "hf")


@dataclass
class TrainingRun:
    """A started run, as its steps see it."""

    config: RunConfig  # fitted to the machine
    cluster: Cluster
    log: RunLog
    saver: Saver
    checkpoints: Checkpoints
    sets: QuestionSets
    tickets: Tickets[list[Trajectory]]
    begun: dict[str, Any]  # state of the tickets before the first step
    done: int  # steps
    updates_per_step: int
    stop: StopRequest
    confirm: Callable[
        [Callable[[], None]], None
    ]  # before a step is written; where that must not be, calls its argument and raises
    _updates: int = field(init=False)  # that the engines have
    _given_up: int = field(init=False, default=0)  # versions of weights that the run went back from: no number is used twice
    _first: int = field(init=False)  # step whose weights are verified
    _evaluation: "asyncio.Task[None] | None" = field(init=False, default=None)  # beside the next step's rollout

    def __post_init__(self) -> None:
        self._updates, self._first = self.done * self.updates_per_step, self.done + 1

    @property
    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 1; after a return to a checkpoint, those since then again."""
        while self.done < self.config.steps:
            yield self.done + 1

    @property
    def _version(self) -> int:
        """Of the engines' weights."""
        return self._updates + self._given_up

    @asynccontextmanager
    async def surviving(self) -> AsyncIterator[None]:
        """A step during which processes may fail: the team then goes back to its last checkpoint, and the step ends here.

        Raises:
            RestartsExhausted: it has gone back too often.
        """
        try:
            yield
        except ProcessLost as lost:
            with self.log.phase("restart"):
                await self._go_back(str(lost))

    async def _go_back(self, problem: str) -> None:
        """New processes with the last checkpoint, or with the weights that the run began with, and the questions since then.

        The version numbers of the engines' weights go on rising.
        """
        self.confirm(self.log.abandon)
        await self.drop_evaluation()
        await self.tickets.abandon()
        while True:
            self.cluster.restarts.team(self.done, problem)
            self.log.log_restart("team", problem)
            try:
                await self.cluster.rebuild()
                step, state = 0, {"sampler": self.begun}
                await self.saver.rewind(step)
                if self.checkpoints.resumable():
                    step, state = await load_newest(self.cluster, self.checkpoints, self.log.note)
                used, self._updates = self._version, step * self.updates_per_step
                self._given_up = used + 1 - self._updates
                await self.cluster.sync_weights(self._version, verify=True)
                break
            except (ProcessFailure, WeightSyncError) as failure:
                problem = str(failure)
        self.confirm(self.log.abandon)
        self.checkpoints.clear(after=step)
        self.done, self._first = step, step + 1
        self.tickets.rewind(self._updates, state["sampler"])
        await self.saver.rewind(step)
        self.log.rewind(step)
        self.log.note(f"goes on {f'from {self.checkpoints.complete()[-1].name}' if step else 'from the beginning'}")
        await self.evaluate(step)

    def questions(self, draw: Draw, count: int) -> list[Question]:
        """So many training questions, of the indices that `draw` gives."""
        return [self.sets.train[index] for index in draw(count)]

    async def collect(self, questions: list[Question], sampling: Sampling) -> list[Trajectory]:
        """A group of trajectories for each question."""
        config = self.config
        return await self.cluster.collector.collect(
            questions, config.group_size, sampling, config.algorithm.reward.use_turn_rewards
        )

    def refuse_unhealthy(self, step: int, trajectories: list[Trajectory]) -> None:
        """Keep trajectories of which too many are masked from being trained on.

        Raises:
            UnhealthyRun: they are; they are logged.
        """
        problem = refusal(trajectories, self.config.health, f"step {step} is not trained on")
        if problem:
            self.confirm(self.log.abandon)
            records = trajectory_records(trajectories, self.config, self.cluster.collector.tokenizers, refused=True)
            self.log.log_refused(step, problem, count_causes(trajectories), records)
            raise UnhealthyRun(problem)

    async def before_update(self, batch: TurnBatch) -> Tensor:
        """Let engines finish what an update would disturb: where they sleep meanwhile, an evaluation of their weights.

        Returns:
            The ages of the batch's tokens (`step_record.token_ages`), each in [0, algorithm.staleness].
        """
        staleness = self.config.algorithm.staleness
        if not staleness:
            await self.end_evaluation()
        ages = token_ages(batch, self._version, self.cluster.trainable)
        assert ((ages >= 0) & (ages <= staleness)).all(), f"ages {ages.unique().tolist()} with algorithm.staleness={staleness}"
        return ages

    async def sync_weights(self, step: int) -> None:
        """Bring the engines to the weights of the update just made; the first step's are verified.

        With `algorithm.staleness` they go on generating, and further tickets are admitted.  In deterministic mode they finish
        first, so that each ticket is sampled by one version.
        """
        with self.cluster.draining():
            await self.end_evaluation()
            if self.config.deterministic:
                await self.tickets.settle()
        self._updates += 1
        await self.cluster.sync_weights(self._version, verify=step == self._first)
        self.tickets.published(self._updates)
        if self.config.algorithm.staleness and not self.config.deterministic:
            self.tickets.admit()

    async def finish_step(self, step: int, stages: list[Stage]) -> None:
        """Log a step, save and evaluate where that is due, and stop where that was asked for.

        Raises:
            UnhealthyRun: the steps were unhealthy for too long.
            SystemExit: the run was asked to stop; it is saved.
        """
        self.confirm(self.log.abandon)
        config, log, whole = self.config, self.log, merge_stages(stages)
        problem = log.log_step(step_record(step, whole))
        with log.contained("trajectories"):
            tokenizers = self.cluster.collector.tokenizers
            log.log_trajectories(step, trajectory_records(whole.trajectories, config, tokenizers, whole.batch))
        self.saver.updated(step)
        self.saver.check()
        last = step == config.steps
        if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
            await self.saver.save()
        if last:
            await self.saver.settle()  # as long as the team can go back for it
        if problem and not last:
            raise UnhealthyRun(problem)
        if not self.stop.requested:
            await self.evaluate(step)
        if self.stop.requested:
            await self.saver.save()
            await self.saver.settle()
            sys.exit(f"stopped by {self.stop.requested} after step {step}; {_continuing(config)} from there")
        self.done = step

    async def evaluate(self, step: int) -> None:
        """Evaluate after `step` steps where that is due: beside the next step's rollout, which has the same weights.

        After the last step there is none, and in deterministic mode what the engines compute together must not depend on
        whether there is an evaluation: then it is over when this returns, and a request to stop ends it.
        """
        beside = step < self.config.steps and not self.config.deterministic
        work = evaluate_team(self.cluster, self.log, self.sets.evaluation, step, beside)
        if beside:
            self._evaluation = asyncio.ensure_future(work)
        else:
            await self.stop.unless_requested(work)

    async def end_evaluation(self) -> None:
        """Wait for the evaluation of the weights that are about to change.

        Raises:
            UnhealthyRun: it does not count.
        """
        if self._evaluation is not None:
            with self.log.phase("evaluate"):
                await self._evaluation
            self._evaluation = None

    async def drop_evaluation(self) -> None:
        """End an evaluation that is not over; it is done again when the run continues."""
        if self._evaluation is not None:
            self._evaluation.cancel()
            await asyncio.gather(self._evaluation, return_exceptions=True)
            self._evaluation = None


async def load_newest(cluster: Cluster, checkpoints: Checkpoints, note: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Restore every actor from the newest checkpoint that can be; those that cannot are said.

    Returns:
        Its steps and its state.

    Raises:
        CheckpointError: none can be loaded; they are where they were.
        ProcessLost: an actor rank died.
    """
    readable = checkpoints.readable()
    damaged = [folder for folder in checkpoints.resumable() if folder not in [other for other, _ in readable]]
    problems = [f"{folder / 'state.json'} is damaged" for folder in damaged if not readable or folder > readable[-1][0]]
    for folder, state in reversed(readable):
        for problem in problems:
            note(f"warning: {problem}; tries {folder.name}, the checkpoint before")
        try:
            await cluster.load(folder)
            return state["step"], state
        except ProcessLost:
            raise
        except ProcessFailure as failure:
            problems = [f"{folder} cannot be loaded: {failure}"]
            await cluster.rebuild()  # what it has read of it is not to stay, nor ranks that wait for one that failed
    raise CheckpointError(f"{'; '.join(problems)}; there is no checkpoint before it; resume=never begins again")


def _continuing(config: RunConfig) -> str:
    """What continues from the checkpoint that a stopped run leaves: with resume=never the same command would begin again."""
    return "the same command continues" if config.resume == "auto" else "the same command without resume=never continues"
