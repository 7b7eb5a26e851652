"""Ray for one run: a cluster of its own, apart from every other on the machine, or the one that RAY_ADDRESS names."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import ray

from megatron_drmas.cluster.process import ProcessFailure
from megatron_drmas.cluster.signals import reinstall_handlers
from megatron_drmas.config.errors import ConfigError

OBJECT_STORE_BYTES = 128 * 2**20  # at least
TEMPORARY_BYTES = 128 * 2**20  # for Ray's logs and sockets
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "ray_"
LONGEST_SOCKET = 107  # bytes of a Unix socket's path
# What Ray and `tempfile` append to the folder, with the longest process id.
SOCKET = f"/{PREFIX}12345678/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
CONNECT_TIMEOUT_S = 5.0
ENDING_TIMEOUT_S = 5.0
POLL_S = 0.05


def named_cluster() -> tuple[str, int] | None:
    """Host and port that RAY_ADDRESS names; None where a run starts Ray itself.

    Raises:
        ConfigError: it names something else.
    """
    given = os.environ.get("RAY_ADDRESS", "").strip()
    if given in ("", "local"):
        return None
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})", given)
    if not match or not 0 < int(match[3]) < 65536:
        raise ConfigError(
            "RAY_ADDRESS",
            given,
            "is not HOST:PORT of a cluster",
            "unset it, and the run starts Ray itself, or name the port of the cluster's head",
        )
    return match[1] or match[2], int(match[3])


def check_ray(nodes: int, object_store_bytes: int = OBJECT_STORE_BYTES) -> None:
    """Check what Ray needs of this machine, without starting it.

    Args:
        nodes: how many the run has GPUs on.
        object_store_bytes: of a cluster that the run starts.

    Raises:
        ConfigError: names the variable or the folder, and the remedy.
    """
    address = named_cluster()
    if address is not None:
        try:
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConfigError(
                "RAY_ADDRESS", os.environ["RAY_ADDRESS"], f"nothing answers there ({error})", "start Ray there, or unset it"
            ) from error
        return
    if nodes > 1:
        raise ConfigError(
            "cluster.nodes",
            nodes,
            "RAY_ADDRESS names no cluster, and Ray that a run starts has one node",
            "start Ray on all of them, as slurm/lib.sh does",
        )
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free < object_store_bytes:
        raise ConfigError(
            str(SHARED_MEMORY),
            f"{free >> 20} MiB free",
            f"Ray's objects take {object_store_bytes >> 20} MiB",
            "enlarge it (containers: --shm-size), or remove what ended processes left there",
        )
    shutil.rmtree(make_folder())


def make_folder() -> Path:
    """A folder of the run's own for Ray's sockets and logs: in RAY_TMPDIR, or in the first of TMPDIR and /tmp that can hold it.

    Raises:
        ConfigError: none can.
    """
    given = os.environ.get("RAY_TMPDIR")
    if given:
        with contextlib.suppress(OSError):  # said below
            os.makedirs(given, exist_ok=True)
    places = [given] if given else list(dict.fromkeys(filter(None, (os.environ.get("TMPDIR"), "/tmp"))))
    problems = []
    for place in places:
        problem = _unusable(place)
        if problem is None:
            try:
                return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            except OSError as error:
                problem = error.strerror
        problems.append(f"{place} {problem}")
    raise ConfigError(
        "RAY_TMPDIR",
        given,
        f"Ray's sockets and logs fit nowhere: {', '.join(problems)}",
        "set it to a folder with a short path that can be written",
    )


def _unusable(place: str) -> str | None:
    if not os.path.isabs(place):
        return "is not an absolute path"
    length = len(os.fsencode(place.rstrip("/"))) + len(SOCKET)
    if length > LONGEST_SOCKET:
        return f"is {length - LONGEST_SOCKET} characters too long for the path of a socket"
    if not os.path.isdir(place):
        return "is not a directory"
    free = shutil.disk_usage(place).free
    return f"has {free >> 20} MiB free of the {TEMPORARY_BYTES >> 20} that it takes" if free < TEMPORARY_BYTES else None


class RaySession:
    """Started once, and stopped; nothing of a cluster of its own is left behind.

    Args:
        processes: how many workers a cluster of its own starts at a time.
        timeout_s: for the start as a whole.
        logs: where the logs of a start that failed are kept.
        object_store_bytes: room for the objects of a cluster of its own.
        prestart: start the workers before they are asked for; those that are asked for with a `py_executable` are others.
    """

    def __init__(
        self, processes: int, timeout_s: float, logs: Path, object_store_bytes: int = OBJECT_STORE_BYTES, prestart: bool = True
    ):
        self._processes = processes
        self._object_store_bytes = object_store_bytes
        self._timeout_s = timeout_s
        self._logs = logs
        self._prestart = prestart
        self._folder: Path | None = None
        self._error: BaseException | None = None
        self._tried, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start Ray, or connect to it.

        Raises:
            ConfigError: as of `check_ray`.
            ProcessFailure: it did not start, or did not answer, in time.
        """
        deadline = time.monotonic() + self._timeout_s
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # devices are set by `placement`, not by Ray
        options: dict = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        address = named_cluster()
        if address is not None:
            await self._until_healthy(deadline)
            options["address"] = os.environ["RAY_ADDRESS"].strip()
        else:
            self._folder = make_folder()
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray makes one in the home folder
            options |= {
                "address": "local",
                "num_cpus": self._processes,
                "include_dashboard": False,
                "object_store_memory": self._object_store_bytes,
                "_temp_dir": str(self._folder),
                "_system_config": {"prestart_worker_first_driver": self._prestart},
            }
        in_main_thread = threading.current_thread() is threading.main_thread()
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and in_main_thread:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `stop` is reached
        # In a thread, since it may never return; one that lives on, since Ray's processes end with the thread that started them.
        self._thread = threading.Thread(target=self._hold, args=(options,), name="ray", daemon=True)
        self._thread.start()
        while not self._tried.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if in_main_thread:
                reinstall_handlers()
        if not self._tried.is_set():
            raise ProcessFailure(f"Ray: not started after {self._timeout_s:g} s (cluster.start_timeout_s){self._keep_logs()}")
        if self._error is not None:
            first = str(self._error).strip().split("\n")[0]
            raise ProcessFailure(f"Ray: did not start: {type(self._error).__name__}: {first}{self._keep_logs()}") from self._error

    def stop(self) -> None:
        """End what was started, or disconnect."""
        if self._tried.is_set() and self._error is None:
            ray.shutdown(wait_for_processes=True)
        self._over.set()
        if self._folder is not None:
            ended = []
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                    if any(str(self._folder) in argument for argument in process.cmdline()):
                        process.kill()
                        ended.append(process)
            psutil.wait_procs(ended, ENDING_TIMEOUT_S)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _hold(self, options: dict) -> None:
        logger = logging.getLogger("ray")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            ray.init(**options)
        except BaseException as error:  # raised by `start`
            self._error = error
        finally:
            logger.setLevel(level)
            self._tried.set()
        self._over.wait()

    async def _until_healthy(self, deadline: float) -> None:
        """Ask in a process of its own: a listener that is not Ray makes a client wait for minutes, and then ends its process."""
        given = os.environ["RAY_ADDRESS"].strip()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "health-check",
            "--address",
            given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            code = await asyncio.wait_for(process.wait(), deadline - time.monotonic())
        except TimeoutError as error:
            raise ProcessFailure(
                f"Ray: what listens at RAY_ADDRESS={given} did not answer in {self._timeout_s:g} s (cluster.start_timeout_s)"
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
        if code != 0:
            raise ProcessFailure(
                f"Ray: what listens at RAY_ADDRESS={given} is not a healthy Ray cluster of this version; unset it or name another"
            )

    def _keep_logs(self) -> str:
        if self._folder is None:
            return ""
        kept = self._logs / "ray"
        found = [path for name in ("gcs_server", "raylet") for path in self._folder.glob(f"session_2*/logs/{name}.*")]
        if not found:
            return ""
        kept.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copy(path, kept)
        return f"; logs: {kept}"
