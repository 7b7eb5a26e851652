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


def test_repeated_ids_are_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": 1, "question": "q", "answer": "a"}\n' * 2)
    with pytest.raises(ConfigError, match="line 2 repeats id"):
        load_questions(str(path), "data.eval")


def test_limit(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n' * 5)
    assert len(load_questions(str(path), "k", limit=3)) == 3


@given(size=st.integers(1, 9), seed=st.integers(0, 3), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6), shuffle=st.booleans())
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
        assert sorted(drawn[start:start + size]) == list(range(size))
