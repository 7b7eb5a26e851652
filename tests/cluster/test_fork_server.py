"""Workers that are forked instead of importing: each is like an ordinary process, and none outlives what it belongs to."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_drmas.cluster import fork_server
from megatron_drmas.cluster.fork_server import ForkServer

TELL = """
import json, os, signal, sys
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
found = {"pid": os.getpid(), "group": os.getpgid(0), "argv": sys.argv[1:], "folder": os.getcwd(), "it": os.environ.get("IT")}
found |= {"other": os.environ.get("OTHER"), "marked": "marker" in sys.modules, "ray": "ray" in sys.modules, "blocked": blocked}
found |= {"open": [int(name) for name in os.listdir("/proc/self/fd")]}
print(json.dumps(found), flush=True)
print("said", file=sys.stderr)
if "wait" in sys.argv:
    import time
    time.sleep(60)
sys.exit(3)
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Makes a server that imports a module with this code."""
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setitem(fork_server.PRELOADED, "actor", ("marker",))

    def make(code=""):
        (tmp_path / "marker.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('.')\n{code}")
        (tmp_path / "socket").mkdir()
        return ForkServer("actor", tmp_path / "socket", {"PYTHONPATH": str(tmp_path), "IT": "server's"}, tmp_path / "log")

    return make


def ask(executable, tmp_path, *arguments, **options):
    """A client whose worker runs tell.py."""
    environment = {name: value for name, value in os.environ.items() if name != "OTHER"} | {"IT": "worker's"}
    return subprocess.Popen(
        [*shlex.split(executable), str(tmp_path / "tell.py"), *arguments],
        cwd=tmp_path / "elsewhere",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(pid, seconds=5.0):
    until = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


def test_a_worker_is_what_its_client_would_have_been_and_the_imports_are_done_once(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "of the driver alone")

    async def main():
        async with server() as running:
            executable = await running.py_executable(30)
            block = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # noqa: E731
            clients = [ask(executable, tmp_path, "a b", str(number), preexec_fn=block) for number in range(3)]
            return [(*client.communicate(timeout=30), client.returncode, client.pid) for client in clients]

    answers = asyncio.run(main())
    for number, (out, err, code, client) in enumerate(answers):
        found = json.loads(out)
        assert (err, code) == ("said\n", 3)
        assert found["argv"] == ["a b", str(number)] and found["folder"] == str(tmp_path / "elsewhere")
        assert found["it"] == "worker's" and found["other"] is None
        assert found["marked"] and not found["ray"] and found["blocked"] == [signal.SIGINT]
        assert found["pid"] == found["group"] != client
        assert max(found["open"]) <= 3, "only the standard streams, and the listing's own"
    assert (tmp_path / "imports").read_text() == "."
    assert not (tmp_path / "socket").exists()


@pytest.mark.parametrize("victim", ["client", "worker", "server", "nobody"])
def test_what_belongs_together_ends_together(server, tmp_path, victim):
    async def main():
        async with server() as running:
            executable = await running.py_executable(30)
            client, other = (ask(executable, tmp_path, "wait") for _ in range(2))
            worker, stays = (json.loads(each.stdout.readline())["pid"] for each in (client, other))
            pids = {"client": client.pid, "worker": worker, "server": running._process.pid}
            if victim != "nobody":
                os.kill(pids[victim], signal.SIGKILL)
                code = client.wait(5)
                assert code == {"client": -signal.SIGKILL, "worker": -signal.SIGKILL & 0xFF, "server": 1}[victim]
                assert ended(worker)
            if victim in ("client", "worker"):
                assert other.poll() is None and psutil.pid_exists(stays)
        assert ended(worker) and ended(stays) and client.wait(5) is not None and other.wait(5) is not None
        assert not (tmp_path / "socket").exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    "code, reason",
    [("import nowhere", "No module named 'nowhere'"), ("import threading\nthreading.Thread(target=input).start()", "2 threads")],
)
def test_a_server_that_cannot_fork_is_none_and_its_log_says_why(server, tmp_path, code, reason):
    async def main():
        async with server(code) as running:
            return await running.py_executable(30)

    assert asyncio.run(main()) is None
    assert reason in (tmp_path / "log").read_text()


def test_a_server_that_never_gets_ready_is_given_up_in_time_and_ended(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "ENDING_TIMEOUT_S", 0.1)

    async def main():
        async with server("import time\ntime.sleep(60)") as running:
            with pytest.raises(TimeoutError):
                await running.py_executable(0.1)
            return running._process.pid

    assert ended(asyncio.run(main()))


DRIVER = """
import asyncio, os, sys
from pathlib import Path
from megatron_drmas.cluster import fork_server

async def main(folder):
    fork_server.PRELOADED["actor"] = ("json",)
    async with fork_server.ForkServer("actor", folder / "socket", {}, folder / "log") as running:
        print(running._process.pid, await running.py_executable(30), flush=True)
        await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_driver_that_is_killed_leaves_nothing(tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    for name in ("socket", "elsewhere"):
        (tmp_path / name).mkdir()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    server, _, executable = driver.stdout.readline().strip().partition(" ")
    client = ask(executable, tmp_path, "wait")
    worker = json.loads(client.stdout.readline())["pid"]
    driver.kill()
    driver.wait()
    assert client.wait(5) == 1 and ended(worker) and ended(int(server))
    assert not Path(tmp_path, "socket").exists()
