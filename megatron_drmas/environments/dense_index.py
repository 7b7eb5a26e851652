"""Dense retrieval: the passages whose vectors have the largest inner product with the query's, by FAISS.

A corpus is encoded once; its vectors are kept next to it in parts, so that an interrupted run continues where it stopped.
"""

import hashlib
import os
import shutil
from itertools import islice
from pathlib import Path

import faiss
import numpy as np
from rich.console import Console
from rich.progress import track

from megatron_drmas.environments.corpus import CorpusError, Passage, Passages, read_passages
from megatron_drmas.environments.encoder import Encoder

PART = 4096  # passages that an interruption can cost
INDEX = "index.faiss"


class DenseIndex:
    """A FAISS index over one corpus file, and the encoder that it was made with."""

    def __init__(self, corpus: Path, offsets: np.ndarray, index: faiss.Index, encoder: Encoder):
        self._passages = Passages(corpus, offsets)
        self._index = index
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self._passages)

    @classmethod
    def open(cls, corpus: "str | os.PathLike", encoder: Encoder, file: Path | None = None) -> "DenseIndex":
        """Encode `corpus` for exact search, or take what an earlier call left in `<corpus>.faiss/`.

        Args:
            file: a FAISS index of one's own, of any kind, whose n-th vector is that of the n-th passage; nothing is encoded.

        Raises:
            CorpusError: a malformed or empty corpus; an index that is not of this corpus and encoder.
            OSError: no such file.
        """
        corpus = Path(corpus)
        with open(corpus, "rb") as whole:
            folder = corpus.with_name(corpus.name + ".faiss") / hashlib.file_digest(whole, "blake2b").hexdigest()[:24]
        offsets = _offsets(corpus, folder)
        if file is None:
            file = _build(corpus, len(offsets), folder / encoder.digest(), encoder)
        try:
            index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise CorpusError(f"{file} cannot be read as a FAISS index: {str(error).splitlines()[0]}") from error
        if (index.ntotal, index.d) != (len(offsets), encoder.dimension):
            raise CorpusError(
                f"{file} holds {index.ntotal} vectors of {index.d} numbers, but {corpus} has {len(offsets)} passages and the "
                f"encoder makes {encoder.dimension} numbers of each"
            )
        return cls(corpus, offsets, index, encoder)

    def search_all(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The nearest `topk` passages of each query, best first; fewer where the index holds or finds no more."""
        if not queries:
            return []
        scores, rows = self._index.search(self._encoder.queries(queries), min(topk, len(self)))
        return [
            [self._passages.result(int(row), float(score)) for row, score in zip(of_rows, of_scores) if row >= 0]
            for of_rows, of_scores in zip(rows, scores)
        ]


def _offsets(corpus: Path, folder: Path) -> np.ndarray:
    """Where each passage begins, int64 [n]: read from the corpus once, then from `folder`."""
    file = folder / "offsets.npy"
    if not file.is_file():
        offsets = np.fromiter((offset for offset, _ in read_passages(corpus)), dtype=np.int64)
        if not len(offsets):
            raise CorpusError(f"{corpus}: no passage in it; a corpus needs at least one")
        folder.mkdir(parents=True, exist_ok=True)
        _save(file, offsets)
    return np.load(file)


def _build(corpus: Path, count: int, folder: Path, encoder: Encoder) -> Path:
    """The file of the exact index of a corpus, made if it is not there."""
    file, parts = folder / INDEX, folder / "parts"
    if file.is_file():
        return file
    parts.mkdir(parents=True, exist_ok=True)
    index = faiss.IndexFlatIP(encoder.dimension)
    contents = (text for _, text in read_passages(corpus))
    for start in track(range(0, count, PART), f"encoding {count:,} passages", console=Console(stderr=True)):
        texts = list(islice(contents, PART))
        index.add(_part(parts / f"{start}.npy", texts, encoder))
    temp_path = folder / f"{INDEX}.{os.getpid()}"
    faiss.write_index(index, str(temp_path))
    os.replace(temp_path, file)
    shutil.rmtree(parts, ignore_errors=True)
    return file


def _part(file: Path, texts: list[str], encoder: Encoder) -> np.ndarray:
    """The vectors of some passages: those that an interrupted run left whole, or new ones."""
    try:
        vectors = np.load(file)
        if vectors.shape == (len(texts), encoder.dimension):
            return vectors
    except (FileNotFoundError, ValueError, EOFError):
        pass
    vectors = encoder.passages(texts)
    _save(file, vectors)
    return vectors


def _save(file: Path, array: np.ndarray) -> None:
    temp_path = file.with_suffix(f".{os.getpid()}")
    with temp_path.open("wb") as out:
        np.save(out, array)
    os.replace(temp_path, file)
