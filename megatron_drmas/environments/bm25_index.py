"""BM25 over a JSON-lines corpus, with its index cached next to the corpus.

A corpus is a text file with one JSON object a line, `{"id": str | int, "contents": str}`, ids unique.
Words are maximal runs of letters, digits and underscores, in lower case; nothing is stemmed and no word
is dropped, so a name is found exactly as it is written (a frequent word weighs next to nothing in BM25 anyway).
"""

import hashlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

import bm25s
import numpy as np

from megatron_drmas.environments.corpus import CorpusError, Passage, Passages, read_passages

logger = logging.getLogger(__name__)

FORMAT = f"v1-bm25s-{bm25s.__version__}"  # part of the cache's key: an index of another format is never read
_WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    """The words of `text` as the index knows them."""
    return _WORD.findall(text.lower())


class Bm25Index:
    """BM25 (Lucene's variant, k1 1.5, b 0.75) over one corpus file; passages stay on disk and are read as they are found."""

    def __init__(self, corpus: Path, bm25: bm25s.BM25, offsets: np.ndarray):
        self._bm25 = bm25
        self._passages = Passages(corpus, offsets)

    def __len__(self) -> int:
        return len(self._passages)

    @classmethod
    def open(cls, corpus: str | os.PathLike) -> "Bm25Index":
        """Index `corpus`, or take the index that an earlier call left in `<corpus>.bm25/<digest>/`.

        The digest is of the corpus' bytes, so an edited corpus gets a new index.  Building goes to a folder next to
        and is renamed, so that an interrupted or a concurrent call leaves either nothing or a whole index.
        Raises CorpusError (malformed or empty corpus) and OSError (no such file).
        """
        corpus = Path(corpus)
        with open(corpus, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(FORMAT.encode(), digest_size=12)).hexdigest()
        folder = corpus.with_name(corpus.name + ".bm25") / digest
        if not folder.is_dir():
            found = [(offset, split_words(contents)) for offset, contents in read_passages(corpus)]
            words = [of for _, of in found]
            if not any(words):
                raise CorpusError(f"{corpus}: no passage with any word in it; a corpus needs at least one")
            offsets = np.asarray([offset for offset, _ in found], dtype=np.int64)
            bm25 = bm25s.BM25()
            bm25.index(words, show_progress=False)
            _write(folder, bm25, offsets)
            return cls(corpus, bm25, offsets)
        return cls(corpus, bm25s.BM25.load(folder, show_progress=False), np.load(folder / "offsets.npy"))

    def search_all(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """`search` for each query."""
        return [self.search(query, topk) for query in queries]

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
        return [self._passages.result(int(row), float(scores[row])) for row in best]


def _write(folder: Path, bm25: bm25s.BM25, offsets: np.ndarray) -> None:
    """Cache an index; a place that cannot be written costs the next start its index, not this one."""
    try:
        folder.parent.mkdir(exist_ok=True)
        temp_path = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        logger.warning("the BM25 index is not cached, every start builds it again: %s", error)
        return
    try:
        bm25.save(temp_path, show_progress=False)
        np.save(temp_path / "offsets.npy", offsets)
        try:
            os.rename(temp_path, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process finished the same index first
                raise
    finally:
        shutil.rmtree(temp_path, ignore_errors=True)
