"""One process at a time in a run's folder.

Between processes of one machine the kernel's lock on the file (`flock`) decides; it ends with its process, however that ends.
On file systems that machines share the lock may reach no further than the machine, or not exist.  So the file also holds a
record (host, process id, boot, start time), and its holder touches it twice a second: a record of another machine counts for
as long as its file is being touched, and where there is no `flock` at all so does one of this machine whose process is gone.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_drmas.config.errors import ConfigError

BEAT_S = 0.5  # between two touches
WATCH_S = 3.0  # without a touch: its owner is gone


class RunLockLost(RuntimeError):
    """Another process has taken the run's folder."""


class RunLock:
    """Exclusive use of a run's folder; a context manager.

    Args:
        folder: of the run, made if it is missing.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path = folder / ".lock"
        self._file = -1
        self._record: dict[str, Any] = {}
        self._stop = threading.Event()

    def __enter__(self) -> "RunLock":
        """Take the folder.

        Raises:
            ConfigError: a living process has it (the message names its host and id), or it cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                "name", str(self._folder), f"{self._path}: {error.strerror}", "choose a folder that can be written"
            ) from error
        try:
            reliable = self._flock()
            found = self._read()
            if found and not (reliable and found.get("boot") == _boot()) and self._lives(found):
                raise self._taken(found)
        except BaseException:
            os.close(self._file)
            raise
        self._record = {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot(), "started": _started(os.getpid())}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(self._record).encode(), 0)
        os.fsync(self._file)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._read() == self._record:
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def confirm(self, lost: Callable[[], None] = lambda: None) -> None:
        """Make sure that the folder still is this process's.

        Args:
            lost: called before the error is raised.

        Raises:
            RunLockLost: a machine that this one's touches did not reach has taken it.
        """
        found = self._read()
        if found != self._record:
            lost()
            raise RunLockLost(f"{self._folder} has been taken by {_called(found)}; this run must not continue")

    def _flock(self) -> bool:
        """Take the kernel's lock; whether the file system has such locks."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            time.sleep(0.0 if self._read() else BEAT_S)  # it may be about to write its record
            raise self._taken(self._read()) from error
        except OSError:
            return False
        return True

    def _lives(self, found: dict[str, Any]) -> bool:
        """Whether the process of a record, which this machine's `flock` says nothing about, is there."""
        if found.get("boot") == _boot() and found.get("started") is not None and _started(found.get("pid")) == found["started"]:
            return found["pid"] != os.getpid()
        until, touched = time.monotonic() + WATCH_S, self._touched()
        while time.monotonic() < until:
            time.sleep(BEAT_S / 5)
            if self._touched() != touched:
                return True
        return False

    def _touched(self) -> int:
        with open(self._path, "rb") as fresh:  # opening asks a file server again
            return os.fstat(fresh.fileno()).st_mtime_ns

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_bytes() or b"{}")
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                os.utime(self._path)
            except OSError:  # `confirm` says so if the file is gone
                continue

    def _taken(self, found: dict[str, Any]) -> ConfigError:
        return ConfigError(
            "name", str(self._folder), f"is in use by {_called(found)}", "wait for its end, stop it, or choose another name=…"
        )


def _called(record: dict[str, Any]) -> str:
    return f"process {record['pid']} on host {record['host']}" if {"pid", "host"} <= record.keys() else "another process"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int | None) -> int | None:
    """Clock ticks from the boot to a process's start; None: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
