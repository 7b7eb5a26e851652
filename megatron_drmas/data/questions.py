"""Questions from JSON lines or parquet.

A row needs a question and one or more accepted answers, under the names the field's data sets use:

- flat: `question` with `answers` (list), `answer` or `golden_answers`;
- verl-style: `env_kwargs {question, ground_truth}` or `extra_info {question}` with `reward_model {ground_truth}`,
  where ground_truth is a string, a list, or `{"target": …}`; `prompt` (chat messages) serves when no question is given.

`data_source` and `id` are kept; every other column goes to `Question.extra`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Optional

from megatron_drmas.config.errors import ConfigError

REMEDY = 'each row needs "question" and "answer" or "answers"'


@dataclass(frozen=True)
class Question:
    """One task of the data set."""

    id: str
    text: str
    answers: tuple[str, ...]
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def load_questions(path: str, key: str, limit: Optional[int] = None) -> list[Question]:
    """Read a .jsonl or .parquet file.

    Args:
        path: the file.
        key: the configuration key the path came from, for error messages.
        limit: keep at most so many rows.

    Raises:
        ConfigError: no such file, an empty file, or a malformed row (named by file and line).
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(key, path, "no such file", "give a .jsonl or .parquet file of questions")
    questions = []
    seen: set[str] = set()
    for line, row in _rows(file, key):
        question = _question(row, line, file, key)
        if question.id in seen:
            raise ConfigError(key, path, f"line {line} repeats id {question.id!r}", "make ids unique or leave them out")
        seen.add(question.id)
        questions.append(question)
        if limit is not None and len(questions) == limit:
            break
    if not questions:
        raise ConfigError(key, path, "holds no question", REMEDY)
    return questions


def _rows(file: Path, key: str) -> Iterator[tuple[int, dict]]:
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(file)
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(key, str(file), f"is not parquet: {error}", "give a parquet or JSON-lines file") from error
        yield from enumerate(table.to_pylist(), 1)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(key, str(file), f"line {number} is not JSON ({error})", "write one JSON object a line") from error
            if not isinstance(row, dict):
                raise ConfigError(key, str(file), f"line {number} is not a JSON object", REMEDY)
            yield number, row


def _question(row: dict, line: int, file: Path, key: str) -> Question:
    env = row.get("env_kwargs") or {}
    extra = row.get("extra_info") or {}
    text = row.get("question") or env.get("question") or extra.get("question")
    if text is None and isinstance(row.get("prompt"), list):
        text = next((message["content"] for message in row["prompt"] if message.get("role") == "user"), None)
    answers = next((source[name] for source, name in (
        (row, "answers"), (row, "answer"), (row, "golden_answers"), (env, "ground_truth"), (row.get("reward_model") or {}, "ground_truth"),
    ) if source.get(name) is not None), None)
    if isinstance(answers, dict):
        answers = answers.get("target")
    if isinstance(answers, (str, int, float)):
        answers = [answers]
    where = f"line {line}"
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(key, str(file), f"{where} has no question", REMEDY)
    if not isinstance(answers, list) or not answers or not all(isinstance(a, (str, int, float)) and str(a).strip() for a in answers):
        raise ConfigError(key, str(file), f"{where} has no answer", REMEDY)
    known = {"id", "question", "answers", "answer", "golden_answers", "data_source"}
    source = row.get("data_source") or env.get("data_source") or ""
    return Question(
        id=str(row.get("id", line)), text=text.strip(), answers=tuple(str(answer).strip() for answer in answers),
        data_source=str(source), extra={name: value for name, value in row.items() if name not in known},
    )
