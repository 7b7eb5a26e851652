"""Texts as vectors, by a sentence-transformers folder."""

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_drmas.environments.corpus import RetrievalError

BATCH = 64  # texts at a time


class EncoderError(RetrievalError):
    """A folder that holds no encoder; the message names it."""


def encoder_objection(folder: Path) -> str | None:
    """Why a folder cannot be an encoder, as far as its files' names and config.json tell; None if it may be one.

    A folder without modules.json is a plain transformer, whose tokens' mean is the vector; a language model's says little.
    """
    if (folder / "modules.json").is_file():
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return "holds no encoder"
    except (OSError, ValueError) as error:
        return f"its config.json cannot be read: {error}"
    architectures = config.get("architectures") if isinstance(config, dict) else None
    generative = [name for name in architectures or () if "ForCausalLM" in name or "ForConditionalGeneration" in name]
    return f"holds a language model ({generative[0]}), not a sentence encoder" if generative else None


class Encoder:
    """Encodes queries and passages, each as its kind, to vectors of length 1: inner products are cosines.

    Raises (on construction):
        EncoderError: the folder is missing, or holds no encoder.
    """

    def __init__(self, folder: Path, query_prefix: str | None = None, passage_prefix: str | None = None, device: str = "cpu"):
        """
        Args:
            query_prefix: put before every query ("query: " for E5); None: what the folder itself says, if anything.
            passage_prefix: the same for passages ("passage: " for E5).
            device: torch's name of where it runs.
        """
        from sentence_transformers import SentenceTransformer  # takes seconds, which a check of the folder need not wait for

        objection = encoder_objection(folder)
        if objection:
            raise EncoderError(f"{folder} {objection}: a sentence-transformers folder is needed")
        try:
            self._model = SentenceTransformer(str(folder), device=device, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            said = str(error).partition("\n")[0]
            raise EncoderError(f"{folder} cannot be loaded as an encoder: {said}") from error
        self._query_prefix, self._passage_prefix = query_prefix, passage_prefix
        self._folder = folder
        self._lock = threading.Lock()  # a fast tokenizer refuses a second thread

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        dimension = self._model.get_embedding_dimension()
        assert dimension is not None
        return dimension

    def queries(self, texts: list[str]) -> np.ndarray:
        """float32 [n, dimension]."""
        return self._encoded(self._model.encode_query, texts, self._query_prefix)

    def passages(self, texts: list[str]) -> np.ndarray:
        """float32 [n, dimension]."""
        return self._encoded(self._model.encode_document, texts, self._passage_prefix)

    def digest(self) -> str:
        """Of everything that a passage's vector depends on, other than the passage."""
        digest = hashlib.blake2b(f"{self._passage_prefix!r}".encode(), digest_size=12)
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and path.suffix in (".json", ".txt", ".model", ".safetensors"):
                digest.update(path.relative_to(self._folder).as_posix().encode())
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()

    def _encoded(self, encode: Callable, texts: list[str], prefix: str | None) -> np.ndarray:
        settings = {} if prefix is None else {"prompt": prefix}
        with self._lock:
            vectors = encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False, **settings)
        return np.asarray(vectors, dtype=np.float32)
