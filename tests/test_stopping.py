"""Whole runs that are stopped from a terminal, met by a second one, and continued with a change."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SMALL = ["questions_per_step=2", "group_size=2", "evaluation.before=false", "evaluation.after=false"]


@pytest.fixture
def command(tiny_team, tmp_path):
    def make(*overrides):
        return [
            sys.executable,
            "-m",
            "megatron_drmas.train",
            f"output_dir={tmp_path}",
            f"variables.tiny_team={tiny_team}",
            *SMALL,
            *overrides,
        ]

    return make


@pytest.fixture
def in_terminal(command, repository):
    """Runs the command as the foreground job of a terminal, presses Ctrl-C when told, and returns (exit code, what was shown)."""

    def run(folder, presses, *overrides):
        arguments = command(*overrides)
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(repository)
            os.environ.pop("RAY_ADDRESS", None)
            os.execv(arguments[0], arguments)
        shown, pressed, began = b"", 0, None
        while True:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    shown += os.read(terminal, 65536)
                except OSError:  # the other end is closed
                    break
            if pressed < presses and (
                (began is None and steps(folder) >= 2) or (began is not None and time.monotonic() - began > 0.3)
            ):
                os.write(terminal, b"\x03")
                pressed, began = pressed + 1, time.monotonic()
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), re.sub(
            r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace")
        )

    return run


def lines(folder, kind):
    metrics = folder / "metrics.jsonl"
    found = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [line for line in map(json.loads, (text for text in found if text.endswith("\n"))) if line["kind"] == kind]


def steps(folder):
    return len(lines(folder, "step"))


def test_one_ctrl_c_finishes_and_saves_and_the_run_goes_on_with_a_change(in_terminal, command, tmp_path, repository):
    folder = tmp_path / "search_hetero"
    code, shown = in_terminal(folder, 1, "steps=400", "checkpoint.every=0")
    done = steps(folder)
    assert code == 1 and "Traceback" not in shown and shown.count("continues from there") == 1
    assert f"stopped by SIGINT after step {done}; " in shown and done < 400
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"

    more = command(
        f"steps={done + 2}", "policies.qwen2.optimizer.lr=1e-4", "checkpoint.every=0", "logging.trajectories_per_step=null"
    )
    first = subprocess.Popen(more, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (folder / ".lock").read_text():
        time.sleep(0.1)
    second = subprocess.run(more, cwd=repository, capture_output=True, text=True)
    assert second.returncode == 2 and len(second.stderr.splitlines()) == 1
    assert f"is in use by process {first.pid} on host {os.uname().nodename}" in second.stderr
    said, _ = first.communicate()
    assert first.returncode == 0, said
    assert f"changed from step {done + 1} on: policies.qwen2.optimizer.lr = 0.0001 (was 0.0005)" in said
    (change,) = lines(folder, "change")
    assert change["changes"]["policies.qwen2.optimizer.lr"] == [5e-4, 1e-4] and change["changes"]["steps"] == [400, done + 2]
    rates = [line["policies"]["qwen2"]["lr"] for line in lines(folder, "step")]
    assert rates == pytest.approx([5e-4] * done + [1e-4] * 2)
    kept = (folder / "trajectories" / f"step_{done + 1:06d}.jsonl").read_text().splitlines()
    assert len(kept) == 4


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing_half_written(in_terminal, tmp_path):
    folder = tmp_path / "search_hetero"
    code, shown = in_terminal(folder, 2, "steps=400", "checkpoint.every=1")
    assert code == 1 and "Traceback" not in shown and shown.count("stopped at once by SIGINT") == 1
    assert all(
        re.fullmatch(r"step_\d{6}", path.name) and (path / "state.json").exists() for path in (folder / "checkpoints").iterdir()
    )
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
