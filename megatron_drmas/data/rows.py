"""Rows of JSON lines and parquet files, as plain Python values, and the texts in them.

What a file holds is checked while it is read, so that nothing of it can fail, or mean something else, at the step that
draws it.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_drmas.config.errors import ConfigError

BATCH_ROWS = 4096
# also what is left of \times, \text{, \theta, \right, \neq, … once "\\t", "\\r" or "\\n" was read as one character
CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\t(?=imes|ext\{|frac|heta|binom|riangle)|\r(?=ight|angle|ceil|floor)|\n(?=eq\b|abla|otin)"
)


def read_rows(file: Path, key: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .jsonl or .parquet file, each with its place ("line 3", "row 3"; counted from 1).

    Args:
        file: an existing file.
        key: the configuration key the path came from, for error messages.
        remedy: what a row needs, for error messages.

    Raises:
        ConfigError: the file is not what its name says; blank lines are skipped.
    """
    return _parquet_rows(file, key) if file.suffix == ".parquet" else _json_rows(file, key, remedy)


def _json_rows(file: Path, key: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    key, str(file), f"line {number} is not JSON ({error})", "write one JSON object a line, in UTF-8"
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(key, str(file), f"line {number} is not a JSON object", remedy)
            yield f"line {number}", row


def _parquet_rows(file: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(BATCH_ROWS):
                for at, column in enumerate(batch.columns):
                    if column.type == pyarrow.float32():  # 0.1 is to stay 0.1, and not become 0.10000000149011612
                        shortest = column.cast(pyarrow.string()).cast(pyarrow.float64())
                        batch = batch.set_column(at, batch.schema.field(at).with_type(pyarrow.float64()), shortest)
                try:
                    rows = batch.to_pylist(maps_as_pydicts="strict")
                except (
                    UnicodeDecodeError,
                    KeyError,
                    OverflowError,
                    ValueError,
                ):  # somewhere in this batch: row by row, to name it
                    rows = (batch.slice(row, 1).to_pylist(maps_as_pydicts="strict")[0] for row in range(len(batch)))
                for row in rows:
                    number += 1
                    yield f"row {number}", row
    except UnicodeDecodeError as error:
        raise ConfigError(
            key, str(file), f"row {number + 1} has a text that is not UTF-8 ({error})", "write it again as UTF-8"
        ) from error
    except (pyarrow.ArrowException, OSError, KeyError, OverflowError, ValueError) as error:
        problem = f"cannot be read as parquet after row {number}: {error}" if number else f"is not parquet: {error}"
        raise ConfigError(key, str(file), problem, "give a parquet or JSON-lines file") from error


def decoded(value: Any, kinds: tuple[type, ...]) -> Any:
    """A value that was stored as the JSON text of one of `kinds` (dict, list), as some data sets store nested columns."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(inner, kinds):
            return inner
    return value


def is_missing(value: Any) -> bool:
    """None, a blank text, and the NaN that data frames put where there is nothing."""
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and math.isnan(value))


def flaw(text: str) -> str | None:
    """What keeps a text from being shown to a model or compared with an answer; None if nothing does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"cannot be written as UTF-8: it has half of a surrogate pair, {text[error.start]!r}, at character {error.start + 1}"
        )
    found = CONTROL.search(text)
    if found:
        return f"has the control character {found.group()!r} at character {found.start() + 1}; was a backslash lost?"
    return None
