"""The training command as a user gives it, from this tree or an old commit's, and what its own log says of its speed."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def source_of(commit: str, folder: Path) -> Path:
    """Write a commit's files to a folder.

    Raises:
        ValueError: this is no Git repository, or it has no such commit.
    """
    made = subprocess.run(["git", "-C", str(ROOT), "archive", "--format=tar", commit, "--"], capture_output=True)
    if made.returncode:
        raise ValueError(f"{commit}: {made.stderr.decode().strip().splitlines()[0]}; give a commit that this clone has")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def train(source: Path, out: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """One training run in processes of its own, with this environment's packages.

    Args:
        source: the tree whose code runs.
        out: folder to make; the run's output goes to train.log in it.

    Returns:
        The lines of the run's metrics.jsonl.

    Raises:
        SystemExit: the run failed; names its log.
    """
    out.mkdir(parents=True)
    log = out / "train.log"
    command = [sys.executable, "-m", "megatron_drmas.train", *arguments, "name=run", f"output_dir={out}"]
    with open(log, "w") as output:
        code = subprocess.run(
            command, cwd=source, env={**os.environ, "PYTHONPATH": str(source)}, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        last = (log.read_text().splitlines() or [""])[-1]
        sys.exit(f"{Path(sys.argv[0]).stem}: training from {source} ended with exit code {code}: {last}")
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run's lines of steps."""
    return [line for line in lines if line["kind"] == "step"]
