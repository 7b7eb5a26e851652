"""What a search team earns, and what a bad retrieval server costs."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.retrieval_service import RetrievalConfig
from megatron_drmas.environments.search import MAX_QUERIES, SearchConfig, SearchEnvironment
from megatron_drmas.team.trajectory import TrajectoryFailure


def ask(handler, queries=1, check=False, asks=None, **settings):
    """Retrieve from a server that answers with `handler`, as `asks` does with the environment, or only check it."""

    async def run():
        app = web.Application()
        app.router.add_post("/retrieve", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        config = SearchConfig(name="search", retrieval=RetrievalConfig(url=f"http://127.0.0.1:{port}", **settings))
        try:
            async with SearchEnvironment(config) as environment:
                if check:
                    return await environment.check()
                if asks:
                    return await asks(environment)
                return await asyncio.gather(*(environment.retrieve(f"q{i}") for i in range(queries)), return_exceptions=True)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def ranked(request):
    body = await request.json()
    return web.json_response(
        {"result": [[{"contents": f"{query} {rank}"} for rank in range(body["topk"])] for query in body["queries"]]}
    )


@pytest.mark.parametrize("order, first", [("best_first", "q0 0"), ("best_last", "q0 1")])
def test_passages_come_in_the_order_that_was_asked_for(order, first):
    [passages] = ask(ranked, topk=2, order=order)
    assert passages[0] == first and len(passages) == 2


async def broken(request):
    return web.Response(status=500)


async def slow(request):
    await asyncio.sleep(1)


async def no_json(request):
    return web.Response(text="<html>", content_type="application/json")


async def wrong_shape(request):
    return web.json_response({"result": []})


@pytest.mark.parametrize("handler", [broken, slow, no_json, wrong_shape])
def test_a_bad_answer_is_the_trajectory_s_failure(handler):
    [failure] = ask(handler, timeout_s=0.3)
    assert isinstance(failure, TrajectoryFailure) and failure.cause == "retrieval"


def test_what_nobody_foresaw_reaches_whoever_asked(monkeypatch):
    async def run():
        async with SearchEnvironment(
            SearchConfig(name="search", retrieval=RetrievalConfig(url="http://127.0.0.1:9"))
        ) as environment:

            async def fails(*asked):
                raise RuntimeError("unforeseen")

            monkeypatch.setattr(environment, "_ask", fails)
            return await asyncio.wait_for(
                asyncio.gather(*(environment.retrieve("q") for _ in range(3)), return_exceptions=True), 5
            )

    assert [type(error) for error in asyncio.run(run())] == [RuntimeError] * 3


def test_queries_in_flight_end_with_the_environment():
    async def run():
        environment = SearchEnvironment(SearchConfig(name="search", retrieval=RetrievalConfig(url="http://127.0.0.1:9")))
        await environment.__aenter__()
        early = asyncio.ensure_future(environment.retrieve("q"))
        await asyncio.sleep(0)
        await environment.__aexit__(None, None, None)
        await asyncio.wait([early], timeout=5)
        return early.done()

    assert asyncio.run(run())


def test_a_time_out_is_not_tried_again():
    requests = []

    async def slow_and_counted(request):
        requests.append(request)
        await asyncio.sleep(1)

    found = ask(slow_and_counted, queries=5, timeout_s=0.3)
    assert all(isinstance(each, TrajectoryFailure) for each in found) and len(requests) == 1


def test_a_server_that_is_gone_is_the_trajectory_s_failure():
    async def run():
        config = SearchConfig(name="search", retrieval=RetrievalConfig(url="http://127.0.0.1:9", timeout_s=1))
        async with SearchEnvironment(config) as environment:
            await environment.retrieve("q")

    with pytest.raises(TrajectoryFailure, match="retrieval"):
        asyncio.run(run())


def test_one_failure_leaves_the_others_alone():
    async def every_other(request):
        return await (broken if "q1" in (await request.json())["queries"] else ranked)(request)

    found = ask(every_other, queries=3, timeout_s=0.8)
    assert [isinstance(each, TrajectoryFailure) for each in found] == [False, True, False]


@given(st.integers(1, 200))
@settings(max_examples=8)
def test_queries_made_together_travel_together_and_each_gets_its_own_passages(count):
    requests = []

    async def counted(request):
        requests.append((await request.json())["queries"])
        return await ranked(request)

    found = ask(counted, queries=count, topk=2)
    assert found == [[f"q{i} 0", f"q{i} 1"] for i in range(count)]
    assert len(requests) == -(-count // MAX_QUERIES)


def test_a_query_is_searched_once_for_all_who_ask_meanwhile_and_each_gets_a_list_of_his_own():
    requests = []

    async def counted(request):
        requests.append((await request.json())["queries"])
        await asyncio.sleep(0.1)
        return await ranked(request)

    async def asks(environment):
        first = asyncio.ensure_future(environment.retrieve("q"))
        gone = asyncio.ensure_future(environment.retrieve("q"))
        await asyncio.sleep(0.03)
        gone.cancel()
        later = await environment.retrieve("q")
        later.append("mine")
        return [await first, later, await environment.retrieve("q")]

    assert ask(counted, asks=asks, topk=1) == [["q 0"], ["q 0", "mine"], ["q 0"]]
    assert requests == [["q"], ["q"]]


def test_queries_that_wait_for_others_answers_travel_together():
    requests = []

    async def counted(request):
        requests.append((await request.json())["queries"])
        await asyncio.sleep(0.1)
        return await ranked(request)

    async def asks(environment):
        asked = []
        for number in range(5):
            asked.append(asyncio.ensure_future(environment.retrieve(f"q{number}")))
            await asyncio.sleep(0.005)
        return await asyncio.gather(*asked)

    assert ask(counted, asks=asks, topk=1, concurrency=1) == [[f"q{number} 0"] for number in range(5)]
    assert requests == [["q0"], ["q1", "q2", "q3", "q4"]]


def test_an_answer_to_fewer_queries_is_not_taken_for_all():
    async def short(request):
        body = await request.json()
        return web.json_response({"result": [[{"contents": "?"}]] * (len(body["queries"]) - 1)})

    assert all(isinstance(each, TrajectoryFailure) for each in ask(short, queries=3, timeout_s=0.3))


@pytest.mark.parametrize(
    "passage, accepted, holds",
    [
        ("the mayor of Bavor is Duvas.", ("duvas",), True),
        ("The Mayor of Bavor is Duvas.", ("An Other", "the Duvas"), True),
        ("the mayor of Bavor is Duvasel.", ("Duvas",), False),
        ("", ("Duvas",), False),
        ("no", ("no",), False),
        ("the", ("the",), False),
    ],
)
def test_a_passage_supports_an_answer_that_it_holds_as_whole_words(passage, accepted, holds):
    environment = SearchEnvironment(SearchConfig(name="search"))
    assert environment.supports(Question("0", "who?", accepted), ["nothing here", passage]) is holds


def test_a_server_is_tried_before_the_run_begins():
    ask(ranked, check=True)

    async def refuses(request):
        return web.Response(status=422)

    with pytest.raises(ConfigError, match=r"environment\.retrieval\.url = .*topk=1000.*answered 422"):
        ask(refuses, check=True, topk=1000)

    async def nobody():
        async with SearchEnvironment(
            SearchConfig(name="search", retrieval=RetrievalConfig(url="http://127.0.0.1:1"))
        ) as environment:
            await environment.check()

    with pytest.raises(ConfigError, match=r"environment\.retrieval\.url = 'http://127\.0\.0\.1:1"):
        asyncio.run(nobody())
