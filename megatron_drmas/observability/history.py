"""metrics.jsonl: what a run logged, one JSON object a line, the durable source of everything shown.

Every line has `kind`, `step`, `seconds` (by phase, since the line before) and `peak_memory_gib` (so far), and a step's or the
last one `background` (likewise seconds, of work beside the phases), where there was any.  Results
("step", "evaluation", and a step that was "refused") are undone when the run goes back to an earlier checkpoint, and so is
its "end"; events ("start", "restart", "change") have happened and stay.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS, RESULTS = ("start", "restart", "change"), ("step", "evaluation", "refused")


class HistoryError(ValueError):
    """A metrics.jsonl that cannot be read or written; the message names file and line."""


def write_atomically(path: Path, content: str) -> None:
    """Replace `path` by `content` (UTF-8; what UTF-8 cannot hold becomes a character reference).

    A reader sees the old file or the new one; after an error, the old one.
    """
    temp_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temp_path, "wb") as file:
            file.write(content.encode("utf-8", "xmlcharrefreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp_path, path)
    finally:
        temp_path.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    """Strict JSON on one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file; a last line without its end, being written or cut off by a crash, is left out.

    Raises:
        HistoryError: a complete line that is not a JSON object; names file and line.
    """
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
            except ValueError as error:
                raise HistoryError(f"{path}:{number}: {error}; remove the line or restore the file") from error
            if not isinstance(line, dict):
                shown = text.decode(errors="replace").strip()[:80]
                raise HistoryError(f"{path}:{number}: {shown} is not a JSON object; remove the line or restore the file")
            yield line


class History:
    """The lines of one run's metrics.jsonl, on disk only."""

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return read_json_lines(self.path) if self.path.exists() else iter(())

    def append(self, line: dict[str, Any]) -> None:
        """Add one line; on disk when this returns.

        Raises:
            HistoryError: it could not be written.
        """
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            what = f"{line['kind']} {line['step']}"
            raise HistoryError(
                f"{self.path}: the line of {what} could not be written: {error.strerror}; make room, and the same command "
                "continues from the last checkpoint"
            ) from error

    def cut(self, step: int) -> None:
        """Keep the events, and the results of no more than `step` steps."""
        kept = [line for line in self if line["kind"] in EVENTS or (line["kind"] in RESULTS and line["step"] <= step)]
        write_atomically(self.path, "".join(to_json(line) + "\n" for line in kept))
