r"""Questions from JSON lines or parquet.

A row needs a question and one or more accepted answers, under the names the field's data sets use (the first that holds
something counts):

- flat: `question` with `answers` (list), `answer` or `golden_answers`;
- verl-style: `env_kwargs {question, ground_truth}` or `extra_info {question}` with `reward_model {ground_truth}`,
  where ground_truth is a string, a list, or `{"target": …}`; `prompt` serves when no question is given.

`prompt` is a text, or chat messages that end with the user's.  A lone user message is the question; where others come
before it (a system message, examples) the question is the whole conversation, a paragraph "System: …", "User: …" or
"Assistant: …" for each message, since a team's agents have messages of their own to put it in.

A coding problem may have `tests`, `input_output` or `test` instead of an answer (see `environments.code_tests`).

An answer is a text or a number.  Nested values may be stored as JSON text.  `data_source` is kept, and every other column
goes to `Question.extra`.

`Question.id` tells the questions of a file apart and depends on the row alone: `source#id` from the row's `data_source`
and `id`, `id` without a source, and `#n` for the n-th line (row, in parquet) without an id; `%` and `#` within a source or
an id are written %25 and %23.  An id need be unique within its source only, since merged sets number each part anew.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.rows import decoded, flaw, is_missing, read_rows

REMEDY = 'each row needs "question" and "answer" or "answers"'
ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
PYTHON_LIST = re.compile(r"(?:array\()?\[\s*['\"].*['\"]\s*\](?:, dtype=.*)?\)?", re.DOTALL)
WORKED = re.compile(r"^####\s*\S", re.MULTILINE)
TESTED = {"tests", "input_output", "test"}  # a row with one of these is graded by it, and needs no answer
KNOWN = {"id", "question", "answers", "answer", "golden_answers", "data_source"}


@dataclass(frozen=True)
class Question:
    """One task of the data set."""

    id: str
    text: str
    answers: tuple[str, ...]
    data_source: str = ""
    in_training: bool = False  # an evaluation question that the run trains on too
    extra: dict[str, Any] = field(default_factory=dict)


class _Flaw(ValueError):
    """What is wrong with a row, as a phrase that follows "line 3"."""


def load_questions(path: str, key: str, limit: int | None = None) -> list[Question]:
    """Read a .jsonl or .parquet file.

    Args:
        path: the file.
        key: the configuration key the path came from, for error messages.
        limit: keep at most so many rows.

    Raises:
        ConfigError: no such file, an empty file, or a row that cannot be asked or graded (named by file and line).
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            key, path, "is a folder" if file.is_dir() else "no such file", "give a .jsonl or .parquet file of questions"
        )
    questions: list[Question] = []
    seen: dict[str, str] = {}
    try:
        for place, row in read_rows(file, key, REMEDY):
            try:
                question = _question(row, place)
            except _Flaw as problem:
                raise ConfigError(key, path, f"{place} {problem}", REMEDY) from problem
            if question.id in seen:
                where = f" within {question.data_source!r}" if question.data_source else ""
                raise ConfigError(
                    key,
                    path,
                    f"{place} repeats id {row['id']!r} of {seen[question.id]}{where}",
                    "make ids unique or leave them out",
                )
            seen[question.id] = place
            questions.append(question)
            if len(questions) == limit:
                break
    except OSError as error:
        raise ConfigError(
            key, path, f"cannot be read ({error.strerror})", "give a .jsonl or .parquet file of questions"
        ) from error
    if not questions:
        raise ConfigError(key, path, "holds no question", REMEDY)
    return questions


def _question(row: dict[str, Any], place: str) -> Question:
    env, extra, reward = (_section(row, name) for name in ("env_kwargs", "extra_info", "reward_model"))
    text = next((source["question"] for source in (row, env, extra) if not is_missing(source.get("question"))), None)
    if text is None:
        text = _conversation(row.get("prompt"))
    if not isinstance(text, str):
        raise _Flaw(f"has a question of type {type(text).__name__}, not a text")
    source = next((str(part["data_source"]) for part in (row, env) if not is_missing(part.get("data_source"))), "")
    given = [
        part.get(name)
        for part, name in (
            (row, "answers"),
            (row, "answer"),
            (row, "golden_answers"),
            (env, "ground_truth"),
            (reward, "ground_truth"),
        )
    ]
    answers = next(
        (value for value in given if not is_missing(value) and value != []),
        next((value for value in given if value is not None), None),
    )
    for name, value in ({"question": text, "data_source": source} | row).items():
        if isinstance(value, str):
            _check_text(name, value)
    return Question(
        id=_identity(source, row.get("id"), place),
        text=text.strip(),
        answers=() if answers is None and row.keys() & TESTED else _answers(answers),
        data_source=source,
        extra={name: value for name, value in row.items() if name not in KNOWN},
    )


