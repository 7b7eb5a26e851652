"""The tests of a coding problem, in the forms that public data sets have.

A question's `tests` (or `input_output`, as in APPS) is an object, or JSON text of one:

- `{"inputs": [text, …], "outputs": [text, …]}`: a program reads standard input and prints (APPS, CodeContests);
- `{"fn_name": name, "inputs": [[argument, …], …], "outputs": [value, …]}`: a function is called (APPS); where inputs are texts,
  each line of one is an argument as JSON, and outputs are JSON as well (LiveCodeBench);
- `{"entry_point": name, "test": source of check(candidate), "prompt": source that it needs}`: assertions; these may also be
  columns of the row itself (HumanEval).
"""

import json
from dataclasses import dataclass
from typing import Any

from megatron_drmas.data.questions import Question

MAX_TESTS = 1000  # of a problem


class MalformedTests(ValueError):
    """A question has no tests, or tests in no known form."""


@dataclass(frozen=True)
class Programs:
    """A program is run for each test: (standard input, expected output)."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Calls:
    """A function is called for each test: (arguments, expected value)."""

    function: str
    cases: tuple[tuple[list[Any], Any], ...]


@dataclass(frozen=True)
class Assertions:
    """`source` defines check(candidate), which raises where the function is wrong; one test in all.

    `prelude` is run before it: what the assertions need of the problem's own text.
    """

    function: str
    source: str
    prelude: str


def read_tests(question: Question) -> Programs | Calls | Assertions:
    """A question's tests.

    Raises:
        MalformedTests: it has none, or they are malformed; a phrase that follows the question's name.
    """
    columns = question.extra
    given = next((columns[name] for name in ("tests", "input_output") if columns.get(name)), None)
    given = columns if given is None and "test" in columns else given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise MalformedTests(f"has tests that are not JSON ({error})") from error
    if not isinstance(given, dict):
        raise MalformedTests("has no tests")
    if "test" in given:
        if not isinstance(given.get("entry_point"), str) or not isinstance(given["test"], str):
            raise MalformedTests("has a test without the name of its function in entry_point")
        return Assertions(given["entry_point"], given["test"], str(given.get("prompt", "")))
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise MalformedTests("has tests without as many inputs as outputs")
    if len(inputs) > MAX_TESTS:
        raise MalformedTests(f"has {len(inputs)} tests; {MAX_TESTS} are the limit")
    function = given.get("fn_name")
    if function is None:
        if not all(isinstance(text, str) for text in [*inputs, *outputs]):
            raise MalformedTests("has tests of a program whose inputs and outputs are not texts")
        return Programs(tuple(zip(inputs, outputs)))
    try:
        cases = tuple((_arguments(given_), _value(expected)) for given_, expected in zip(inputs, outputs))
    except ValueError as error:
        raise MalformedTests(f"has a call whose arguments or value are not JSON ({error})") from error
    return Calls(str(function), cases)


def _arguments(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"arguments are {type(given).__name__}, not a list")
    return given


def _value(expected: Any) -> Any:
    if isinstance(expected, str):
        try:
            return json.loads(expected)
        except ValueError:
            return expected
    return expected
