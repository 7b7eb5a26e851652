"""Question answering over a retrieval server; the return is exact match."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.config.setting import setting
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment, Place, register_environment
from megatron_drmas.environments.exact_match import exact_match, normalize_answer
from megatron_drmas.environments.retrieval_protocol import DIALECTS, endpoint, read_answer
from megatron_drmas.environments.retrieval_service import RetrievalConfig, RetrievalService, check_retrieval
from megatron_drmas.team.tool import tool
from megatron_drmas.team.trajectory import Outcome, TrajectoryFailure

MAX_QUERIES = 64  # in one request
PAUSES_S = (0.5, 8.0)  # before a server is asked again: the first, which doubles, and the longest
AWAY = (408, 425, 429, 502, 503, 504)  # what is answered when a server is not there, or not yet
KEEPALIVE_S = 2.0  # less than a server's own (uvicorn: 5 s), or a request could meet a connection that is being closed


class _Unavailable(Exception):
    """No server answered: it is gone, slow, or something else answers in its place."""


class _Refused(Exception):
    """The server answered, but not with the passages.  `again`: it may, another time."""

    def __init__(self, problem: str, again: bool = True):
        super().__init__(problem)
        self.again = again


def _settle(asked: list[tuple[str, asyncio.Future]], error: BaseException) -> None:
    for _, found in asked:
        if not found.done():
            found.cancel() if isinstance(error, asyncio.CancelledError) else found.set_exception(error)


@dataclass
class SearchConfig(EnvironmentConfig):
    """The search environment."""

    normalization: str = setting(
        "What exact match ignores; see megatron_drmas.environments.exact_match",
        "squad",
        choices={"squad": "as in published figures", "unicode": "also punctuation outside ASCII"},
    )
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)


@register_environment("search")
class SearchEnvironment(Environment):
    """Retrieval over HTTP (`megatron_drmas.environments.retrieval_protocol`) and exact match on the Answer agent's own output.

    A server that does not answer is asked again until `environment.retrieval.timeout_s` have passed; then the query is its
    trajectory's failure.  The server that it runs itself is started again instead, and asked again, so that no query fails.
    """

    Config = SearchConfig
    config: SearchConfig

    def __init__(self, config: SearchConfig, place: Place = Place()):
        super().__init__(config, place)
        self._service: RetrievalService | None = None
        self.recover: Callable[[str, str, bool], Awaitable[str]] | None = None  # brings back a server of the run's own
        self._url = config.retrieval.url or ""
        self._dialect = DIALECTS[0]
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Semaphore(config.retrieval.concurrency)
        self._found: dict[str, asyncio.Future[list[str]]] = {}  # what is being searched for, by query
        self._waiting: list[tuple[str, asyncio.Future]] = []  # queries that no request has taken yet
        self._scheduled = False
        self._tasks: set[asyncio.Task] = set()

    @classmethod
    def check_config(cls, config: EnvironmentConfig, tools: tuple[str, ...], files: bool) -> None:
        super().check_config(config, tools, files)
        assert isinstance(config, SearchConfig)
        if "search" in tools:
            check_retrieval(config.retrieval, files)

    def begin(self) -> bool:
        if self._url or not self.config.retrieval.corpus:
            return False
        log = self.place.logs / "retrieval.log"
        self._service = RetrievalService(self.config.retrieval, log, self.place.start_timeout_s, self.place.restarted)
        self.recover = self._service.recover
        return True

    def end(self) -> None:
        if self._service is not None:
            self._service.stop()

    async def __aenter__(self) -> "SearchEnvironment":
        if self._service is not None:
            self._url = await self._service.ready()
        if self._url:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S))
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
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

    async def check(self) -> str | None:
        """Find out how the server wants to be asked, so that a wrong address, a server that is gone or a `topk` it refuses
        ends the run before it begins."""
        settings = self.config.retrieval
        if self._session is None:
            return None
        problems: list[Exception] = []
        for self._dialect in DIALECTS:
            try:
                await self._ask(["check", "who"] if self._dialect.many else ["check"], settings.timeout_s)
                return f"retrieval at {endpoint(self._url)}: {self._dialect}" if self._service is None else None
            except _Refused as refusal:
                problems.append(refusal)
            except _Unavailable as error:
                problems.append(error)
                break
        problem = f"a query for topk={settings.topk} passages failed: {problems[0]}"
        raise ConfigError(
            "environment.retrieval.url", self._url, problem, "start the server there, or correct url or topk"
        ) from problems[0]

    @tool("search", timeout_s=None, cause="retrieval")
    async def retrieve(self, query: str) -> list[str]:
        """Passages for a query, in the order in which a prompt shows them.

        Queries made in one turn of the event loop, or while `environment.retrieval.concurrency` requests are out, travel
        together.  A query that is being searched for is not asked again: what it finds, or its failure, is everyone's who
        asks meanwhile.
        """
        if self._session is None:
            raise TypeError("environment.retrieval.url is not set: no retrieval server serves this run")
        found = self._found.get(query)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._found[query] = loop.create_future()
            found.add_done_callback(lambda _: self._found.pop(query))
            self._waiting.append((query, found))
            if not self._scheduled:
                self._scheduled = True
                loop.call_soon(self._flush)
        return list(await asyncio.shield(found))

    @property
    def _together(self) -> int:
        return MAX_QUERIES if self._dialect.many else 1

    def _flush(self) -> None:
        self._scheduled = False
        for _ in range(0, len(self._waiting), self._together):
            self._start([])

    def _start(self, asked: list[tuple[str, asyncio.Future]]) -> None:
        task = asyncio.ensure_future(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: list[tuple[str, asyncio.Future]]) -> None:
        """Ask together; where the server refuses, each alone, so that a query it cannot answer costs its own trajectory only.

        Args:
            asked: the queries; none: those that wait when the request may leave, which are put here.
        """
        try:
            answers = await self._insist(asked)
        except _Refused as refusal:
            if len(asked) > 1:
                for query, found in asked:
                    self._start([(query, found)])
            else:
                _settle(asked, TrajectoryFailure("retrieval", str(refusal)))
        except _Unavailable as error:
            _settle(asked, TrajectoryFailure("retrieval", str(error)))
        except BaseException as error:
            _settle(asked, error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, found), passages in zip(asked, answers):
                if not found.done():
                    found.set_result(passages)

    async def _insist(self, asked: list[tuple[str, asyncio.Future]]) -> list[list[str]]:
        """Ask, and ask again, within the time limit, which begins when the first request leaves."""
        now, limit_s = asyncio.get_running_loop().time, self.config.retrieval.timeout_s
        deadline: float | None = None
        pause = PAUSES_S[0]
        while True:
            async with self._gate:
                if not asked:
                    asked += self._waiting[: self._together]
                    del self._waiting[: self._together]
                if not asked:
                    return []  # an earlier request has taken them
                queries = [query for query, _ in asked]
                deadline = deadline or now() + limit_s
                url = self._url
                try:
                    return await self._ask(queries, deadline - now())
                except (_Refused, _Unavailable) as error:
                    problem = error
            if isinstance(problem, _Refused) and (len(queries) > 1 or not problem.again):
                raise problem
            if isinstance(problem, _Unavailable) and self.recover is not None:
                self._url = await self.recover(url, str(problem), now() >= deadline)
                if self._url != url:
                    deadline = None
                continue
            if now() + pause >= deadline:
                raise problem
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1])

    async def _ask(self, queries: list[str], timeout_s: float) -> list[list[str]]:
        assert self._session is not None, "the environment is entered"
        settings, url = self.config.retrieval, endpoint(self._url)
        timeout = aiohttp.ClientTimeout(total=max(timeout_s, 1e-3))
        try:
            async with self._session.post(url, json=self._dialect.request(queries, settings.topk), timeout=timeout) as response:
                body = await response.read()
        except TimeoutError as error:
            raise _Unavailable(f"{url} gave no answer in {settings.timeout_s:g} s") from error
        except aiohttp.InvalidURL as error:
            raise _Refused(f"{url} is not an address", again=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Unavailable(f"{url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            problem = f"{url} answered {response.status}"
            raise _Unavailable(problem) if response.status in AWAY else _Refused(problem, again=response.status >= 500)
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError) as error:
            begins = body[:40].decode("utf-8", "replace")
            raise _Unavailable(
                f"{url} answered 200 with {response.content_type} that is not JSON and begins {begins!r}"
            ) from error
        try:
            answers = [passages[: settings.topk] for passages in read_answer(reply, len(queries), self._dialect)]
        except ValueError as error:
            raise _Refused(f"{url}: {error}") from error
        return [passages[::-1] for passages in answers] if settings.order == "best_last" else answers

    @tool("supports", timeout_s=None)
    async def _supports(self, passages: list[str], question: Question) -> bool:
        """Whether any of the passages contains an accepted answer."""
        return self.supports(question, passages)

    def supports(self, question: Question, passages: list[str]) -> bool:
        """Whether a passage has an accepted answer as whole words; "yes", "no" and articles are in too many to count."""
        rule = self.config.normalization
        words = [f" {normalize_answer(passage, rule)} " for passage in passages]
        answers = {normalize_answer(gold, rule) for gold in question.answers} - {"", "yes", "no", "a", "an", "the"}
        return any(f" {answer} " in text for answer in answers for text in words)

    async def reward(self, question: Question, outcome: Outcome) -> float:
        return exact_match(outcome.answer, question.answers, self.config.normalization)
