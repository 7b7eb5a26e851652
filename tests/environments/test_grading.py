"""Grading: equal answers are equal however they are written, and no answer can hold up or harm the run."""

import asyncio
import csv
import os
import signal
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_drmas.data.questions import load_questions
from megatron_drmas.environments.grading import MAX_CHARS, Grader, GraderError, GradeResult


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


# A sum of nested radicals and what it equals: sympy does not end to prove it
PRIMES = ((2, 3), (5, 7), (11, 13))
ENDLESS = (
    "+".join(f"\\sqrt{{{p + q}+2\\sqrt{{{p * q}}}}}" for p, q in PRIMES),
    "+".join(f"\\sqrt{{{p}}}+\\sqrt{{{q}}}" for p, q in PRIMES),
)


def boxed(text: str) -> str:
    return f"First \\boxed{{0}}, so the answer is $\\boxed{{{text}}}$."


def table() -> list[tuple[str, str, str]]:
    """The rows of graded_answers.tsv (answer, gold, verdict; the kind is a comment)."""
    with Path(__file__).with_name("graded_answers.tsv").open(encoding="utf-8", newline="") as file:
        return [
            (row["answer"], row["gold"], row["verdict"]) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def test_every_answer_of_the_table_gets_its_verdict(loop, grader):
    async def graded() -> list[GradeResult]:
        return [await grader.grade(answer, gold) for answer, gold, _ in rows]

    rows = table()
    assert len(rows) >= 300 and {verdict for _, _, verdict in rows} == {"right", "wrong"}
    results = loop.run_until_complete(graded())
    assert [row for row, result in zip(rows, results) if result.error or result.correct != (row[2] == "right")] == []


@pytest.mark.parametrize("answer", ["12", "\\boxed{12}", "so it is $\\boxed {12}$.", "\\boxed 12", "\\boxed{\\boxed{12}}"])
@pytest.mark.parametrize("gold", ["12", "$12$", "\\boxed{12}"])
def test_the_box_is_graded_where_there_is_one_and_the_whole_content_otherwise(loop, grader, answer, gold):
    assert loop.run_until_complete(grader.grade(answer, gold)) == GradeResult(True)


@pytest.mark.parametrize("answer", ["\\boxed{12", "\\boxed{12} or \\boxed{", "\\boxed{}", "12 \\boxed{13}"])
def test_a_box_that_is_open_or_holds_something_else_is_wrong(loop, grader, answer):
    assert not loop.run_until_complete(grader.grade(answer, "12")).correct


def test_public_golds_are_right_and_other_numbers_are_wrong(loop, grader, public_data):
    async def wrongly_graded() -> list[tuple[str, str]]:
        wrong = []
        for name in ("gsm8k_part", "aime24", "amc23"):
            for question in load_questions(str(public_data / f"{name}.jsonl"), "data.eval"):
                gold = question.answers[0]
                number = Fraction(gold.replace(",", ""))
                right = [
                    gold,
                    f"{float(number):,}",
                    f"\\boxed{{{gold}}}",
                    f"{number}.",
                    f"\\$ {number}",
                    f"{number} \\text{{ dollars}}",
                    f"\\frac{{{2 * number}}}{{2}}",
                ]
                other = [
                    f"{number + 1}",
                    f"{number}1",
                    f"{float(number)}01",
                    f"{-number if number else 1}",
                    f"{number}x",
                    f"\\sqrt{{{number**2 + 1}}}",
                ]
                wrong += [(answer, gold) for answer in right if not (await grader.grade(answer, gold)).correct]
                wrong += [(answer, gold) for answer in other if (await grader.grade(answer, gold)).correct]
        return wrong

    assert loop.run_until_complete(wrongly_graded()) == []


def test_an_answer_that_never_ends_is_wrong_even_if_it_is_equal_and_the_pool_goes_on(loop, hasty_grader):
    before = hasty_grader.restarts["time limit"]
    assert loop.run_until_complete(hasty_grader.grade(boxed(ENDLESS[0]), ENDLESS[1])) == GradeResult(False, "time limit")
    assert hasty_grader.restarts["time limit"] == before + 1
    assert loop.run_until_complete(hasty_grader.grade(boxed("5"), "5")) == GradeResult(True)


@pytest.mark.parametrize(
    "hostile",
    [
        "10**10**10",
        "10^{10^{10}}",
        "2^{2^{2^{2^{2^{2}}}}}",
        "1e999999999",
        "(10^9)!",
        "\\binom{10^9}{10^8}",
        "(" * 900 + "1" + ")" * 900,
        "9" * MAX_CHARS,
        "{" * 99,
        "\\sqrt{" * 50 + "2" + "}" * 50,
        "__import__('os').abort()",
        "\x00",
        "\\",
    ],
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
        task = asyncio.create_task(grader.grade(boxed(ENDLESS[0]), ENDLESS[1]))
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
    with pytest.raises(GraderError, match=r"memory_mib=16: .* must be [0-9]+ or more"):
        loop.run_until_complete(Grader(workers=1, timeout_s=1.0, memory_mib=16).start())
