"""Every form in which servers answer reads as the same passages, and what is not an answer is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.environments.retrieval_protocol import DIALECTS, Dialect, endpoint, passage_text, read_answer

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
FORMS = [
    lambda text: text,
    lambda text: {"contents": text},
    lambda text: {"id": 3, "contents": text, "title": "not shown twice"},
    lambda text: {"document": {"contents": text}, "score": 0.5},
    lambda text: {"document": {"id": "7", "text": text, "title": ""}, "score": None},
    lambda text: {"document": text, "score": 1},
    lambda text: {"doc": {"content": text}},
    lambda text: {"page_content": text, "metadata": {"contents": 1}},
    lambda text: {"passage": text},
]
MANY, ONE = Dialect(True, False), Dialect(False, True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["result", "results", None])
@given(found=st.lists(st.lists(TEXT, max_size=4), min_size=1, max_size=4))
def test_passages_read_the_same_in_every_form(form, key, found):
    result = [[form(text) for text in texts] for texts in found]
    reply = json.loads(json.dumps(result if key is None else {key: result, "took": 3}))
    assert read_answer(reply, len(found), MANY) == found


@pytest.mark.parametrize("form", FORMS)
@given(texts=st.lists(TEXT, max_size=4))
def test_the_answer_to_one_query_may_be_flat(form, texts):
    passages = [form(text) for text in texts]
    assert read_answer({"result": passages}, 1, ONE) == read_answer({"result": [passages]}, 1, ONE) == [texts]


def test_a_title_that_is_kept_apart_stands_before_the_text():
    assert passage_text({"document": {"title": "Bexo", "text": "a town"}}) == "Bexo\na town"
    assert passage_text({"title": "Bexo", "contents": '"Bexo"\na town'}) == '"Bexo"\na town'


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["result", "document", "contents", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON, st.integers(1, 3), st.sampled_from(DIALECTS))
def test_any_other_reply_is_a_value_error(reply, queries, dialect):
    try:
        found = read_answer(reply, queries if dialect.many else 1, dialect)
    except ValueError as error:
        assert str(error)
    else:
        assert len(found) == (queries if dialect.many else 1) and all(isinstance(text, str) for texts in found for text in texts)


@pytest.mark.parametrize(
    "reply, problem",
    [
        ({"result": [[{"contents": None}]]}, "no text .its keys: 'contents'"),
        ({"result": [[{"contents": "\ud800"}]]}, "surrogates not allowed"),
        ({"error": "index is loading"}, "got an object with 'error'"),
        ({"result": []}, "0 of 1"),
        ({"result": [None]}, "for every query"),
        ("<html>", "got str"),
        (None, "got NoneType"),
    ],
)
def test_what_is_wrong_with_a_reply_is_said(reply, problem):
    with pytest.raises(ValueError, match=problem):
        read_answer(reply, 1, MANY)


def test_the_dialects_differ_and_say_so():
    assert len(set(map(str, DIALECTS))) == len(DIALECTS) == 6
    assert MANY.request(["a", "b"], 3) == {"queries": ["a", "b"], "topk": 3, "return_scores": False}
    assert Dialect(False, None).request(["a"], 3) == {"query": "a", "topk": 3}


@pytest.mark.parametrize("url", ["http://h:8000", "http://h:8000/", "http://h:8000/retrieve", "http://h:8000/retrieve/"])
def test_an_address_may_end_with_the_path(url):
    assert endpoint(url) == "http://h:8000/retrieve"
