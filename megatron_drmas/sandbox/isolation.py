"""The commands that start a guest, by kind of isolation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.sandbox.settings import SandboxConfig

GUEST = Path(__file__).with_name("guest.py")
FIRST_UID = 61_000  # each worker has a user of its own, so that its processes are counted by themselves
MIB = 2**20
PROBE_TIMEOUT_S = 20.0
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64")


def choose_kind(config: SandboxConfig, key: str) -> str:
    """bubblewrap, apptainer or none.

    Args:
        key: of the settings in the configuration, for errors.

    Raises:
        ConfigError: it is not there, or does not work on this machine.
    """
    kind = "bubblewrap" if config.kind == "auto" else config.kind
    remedy = "install bubblewrap, use an Apptainer image (kind=apptainer), or kind=none for programs that are trusted"
    if kind == "none":
        return kind
    if kind == "apptainer" and not config.image:
        raise ConfigError(f"{key}.image", "", "is needed by kind=apptainer", "name an image that has Python 3")
    program = {"bubblewrap": "bwrap", "apptainer": "apptainer"}[kind]
    if shutil.which(program) is None:
        raise ConfigError(f"{key}.kind", config.kind, f"there is no {program} on this machine", remedy)
    try:
        done = subprocess.run(
            guest_command(config, kind, 0), input=b"", capture_output=True, timeout=PROBE_TIMEOUT_S, start_new_session=True
        )
        problem = "" if done.stderr.startswith(b"ready") else done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        problem = [f"it did not start in {PROBE_TIMEOUT_S:g} s"]
    if problem != "":
        raise ConfigError(f"{key}.kind", config.kind, f"{program} does not work here: {''.join(problem) or 'no message'}", remedy)
    return kind


def guest_command(config: SandboxConfig, kind: str, worker: int) -> list[str]:
    """What starts a guest.

    Args:
        kind: bubblewrap | apptainer | none.
        worker: its number, from 0.
    """
    superuser = os.geteuid() == 0
    uid = FIRST_UID + worker if superuser and kind == "bubblewrap" else 0
    cpu_s = max(1, round(config.timeout_s) + 1)
    limits = [str(n) for n in (uid, config.memory_mib * MIB, config.processes, config.disk_mib * MIB, cpu_s)]
    if kind == "none":
        return [sys.executable, "-I", "-S", str(GUEST), *limits]
    if kind == "apptainer":
        options = ["--containall", "--cleanenv", "--no-home", "--net", "--network=none", "--no-privs", "--pwd", "/tmp"]
        return [
            "apptainer",
            "exec",
            *options,
            "--bind",
            f"{GUEST}:/guest.py:ro",
            config.image,
            "python3",
            "-I",
            "-S",
            "/guest.py",
            *limits,
        ]
    # The superuser needs no user namespace, and in none of its own each worker can have a user that only its processes have.
    command = ["bwrap", "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", *([] if superuser else ["--unshare-user", "--uid", "65534", "--gid", "65534"])]
    for folder in SYSTEM:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    command += ["--ro-bind", sys.base_prefix, "/python", "--ro-bind", str(GUEST), "/guest.py"]
    command += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--size",
        str(config.disk_mib * MIB),
        "--tmpfs",
        "/tmp",
        "--chmod",
        "1777",
        "/tmp",
    ]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--hostname", "sandbox", "--clearenv", "--setenv", "HOME", "/tmp"]
    command += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"]
    python = f"/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return [*command, python, "-I", "-S", "/guest.py", *limits]
