"""Programs that try to get out, or to take more than their share, are contained; those that do not are undisturbed."""

import asyncio
import hashlib
import os
import socket
import time
from pathlib import Path

import pytest

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.sandbox.isolation import choose_kind, guest_command
from megatron_drmas.sandbox.pool import SandboxError, SandboxPool
from megatron_drmas.sandbox.settings import SandboxConfig

LIMITS = SandboxConfig(timeout_s=3.0, memory_mib=256, processes=8, disk_mib=8, output_kib=64)


@pytest.fixture(scope="module")
def kind():
    try:
        return choose_kind(LIMITS, "sandbox")
    except ConfigError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def use(kind, work, config=LIMITS):
    async def within():
        async with SandboxPool(config, kind, config.workers) as pool:
            return await work(pool)

    return asyncio.run(within())


def run(kind, code, stdin="", config=LIMITS):
    return use(kind, lambda pool: pool.run(code, stdin), config)


def guests() -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes()
        except OSError:
            continue
        if b"guest.py" in line:
            lines.append(line.replace(b"\0", b" ").decode())
    return lines


def test_a_program_has_its_input_its_output_and_its_status(kind):
    result = run(
        kind, "import sys\nname = input()\nprint('hello', name)\nprint('bye', file=sys.stderr)\nsys.exit(3)", "you\nmore"
    )
    assert (result.stdout, result.stderr, result.exit_code, result.killed) == ("hello you\n", "bye\n", 3, None)
    assert not result.succeeded and run(kind, "pass").succeeded


def test_an_error_is_shown_without_what_is_not_the_programs(kind):
    result = run(kind, "def f():\n    return 1 / 0\nprint('so far')\nf()")
    assert result.stdout == "so far\n" and result.exit_code == 1
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n") and "guest.py" not in result.stderr


