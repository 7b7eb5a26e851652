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

# What may differ between the run that saved a checkpoint and the run that continues from it.
FREE = ("steps", "resume", "output_dir", "checkpoint.", "evaluation.", "cluster.", "rollout.timeout_s", "rollout.max_in_flight", "environment.retrieval.url",
        "environment.retrieval.timeout_s", "environment.retrieval.concurrency", "environment.grader.")
FREE_OF_POLICY = ("parallel.", "engine.", "micro_batch_tokens")


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

    def latest(self, config: dict[str, Any]) -> Optional[tuple[Path, dict[str, Any]]]:
        """The newest complete checkpoint and its state; None if there is none.

        Args:
            config: of the run that wants to continue.

        Raises:
            ConfigError: the checkpoint belongs to a run that was configured differently.
        """
        found = self.complete()
        if not found:
            return None
        try:
            state = json.loads((found[-1] / "state.json").read_text())
            theirs, _ = _flat(state["config"]), state["step"]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                "resume", "auto", f"{found[-1] / 'state.json'} is damaged", "remove that folder to go on from the one before, or use resume=never"
            ) from error
        ours = _flat(json.loads(json.dumps(config)))
        for key in sorted(theirs.keys() | ours.keys()):
            if theirs.get(key) != ours.get(key) and not _may_differ(key):
                raise ConfigError(
                    key, ours.get(key), f"the checkpoint {found[-1]} was made with {theirs.get(key)!r}",
                    "choose another name=…, or resume=never to start this run again",
                )
        return found[-1], state


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix[:-1]: config}
    return {key: value for name, node in config.items() for key, value in _flat(node, f"{prefix}{name}.").items()}


def _may_differ(key: str) -> bool:
    if key.startswith("policies."):
        return key.split(".", 2)[-1].startswith(FREE_OF_POLICY)
    return key.startswith(FREE)
