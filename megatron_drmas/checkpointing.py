"""Checkpoints of a whole run: every policy and what the driver must remember, all or nothing.

checkpoints/step_000010/state.json     step, data cursor, whether the steps up to it were healthy, the configuration that made it
checkpoints/step_000010/<policy>/      the actor: weights, optimizer, learning-rate schedule, RNG
checkpoints/passed_over_step_000020/   one that was newer than the healthy one from which the run went on
checkpoints/stopped_unhealthy          there when the run stopped itself for its health: it continues from the newest healthy one
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatron_drmas.cluster.process import ProcessFailure, ProcessLost
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.environments.base import ServiceFailure
from megatron_drmas.observability.health import UnhealthyRun
from megatron_drmas.observability.history import write_atomically
from megatron_drmas.observability.records import CHECKPOINT
from megatron_drmas.observability.run_log import RunLog
from megatron_drmas.run_lock import RunLockLost

# What may change when a run continues from a checkpoint: when it ends, how it learns from there on, what it shows and keeps, and
# where and how fast it works.  Everything else (data, team, environment, algorithm, sampling, precision, seed) makes the run
# what it is.  An entry that ends with a dot is a whole section.
MAY_CHANGE = (
    "steps",
    "name",
    "output_dir",
    "checkpoint.",
    "evaluation.",
    "logging.",
    "health.",
    "cluster.",
    "environment.grader.",
    "environment.retrieval.url",
    "environment.retrieval.timeout_s",
    "environment.retrieval.concurrency",
    "environment.retrieval.restarts",
    "rollout.timeout_s",
    "rollout.max_in_flight",
)
OF_A_POLICY = (
    "parallel.",
    "engine.",
    "micro_batch_tokens",
    "packing",
    "recompute",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.decay",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.grad_clip",
)
LAST_WRITE_S = 60.0  # that a checkpoint in the making has left when a run fails
NO_SETTING = ("resume", "plugins", "variables.")  # of no effect on a run but through other keys

# key -> (value of the run that saved, value now)
Changes = dict[str, tuple[Any, Any]]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: made when the first is saved.
        keep: how many complete ones to keep, and the newest healthy one besides, if it is older than those.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        self._keep = keep

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self._folder.glob("step_*/state.json"))

    def discard_partial(self) -> None:
        """Remove what a save that did not come to its end has left, and what was about to be removed."""
        for left in (*self._folder.glob(".partial_*"), *self._folder.glob(".replaced_*")):
            shutil.rmtree(left, ignore_errors=True)

    def resumable(self) -> list[Path]:
        """Complete checkpoints from which the run may continue, oldest first: not those newer than the newest healthy one, if
        the run stopped itself for its health."""
        found = self.complete()
        healthy = self._newest_healthy(found)
        if healthy is not None and self._stopped.exists():
            found = found[: found.index(healthy) + 1]
        return found

    def clear(self, after: int) -> None:
        """The run begins after `step` steps: later checkpoints are renamed passed_over_*; with 0 everything is removed."""
        if after == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        for folder in self.complete():
            if folder.name > f"step_{after:06d}":
                aside = folder.with_name(f"passed_over_{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(folder, aside)
        self._stopped.unlink(missing_ok=True)

    def stop_unhealthy(self) -> Path | None:
        """Remember that the run stopped itself for its health; the checkpoint that it will continue from, if any."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stopped.touch()
        resumable = self.resumable()
        return resumable[-1] if resumable else None

    @property
    def _stopped(self) -> Path:
        return self._folder / "stopped_unhealthy"

    def begin(self, step: int) -> Path:
        """An empty folder for the policies after `step` steps, which `commit` makes a checkpoint."""
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, state: dict[str, Any]) -> None:
        """Rename the folder that `begin` gave, which holds the policies, into its place.

        Args:
            step: training steps done.
            state: what the driver remembers, as JSON; `healthy` says whether the steps since the checkpoint before were.
        """
        partial, final = self._partial(step), self._folder / f"step_{step:06d}"
        write_atomically(partial / "state.json", json.dumps({"step": step, **state}))
        if final.exists():
            os.replace(final, self._aside(final))
        os.replace(partial, final)

    def rotate(self) -> None:
        """Remove those beyond `keep`, but never the newest healthy one."""
        found = self.complete()
        healthy = self._newest_healthy(found)
        for old in found[: -self._keep]:
            if old != healthy:
                os.replace(old, self._aside(old))  # one that is half removed does not look complete
        for old in self._folder.glob(".replaced_*"):
            shutil.rmtree(old, ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self._folder / f".partial_step_{step:06d}"

    def _aside(self, old: Path) -> Path:
        aside = old.with_name(f".replaced_{old.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return aside

    @staticmethod
    def _newest_healthy(found: list[Path]) -> Path | None:
        return next((folder for folder in reversed(found) if _is_healthy(folder)), None)

    def latest(self, config: dict[str, Any]) -> tuple[Path, dict[str, Any], Changes] | None:
        """The newest of the `resumable` checkpoints whose state can be read, that state, and what the configuration changes.

        None if there is no checkpoint.

        Args:
            config: of the run that wants to continue.

        Raises:
            ConfigError: the checkpoint belongs to a run that was configured differently in what may not change, or that has
                done more steps; or none can be read.
        """
        found = self.resumable()
        if not found:
            return None
        readable = self.readable()
        if not readable:
            damaged = ", ".join(str(folder / "state.json") for folder in found)
            raise ConfigError("resume", "auto", f"{damaged} is damaged", "restore it, or use resume=never to begin again")
        folder, state = readable[-1]
        step = state["step"]
        changes = changed(state["config"], config)
        for key, (old, new) in changes.items():
            if not _may_change(key):
                raise ConfigError(
                    key,
                    new,
                    f"the checkpoint {folder} was made with {old!r}, and this may not change within a run",
                    "restore it, choose another name=…, or use resume=never to start this run again",
                )
        if config.get("steps", step) < step:
            problem = f"the checkpoint {folder} has {step} already"
            raise ConfigError("steps", config["steps"], problem, f"use {step} or more, or resume=never")
        return folder, state, changes

    def readable(self) -> list[tuple[Path, dict[str, Any]]]:
        """The `resumable` checkpoints whose state can be read, oldest first, with it."""
        found = []
        for folder in self.resumable():
            with contextlib.suppress(ValueError, TypeError, LookupError, OSError):
                state = json.loads((folder / "state.json").read_text())
                found.append((folder, {key: state[key] for key in ("step", "sampler", "config")}))
        return found


def changed(old: dict[str, Any], new: dict[str, Any]) -> Changes:
    """The settings, by dotted key, in which two configurations differ; None means that one of them lacks the key."""
    ours, theirs = _flat(json.loads(json.dumps(new))), _flat(old)
    keys = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    return {key: (theirs.get(key), ours.get(key)) for key in keys if not key.startswith(NO_SETTING)}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are there."""


class PolicyWriter(Protocol):
    """Who writes the policies: the `Cluster`."""

    async def begin_save(self, folder: Path) -> None:
        """Copy every policy, and begin to write the copies to folder/<policy>."""

    async def finish_save(self) -> None:
        """Wait until they are written."""


class Remembered(Protocol):
    """What has a state of plain data."""

    def state_dict(self) -> dict[str, Any]: ...


class Saver:
    """Knows the last step that the actors have trained on from start to end, and saves the run as it was after it.

    A save waits for the copy alone: the files are written while the next step runs, and are a checkpoint, under its name, as
    soon as the last of them is written.  One is written at a time.

    An asynchronous context manager around the run: one that stops between two updates, for its health or because a service
    failed, loses no step that it has done.

    Args:
        checkpoints: of the run.
        policies: write their part.
        log: of the run.
        sampler: of the training questions: its state is saved.
        config: of the run, as plain data.
        step: steps that are saved already.
        confirm: raises where the folder is no longer this run's; asked before anything in it is renamed.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        policies: PolicyWriter,
        log: RunLog,
        sampler: Remembered,
        config: dict[str, Any],
        step: int,
        confirm: Callable[[], None],
    ):
        self._checkpoints = checkpoints
        self._policies = policies
        self._log = log
        self._sampler = sampler
        self._config = config
        self._begun = step
        self._confirm = confirm
        self._done: int | None = None
        self._writing: asyncio.Task[None] | None = None

    def updating(self) -> None:
        """The actors begin to change."""
        self._done = None

    def updated(self, step: int) -> None:
        """The actors are those after the whole step, and so is the sampler."""
        self._done, self._cursor = step, self._sampler.state_dict()

    async def save(self) -> None:
        """Begin a checkpoint of the last whole step, unless there is one; waits for the one before, and for the copy.

        Raises:
            CheckpointError: one of them could not be written.
            ProcessLost: an actor rank failed meanwhile.
            RunLockLost: the folder is another run's.
        """
        if self._done == self._begun:
            return
        assert self._done is not None, "the actors are in the middle of an update"
        await self.settle()
        step = self._done
        state = {"sampler": self._cursor, "healthy": self._log.healthy(since=self._begun), "config": self._config}
        with self._log.phase(CHECKPOINT), self._named(step):
            self._confirm()
            await self._policies.begin_save(self._checkpoints.begin(step))
        self._begun = step
        self._writing = asyncio.ensure_future(self._finish(step, state))

    async def settle(self) -> None:
        """Wait until the checkpoint that has begun, if any, is complete.

        Raises:
            As `check`.
        """
        if self._writing is not None:
            with self._log.phase(CHECKPOINT):
                await asyncio.wait((self._writing,))
        self.check()

    def check(self) -> None:
        """Nothing, as long as the checkpoint that has begun is being written or complete.

        Raises:
            CheckpointError: it could not be written.
            RunLockLost: the folder is another run's.
        """
        if self._writing is not None and self._writing.done():
            written, self._writing = self._writing, None
            written.result()

    async def rewind(self, step: int) -> None:
        """The actors are those after `step` steps again, as a checkpoint has them; one that is being written is given up."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
        self._checkpoints.discard_partial()
        self._begun = step
        self.updated(step)

    async def _finish(self, step: int, state: dict[str, Any]) -> None:
        with self._log.background(CHECKPOINT), self._named(step):
            await self._policies.finish_save()
            self._confirm()
            self._checkpoints.commit(step, state)
            await asyncio.to_thread(self._checkpoints.rotate)

    @contextlib.contextmanager
    def _named(self, step: int) -> Iterator[None]:
        try:
            yield
        except ProcessLost:
            raise
        except (OSError, ProcessFailure) as error:
            raise CheckpointError(f"the checkpoint after step {step} could not be written: {error}") from error

    async def __aenter__(self) -> "Saver":
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if isinstance(error, (UnhealthyRun, ServiceFailure)) and self._done is not None:
                await self.save()
            if error is None or isinstance(error, (UnhealthyRun, ServiceFailure)):
                await self.settle()
            elif isinstance(error, Exception) and not isinstance(error, RunLockLost) and self._writing is not None:
                await asyncio.wait((self._writing,), timeout=LAST_WRITE_S)  # unless its actor is what failed
        finally:
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.gather(self._writing, return_exceptions=True)
        if isinstance(error, UnhealthyRun):
            self._confirm()
            folder = self._checkpoints.stop_unhealthy()
            raise UnhealthyRun(
                f"{error}; then the same command {f'continues from {folder.name}' if folder else 'begins again'}"
            ) from error


def _is_healthy(folder: Path) -> bool:
    """What a checkpoint says of its steps; one that cannot be read is not relied on."""
    try:
        return bool(json.loads((folder / "state.json").read_text()).get("healthy", True))
    except (ValueError, AttributeError):
        return False


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix[:-1]: config}
    return {key: value for name, node in config.items() for key, value in _flat(node, f"{prefix}{name}.").items()}


def _may_change(key: str) -> bool:
    allowed = OF_A_POLICY if key.startswith("policies.") else MAY_CHANGE
    name = key.split(".", 2)[-1] if key.startswith("policies.") else key
    return any(name.startswith(entry) if entry.endswith(".") else name == entry for entry in allowed)
