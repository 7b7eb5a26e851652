"""A folder that is written under `<name>.incomplete`, can be resumed, and gets its final name when it is complete."""

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from checkpoints_conv.errors import ConversionError

JOB = "conversion.json"
LOCK = "conversion.lock"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Staging:
    """The incomplete folder of one conversion.

    Raises (on construction):
        ConversionError: the target exists; the incomplete folder belongs to another conversion, or to another process at
            this moment; too little disk space.
    """

    def __init__(self, target: Path, job: dict, needed_bytes: int):
        """
        Args:
            target: the folder to make; its parent folders are made.
            job: plain JSON values that identify source and settings; an interrupted conversion continues only with equal ones.
            needed_bytes: size of the finished folder.
        """
        if os.path.lexists(target):
            raise ConversionError(f"{target} exists; remove it, or choose another name")
        self.target = target
        self.folder = target.with_name(target.name + ".incomplete")
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            written = [path for path in self.folder.iterdir() if path.name not in (JOB, LOCK)]
            if written and self._job() != job:
                raise ConversionError(
                    f"{self.folder} holds an interrupted conversion of another source or with other settings; remove it"
                )
            if written:
                print(f"resuming {self.folder}: what is already written is compared with the source", file=sys.stderr)
            missing = needed_bytes - sum(path.stat().st_size for path in written if path.is_file())
            free = shutil.disk_usage(self.folder).free
            if missing > free:
                if not written:
                    shutil.rmtree(self.folder)
                raise ConversionError(
                    f"{target} needs {missing / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on its file system"
                )
            (self.folder / JOB).write_text(json.dumps(job), encoding="utf-8")

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The folder to write to.

        After an I/O error or Ctrl-C, what was written is kept for the next run.  After a ConversionError the source must be
        replaced first, so nothing could be reused: the folder is removed.

        Raises:
            ConversionError: names the file and quotes the file system's error.
        """
        kept = f"; what is complete was kept in {self.folder}: run the same command again to continue from there"
        with self._lock, _explained(self.folder, kept):
            try:
                yield self.folder
            except ConversionError:
                shutil.rmtree(self.folder)
                raise

    def finish(self) -> None:
        """Give the folder its name."""
        (self.folder / JOB).unlink()
        (self.folder / LOCK).unlink()
        os.replace(self.folder, self.target)

    def _take_lock(self) -> IO:
        """Held until `writing` ends, so that two conversions never write to one folder."""
        lock = open(self.folder / LOCK, "wb")  # noqa: SIM115  the caller closes it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionError(f"another process is writing {self.folder}") from None
        return lock

    def _job(self) -> dict | None:
        path = self.folder / JOB
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not written by this class
            return None


@contextmanager
def _explained(folder: Path, kept: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Of a copy from file to file, shutil names the source first.
        place = Path((error.filename2 if error.errno in FULL else None) or error.filename or folder)
        ours = place == folder or folder in place.parents or place in folder.parents
        raise ConversionError(f"cannot {'write' if ours else 'read'} {place}: {error.strerror or error}{kept}") from error


def fingerprint(folder: Path) -> dict[str, list[int]]:
    """Size and modification time of every file, to notice that a source has changed under an interrupted conversion."""
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(folder.iterdir()) if path.is_file()}


def check_unchanged(folder: Path, before: dict[str, list[int]]) -> None:
    """Compare a source with its `fingerprint` of the beginning.

    Raises:
        ConversionError: names the files that have changed.
    """
    now = fingerprint(folder)
    changed = [name for name in sorted(now.keys() | before.keys()) if now.get(name) != before.get(name)]
    if changed:
        raise ConversionError(
            f"{folder} has changed during the conversion ({', '.join(changed[:5])}); run it again when nothing writes to it"
        )
