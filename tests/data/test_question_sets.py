"""What is evaluated is not trained on, or is said to be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import DataConfig
from megatron_drmas.data.question_sets import check_data, load_question_sets, overlap_warning
from megatron_drmas.observability.records import name_questions


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")

    def written(name, texts):
        path = folder / name
        path.write_text("".join(json.dumps({"question": text, "answer": "a"}) + "\n" for text in texts))
        return str(path)

    return written


@given(
    texts=st.lists(st.sampled_from([f"q{number}" for number in range(12)]), min_size=3, max_size=20),
    held=st.integers(1, 5),
    data=st.data(),
)
def test_a_holdout_is_exact_disjoint_and_the_same_in_any_order(write, texts, held, data):
    config = DataConfig(train=write("a.jsonl", texts), eval_holdout=held)
    if held >= len(set(texts)):
        with pytest.raises(ConfigError, match=r"data.eval_holdout"):
            load_question_sets(config)
        return
    sets = load_question_sets(config)
    trained, evaluated = ([question.text for question in part] for part in (sets.train, sets.evaluation))
    assert sorted(trained + evaluated) == sorted(texts) and not set(trained) & set(evaluated)
    assert len(set(evaluated)) == held and sets.shared == 0
    again = load_question_sets(DataConfig(train=write("b.jsonl", data.draw(st.permutations(texts))), eval_holdout=held))
    assert {question.text for question in again.evaluation} == set(evaluated)


@pytest.mark.parametrize(
    "evaluated, shared, name",
    [
        (["What is  A?", "b"], 2, "2 training questions"),
        (["what is a?", "new"], 1, "2 questions, 1 of them training questions"),
        (["new", "other"], 0, "2 held-out questions"),
    ],
)
def test_shared_questions_are_found_by_their_text(write, evaluated, shared, name):
    config = DataConfig(train=write("train.jsonl", ["what is A?", "b", "c"]), eval=write("eval.jsonl", evaluated))
    sets = load_question_sets(config)
    assert sets.shared == shared and name_questions(len(sets.evaluation), sets.shared) == name
    warning = overlap_warning(config, sets)
    assert (warning is None) == (shared == 0)
    if shared:
        assert (
            "\n" not in warning
            and "data.eval" in warning
            and "data.eval_holdout" in warning
            and ("all 2" if shared == 2 else "1 of 2") in warning
        )


@pytest.mark.parametrize("settings, key", [({}, "data.eval"), ({"eval": "x", "eval_holdout": 3}, "data.eval_holdout")])
def test_evaluation_questions_come_from_one_place(settings, key):
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(train="x", **settings))
    assert caught.value.key == key
