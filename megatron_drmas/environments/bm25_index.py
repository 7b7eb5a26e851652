"""BM25 over a JSON-lines corpus, with its index cached beside the corpus.

A corpus is a text file with one JSON object a line, `{"id": str | int, "contents": str}`, ids unique.
Words are maximal runs of letters, digits and underscores, in lower case; nothing is stemmed and no word
is dropped, so a name is found exactly as it is written (a frequent word weighs next to nothing in BM25 anyway).
"""

import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bm25s
import numpy as np

from megatron_drmas.environments.corpus import CorpusError, parse_line

logger = logging.getLogger(__name__)

FORMAT = f"v1-bm25s-{bm25s.__version__}"  # part of the cache's key: an index of another format is never read
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Passage:
    """One passage of a result: its corpus fields and its BM25 score (higher is better)."""

    id: str
    contents: str
    score: float


def split_words(text: str) -> list[str]:
    """The words of `text` as the index knows them."""
    return _WORD.findall(text.lower())


def _read_corpus(path: Path) -> tuple[list[list[str]], np.ndarray]:
    """Words of every passage and the byte offset of every passage's line; blank lines are skipped."""
    words, offsets, first_line = [], [], {}
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                identity, contents = parse_line(raw, path, number)
                if identity in first_line:
                    raise CorpusError(f"{path}:{number}: id {identity!r} was used on line {first_line[identity]}; ids are unique")
                first_line[identity] = number
                words.append(split_words(contents))
                offsets.append(offset)
            offset += len(raw)
    if not any(words):
        raise CorpusError(f"{path}: no passage with any word in it; a corpus needs at least one")
    return words, np.asarray(offsets, dtype=np.int64)


class Bm25Index:
    """BM25 (Lucene's variant, k1 1.5, b 0.75) over one corpus file; passages stay on disk and are read as they are found."""

    def __init__(self, corpus: Path, bm25: bm25s.BM25, offsets: np.ndarray):
        self.corpus = corpus
        self._bm25 = bm25
        self._offsets = offsets
        with open(corpus, "rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets)

    @classmethod
    def open(cls, corpus: str | os.PathLike) -> "Bm25Index":
        """Index `corpus`, or take the index that an earlier call left in `<corpus>.bm25/<digest>/`.

        The digest is of the corpus' bytes, so an edited corpus gets a new index.  Building goes to a folder beside
        and is renamed, so that an interrupted or a concurrent call leaves either nothing or a whole index.
        Raises CorpusError (malformed or empty corpus) and OSError (no such file).
        """
        corpus = Path(corpus)
        with open(corpus, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(FORMAT.encode(), digest_size=12)).hexdigest()
        folder = corpus.with_name(corpus.name + ".bm25") / digest
        if not folder.is_dir():
            words, offsets = _read_corpus(corpus)
            bm25 = bm25s.BM25()
            bm25.index(words, show_progress=False)
            _write(folder, bm25, offsets)
            return cls(corpus, bm25, offsets)
        return cls(corpus, bm25s.BM25.load(folder, show_progress=False), np.load(folder / "offsets.npy"))

    def search(self, query: str, topk: int) -> list[Passage]:
        """The best `topk` passages, best first; equal scores in corpus order.

        A passage that shares no word with the query is never returned, so the list may be shorter, or empty.
        """
        words = self._bm25.get_tokens_ids(split_words(query))
        if not words:
            return []
        scores = self._bm25.get_scores_from_ids(words)
        found = np.flatnonzero(scores > 0)
        if len(found) > topk:
            threshold = np.partition(scores[found], -topk)[-topk]
            found = found[scores[found] >= threshold]
        best = found[np.argsort(-scores[found], kind="stable")][:topk]
        return [self._passage(int(row), float(scores[row])) for row in best]

    def _passage(self, row: int, score: float) -> Passage:
        start = int(self._offsets[row])
        end = self._text.find(b"\n", start)
        record = json.loads(self._text[start : end if end >= 0 else len(self._text)])
        return Passage(str(record["id"]), record["contents"], score)


def _write(folder: Path, bm25: bm25s.BM25, offsets: np.ndarray) -> None:
    """Cache an index; a place that cannot be written costs the next start its index, not this one."""
    try:
        folder.parent.mkdir(exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        logger.warning("the BM25 index is not cached, every start builds it again: %s", error)
        return
    try:
        bm25.save(beside, show_progress=False)
        np.save(beside / "offsets.npy", offsets)
        try:
            os.rename(beside, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process finished the same index first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
