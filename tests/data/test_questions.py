"""Questions come out the same from every format, and in an order that a resumed run continues."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.data.questions import load_questions
from megatron_drmas.data.sampler import QuestionSampler

FORMS = [
    {"question": "q", "answers": ["a", "b"]},
    {"question": "q", "golden_answers": ["a", "b"]},
    {"env_kwargs": {"question": "q", "ground_truth": ["a", "b"]}},
    {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": {"target": ["a", "b"]}}},
    {"extra_info": {"question": "q"}, "reward_model": {"ground_truth": ["a", "b"]}},
]


@pytest.mark.parametrize("row", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_formats_agree(tmp_path, row, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n" + json.dumps(row) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    [question] = load_questions(str(path), "data.train")
    assert (question.text, question.answers) == ("q", ("a", "b"))


def test_a_single_answer_and_a_number_are_answers(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "1+1", "answer": 2}\n{"question": "x", "answer": "18"}\n')
    assert [question.answers for question in load_questions(str(path), "k")] == [("2",), ("18",)]


def load(tmp_path, *rows, kind="jsonl"):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return load_questions(str(path), "data.train")


def asked(id=None, source=None, **more):
    return {"id": id, "question": "q", "answer": "a", "data_source": source, **more}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_ids_are_unique_within_their_source(tmp_path, kind):
    rows = [asked("train_0", "nq"), asked("train_1", "nq"), asked("train_0", "hotpotqa"), asked(None, "nq"), asked("train_0")]
    assert [question.id for question in load(tmp_path, *rows, kind=kind)] == [
        "nq#train_0",
        "nq#train_1",
        "hotpotqa#train_0",
        "#4",
        "train_0",
    ]


@pytest.mark.parametrize("missing", [{}, {"id": None}, {"id": ""}, {"id": float("nan")}])
def test_ids_may_be_missing_on_some_rows(tmp_path, missing):
    row = {"question": "q", "answer": "a"}
    assert [question.id for question in load(tmp_path, row | {"id": "2"}, row | missing)] == ["2", "#2"]


@pytest.mark.parametrize("first, second", [(1, 1), (1, "1"), (1, 1.0), ("a", " a ")])
def test_repeated_ids_are_refused(tmp_path, first, second):
    with pytest.raises(ConfigError, match=r"line 2 repeats id .* of line 1"):
        load(tmp_path, asked(first), asked(second))
    with pytest.raises(ConfigError, match="within 'nq'"):
        load(tmp_path, asked(first, "nq"), asked(second, "nq"))


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "a#", "a%23", "#2"]), st.sampled_from(["", "a", "#a", "2", "#2", "a#a"])),
        max_size=8,
        unique=True,
    )
)
def test_identities_differ_where_rows_do(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("identities")
    questions = load(folder, asked(), *(asked(identity, source) for source, identity in rows))
    assert len({question.id for question in questions}) == len(questions)
    alone = [load(folder, "\n" * line, asked(identity, source))[0].id for line, (source, identity) in enumerate(rows, 1)]
    assert alone == [question.id for question in questions[1:]]


def chat(*messages):
    return {"prompt": [{"role": role, "content": content} for role, content in messages], "reward_model": {"ground_truth": "5"}}


@pytest.mark.parametrize(
    "row, text",
    [
        (chat(("user", "2+3?")), "2+3?"),
        (chat(("user", "1+1?"), ("assistant", "2"), ("user", "2+3?")), "User: 1+1?\n\nAssistant: 2\n\nUser: 2+3?"),
        (chat(("system", "Teach."), ("user", "2+3?")), "System: Teach.\n\nUser: 2+3?"),
        (chat(("user", [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}])), "2+3?"),
        (chat(("user", "[1, 2]")), "[1, 2]"),
        ({"prompt": "2+3?", "answer": "5"}, "2+3?"),
        ({"prompt": "[2, 3] summed?", "answer": "5"}, "[2, 3] summed?"),
        ({"prompt": "[2, 3]", "answer": "5"}, "[2, 3]"),
        (
            {"prompt": json.dumps(chat(("system", "S"), ("user", "q"))["prompt"]), "reward_model": '{"ground_truth": "5"}'},
            "System: S\n\nUser: q",
        ),
        ({"question": "2+3?", **chat(("system", "S"), ("user", "Reason. 2+3?"))}, "2+3?"),
        ({"question": None, **chat(("user", "2+3?"))}, "2+3?"),
    ],
)
def test_nothing_of_a_prompt_is_dropped(tmp_path, row, text):
    for kind in ("jsonl", "parquet"):
        [question] = load(tmp_path, row, kind=kind)
        assert (question.text, question.answers) == (text, ("5",))


@pytest.mark.parametrize(
    "prompt, problem",
    [
        ([], "neither a text nor chat messages"),
        ({"role": "user", "content": "q"}, "neither a text nor chat messages"),
        (["q"], "message of role 'q'"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "5"}], "ends with a message of the assistant"),
        ([{"role": "system", "content": "q"}], "ends with a message of the system"),
        ([{"role": "tool", "content": "q"}], "message of role 'tool'"),
        ([{"role": "user", "content": " "}], "message of the user without a text"),
        ([{"role": "system", "content": None}, {"role": "user", "content": "q"}], "message of the system without a text"),
        ([{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "q"}]}], "part of type 'image'"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused(tmp_path, prompt, problem):
    with pytest.raises(ConfigError, match=f"data.train.*line 2 has a prompt .*{problem}"):
        load(tmp_path, asked(), {"prompt": prompt, "answer": "5"})


@pytest.mark.parametrize(
    "answer, accepted",
    [
        ("18", ("18",)),
        (18, ("18",)),
        (18.0, ("18",)),
        (0, ("0",)),
        (0.5, ("0.5",)),
        (["a", 2, 3.0], ("a", "2", "3")),
        ({"target": ["a"]}, ("a",)),
        ('["a", "b"]', ("a", "b")),
        ('{"target": ["a"]}', ("a",)),
        ("[1, 2]", ("[1, 2]",)),
        ("{1, 2}", ("{1, 2}",)),
        ("nan", ("nan",)),
        ("None", ("None",)),
    ],
)
def test_answers_are_texts_or_numbers(tmp_path, answer, accepted):
    assert load(tmp_path, {"question": "q", "answer": answer})[0].answers == accepted


UNGRADABLE = [
    None,
    float("nan"),
    float("inf"),
    [],
    [None],
    [""],
    "",
    " ",
    True,
    ["a", None],
    ["a", False],
    [["a"]],
    {"value": "a"},
    {"target": None},
    "['a', 'b']",
]


@pytest.mark.parametrize("answer", UNGRADABLE, ids=repr)
def test_what_cannot_be_graded_is_refused_by_line(tmp_path, answer):
    for row in ({"question": "q", "answer": answer}, {"question": "q", "reward_model": {"ground_truth": answer}}):
        with pytest.raises(ConfigError, match=r"data.train.*data.jsonl.*line 2 ") as caught:
            load(tmp_path, asked(), row)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", [[None], [float("nan")], [1.5, float("inf")], [[]], [[""]], [[None]], [True], [""]], ids=repr)
def test_what_cannot_be_graded_is_refused_by_row_in_parquet_too(tmp_path, column):
    with pytest.raises(ConfigError, match=f"data.train.*data.parquet.*row {len(column)} "):
        load(tmp_path, *({"question": "q", "answer": answer} for answer in column), kind="parquet")


def test_another_answer_column_serves_where_one_is_empty(tmp_path):
    rows = [
        {"question": "q", "golden_answers": empty, "reward_model": {"ground_truth": "5"}} for empty in (None, [], float("nan"))
    ]
    assert {question.answers for question in load(tmp_path, *rows)} == {("5",)}


@given(
    st.text(st.characters(codec=None, categories=["Cs", "Cc", "L", "N", "P"]), min_size=1),
    st.sampled_from(["question", "answer", "data_source", "id", "note"]),
)
def test_a_text_is_kept_as_it_is_or_refused(tmp_path_factory, text, name):
    """Nothing is accepted that cannot be written down, and only what no text holds is refused."""
    row = {"question": "q", "answer": "a", "data_source": "s", "id": "i", "note": "n"} | {name: text}
    bad = any(0xD800 <= ord(c) <= 0xDFFF or ord(c) == 0x7F or (ord(c) < 0x20 and c not in "\t\n\r") for c in text)
    try:
        [question] = load(tmp_path_factory.mktemp("texts"), json.dumps(row))
    except ConfigError as error:
        assert "line 1 has " in str(error) and (bad or not text.strip() or text.strip().startswith("['"))
        str(error).encode()
    else:
        kept = {
            "question": question.text,
            "answer": question.answers[0],
            "data_source": question.data_source,
            "id": question.id,
            "note": question.extra["note"],
        }
        kept[name].encode()
        assert not bad and (name in ("data_source", "id") or kept[name].strip() == text.strip())


@pytest.mark.parametrize("answer", ["\frac{1}{2}", "\boxed{1}", "a\0"])
def test_a_lost_backslash_is_seen_at_the_edge_too(tmp_path, answer):
    with pytest.raises(
        ConfigError, match=r"line 1 has an answer that has the control character .* at character [12]; was a backslash lost"
    ):
        load(tmp_path, {"question": "q", "answer": answer})


def test_a_text_that_is_not_utf8_is_named_by_its_row(tmp_path):
    bad = pyarrow.array([b"q", b"q", b"\xed\xa0\xbd"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": bad, "answer": ["a"] * 3}), tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match="row 3 has a text that is not UTF-8"):
        load_questions(str(tmp_path / "data.parquet"), "data.train")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 9, b"{}"])
def test_what_is_no_parquet_is_refused(tmp_path, content):
    (tmp_path / "data.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data.train.*is not parquet"):
        load_questions(str(tmp_path / "data.parquet"), "data.train")


def test_limit(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n' * 5)
    assert len(load_questions(str(path), "k", limit=3)) == 3


@given(
    size=st.integers(1, 9),
    seed=st.integers(0, 3),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    shuffle=st.booleans(),
)
def test_every_epoch_is_a_permutation_however_it_is_drawn(size, seed, cuts, shuffle):
    whole, parts = QuestionSampler(size, seed, shuffle), QuestionSampler(size, seed, shuffle)
    drawn = []
    for count in cuts:
        resumed = QuestionSampler(size, seed, shuffle)
        resumed.load_state_dict(parts.state_dict())
        drawn += parts.draw(count)
        assert resumed.draw(count) == drawn[-count:]
    assert whole.draw(sum(cuts)) == drawn
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == list(range(size))


@pytest.mark.parametrize(
    "answer, problem",
    [
        ("6 + 9 = <<6+9=15>>15 apples.\n#### 15", "worked solution"),
        ("[\"it's\", 'b']", "Python text"),
        ("array(['a'], dtype=object)", "Python text"),
        ("3\times 4", "backslash"),
        ("\neq 2", "backslash"),
        ("\right)", "backslash"),
    ],
)
def test_an_answer_that_nothing_could_equal_is_refused(tmp_path, answer, problem):
    with pytest.raises(ConfigError, match=f"line 2 .*{problem}"):
        load(tmp_path, {"question": "q", "answer": "1"}, {"question": "r", "answer": answer})


def test_a_float32_column_holds_the_numbers_that_were_written(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"question": ["q", "r"], "answer": pyarrow.array([0.1, 18.0], pyarrow.float32())}), path
    )
    assert [question.answers for question in load_questions(str(path), "k")] == [("0.1",), ("18",)]


@pytest.mark.parametrize("kind, value", [(pyarrow.timestamp("ns"), 1), (pyarrow.duration("s"), 2**62)], ids=str)
def test_a_column_that_python_cannot_hold_is_refused_by_row(tmp_path, kind, value):
    path = tmp_path / "data.parquet"
    column = pyarrow.array([0, value], kind)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q", "r"], "answer": ["a", "b"], "when": column}), path)
    with pytest.raises(ConfigError, match="after row 1"):
        load_questions(str(path), "k")