def _check_text(name: str, text: str) -> None:
    problem = flaw(text)
    if problem:
        raise _Flaw(f"has {'an' if name[0] in 'aeiou' else 'a'} {name} that {problem}")


def _section(row: dict[str, Any], name: str) -> dict[str, Any]:
    section = decoded(row.get(name), (dict,))
    if is_missing(section):
        return {}
    if not isinstance(section, dict):
        raise _Flaw(f"has {name} of type {type(section).__name__}, not an object")
    return section


def _identity(source: str, given: Any, place: str) -> str:
    if is_missing(given):
        return f"#{place.split()[1]}"
    if isinstance(given, bool) or not isinstance(given, (str, int, float)):
        raise _Flaw(f"has an id of type {type(given).__name__}, which is neither a text nor a number")
    parts = [source, _number(given)] if source else [_number(given)]
    return "#".join(part.replace("%", "%25").replace("#", "%23") for part in parts)


def _number(value: str | int | float) -> str:
    """As text; data frames make 18.0 of an 18 whose column has gaps."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value).strip()


def _answers(given: Any) -> tuple[str, ...]:
    given = decoded(given, (dict,))
    if isinstance(given, dict):
        if "target" not in given:
            raise _Flaw(f"has an answer with the keys {', '.join(map(repr, given)) or 'none'}, and no 'target'")
        given = given["target"]
    if isinstance(given, str):
        stored = decoded(given, (list,))
        # '["a"]' is a list; '[1, 2]' is an interval, or what else mathematics writes in brackets
        given = stored if isinstance(stored, list) and stored and all(isinstance(answer, str) for answer in stored) else given
    answers = given if isinstance(given, list) else [given]
    if given is None or not answers:
        raise _Flaw("has no answer")
    for answer in answers:
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise _Flaw(f"has {'no' if len(answers) == 1 else 'an empty'} answer ({answer!r})")
        if isinstance(answer, bool) or (not isinstance(answer, (str, int, float)) and not _is_decimal(answer)):
            raise _Flaw(f"has the answer {answer!r}, which is neither a text nor a number")
        if not isinstance(answer, str) and not float("-inf") < answer < float("inf"):
            raise _Flaw(f"has the answer {answer!r}, which is not a finite number")
        if isinstance(answer, str) and PYTHON_LIST.fullmatch(answer.strip()):
            raise _Flaw(f"has the answer {answer!r}, a list that was written as Python text; write it as a list")
        if isinstance(answer, str) and WORKED.search(answer):
            raise _Flaw(
                "has an answer that is a worked solution with its result after '####' (GSM8K's form), which no answer equals; "
                "keep the result alone"
            )
        if isinstance(answer, str):
            _check_text("answer", answer)
    return tuple(_number(answer) for answer in answers)


def _is_decimal(value: Any) -> bool:
    from decimal import Decimal

    return isinstance(value, Decimal)


def _conversation(prompt: Any) -> str:
    if is_missing(prompt):
        raise _Flaw("has no question")
    stored = decoded(prompt, (list,))
    if isinstance(stored, list) and stored and all(isinstance(message, dict) for message in stored):
        prompt = stored
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise _Flaw("has a prompt that is neither a text nor chat messages")
    turns = []
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise _Flaw(f"has a prompt with a message of role {role!r}; known are {', '.join(ROLES)}")
        turns.append((message["role"], _content(message)))
    if turns[-1][0] != "user":
        raise _Flaw(f"has a prompt that ends with a message of the {turns[-1][0]}, not of the user; give a question")
    if len(turns) == 1:
        return turns[0][1]
    return "\n\n".join(f"{ROLES[role]}: {text}" for role, text in turns)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content) and content:
        other = next((part.get("type") for part in content if part.get("type") != "text"), None)
        if other is not None or not all(isinstance(part.get("text"), str) for part in content):
            raise _Flaw(f"has a prompt with a part of type {other!r}; only texts can be asked")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        raise _Flaw(f"has a prompt with a message of the {message['role']} without a text")
    return content.strip()
