"""Grading: equal answers are equal however they are written, and no answer can hold up or harm the run."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.environments.grading import MAX_CHARS, Grader, GraderError, GradeResult, last_boxed


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def running(loop, timeout_s: float):
    grader = Grader(workers=1, timeout_s=timeout_s, memory_mib=1024)
    loop.run_until_complete(grader.start())
    yield grader
    loop.run_until_complete(grader.close())


@pytest.fixture(scope="module")
def grader(loop):
    yield from running(loop, timeout_s=60.0)


@pytest.fixture(scope="module")
def hasty_grader(loop):
    yield from running(loop, timeout_s=1.0)


def boxed(text: str) -> str:
    return f"First \\boxed{{0}}, so the answer is $\\boxed{{{text}}}$."


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("72", "72"),
        ("0.5", "\\frac{1}{2}"),
        ("\\frac12", "0.5"),
        ("1,234", "1234"),
        ("1234", "1,234"),
        ("\\$12", "12"),
        ("12 \\text{ apples}", "12"),
        ("(x+1)^2", "x^2+2x+1"),
        ("\\{2,1\\}", "\\{1,2\\}"),
        ("x=5", "5"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("\\text{Monday}", "Monday"),
    ],
)
def test_equal_answers_are_right(loop, grader, answer, gold):
    assert loop.run_until_complete(grader.grade(boxed(answer), gold)) == GradeResult(True)


@pytest.mark.parametrize(
    "answer, gold",
    [("3", "4"), ("-3", "3"), ("(2,1)", "(1,2)"), ("x^2", "2x"), ("72.5", "72"), ("\\text{Monday}", "Friday"), ("", "3")],
)
def test_different_answers_are_wrong(loop, grader, answer, gold):
    assert not loop.run_until_complete(grader.grade(boxed(answer), gold)).correct


@pytest.mark.parametrize("hostile", ["10^{10^{10}}", "(" * 900 + "1" + ")" * 900])
def test_an_answer_that_never_ends_is_wrong_and_the_pool_goes_on(loop, hasty_grader, hostile):
    before = hasty_grader.restarts["time limit"]
    assert loop.run_until_complete(hasty_grader.grade(boxed(hostile), "5")) == GradeResult(False, "time limit")
    assert hasty_grader.restarts["time limit"] == before + 1
    assert loop.run_until_complete(hasty_grader.grade(boxed("5"), "5")) == GradeResult(True)


@pytest.mark.parametrize(
    "hostile",
    ["10**10**10", "9" * MAX_CHARS, "{" * 99, "\\sqrt{" * 50 + "2" + "}" * 50, "__import__('os').abort()", "\x00", "\\"],
)
def test_a_strange_answer_is_wrong_and_nothing_else(loop, grader, hostile):
    before = grader.restarts.total()
    assert not loop.run_until_complete(grader.grade(f"\\boxed{{{hostile}}}", "5")).correct
    assert grader.restarts.total() == before


def test_a_long_answer_is_refused_before_it_is_parsed(loop, grader):
    assert f"limit is {MAX_CHARS}" in loop.run_until_complete(grader.grade(boxed("1" * (MAX_CHARS + 1)), "1")).error


@pytest.mark.parametrize("times", [1, 2])
def test_an_answer_whose_worker_is_killed_is_asked_again_once(loop, grader, times):
    async def kill_and_grade() -> GradeResult:
        worker = grader._workers[0]
        asked = worker.ask

        async def killed_first(answer: str, gold: str) -> GradeResult:
            nonlocal times
            await worker.start()
            if times:
                times -= 1
                os.kill(worker._process.pid, signal.SIGKILL)
            return await asked(answer, gold)

        worker.ask = killed_first
        try:
            return await grader.grade(boxed("5"), "5")
        finally:
            worker.ask = asked

    expected = GradeResult(True) if times == 1 else GradeResult(False, "the grading worker died")
    assert loop.run_until_complete(kill_and_grade()) == expected
    assert loop.run_until_complete(grader.grade(boxed("5"), "5")) == GradeResult(True)


def test_a_cancelled_answer_is_not_taken_for_the_next_one(loop, grader):
    async def cancel_then_grade() -> GradeResult:
        task = asyncio.create_task(grader.grade(boxed("x^2+2x+1"), "(x+1)^2"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await grader.grade(boxed("3"), "4")

    assert not loop.run_until_complete(cancel_then_grade()).correct


def test_answers_are_graded_by_all_workers_at_once_and_in_their_own_order(loop):
    async def run() -> list[GradeResult]:
        grader = Grader(workers=2, timeout_s=60.0, memory_mib=1024)
        await grader.start()
        try:
            return await asyncio.gather(*(grader.grade(boxed(str(i % 3)), "1") for i in range(30)))
        finally:
            await grader.close()

    assert [r.correct for r in loop.run_until_complete(run())] == [i % 3 == 1 for i in range(30)]


def test_a_closed_grader_leaves_no_process(loop):
    async def run() -> list[int]:
        grader = Grader(workers=2, timeout_s=60.0, memory_mib=1024)
        await grader.start()
        pids = [w._process.pid for w in grader._workers]
        await grader.close()
        return pids

    assert not any(Path(f"/proc/{pid}").exists() for pid in loop.run_until_complete(run()))


def test_a_memory_limit_too_small_to_start_is_named(loop):
    with pytest.raises(GraderError, match="memory_mib=16: .* must be [0-9]+ or more"):
        loop.run_until_complete(Grader(workers=1, timeout_s=1.0, memory_mib=16).start())


@pytest.mark.parametrize(
    "text, content",
    [
        ("no box", None),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed {a{b}c} }", "a{b}c"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{\\left\\{x\\right.}", "\\left\\{x\\right."),
        ("\\boxed{1} and \\boxed{2", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box_counts(text, content):
    assert last_boxed(text) == content


@given(st.text(alphabet="ab{}\\ ", max_size=20), st.text(alphabet="ab \\{}", max_size=20))
def test_a_balanced_content_is_returned_whole(before, content):
    depth, escaped = 0, False
    for char in content:
        depth += 0 if escaped else (char == "{") - (char == "}")
        escaped = char == "\\" and not escaped
        if depth < 0:
            break
    if depth == 0 and not escaped and "boxed" not in before:
        assert last_boxed(f"{before}\\boxed{{{content}}} after") == content
