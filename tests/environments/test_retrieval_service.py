"""The run's own retrieval server may die or hang: it is restarted and no query notices; what cannot be fixed ends by name."""

import asyncio
import json
import os
import signal

import pytest

from megatron_drmas.environments.base import Place, ServiceFailure
from megatron_drmas.environments.retrieval_service import RetrievalConfig
from megatron_drmas.environments.search import SearchConfig, SearchEnvironment

QUERIES = [f"town{i}" for i in range(100)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "contents": f"the mayor of {query}"}) + "\n" for i, query in enumerate(QUERIES)))
    return path


def run(corpus, work, restarts=2, timeout_s=30.0):
    """`work(environment, service)` beside a living server; its result, and what was started again."""
    said = []

    async def within():
        settings = RetrievalConfig(corpus=str(corpus), topk=1, timeout_s=timeout_s, restarts=restarts)
        place = Place(corpus.parent / "logs", 60.0, lambda *restart: said.append(restart))
        served = SearchEnvironment(SearchConfig(name="search", retrieval=settings), place)
        try:
            assert served.begin()
            async with served as environment:
                await environment.check()
                return await work(environment, environment._service)
        finally:
            served.end()

    return asyncio.run(within()), said


async def ask(environment):
    return await asyncio.gather(*map(environment.retrieve, QUERIES), return_exceptions=True)


EXPECTED = [[f"the mayor of {query}"] for query in QUERIES]


def test_one_that_is_killed_or_hangs_is_started_again_and_asked_again(corpus):
    async def work(environment, service):
        os.kill(service._process.pid, signal.SIGKILL)
        first = await ask(environment)
        os.kill(service._process.pid, signal.SIGSTOP)
        return first, await ask(environment)

    (first, second), said = run(corpus, work, timeout_s=4.0)
    assert first == EXPECTED and second == EXPECTED
    assert said[0] == ("retrieval server", "it ended with code -9")
    assert said[1][0] == "retrieval server" and "gave no answer in 4 s" in said[1][1] and len(said) == 2


def test_one_that_cannot_start_again_ends_the_run_by_its_name(corpus):
    async def work(environment, service):
        corpus.unlink()
        os.kill(service._process.pid, signal.SIGKILL)
        return await ask(environment)

    found, said = run(corpus, work)
    assert {type(each) for each in found} == {ServiceFailure} and len(said) == 2
    message = str(found[0])
    assert message.startswith("retrieval server: ended with code 1 before it was ready") and "\n" not in message
    assert "it was started again 2 times (environment.retrieval.restarts)" in message


def test_a_living_server_is_not_started_again(corpus):
    async def work(environment, service):
        url = service.url
        found = [
            await service.recover(url, "a dropped connection", False),
            await service.recover("http://127.0.0.1:1", "an old address", True),
        ]
        return found == [url, url]

    assert run(corpus, work) == (True, [])
