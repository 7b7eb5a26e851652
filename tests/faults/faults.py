"""What may fail in a run, each fault caused from within the process that fails, by a plug-in, once.

A fault is survived when the run ends well, with the policies and the step lines of a run without a fault, bit for bit, and with
the restarts in its summary; or, where the run cannot go on, when it stops with one line that names what failed.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SMALL = (
    "steps=3", "questions_per_step=4", "group_size=4", "evaluation.before=false", "evaluation.after=false", "checkpoint.every=1",
    "deterministic=true", "cluster.actor_threads=1", "cluster.engine_threads=1",
)  # fmt: skip
TIMEOUT_S = 900.0  # of a run; on a busy machine

# A plug-in is imported by the driver and by every actor and engine.
ONCE = """
import functools, os, signal, threading, time
from megatron_drmas.actor.actor_process import ActorProcess
from megatron_drmas.cluster import supervision
from megatron_drmas.rollout import engine_stream
from megatron_drmas.rollout.engine import Engine

supervision.SILENT_S = engine_stream.STALLED_S = 20.0  # a busy machine
engine_stream.HEARTBEAT_S = 1.0

def once(mark={mark!r}):
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def fail(number):
    os.kill(os.getpid(), number)
    time.sleep(3600)

def before(kind, method, fault):
    original = getattr(kind, method)
    @functools.wraps(original)
    def patched(self, *args):
        fault(self, *args)
        return original(self, *args)
    setattr(kind, method, patched)

def in_update(fault, step, rank=1):
    before(ActorProcess, "update", lambda self, batch, at:
        fault() if (self._actor.settings.name, self._actor.rank, at) == ("qwen2", rank, step) and once() else None)

deliver = Engine._deliver
def in_batch(fault, policy="llama"):
    def patched(self, samples):
        deliver(self, samples)
        if samples and self.settings.name == policy and self._core._version >= 1 and once():
            fault()
    Engine._deliver = patched
