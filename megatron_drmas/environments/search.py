"""Question answering over a retrieval server; the return is exact match."""

import asyncio
from types import TracebackType
from typing import Optional

import aiohttp

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment, register_environment
from megatron_drmas.environments.exact_match import exact_match, normalise_answer
from megatron_drmas.team.trajectory import Outcome, TrajectoryFailure

MOST_QUERIES = 64  # in one request
KEEPALIVE_S = 2.0  # less than a server's own (uvicorn: 5 s), or a request could meet a connection that is being closed


class _Refused(Exception):
    """The server answered, but not with the passages."""


def _settle(asked: list[tuple[str, asyncio.Future]], error: BaseException) -> None:
    for _, found in asked:
        if not found.done():
            found.cancel() if isinstance(error, asyncio.CancelledError) else found.set_exception(error)


@register_environment("search")
class SearchEnvironment(Environment):
    """Retrieval over HTTP (`POST {url}/retrieve`) and exact match on the Answer agent's own output."""

    def __init__(self, config: EnvironmentConfig):
        super().__init__(config)
        self._session: Optional[aiohttp.ClientSession] = None
        self._waiting: list[tuple[str, asyncio.Future]] = []  # queries of this turn of the event loop
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> "SearchEnvironment":
        if self.config.retrieval.url:
            settings = self.config.retrieval
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=settings.concurrency, keepalive_timeout=KEEPALIVE_S), timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
            )
        return self

    async def __aexit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        for _, found in self._waiting:
            found.cancel()
        self._waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def check(self) -> None:
        """One query, so that a wrong address, a server that is gone or a `topk` it refuses ends the run before it begins."""
        settings = self.config.retrieval
        if self._session is not None:
            try:
                await self._ask(["check"])
            except (_Refused, TrajectoryFailure) as error:
                problem = f"a query for topk={settings.topk} passages failed: {error}"
                raise ConfigError("environment.retrieval.url", settings.url, problem, "start the server there, or correct url or topk") from error

    async def retrieve(self, query: str) -> list[str]:
        """Passages for a query; queries made in one turn of the event loop travel together."""
        if self._session is None:
            raise TypeError("environment.retrieval.url is not set: no retrieval server serves this run")
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        found: asyncio.Future[list[str]] = loop.create_future()
        self._waiting.append((query, found))
        return await found

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MOST_QUERIES):
            self._start(waiting[start:start + MOST_QUERIES])

    def _start(self, asked: list[tuple[str, asyncio.Future]]) -> None:
        task = asyncio.ensure_future(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: list[tuple[str, asyncio.Future]]) -> None:
        """Ask together; where the server refuses, each alone, so that a query it cannot answer costs its own trajectory only."""
        try:
            answers = await self._ask([query for query, _ in asked])
        except _Refused as refusal:
            if len(asked) > 1:
                for query, found in asked:
                    self._start([(query, found)])
            else:
                _settle(asked, TrajectoryFailure("retrieval", str(refusal)))
        except BaseException as error:
            _settle(asked, error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, found), passages in zip(asked, answers):
                if not found.done():
                    found.set_result(passages)

    async def _ask(self, queries: list[str]) -> list[list[str]]:
        settings = self.config.retrieval
        request = {"queries": queries, "topk": settings.topk, "return_scores": False}
        try:
            async with self._session.post(f"{settings.url.rstrip('/')}/retrieve", json=request) as response:
                if response.status != 200:
                    raise _Refused(f"{settings.url} answered {response.status}")
                result = (await response.json())["result"]
                if len(result) != len(queries):
                    raise _Refused(f"{settings.url} answered {len(result)} of {len(queries)} queries")
                answers = [[passage["contents"] for passage in found[:settings.topk]] for found in result]
        except asyncio.TimeoutError as error:
            raise TrajectoryFailure("retrieval", f"{settings.url} gave no answer in {settings.timeout_s} s") from error
        except aiohttp.ClientConnectorError as error:
            raise TrajectoryFailure("retrieval", f"{settings.url}: {type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
            raise _Refused(f"{settings.url}: {type(error).__name__}: {error}") from error
        return [passages[::-1] for passages in answers] if settings.order == "best_last" else answers

    def supports(self, question: Question, passages: list[str]) -> bool:
        """Whether an accepted answer stands in any passage as whole words; "yes", "no" and articles stand in too many to count."""
        rule = self.config.normalization
        words = [f" {normalise_answer(passage, rule)} " for passage in passages]
        answers = {normalise_answer(gold, rule) for gold in question.answers} - {"", "yes", "no", "a", "an", "the"}
        return any(f" {answer} " in text for answer in answers for text in words)

    async def reward(self, question: Question, outcome: Outcome) -> float:
        return exact_match(outcome.answer, question.answers, self.config.normalization)
