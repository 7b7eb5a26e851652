"""A retrieval corpus: JSON lines `{"id": str | int, "contents": str}`."""

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_TOPK = 100  # passages of one answer
CHECKED_BYTES = 256 * 2**20  # before the start, of a corpus that may have many times as much


class RetrievalError(ValueError):
    """What a retrieval server cannot serve from."""


class CorpusError(RetrievalError):
    """A corpus that cannot be read; the message names the file, the line and what is expected there."""


def parse_line(raw: bytes, path: Path, number: int) -> tuple[str, str]:
    """Id and contents of one line.

    Raises:
        CorpusError: it is not what a corpus holds.
    """
    expected = f'{path}:{number}: expected {{"id": …, "contents": "…"}}'
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{expected}, got a line that is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{expected}, got {type(record).__name__}")
    for key, kinds in (("id", (str, int)), ("contents", (str,))):
        if key not in record:
            raise CorpusError(f"{expected}, got no {key!r} (keys: {', '.join(map(repr, record)) or 'none'})")
        if not isinstance(record[key], kinds) or isinstance(record[key], bool):
            raise CorpusError(f"{expected}, got {key!r} of type {type(record[key]).__name__}")
    identity, contents = str(record["id"]), record["contents"]
    for key, text in (("id", identity), ("contents", contents)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{expected}, got {key!r} with half of a surrogate pair, {text[error.start]!r}, which is not text"
            ) from error
        if "\0" in text:
            raise CorpusError(f"{expected}, got {key!r} with a NUL character")
    return identity, contents


def check_corpus(path: "str | Path") -> None:
    """Read a corpus, or the first `CHECKED_BYTES` of a large one, before anything starts; its server reads all of it.

    Raises:
        CorpusError: a line that is not a passage, an id that was used before, or no passage.
        OSError: the file cannot be read.
    """
    offset = None
    for offset, _ in read_passages(Path(path)):
        if offset >= CHECKED_BYTES:
            break
    if offset is None:
        raise CorpusError(f"{path}: no passage in it; a corpus needs at least one")


@dataclass(frozen=True)
class Passage:
    """One passage of a result: its corpus fields and its score (higher is better)."""

    id: str
    contents: str
    score: float


def read_passages(path: Path) -> Iterator[tuple[int, str]]:
    """The byte offset of every passage's line, and its contents; blank lines are skipped.

    Raises:
        CorpusError: a line that is not a passage, or an id that was used before.
        OSError: the file cannot be read.
    """
    first_line: dict[str, int] = {}
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                identity, contents = parse_line(raw, path, number)
                if identity in first_line:
                    raise CorpusError(f"{path}:{number}: id {identity!r} was used on line {first_line[identity]}; ids are unique")
                first_line[identity] = number
                yield offset, contents
            offset += len(raw)


class Passages:
    """The passages of a corpus, which stay on disk and are read as they are found."""

    def __init__(self, corpus: Path, offsets: np.ndarray):
        """
        Args:
            offsets: int64 [n], as `read_passages` gives them.
        """
        self._offsets = offsets
        with open(corpus, "rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets)

    def result(self, row: int, score: float) -> Passage:
        """The passage of a row with its score."""
        start = int(self._offsets[row])
        end = self._text.find(b"\n", start)
        record = json.loads(self._text[start : end if end >= 0 else len(self._text)])
        return Passage(str(record["id"]), record["contents"], score)