@pytest.mark.parametrize("size", [0, 65536, 65537, 1_000_000])
def test_input_of_any_size_arrives_whole(kind, size):
    text = "é" * (size // 2) + "x" * (size % 2)
    code = "import hashlib, sys\nprint(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    assert run(kind, code, text).stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


ESCAPES = {
    "never ends": ("while True: pass", "time"),
    "sleeps": ("import time; time.sleep(60)", "time"),
    "ignores signals": ("import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", "time"),
    "floods its output": ("while True: print('x' * 1000)", "output"),
    "floods its errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "forks": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "time"),
    "leaves a child behind": ("import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)", None),
    "takes memory": ("x = bytearray(2**30)", MemoryError),
    "takes memory in children": (
        "import os\nx = []\nwhile True:\n    try:\n        if os.fork() == 0: x.append(bytearray(10**8))\n"
        "    except (OSError, MemoryError): pass",
        "time",
    ),
    "fills the disk with a file": ("open('/tmp/x', 'wb').write(bytes(10**8))", (OSError, MemoryError)),
    "fills the disk with files": ("for n in range(100):\n    with open(f'/tmp/{n}', 'wb') as f: f.write(bytes(10**6))", OSError),
    "writes elsewhere": ("open('/usr/x', 'w')", OSError),
    "writes to the root": ("open('/x', 'w')", OSError),
    "reads the password file": ("open('/etc/passwd').read()", FileNotFoundError),
    "reads a home": ("import os; os.listdir('/home')", FileNotFoundError),
    "becomes the superuser": ("import os; os.setuid(0)", PermissionError),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", PermissionError),
    "traces its parent": ("import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", PermissionError),
    "reaches the network": ("import socket; socket.create_connection(('192.0.2.1', 80), 1)", OSError),
    "raises its limits": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", ValueError),
    "follows a link out": ("import os; os.symlink('/proc/1/root/etc/passwd', '/tmp/x'); open('/tmp/x').read()", OSError),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_contained(kind, name):
    code, expected = ESCAPES[name]
    result = run(kind, code)
    if expected is None or isinstance(expected, str):
        assert result.killed == expected
    else:
        names = [error.__name__ for error in (expected if isinstance(expected, tuple) else (expected,))]
        subclasses = {"OSError": ("OSError", "PermissionError", "FileNotFoundError", "ConnectionRefusedError", "TimeoutError")}
        wanted = [each for name in names for each in subclasses.get(name, (name,))]
        assert result.exit_code == 1 and result.stderr.splitlines()[-1].startswith(tuple(wanted)), result
    deadline = time.monotonic() + 5
    while guests() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert guests() == []


def test_a_server_of_this_machine_is_not_reached(kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(kind, f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    assert result.stderr.splitlines()[-1].startswith("ConnectionRefusedError")


def test_a_program_sees_only_its_own_processes_and_nobody_elses_files(kind):
    async def two(pool):
        code = "import os, time\nopen('/tmp/mine', 'w').write('x'); time.sleep(0.3)\n"
        code += "print([p for p in os.listdir('/proc') if p.isdigit()], os.listdir('/tmp'))"
        return await asyncio.gather(pool.run(code), pool.run(code))

    for result in use(kind, two):
        processes, files = result.stdout.strip().split("] [")
        assert processes.count("'") <= 6 and files == "'mine']"


def test_the_environment_of_the_run_is_not_the_programs(kind, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    assert "hush" not in run(kind, "import os; print(os.environ, open('/proc/1/environ', 'rb').read())").stdout


def test_many_programs_have_their_own_results_whatever_runs_beside_them(kind):
    async def many(pool):
        codes = [f"print({n} ** 2)" if n % 5 else "while True: print('x' * 9999)" for n in range(50)]
        return await asyncio.gather(*map(pool.run, codes)), dict(pool.counts)

    results, counts = use(kind, many)
    for n, result in enumerate(results):
        assert result.killed == "output" if n % 5 == 0 else result.stdout == f"{n**2}\n"
    assert counts == {"ended": 40, "time": 0, "output": 10}


def test_a_session_answers_line_by_line_until_a_limit(kind):
    async def talk(pool):
        code = (
            "for line in open(0):\n    n = int(line)\n    print('x' * n if n < 10**6 else exec('while True: pass'), flush=True)"
        )
        async with pool.sessions(code, "print(input() + '!')") as (one, other):
            said = [await one.ask("3"), await other.ask("a"), await other.ask("b"), await one.ask("2")]
            return said, await one.ask("1000000"), one.killed, await one.ask("1"), other.killed

    said, late, killed, after, other = use(kind, talk)
    assert said == ["xxx", "a!", None, "xx"] and (late, killed, after, other) == (None, "time", None, None)


def test_a_sandbox_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr("megatron_drmas.sandbox.pool.guest_command", lambda *_: ["sh", "-c", "echo no namespaces >&2; exit 1"])
    with pytest.raises(SandboxError, match="did not start 3 times: no namespaces"):
        run("bubblewrap", "pass")


@pytest.mark.parametrize(
    "config, message",
    [
        (SandboxConfig(), "kind = 'auto': there is no bwrap on this machine; install bubblewrap"),
        (SandboxConfig(kind="apptainer"), "image = '': is needed by kind=apptainer; name an image"),
        (SandboxConfig(kind="apptainer", image="x.sif"), "kind = 'apptainer': there is no apptainer"),
    ],
)
def test_a_machine_without_a_sandbox_is_refused(monkeypatch, config, message):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=f"environment.sandbox.{message}"):
        choose_kind(config, "environment.sandbox")


def test_a_sandbox_that_does_not_work_is_refused_with_what_it_says(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="bwrap does not work here: bwrap: No permissions to create a new namespace"):
        choose_kind(SandboxConfig(), "environment.sandbox")


def test_without_isolation_the_limits_still_hold():
    assert choose_kind(SandboxConfig(kind="none"), "sandbox") == "none"
    assert run("none", "while True: pass").killed == "time" and run("none", "x = bytearray(2**30)").exit_code == 1


def test_a_container_has_neither_network_nor_home():
    command = guest_command(SandboxConfig(kind="apptainer", image="py.sif"), "apptainer", 0)
    assert {"--containall", "--no-home", "--network=none", "--cleanenv"} <= set(command) and "py.sif" in command
