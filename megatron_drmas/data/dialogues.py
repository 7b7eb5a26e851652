"""Supervised examples from JSON lines.

A line is `{"messages": [{"role", "content"}, …]}`, whose last message is the assistant's, or `{"prompt": str, "response": str}`,
the prompt being a user's message.  Either may carry `prompt_weight`.  Every message of the assistant is learned, but for those
with `"weight": 0`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.rows import flaw

ROLES = ("system", "developer", "user", "assistant", "tool")  # what chat templates know
REMEDY = 'each line needs "messages" that end with the assistant\'s, or "prompt" and "response"'


@dataclass(frozen=True)
class Dialogue:
    """Chat messages, the last one being the assistant's, and where they came from."""

    messages: tuple[dict[str, str], ...]
    learned: tuple[int, ...]  # messages of the assistant, ascending
    prompt_weight: float | None  # None: the run's
    line: int


def load_dialogues(path: str, key: str) -> list[Dialogue]:
    """Read a JSON-lines file.

    Args:
        path: the file.
        key: the configuration key the path came from, for error messages.

    Raises:
        ConfigError: no such file, an empty file, or a malformed line (named by its number).
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(key, path, "no such file", "give a JSON-lines file of dialogues")
    dialogues = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                dialogues.append(_dialogue(line, number, path, key))
    if not dialogues:
        raise ConfigError(key, path, "holds no dialogue", REMEDY)
    return dialogues


def _dialogue(line: bytes, number: int, path: str, key: str) -> Dialogue:
    def bad(problem: str) -> ConfigError:
        return ConfigError(key, path, f"line {number} {problem}", REMEDY)

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise bad(f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise bad("is not a JSON object")
    messages = row.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": row.get("prompt")}, {"role": "assistant", "content": row.get("response")}]
    if not isinstance(messages, list) or len(messages) < 2:
        raise bad("has fewer than two messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise bad("has a message without a text for role and content")
        if message["role"] not in ROLES:
            raise bad(f"has a message of role {message['role'][:40]!r}, which is not one of {', '.join(ROLES)}")
        problem = flaw(message["content"])
        if problem:
            raise bad(f"has a message of the {message['role']} that {problem}")
        if message.get("weight") not in (None, 0, 1):
            raise bad(f"has a message of weight {message['weight']!r}, which is neither 0 nor 1")
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise bad("does not end with what the assistant says")
    weight = row.get("prompt_weight")
    if weight is not None and (
        isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf")
    ):
        raise bad(f"has prompt_weight {weight!r}, which is not a number of at least 0")
    learned = tuple(i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0)
    if not learned:
        raise bad("has no message to learn: all of the assistant's have weight 0")
    if not all(messages[i]["content"] for i in learned):
        raise bad("has an empty message of the assistant, which cannot be learned")
    if learned[0] == 0:
        raise bad("begins with what the assistant says; give that message weight 0")
    return Dialogue(tuple({"role": m["role"], "content": m["content"]} for m in messages), learned, weight, number)
