"""slurm/search_hetero.sh on a machine without Slurm."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest


def start(repository: Path, *arguments: str) -> subprocess.Popen:
    outside_slurm = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    command = ["bash", "slurm/search_hetero.sh", *arguments]
    return subprocess.Popen(command, cwd=repository, env=outside_slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_of(folder: Path) -> list[str]:
    """Command lines that name `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def test_a_mistake_ends_at_once_in_one_line_and_with_the_commands_exit_code(repository, tmp_path):
    run = start(repository, "stepz=3", f"variables.tiny_team={tmp_path}")
    _, errors = run.communicate()
    assert run.returncode == 2 and len(errors.splitlines()) == 1 and "stepz" in errors
    assert not Path(f"/tmp/ray_{run.pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_nothing_outlives_a_run_that_is_stopped(repository, tmp_path, name):
    run = start(repository, "steps=1000", "evaluation.before=false", "name=stopped", f"output_dir={tmp_path}")
    metrics = tmp_path / "stopped/metrics.jsonl"
    while not (metrics.exists() and '"kind":"step"' in metrics.read_text()):
        assert run.poll() is None, run.communicate()
        time.sleep(0.2)
    run.send_signal(signal.Signals[f"SIG{name}"])
    run.communicate()
    assert run.returncode != 0 and processes_of(tmp_path) == []
    assert not Path(f"/tmp/ray_{run.pid}").exists() and processes_of(Path(f"/tmp/ray_{run.pid}/")) == []
