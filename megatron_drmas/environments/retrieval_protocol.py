"""The dialects of `POST /retrieve` that retrieval servers understand, and their answers.

    {"queries": [str, …] or "query": str, "topk": int, "return_scores": bool}
    -> {"result": [[passage, …] for each query]}, or {"result": [passage, …]} to one query

A passage is a string, or an object that holds its text as "contents", "content", "text" or "page_content"; it may be in
another's "document", next to a "score".
"""

from dataclasses import dataclass
from typing import Any

RESULTS = ("result", "results")
WRAPPERS = ("document", "doc", "passage")
TEXTS = ("contents", "content", "text", "page_content", *WRAPPERS)


@dataclass(frozen=True)
class Dialect:
    """How a server wants to be asked."""

    many: bool  # a list of queries in a request, or one
    scores: bool | None  # the value of return_scores; None: without it

    def request(self, queries: list[str], topk: int) -> dict[str, Any]:
        """The request's body; `queries` holds one query unless the server takes many."""
        asked: dict[str, Any] = {"queries": queries} if self.many else {"query": queries[0]}
        return asked | {"topk": topk} | ({} if self.scores is None else {"return_scores": self.scores})

    def __str__(self) -> str:
        scores = "no return_scores" if self.scores is None else f"return_scores={str(self.scores).lower()}"
        return f"{'lists of queries' if self.many else 'one query a request'}, {scores}"


DIALECTS = tuple(
    Dialect(many, scores) for many in (True, False) for scores in (False, True, None)
)  # in the order in which they are tried


def endpoint(url: str) -> str:
    """Where a server of this address is asked."""
    url = url.rstrip("/")
    return url if url.endswith("/retrieve") else f"{url}/retrieve"


def read_answer(reply: Any, queries: int, dialect: Dialect) -> list[list[str]]:
    """The texts of the passages of every query.

    Args:
        reply: the server's, as JSON holds it.
        queries: how many were asked.

    Raises:
        ValueError: says what is wrong with the reply.
    """
    result = next((reply[key] for key in RESULTS if key in reply), None) if isinstance(reply, dict) else reply
    if not isinstance(result, list):
        held = (
            f"an object with {', '.join(map(repr, list(reply)[:5])) or 'no key'}"
            if isinstance(reply, dict)
            else type(reply).__name__
        )
        raise ValueError(f"a list of passages was expected as 'result', got {held}")
    if not dialect.many and not (len(result) == 1 and isinstance(result[0], list)):
        result = [result]
    if len(result) != queries:
        raise ValueError(f"{len(result)} of {queries} queries were answered")
    if not all(isinstance(found, list) for found in result):
        raise ValueError("a list of passages was expected for every query")
    return [[passage_text(passage) for passage in found] for found in result]


def passage_text(passage: Any) -> str:
    """A passage's text, its title before it where that is kept apart.

    Raises:
        ValueError: it has none, or none that UTF-8 can hold.
    """
    if isinstance(passage, str):
        passage.encode()
        return passage
    if not isinstance(passage, dict):
        raise ValueError(f"a passage is {type(passage).__name__}, not text")
    inner = next((passage[key] for key in WRAPPERS if isinstance(passage.get(key), dict)), None)
    if inner is not None:
        return passage_text(inner)
    key = next((key for key in TEXTS if isinstance(passage.get(key), str)), None)
    if key is None:
        raise ValueError(f"a passage has no text (its keys: {', '.join(map(repr, list(passage)[:8])) or 'none'})")
    text, title = passage_text(passage[key]), passage.get("title")
    return f"{title}\n{text}" if key != "contents" and isinstance(title, str) and title else text
