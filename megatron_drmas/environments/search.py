"""Question answering over a retrieval server; the return is exact match."""

import asyncio
import re
import string
from types import TracebackType
from typing import Optional

import aiohttp

from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment, register_environment
from megatron_drmas.team.trajectory import Outcome, TrajectoryFailure

ARTICLES = re.compile(r"\b(a|an|the)\b")
KEEPALIVE_S = 2.0  # less than a server's own (uvicorn: 5 s), or a request could meet a connection that is being closed
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (the normalisation of SQuAD's evaluation)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: Optional[str], accepted: tuple[str, ...]) -> float:
    """1.0 if the normalised answer equals any normalised accepted answer, else 0.0."""
    if answer is None:
        return 0.0
    return float(normalise_answer(answer) in {normalise_answer(gold) for gold in accepted})


@register_environment("search")
class SearchEnvironment(Environment):
    """Retrieval over HTTP (`POST {url}/retrieve`) and exact match on the Answer agent's own output."""

    def __init__(self, config: EnvironmentConfig):
        super().__init__(config)
        self._session: Optional[aiohttp.ClientSession] = None

    async def __aenter__(self) -> "SearchEnvironment":
        if self.config.retrieval.url:
            settings = self.config.retrieval
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=settings.concurrency, keepalive_timeout=KEEPALIVE_S), timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
            )
        return self

    async def __aexit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def retrieve(self, query: str) -> list[str]:
        settings = self.config.retrieval
        if self._session is None:
            raise TypeError("environment.retrieval.url is not set: no retrieval server serves this run")
        request = {"query": query, "topk": settings.topk, "return_scores": False}
        try:
            async with self._session.post(f"{settings.url.rstrip('/')}/retrieve", json=request) as response:
                if response.status != 200:
                    raise TrajectoryFailure("retrieval", f"{settings.url} answered {response.status}")
                found = (await response.json())["result"][0]
                passages = [item["contents"] for item in found[:settings.topk]]
        except asyncio.TimeoutError as error:
            raise TrajectoryFailure("retrieval", f"{settings.url} gave no answer in {settings.timeout_s} s") from error
        except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
            raise TrajectoryFailure("retrieval", f"{settings.url}: {type(error).__name__}: {error}") from error
        return passages[::-1] if settings.order == "best_last" else passages

    def supports(self, question: Question, passages: list[str]) -> bool:
        words = [f" {normalise_answer(passage)} " for passage in passages]
        return any(f" {normalise_answer(gold)} " in text for gold in question.answers for text in words)

    async def reward(self, question: Question, outcome: Outcome) -> float:
        return exact_match(outcome.answer, question.answers)
