"""Ray on a machine that is shared: what it needs is checked before it starts, and a start ends in time, one way or the other."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple

import pytest

from megatron_drmas.cluster import ray_start
from megatron_drmas.cluster.process import ProcessFailure
from megatron_drmas.cluster.ray_start import LONGEST_SOCKET, SOCKET, RaySession, check_ray, make_folder, named_cluster
from megatron_drmas.config.errors import ConfigError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listener():
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refusal(nodes=1):
    with pytest.raises(ConfigError) as caught:
        check_ray(nodes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "given, named",
    [
        (None, None),
        ("", None),
        ("local", None),
        ("node1:6379", ("node1", 6379)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_names_a_cluster_or_none(monkeypatch, given, named):
    if given is not None:
        monkeypatch.setenv("RAY_ADDRESS", given)
    assert named_cluster() == named


@pytest.mark.parametrize(
    "given",
    [
        "http://127.0.0.1:8265",
        "ray://head:10001",
        "auto",
        "head",
        "head:",
        ":6379",
        "head:0",
        "head:65536",
        "head:x",
        "a b:1",
        "head:6379/x",
    ],
)
def test_what_is_no_address_is_refused_before_anything_starts(monkeypatch, given):
    monkeypatch.setenv("RAY_ADDRESS", given)
    assert refusal().startswith(f"RAY_ADDRESS = {given!r}: is not HOST:PORT")


def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch, listener):
    monkeypatch.setenv("RAY_ADDRESS", listener)
    check_ray(1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")
        began = time.monotonic()
        assert "nothing answers there" in refusal() and time.monotonic() - began < 5


def test_several_nodes_need_a_cluster_that_is_there():
    assert refusal(nodes=2).startswith("cluster.nodes = 2: RAY_ADDRESS names no cluster")


@pytest.mark.parametrize(
    "length, fits", [(LONGEST_SOCKET - len(SOCKET), True), (LONGEST_SOCKET - len(SOCKET) + 1, False), (95, False)]
)
def test_a_folder_holds_the_paths_of_sockets_or_another_is_taken(monkeypatch, length, fits):
    place = "/tmp/" + "x" * (length - 5)
    os.makedirs(place)
    try:
        monkeypatch.setenv("TMPDIR", place)
        folder = make_folder()
        assert str(folder.parent) == (place if fits else "/tmp") and (folder.stat().st_mode & 0o777) == 0o700
        assert len(f"{folder}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store") <= LONGEST_SOCKET
        folder.rmdir()
        monkeypatch.setenv("RAY_TMPDIR", place)
        if fits:
            make_folder().rmdir()
        else:
            assert f"RAY_TMPDIR = {place!r}" in refusal() and "characters too long" in refusal()
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("place", ["file", "file/under", "relative"])
def test_where_no_folder_can_be_is_refused(monkeypatch, tmp_path, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    place = place if place == "relative" else str(tmp_path / place)
    if len(place) + len(SOCKET) > LONGEST_SOCKET:
        monkeypatch.setattr(ray_start, "LONGEST_SOCKET", 1000)
    monkeypatch.setenv("RAY_TMPDIR", place)
    assert f"RAY_TMPDIR = {place!r}: Ray's sockets and logs fit nowhere" in refusal()


@pytest.mark.parametrize("full, key", [("/dev/shm", "/dev/shm"), ("/tmp", "RAY_TMPDIR")])
def test_a_full_disk_is_named(monkeypatch, full, key):
    monkeypatch.setattr(ray_start.shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**20 if str(path) == full else 2**39))
    message = refusal()
    assert message.startswith(key) and "1 MiB free" in message


def test_a_check_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_start, "LONGEST_SOCKET", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check_ray(1)
    assert list(tmp_path.iterdir()) == []


def start(session):
    began = time.monotonic()
    try:
        with pytest.raises(ProcessFailure) as caught:
            asyncio.run(session.start())
    finally:
        session.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value), time.monotonic() - began


def test_a_start_that_never_ends_is_given_up_in_time(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_start.ray, "init", lambda **options: time.sleep(60))
    message, seconds = start(RaySession(1, 0.3, tmp_path))
    assert "not started after 0.3 s (cluster.start_timeout_s)" in message and seconds < 5


def test_a_start_that_fails_is_one_line_with_its_logs(monkeypatch, tmp_path):
    def init(_temp_dir, **options):
        logs = f"{_temp_dir}/session_2026/logs"
        os.makedirs(logs)
        with open(f"{logs}/raylet.out", "w") as file:
            file.write("why")
        raise RuntimeError("no raylet\nand more")

    monkeypatch.setattr(ray_start.ray, "init", init)
    message, _ = start(RaySession(1, 5, tmp_path))
    assert (
        message == f"Ray: did not start: RuntimeError: no raylet; logs: {tmp_path}/ray"
        and (tmp_path / "ray" / "raylet.out").read_text() == "why"
    )


def test_a_listener_that_is_no_ray_is_given_up_in_time(monkeypatch, tmp_path, listener):
    monkeypatch.setenv("RAY_ADDRESS", listener)
    message, seconds = start(RaySession(1, 2, tmp_path))
    assert f"RAY_ADDRESS={listener} did not answer in 2 s" in message and seconds < 10


# Two clusters in one process after the other cannot share its Ray, so each has a process.
OWN = """
from megatron_drmas.cluster.ray_start import RaySession
import asyncio, sys
from pathlib import Path
import ray

async def main():
    session = RaySession(1, 240, Path(sys.argv[1]))
    try:
        await session.start()
        print(len(ray.nodes()), session._folder, flush=True)
        sys.stdin.read()
    finally:
        session.stop()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_runs_have_a_cluster_each_and_leave_nothing(tmp_path):
    """The second joins neither the first nor an address file that names it, with a read-only home and a long TMPDIR."""
    environment = {**os.environ, "HOME": "/dev/null", "TMPDIR": "/tmp/" + "x" * 90}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", OWN, str(tmp_path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = []
    for run in runs:
        nodes, folder = run.stdout.readline().split()
        folders.append(folder)
        assert nodes == "1" and re.fullmatch(r"/tmp/ray_\w{8}", folder)
    assert len(set(folders)) == 2
    for run in runs:
        assert run.communicate()[1] == "" and run.returncode == 0
    for folder in folders:
        assert not os.path.exists(folder)
        assert subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True).stdout == ""
