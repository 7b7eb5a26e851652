"""A retrieval corpus: JSON lines `{"id": str | int, "contents": str}`."""

import json
from itertools import islice
from pathlib import Path

CHECKED_LINES = 1000  # of a corpus that may have millions


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file, the line and what is expected there."""


def parse_line(raw: bytes, path: Path, number: int) -> tuple[str, str]:
    """Id and contents of one line.

    Raises:
        CorpusError: it is not what a corpus holds.
    """
    expected = f'{path}:{number}: expected {{"id": …, "contents": "…"}}'
    try:
        record = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{expected}, got a line that is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{expected}, got {type(record).__name__}")
    for key, kinds in (("id", (str, int)), ("contents", (str,))):
        if key not in record:
            raise CorpusError(f"{expected}, got no {key!r} (keys: {', '.join(map(repr, record)) or 'none'})")
        if not isinstance(record[key], kinds) or isinstance(record[key], bool):
            raise CorpusError(f"{expected}, got {key!r} of type {type(record[key]).__name__}")
    return str(record["id"]), record["contents"]


def check_corpus(path: "str | Path") -> None:
    """Read the first lines, to find what is not a corpus at all before anything starts.

    Raises:
        CorpusError: a line that is no passage, or no passage.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        lines = [(number, raw) for number, raw in enumerate(islice(file, CHECKED_LINES), 1) if raw.strip()]
    if not lines:
        raise CorpusError(f"{path}: no passage in it; a corpus needs at least one")
    for number, raw in lines:
        parse_line(raw, path, number)
