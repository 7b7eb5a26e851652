"""Reading supervised examples."""

import json

import pytest

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.dialogues import load_dialogues

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_both_forms_say_the_same(tmp_path):
    chat, pair = load_dialogues(
        write(tmp_path / "x.jsonl", CHAT, "\n", {"prompt": "a", "response": "b", "prompt_weight": 0.5}), "data"
    )
    assert chat.messages == pair.messages
    assert (chat.prompt_weight, pair.prompt_weight) == (None, 0.5)
    assert (chat.line, pair.line) == (1, 3) and chat.learned == pair.learned == (1,)


def test_every_message_of_the_assistant_is_learned_but_those_of_weight_0(tmp_path):
    long = {"messages": [*CHAT["messages"], *CHAT["messages"], *CHAT["messages"]]}
    skipping = {"messages": [*CHAT["messages"], CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]}
    first, second = load_dialogues(write(tmp_path / "x.jsonl", long, skipping), "data")
    assert first.learned == (1, 3, 5) and second.learned == (1,)


@pytest.mark.parametrize(
    "bad, problem",
    [
        ("{\n", "line 2 is not JSON"),
        ([1], "line 2 is not a JSON object"),
        ({"messages": CHAT["messages"][:1]}, "line 2 has fewer than two messages"),
        ({"messages": CHAT["messages"][::-1]}, "line 2 does not end with what the assistant says"),
        ({"prompt": "a"}, "line 2 has a message without a text"),
        ({"messages": [{"role": "human", "content": "a"}, CHAT["messages"][1]]}, "line 2 has a message of role 'human'"),
        ({"prompt": "a \ud83d", "response": "b"}, "line 2 has a message of the user that cannot be written as UTF-8"),
        ({"prompt": "a", "response": "\frac"}, "line 2 has a message of the assistant that has the control character"),
        ({"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]}, "line 2 has no message to learn"),
        ({"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0.5}]}, "line 2 has a message of weight 0.5"),
        ({"messages": [CHAT["messages"][1], *CHAT["messages"]]}, "line 2 begins with what the assistant says"),
        ({**CHAT, "prompt_weight": -1}, "line 2 has prompt_weight -1"),
        ({**CHAT, "prompt_weight": "much"}, "line 2 has prompt_weight 'much'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, bad, problem):
    with pytest.raises(ConfigError, match=problem):
        load_dialogues(write(tmp_path / "x.jsonl", CHAT, bad), "data")


def test_missing_and_empty_files_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_dialogues(str(tmp_path / "none.jsonl"), "data")
    with pytest.raises(ConfigError, match="holds no dialogue"):
        load_dialogues(write(tmp_path / "x.jsonl"), "data")
