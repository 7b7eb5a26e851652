"""Checkpoints of a whole run: every policy and what the driver must remember, all or nothing.

    checkpoints/step_000010/state.json     step, data cursor, the configuration that made it
    checkpoints/step_000010/<policy>/      the actor: weights, optimizer, learning-rate schedule, RNG
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Awaitable, Callable, Optional

from megatron_drmas.config.errors import ConfigError

# What may change when a run goes on from a checkpoint: when it ends, how it learns from there on, what it shows and keeps, and
# where and how fast it works.  Everything else (data, team, environment, algorithm, sampling, precision, seed) makes the run
# what it is.  An entry that ends with a dot is a whole section.
MAY_CHANGE = (
    "steps", "name", "output_dir", "checkpoint.", "evaluation.", "logging.", "health.", "cluster.", "environment.grader.",
    "environment.retrieval.url", "environment.retrieval.timeout_s", "environment.retrieval.concurrency", "rollout.timeout_s",
    "rollout.max_in_flight",
)
OF_A_POLICY = (
    "parallel.", "engine.", "micro_batch_tokens", "recompute", "optimizer.lr", "optimizer.min_lr", "optimizer.decay",
    "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.beta1", "optimizer.beta2", "optimizer.eps",
    "optimizer.weight_decay", "optimizer.grad_clip",
)
NO_SETTING = ("resume", "variables.")  # of no effect on a run but through other keys

# key -> (value of the run that saved, value now)
Changes = dict[str, tuple[Any, Any]]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: made when the first is saved.
        keep: how many complete ones to keep.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        self._keep = keep

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self._folder.glob("step_*/state.json"))

    def discard_partial(self) -> None:
        """Remove what a save that did not come to its end has left."""
        for partial in self._folder.glob(".partial_*"):
            shutil.rmtree(partial, ignore_errors=True)

    def clear(self) -> None:
        """Remove every checkpoint."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def save(self, step: int, state: dict[str, Any], write: Callable[[Path], Awaitable[None]]) -> Path:
        """Write a checkpoint beside the others and then rename it into place; older ones beyond `keep` go.

        Args:
            step: training steps done.
            state: what the driver remembers, as JSON.
            write: writes the policies into a folder.
        """
        final = self._folder / f"step_{step:06d}"
        partial = self._folder / f".partial_{final.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await write(partial)
        (partial / "state.json").write_text(json.dumps({"step": step, **state}))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in self.complete()[:-self._keep]:
            shutil.rmtree(old)
        return final

    def latest(self, config: dict[str, Any]) -> Optional[tuple[Path, dict[str, Any], Changes]]:
        """The newest complete checkpoint, its state, and what the configuration changes; None if there is none.

        Args:
            config: of the run that wants to continue.

        Raises:
            ConfigError: the checkpoint belongs to a run that was configured differently in what may not change, or that has
                done more steps.
        """
        found = self.complete()
        if not found:
            return None
        try:
            state = json.loads((found[-1] / "state.json").read_text())
            theirs, step = state["config"], state["step"]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                "resume", "auto", f"{found[-1] / 'state.json'} is damaged", "remove that folder to go on from the one before, or use resume=never"
            ) from error
        changes = changed(theirs, config)
        for key, (old, new) in changes.items():
            if not _may_change(key):
                raise ConfigError(
                    key, new, f"the checkpoint {found[-1]} was made with {old!r}, and this may not change within a run",
                    "restore it, choose another name=…, or use resume=never to start this run again",
                )
        if config.get("steps", step) < step:
            problem = f"the checkpoint {found[-1]} has {step} already"
            raise ConfigError("steps", config["steps"], problem, f"use {step} or more, or resume=never")
        return found[-1], state, changes


def changed(old: dict[str, Any], new: dict[str, Any]) -> Changes:
    """The settings, by dotted key, in which two configurations differ; None stands for a key that one of them lacks."""
    ours, theirs = _flat(json.loads(json.dumps(new))), _flat(old)
    keys = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    return {key: (theirs.get(key), ours.get(key)) for key in keys if not key.startswith(NO_SETTING)}


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix[:-1]: config}
    return {key: value for name, node in config.items() for key, value in _flat(node, f"{prefix}{name}.").items()}


def _may_change(key: str) -> bool:
    allowed = OF_A_POLICY if key.startswith("policies.") else MAY_CHANGE
    name = key.split(".", 2)[-1] if key.startswith("policies.") else key
    return any(name.startswith(entry) if entry.endswith(".") else name == entry for entry in allowed)