"""


@dataclass(frozen=True)
class Fault:
    """Attributes:
    name: what happens.
    plugin: code that makes it happen, after `ONCE`.
    restarts: of the summary.
    said: pattern of what the run says.
    overrides: of the configuration.
    ends: the run stops by name instead of surviving, and the same command without the plug-in goes on.
    damage: what happens to the folder before it does.
    then: pattern of what it says then.
    """

    name: str
    plugin: str
    restarts: dict[str, int] = field(default_factory=dict)
    said: str = ""
    overrides: Sequence[str] = ()
    ends: bool = False
    damage: Callable[[Path], None] = lambda folder: None
    then: str = ""

    @property
    def exact(self) -> bool:
        """Whether the state is the undisturbed run's: not where a checkpoint's open tickets are sampled by later weights."""
        return "team" not in self.restarts or self.overrides != OVERLAP

    @property
    def undisturbed(self) -> tuple[str, ...]:
        """Overrides of the run without a fault that it is compared with."""
        return tuple(each for each in self.overrides if not each.startswith(("cluster.step_timeout_s", "cluster.restarts")))


def cut_newest_checkpoint(folder: Path) -> None:
    """Halve the largest file of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step_*"))
    largest = max(newest.glob("qwen2/*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def garble_newest_state(folder: Path) -> None:
    """Spoil what the driver remembers of the newest checkpoint."""
    (max((folder / "checkpoints").glob("step_*")) / "state.json").write_text("{")


LLAMA, TEAM = "engine 0 of policy 'llama'", "team"
OVERLAP = ("algorithm.staleness=1", "algorithm.loss.mismatch.correction=truncate")
SHARED = (
    "cluster.device=cpu",
    "cluster.gpus_per_node=1",
    "policies.qwen2.parallel.tensor=1",
    "policies.llama.parallel.pipeline=1",
)

FAULTS = (
    Fault("an engine is killed in a batch", "in_batch(lambda: fail(signal.SIGKILL))", {LLAMA: 1}, f"restart: {LLAMA} .*died"),
    Fault("an engine hangs in a batch", "in_batch(lambda: fail(signal.SIGSTOP))", {LLAMA: 1}, f"restart: {LLAMA}"),
    Fault(
        "an engine returns errors",
        """
def errors(self, samples, broken=[]):
    if samples and self.settings.name == "llama" and self._core._version >= 1 and (broken or once()):
        broken.append(True)
        samples = [self._core._failed(sample.key, "out of order") for sample in samples]
    deliver(self, samples)
Engine._deliver = errors
""",
        {LLAMA: 1},
        f"restart: {LLAMA} .*returned 3 errors in a row: out of order",
    ),
    Fault(
        "an engine is killed in a weight update",
        """
original = Engine.load_bucket
async def load_bucket(self, info):
    if self.settings.name == "llama" and self._core._version >= 1 and once():
        fail(signal.SIGKILL)
    await original(self, info)
Engine.load_bucket = load_bucket
""",
        {LLAMA: 1},
        f"restart: {LLAMA} .*load_bucket",
    ),
    Fault(
        "an actor rank is killed before the first checkpoint",
        "in_update(lambda: fail(signal.SIGKILL), step=1)",
        {TEAM: 1},
        "restart: team .actor 1 of policy 'qwen2': died during update",
    ),
    Fault(
        "an actor rank is killed in an update",
        "in_update(lambda: fail(signal.SIGKILL), step=3)",
        {TEAM: 1},
        "restart: team .actor 1 of policy 'qwen2': died during update.*\n.*goes on from step_000002",
    ),
    Fault(
        "an actor rank hangs in an update",
        "in_update(lambda: fail(signal.SIGSTOP), step=3, rank=0)",
        {TEAM: 1},
        "restart: team .actor 0 of policy 'qwen2': no answer",
    ),
    Fault(
        "an actor rank is stuck in an update",
        "in_update(lambda: time.sleep(3600), step=3)",
        {TEAM: 1},
        "restart: team .actor 1 of policy 'qwen2': stuck in .*, during update; 1 other rank waits for it",
        ("cluster.step_timeout_s=40",),
    ),
    Fault(
        "an actor rank is killed while a checkpoint is written",
        """
before(ActorProcess, "finish_save", lambda self:
    fail(signal.SIGKILL) if self._actor.settings.name == "qwen2" and self._actor.rank == 0
    and "step_000002" in str(self._actor._save._target) and once() else None)
""",
        {TEAM: 1},
        "restart: team .actor 0 of policy 'qwen2': died during .*\n.*goes on from step_000001",
    ),
    Fault(
        "the retrieval server is killed",
        """
import psutil
def kill_server():
    for process in psutil.process_iter(["cmdline", "environ"]):
        if "megatron_drmas.environments.retrieval_server" in (process.info["cmdline"] or ()) and os.getpgid(0) != 0:
            if (process.info["environ"] or {}).get("DRMAS_FAULT") == os.environ.get("DRMAS_FAULT"):
                process.kill()
in_batch(kill_server)
""",
        {"retrieval server": 1},
        "restart: retrieval server .it ended with code -9",
    ),
    Fault(
        "the disk is full when a checkpoint is written",
        """
import errno
from megatron_drmas.actor import checkpoint
write = checkpoint._write_file
def full(bucket, transforms):
    if ".partial_step_000002" in str(bucket) and once():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(bucket, transforms)
checkpoint._write_file = full
""",
        said="train: the checkpoint after step 2 could not be written: .*No space left on device",
        ends=True,
    ),
    Fault(
        "an actor rank is killed again and again",
        """
before(ActorProcess, "update", lambda self, batch, step:
    fail(signal.SIGKILL) if (self._actor.settings.name, step, self._actor.rank) == ("qwen2", 2, 1) else None)
""",
        {TEAM: 1},
        "train: actor 1 of policy 'qwen2': died during update.*; the team went back to its checkpoint 1 times .cluster.restarts.",
        ("cluster.restarts=1",),
        ends=True,
    ),
    *(
        Fault(
            f"the newest checkpoint's {what} cannot be read",
            "in_update(lambda: fail(signal.SIGKILL), step=3)",
            {},
            "train: actor 1 of policy 'qwen2': died during update.*went back to its checkpoint 0 times",
            ("cluster.restarts=0",),
            ends=True,
            damage=damage,
            then=f"warning: .*step_000002.* {problem}.*; tries step_000001, the checkpoint before",
        )
        for what, damage, problem in (
            ("files", cut_newest_checkpoint, "cannot be loaded"),
            ("state", garble_newest_state, "is damaged"),
        )
    ),
    Fault(
        "an engine is killed while the actors train",
        "in_batch(lambda: fail(signal.SIGKILL))",
        {LLAMA: 1, TEAM: 1},  # its weights are nowhere any more when it is back
        f"restart: team .{LLAMA}: failed before it had finished what the next weights wait for",
        OVERLAP,
    ),
    Fault(
        "an actor rank is killed while the engines generate",
        "in_update(lambda: fail(signal.SIGKILL), step=2)",
        {TEAM: 1},
        "restart: team .actor 1 of policy 'qwen2': died during update",
        OVERLAP,
    ),
    Fault(
        "an engine that shares its device is killed in a batch",
        "in_batch(lambda: fail(signal.SIGKILL))",
        {LLAMA: 1},
        f"restart: {LLAMA} .*died",
        SHARED,
    ),
    Fault(
        "an actor rank that shares its device is killed in an update",
        "in_update(lambda: fail(signal.SIGKILL), step=3, rank=0)",
        {TEAM: 1},
        "restart: team .actor 0 of policy 'qwen2': died during update",
        SHARED,
    ),
)  # fmt: skip


@dataclass
class Run:
    """One run that has ended: its exit code, what it said, and its folder."""

    code: int
    said: str
    folder: Path
    left: list[str]  # processes that it has left behind

    def state(self) -> dict:
        """What it has learned and what its steps measured, without times."""
        models = {
            path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in self.folder.glob("hf/*/*.safetensors")
        }
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        steps = {
            line["step"]: {key: line[key] for key in ("reward", "agents", "policies", "health")}
            for line in lines
            if line["kind"] == "step"
        }
        assert not steps or all(policy["grad_norm"] > 0 for step in steps.values() for policy in step["policies"].values())
        return {"models": models, "steps": steps}

    @property
    def restarts(self) -> dict[str, int]:
        found = json.loads((self.folder / "summary.json").read_text())["restarts"]
        return {cause: count for cause, count in found.items() if cause != "resumed"}


def train(folder: Path, team: Path, repository: Path, *overrides: str) -> Run:
    """Run the command in a folder of its own, or on from what is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_drmas.train", f"name={folder.name}", f"output_dir={folder.parent}"]
    environment = {**os.environ, "RAY_ADDRESS": "", "DRMAS_FAULT": str(folder)}
    done = subprocess.run(
        [*command, f"variables.tiny_team={team}", *SMALL, *overrides], cwd=repository, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DRMAS_FAULT") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
    return Run(done.returncode, done.stdout, folder, left)


def problems(fault: Fault, folder: Path, team: Path, repository: Path, undisturbed: dict) -> list[str]:
    """Run with a fault; what is not as it should be.

    Args:
        folder: of this run, new.
        undisturbed: state of the run without a fault and with the same overrides.
    """
    plugin = folder.with_name(f"{folder.name}.py")
    plugin.parent.mkdir(parents=True, exist_ok=True)
    plugin.write_text(ONCE.format(mark=str(folder.with_name(f"{folder.name}.happened"))) + fault.plugin)
    run = train(folder, team, repository, *fault.overrides, f"plugins=[{plugin}]")
    found, said = [f"left behind: {process}" for process in run.left], run.said
    if not re.search(fault.said, run.said):
        found.append(f"not said: {fault.said}")
    if (run.code == 0) == fault.ends:
        found.append(f"exit code {run.code}")
    if "Traceback" in run.said:
        found.append("a traceback")
    if run.folder.exists() and run.restarts != fault.restarts:
        found.append(f"restarts {run.restarts}, not {fault.restarts}")
    if fault.ends:
        fault.damage(folder)
        run = train(folder, team, repository, *(each for each in fault.overrides if "restarts" not in each))
        found += [f"the same command again: exit code {run.code}"] * (run.code != 0)
        found += [f"not said then: {fault.then}"] * (not re.search(fault.then, run.said))
    if not found and fault.exact and run.state() != undisturbed:
        found.append("another state than that of an undisturbed run")
    return found and [*found, said, *([run.said] if fault.ends else [])]
