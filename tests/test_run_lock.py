"""A run's folder belongs to one living process at a time, wherever it lives."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_drmas import run_lock
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.run_lock import RunLock, RunLockLost

HOLD = """
import fcntl, sys, time
from pathlib import Path
from megatron_drmas import run_lock
if sys.argv[2] == "no flock":
    def refuse(*_): raise OSError(37, "No locks available")
    fcntl.flock = refuse
if sys.argv[3] != "here":
    run_lock._boot = lambda: sys.argv[3]
with run_lock.RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hold(tmp_path, repository):
    """Starts a process that holds the folder: (with flock or not, boot of its machine)."""
    held = []

    def start(flock="flock", boot="here"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), flock, boot], stdout=subprocess.PIPE, text=True, cwd=repository
        )
        held.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in held:
        process.kill()
        process.wait()


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def refused(folder):
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught, RunLock(folder):
        pass
    assert time.monotonic() - began < 5
    return str(caught.value)


def test_a_second_run_is_refused_by_host_and_process_and_the_first_one_keeps_it(tmp_path, hold):
    holder = hold()
    for _ in range(2):
        error = refused(tmp_path)
        assert f"process {holder.pid} on host {os.uname().nodename}" in error and "\n" not in error and "name=" in error


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_runs_lock_does_not_hold(tmp_path, hold, how):
    holder = hold()
    holder.send_signal(how)
    holder.wait()
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < 0.5


def test_without_flock_the_record_decides(tmp_path, hold, no_flock):
    holder = hold("no flock")
    assert f"process {holder.pid} " in refused(tmp_path)
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        pass


def test_a_record_of_another_machine_counts_while_it_is_touched(tmp_path, hold):
    """The lock of the holder's machine says nothing here: the file system has none."""
    holder = hold("no flock", "another machine")
    assert f"process {holder.pid} " in refused(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path):
        pass


def test_a_process_id_that_was_given_to_another_process_is_no_run(tmp_path, no_flock):
    record = {"host": "here", "pid": os.getppid(), "boot": run_lock._boot(), "started": 1}
    (tmp_path / ".lock").write_text(json.dumps(record))
    with RunLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00\xff"])
def test_a_damaged_record_holds_nothing(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    with RunLock(tmp_path):
        assert "in use by process" in refused(tmp_path)


def test_it_can_be_taken_again_after_its_end_and_leaves_no_record(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path):
            pass
        assert (tmp_path / ".lock").read_bytes() == b""


def test_whoever_lost_the_folder_learns_it(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.confirm()
        other = {"host": "node2", "pid": 7, "boot": "x", "started": 1}
        (tmp_path / ".lock").write_text(json.dumps(other))
        with pytest.raises(RunLockLost, match="process 7 on host node2"):
            lock.confirm()
    assert json.loads((tmp_path / ".lock").read_text()) == other
