"""run_group: the exit status is the command's, signals reach it, and nothing it started outlives it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest


@pytest.fixture
def run_group(repository, tmp_path):
    """Start `run_group bash -c SCRIPT` in a shell of its own; $READY is a file for the script to make."""
    started = []

    def start(script: str, grace: int = 20) -> subprocess.Popen:
        shell = f"""
            . "{repository}/tools/shell_lib.sh"
            STOP_GRACE_S={grace}
            run_group bash -c "$1"; status=$?
            echo "received=$RECEIVED"
            exit $status"""
        environment = os.environ | {"READY": str(tmp_path / "ready")}
        process = subprocess.Popen(["bash", "-c", shell, "test", script], stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return process

    def wait_until_ready() -> str:
        while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text().endswith("\n"):
            time.sleep(0.02)
        return (tmp_path / "ready").read_text().strip()

    start.wait_until_ready = wait_until_ready
    yield start
    for process in started:
        process.kill()
        process.wait()


def is_alive(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("code", [0, 7, 127])
def test_the_status_is_the_commands(run_group, code):
    process = run_group(f"exit {code}")
    assert process.communicate()[0] == "received=\n" and process.returncode == code


def test_a_daemon_in_another_session_is_ended_with_the_command(run_group):
    process = run_group('setsid bash -c \'echo $$ >"$READY"; exec sleep 1000\' & while [ ! -s "$READY" ]; do sleep 0.02; done')
    daemon = run_group.wait_until_ready()
    assert process.wait() == 0 and not is_alive(daemon)


def test_a_child_that_ignores_term_is_killed(run_group):
    process = run_group(
        '(trap "" TERM; echo $BASHPID >"$READY"; while :; do sleep 0.1; done) & while [ ! -s "$READY" ]; do sleep 0.02; done'
    )
    child = run_group.wait_until_ready()
    assert process.wait() == 0 and not is_alive(child)


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
def test_a_signal_is_passed_on_and_the_command_may_end_in_its_own_way(run_group, name):
    process = run_group(f'trap "exit 5" {name}; echo >"$READY"; while :; do sleep 0.05; done')
    run_group.wait_until_ready()
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.communicate()[0] == f"received={name}\n" and process.returncode == 5


def test_a_command_that_does_not_end_in_time_is_killed(run_group):
    process = run_group('trap "" TERM; echo >"$READY"; while :; do sleep 0.05; done', grace=1)
    run_group.wait_until_ready()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGKILL


def test_a_killed_shell_takes_the_command_with_it(run_group):
    process = run_group('echo $$ >"$READY"; exec sleep 1000')
    leader = run_group.wait_until_ready()
    process.kill()
    process.wait()
    for _ in range(200):
        if not is_alive(leader):
            break
        time.sleep(0.05)
    assert not is_alive(leader)
