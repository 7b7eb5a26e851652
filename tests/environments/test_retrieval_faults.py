"""A server that is away for a while costs nothing; one that stays away, or lies, fails the trajectories, in time and by name."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.environments import search
from megatron_drmas.environments.retrieval_service import RetrievalConfig
from megatron_drmas.environments.search import SearchConfig, SearchEnvironment
from megatron_drmas.team.trajectory import TrajectoryFailure


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(search, "PAUSES_S", (0.01, 0.05))


@contextlib.asynccontextmanager
async def serving(handler, port=0):
    app = web.Application()
    app.router.add_post("/retrieve", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def environment(url, **of_retrieval):
    return SearchEnvironment(
        SearchConfig(name="search", retrieval=RetrievalConfig(url=url, topk=2, **{"timeout_s": 5.0} | of_retrieval))
    )


def answer(body, form=lambda text: {"contents": text}):
    queries = body["queries"] if "queries" in body else [body["query"]]
    return web.json_response({"result": [[form(f"{query} {rank}") for rank in range(body["topk"])] for query in queries]})


async def retrieve(searching, queries):
    return await asyncio.gather(*(searching.retrieve(f"q{i}") for i in range(queries)), return_exceptions=True)


def passages(queries):
    return [[f"q{i} 0", f"q{i} 1"] for i in range(queries)]


async def ranked(request):
    return answer(await request.json())


async def needs_scores(request):
    body = await request.json()
    if not body.get("return_scores"):
        return web.Response(status=500)
    return answer(body, lambda text: {"document": {"contents": text}, "score": 0.5})


async def takes_one(request):
    body = await request.json()
    if "query" not in body:
        return web.json_response({"detail": [{"loc": ["body", "query"], "msg": "field required"}]}, status=422)
    return web.json_response({"result": [{"document": {"contents": f"{body['query']} {rank}"}} for rank in range(body["topk"])]})


async def knows_no_scores(request):
    body = await request.json()
    return web.Response(status=422) if "return_scores" in body else answer(body, str)


async def answers_the_first_only(request):
    body = await request.json()
    return web.json_response(
        {"result": [[f"{(body.get('queries') or [body['query']])[0]} {rank}" for rank in range(body["topk"])]]}
    )


@pytest.mark.parametrize(
    "handler, dialect",
    [
        (ranked, "lists of queries, return_scores=false"),
        (needs_scores, "lists of queries, return_scores=true"),
        (takes_one, "one query a request, return_scores=false"),
        (knows_no_scores, "lists of queries, no return_scores"),
        (answers_the_first_only, "one query a request, return_scores=false"),
    ],
)
def test_a_server_is_asked_once_how_it_wants_to_be_asked(handler, dialect):
    requests = []

    async def counted(request):
        requests.append(await request.json())
        return await handler(request)

    async def run():
        async with serving(counted) as url, environment(url) as searching:
            said = await searching.check()
            checked = len(requests)
            return said, await retrieve(searching, 5), checked

    said, found, checked = asyncio.run(run())
    assert said.endswith(dialect) and found == passages(5)
    assert len(requests) - checked == (1 if "lists" in dialect else 5)


def test_a_server_that_speaks_no_dialect_is_refused_at_once():
    async def refuses(request):
        return web.Response(status=500)

    async def run():
        async with serving(refuses) as url, environment(url) as searching:
            await searching.check()

    with pytest.raises(ConfigError, match=r"environment\.retrieval\.url = .*answered 500"):
        asyncio.run(run())


async def html(request):
    return web.Response(text="<html><body>Please log in</body></html>", content_type="text/html")


async def other_json(request):
    return web.json_response({"error": "index is loading"})


async def gateway(request):
    return web.Response(status=502)


async def internal(request):
    return web.Response(status=500)


async def hangs_up(request):
    request.transport.abort()
    return web.Response()


FAULTS = [html, other_json, gateway, internal, hangs_up]


@given(st.lists(st.sampled_from([None, *FAULTS]), max_size=12), st.integers(1, 5), st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flapping_server_changes_no_result(faults, queries, one):
    """Whatever it answers in between, every query gets its own passages."""
    left = iter(faults)

    async def flapping(request):
        fault = next(left, None)
        return await (fault or (takes_one if one else ranked))(request)

    async def run():
        async with serving(flapping) as url, environment(url) as searching:
            if one:
                searching._dialect = search.DIALECTS[3]
            return await retrieve(searching, queries)

    assert asyncio.run(run()) == passages(queries)


def test_a_server_that_is_started_again_in_time_changes_no_result():
    async def run():
        async with serving(ranked) as url:
            port = int(url.rpartition(":")[2])
        async with environment(url) as searching:
            waiting = asyncio.ensure_future(retrieve(searching, 3))
            await asyncio.sleep(0.3)
            async with serving(ranked, port):
                return await waiting

    assert asyncio.run(run()) == passages(3)


@pytest.mark.parametrize(
    "handler, named",
    [
        (html, r"answered 200 with text/html that is not JSON and begins '<html>"),
        (other_json, r"got an object with 'error'"),
        (gateway, "answered 502"),
        (internal, "answered 500"),
        (hangs_up, "ServerDisconnected"),
    ],
)
def test_one_that_stays_so_is_named_when_the_time_is_over(handler, named):
    async def run():
        async with serving(handler) as url, environment(url, timeout_s=0.4) as searching:
            began = time.monotonic()
            return await retrieve(searching, 3), time.monotonic() - began

    found, seconds = asyncio.run(run())
    assert all(isinstance(each, TrajectoryFailure) and each.cause == "retrieval" for each in found)
    assert seconds < 2
    with pytest.raises(TrajectoryFailure, match=named):
        raise found[0]


def test_a_refused_query_is_not_asked_again():
    requests = []

    async def refuses(request):
        requests.append(request)
        return web.Response(status=422)

    async def run():
        async with serving(refuses) as url, environment(url) as searching:
            return await retrieve(searching, 1)

    assert isinstance(asyncio.run(run())[0], TrajectoryFailure) and len(requests) == 1


def test_the_wait_for_others_does_not_count():
    """Six queries, each within the limit, one at a time."""

    async def slow(request):
        await asyncio.sleep(0.3)
        return await takes_one(request)

    async def run():
        async with serving(slow) as url, environment(url, timeout_s=0.8, concurrency=1) as searching:
            searching._dialect = search.DIALECTS[3]
            return await retrieve(searching, 6)

    assert asyncio.run(run()) == passages(6)


def test_the_runs_own_server_is_brought_back_and_asked_again():
    asked = []

    async def run():
        async with serving(ranked) as second, serving(html) as first:

            async def recover(url, problem, hung):
                asked.append((url, hung))
                return second

            async with environment(first) as searching:
                searching.recover = recover
                return first, await retrieve(searching, 4)

    first, found = asyncio.run(run())
    assert found == passages(4) and asked == [(first, False)]


def test_one_that_hangs_is_said_to():
    asked = []

    async def hangs(request):
        await asyncio.sleep(30)

    async def run():
        async with serving(ranked) as second, serving(hangs) as first:

            async def recover(url, problem, hung):
                asked.append((problem, hung))
                return second

            async with environment(first, timeout_s=0.3) as searching:
                searching.recover = recover
                return await retrieve(searching, 2)

    assert asyncio.run(run()) == passages(2)
    [(problem, hung)] = asked
    assert "gave no answer in 0.3 s" in problem and hung


def test_one_that_cannot_be_brought_back_ends_the_run_and_no_trajectory_alone():
    class Gone(Exception):
        pass

    async def recover(url, problem, hung):
        raise Gone

    async def run():
        async with serving(hangs_up) as url, environment(url) as searching:
            searching.recover = recover
            return await retrieve(searching, 3)

    assert [type(error) for error in asyncio.run(run())] == [Gone] * 3
