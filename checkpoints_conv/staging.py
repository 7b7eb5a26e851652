"""A folder that is written under `<name>.incomplete`, can be taken up again, and gets its name when it is complete."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from checkpoints_conv.errors import ConversionError

JOB = "conversion.json"


class Staging:
    """The incomplete folder of one conversion.

    Raises (on construction):
        ConversionError: the target exists; the incomplete folder belongs to another conversion; too little disk space.
    """

    def __init__(self, target: Path, job: dict, needed_bytes: int):
        """
        Args:
            target: the folder to make; its parent folders are made.
            job: plain JSON values that identify source and settings; an interrupted conversion goes on only with equal ones.
            needed_bytes: size of the finished folder.
        """
        self.target = target
        self.folder = target.with_name(target.name + ".incomplete")
        if target.exists():
            raise ConversionError(f"{target} exists; remove it, or choose another name")
        self.resumed = self.folder.exists()
        if self.resumed and self._job() != job:
            raise ConversionError(
                f"{self.folder} holds an interrupted conversion of another source or with other settings; remove it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        written = sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        free = shutil.disk_usage(self.folder).free
        if needed_bytes - written > free:
            if not self.resumed:
                self.folder.rmdir()
            raise ConversionError(
                f"{target} needs {_gb(needed_bytes - written)}, but only {_gb(free)} are free on its file system"
            )
        if not self.resumed:
            (self.folder / JOB).write_text(json.dumps(job), encoding="utf-8")

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The folder to write to; a file system error is explained, and what was written is kept for the next run.

        Raises:
            ConversionError: names the folder and what the file system said.
        """
        try:
            yield self.folder
        except OSError as error:
            raise ConversionError(
                f"cannot write {error.filename or self.folder}: {error.strerror or error}; what is complete was kept in "
                f"{self.folder}: run the same command again to go on from there"
            ) from error

    def finish(self) -> None:
        """Give the folder its name."""
        (self.folder / JOB).unlink()
        os.replace(self.folder, self.target)

    def _job(self) -> "dict | None":
        path = self.folder / JOB
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # interrupted before the first byte, or not ours
            return None


def fingerprint(folder: Path) -> dict[str, list[int]]:
    """Size and modification time of every file, to notice that a source has changed under an interrupted conversion."""
    return {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
