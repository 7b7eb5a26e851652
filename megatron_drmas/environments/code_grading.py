"""Whether a program passes its tests, found out in sandboxes that never see what is expected.

Programs are run once a test, and their output is compared here.  A function runs in a sandbox of its own that is sent
arguments and answers with values, both as Python literals; assertions run in another one and reach the function through
this process.  So nothing that a candidate can read, not even its own memory, holds an expected value.
"""

import ast
import math
from dataclasses import dataclass
from typing import Any

from megatron_drmas.environments.code_tests import Assertions, Calls, Programs
from megatron_drmas.sandbox.pool import SandboxPool, Session

MAX_LITERAL = 1 << 20  # characters of a value
MAX_CALLS = 100_000  # of a function by assertions
TOLERANCE = 1e-9  # relative, of floats that a function returns

# What becomes of a candidate's function: it answers a line of arguments with a line: "value …" or "error …".
CANDIDATE = """
import os as _os, sys as _sys

def _serve(_source, _name):
    import ast
    asked, answers = _os.fdopen(_os.dup(0)), _os.fdopen(_os.dup(1), "w")
    _os.dup2(_os.open(_os.devnull, _os.O_RDWR), 0)
    _os.dup2(0, 1)
    _os.dup2(0, 2)
    space = {"__name__": "candidate", "__builtins__": __builtins__}
    problem = function = None
    try:
        exec(compile(_source, "solution.py", "exec"), space)
        function = space.get(_name) or getattr(space["Solution"](), _name)
    except BaseException as error:
        problem = error
    for line in asked:
        try:
            if problem is not None:
                raise problem
            answer = "value " + repr(function(*ast.literal_eval(line)))
        except BaseException as error:
            answer = "error " + f"{type(error).__name__}: {error}"[:500]
        answers.write(" ".join(answer.split("\\n")) + "\\n")
        answers.flush()

_serve(%r, %r)
"""

# What assertions see: `candidate` asks by a line, "call …", and the last line is "passed", or "failed …".
TESTER = """
import os as _os, sys as _sys

def _run(_prelude, _source, _name):
    import ast
    replies, says = _os.fdopen(_os.dup(0)), _os.fdopen(_os.dup(1), "w")
    _os.dup2(_os.open(_os.devnull, _os.O_RDWR), 0)
    _os.dup2(0, 1)

    def say(text):
        says.write(" ".join(text.split("\\n")) + "\\n")
        says.flush()

    def candidate(*arguments):
        say("call " + repr(list(arguments)))
        kind, _, text = replies.readline().rstrip("\\n").partition(" ")
        if kind != "value":
            raise RuntimeError(text)
        return ast.literal_eval(text)

    replies.readline()
    try:
        space = {"__name__": "tests", "__builtins__": __builtins__}
        exec(compile(_prelude, "prompt.py", "exec"), space)
        space[_name] = candidate
        exec(compile(_source, "tests.py", "exec"), space)
        space["check"](candidate)
    except AssertionError:
        say("failed wrong value")
    except BaseException as error:
        say("failed " + f"{type(error).__name__}: {error}"[:500])
    else:
        say("passed")

_run(%r, %r, %r)
"""


@dataclass(frozen=True)
class Verdict:
    """How a candidate did.

    `problem` says why its first failed test failed, in words that give away nothing that was expected; empty where all passed.
    """

    passed: int
    total: int
    problem: str = ""

    @property
    def share(self) -> float:
        """Of the tests that passed."""
        return self.passed / self.total


async def grade_code(pool: SandboxPool, code: str, tests: Programs | Calls | Assertions) -> Verdict:
    """Run all tests of a candidate.

    Args:
        code: Python source.

    Raises:
        SandboxError: no sandbox could be started.
    """
    if isinstance(tests, Programs):
        return await _grade_programs(pool, code, tests)
    if isinstance(tests, Calls):
        async with pool.sessions(CANDIDATE % (code, tests.function)) as (session,):
            return await _grade_calls(session, tests)
    programs = CANDIDATE % (code, tests.function), TESTER % (tests.prelude, tests.source, tests.function)
    async with pool.sessions(*programs) as (candidate, tester):
        problem = await _grade_assertions(candidate, tester)
    return Verdict(int(not problem), 1, problem)


async def _grade_programs(pool: SandboxPool, code: str, tests: Programs) -> Verdict:
    passed, problem = 0, ""
    for number, (given, expected) in enumerate(tests.cases, 1):
        result = await pool.run(code, given)
        if result.succeeded and same_output(result.stdout, expected):
            passed += 1
        elif not problem:
            last = (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
            why = f"over the limit of {result.killed}" if result.killed else "wrong output" if result.succeeded else last
            problem = f"test {number}: {why}"
    return Verdict(passed, len(tests.cases), problem)


async def _grade_calls(session: Session, tests: Calls) -> Verdict:
    passed, problem = 0, ""
    for number, (arguments, expected) in enumerate(tests.cases, 1):
        answer = await session.ask(repr(arguments))
        why = _ended(session) if answer is None else ""
        if answer is not None:
            kind, _, text = answer.partition(" ")
            if kind == "value" and _equal(_literal(text), expected):
                passed += 1
                continue
            why = "wrong value" if kind == "value" else text
        problem = problem or f"test {number}: {why}"
        if answer is None:
            break  # the rest cannot be asked
    return Verdict(passed, len(tests.cases), problem)


async def _grade_assertions(candidate: Session, tester: Session) -> str:
    """Why the assertions fail; empty if they hold."""
    reply = "begin"
    for _ in range(MAX_CALLS):
        asked = await tester.ask(reply)
        if asked is None:
            return f"the tests did not end: {_ended(tester)}"
        kind, _, text = asked.partition(" ")
        if kind == "passed":
            return ""
        if kind == "failed":
            return text
        answer = await candidate.ask(text)
        if answer is None:
            return _ended(candidate)
        reply = answer if len(answer) <= MAX_LITERAL else "error the value is too long"
    return f"more than {MAX_CALLS} calls"


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are the same but for spaces at the ends of lines and empty lines at the end."""
    return _lines(found) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _ended(session: Session) -> str:
    return f"over the limit of {session.killed}" if session.killed else "the program ended early"


_UNREADABLE = object()


def _literal(text: str) -> Any:
    if len(text) > MAX_LITERAL:
        return _UNREADABLE
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _UNREADABLE


def _equal(found: Any, expected: Any) -> bool:
    """Equal values; tuples count as lists, as JSON writes them, and floats agree to `TOLERANCE`."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(found, int) and isinstance(expected, int):
            return found == expected
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        named = {str(key): value for key, value in found.items()}
        return len(named) == len(expected) and all(str(k) in named and _equal(named[str(k)], v) for k, v in expected.items())
    return type(found) is type(expected) and found == expected
