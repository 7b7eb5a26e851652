"""Exact match: SQuAD's rule, except that no answer is normalized to nothing, and a rule for Unicode punctuation."""

import asyncio
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.data.questions import Question
from megatron_drmas.environments.exact_match import NORMALIZATIONS, exact_match, normalize_answer
from megatron_drmas.environments.search import SearchConfig, SearchEnvironment
from megatron_drmas.team.trajectory import Outcome


@pytest.mark.parametrize(
    "answer, accepted, score",
    [
        ("The Eiffel Tower.", ("eiffel tower",), 1.0),
        ("an apple", ("Apple",), 1.0),
        ("Paris, France", ("paris france",), 1.0),
        ("Paris", ("London", "PARIS"), 1.0),
        ("Paris France", ("Paris",), 0.0),
        (None, ("x",), 0.0),
        ("", ("x",), 0.0),
        ("theatre", ("atre",), 0.0),
    ],
)
def test_exact_match(answer, accepted, score):
    assert exact_match(answer, accepted) == score


def test_normalization_is_idempotent():
    text = "  The  quick,  brown fox -- an answer! "
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text) == "quick brown fox answer"


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(
    "gold, right, wrong",
    [
        ("A", ["A", "a", "A.", '"A"', " a "], ["?", "the", "an", "", " ", "b", "...", "the a"]),
        ("The The", ["the the", "The The!"], ["the", "a", "?", "the the the", ""]),
        (".", [".", " . "], ["!", "the", "", "..", "a"]),
        ("?", ["?"], [".", "the", "??"]),
        ("the", ["The", "the."], ["a", "?", "an"]),
        ("The A", ["the a"], ["the", "a", "the the"]),
        ("C++", ["c++", "c"], ["++", ""]),
        ("The Who", ["who", "The Who?"], ["the", "whom"]),
    ],
)
def test_a_gold_that_articles_or_punctuation_make_up_equals_itself_alone(normalization, gold, right, wrong):
    assert [answer for answer in right if not exact_match(answer, (gold,), normalization)] == []
    assert [answer for answer in wrong if exact_match(answer, (gold,), normalization)] == []


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("1914–1918", "1914-1918"),
        ("1914−1918", "1914-1918"),
        ("1914—1918", "1914–1918"),
        ("“Hamlet”", "Hamlet"),
        ("l’Étoile", "l'Étoile"),
        ("O´Neill", "O'Neill"),
        ("New\u00a0York", "New York"),
        ("Ｐａｒｉｓ", "Paris"),
        ("ﬁne", "fine"),
        ("「東京」", "東京"),
        ("¿Qué?", "qué"),
        ("Straße", "STRASSE"),
        ("co\u00adop", "coop"),
        ("Cafe\u0301", "Café"),
        ("«Le Monde»", "le monde"),
        ("ʻOumuamua", "'Oumuamua"),
        ("the\u2009end", "end"),
        ("a…", "a..."),
    ],
)
def test_unicode_punctuation(answer, gold):
    assert exact_match(answer, (gold,), "unicode") == exact_match(gold, (answer,), "unicode") == 1.0


@pytest.mark.parametrize(
    "answer, gold", [("1914–1918", "1914-1918"), ("“Hamlet”", "Hamlet"), ("l’Étoile", "l'Étoile"), ("Ｐａｒｉｓ", "Paris")]
)
def test_squad_s_rule_knows_ascii_punctuation_alone(answer, gold):
    assert exact_match(answer, (gold,)) == 0.0


@pytest.mark.parametrize("answer, gold", [("1914", "1918"), ("Cafe", "Café"), ("ten", "10"), ("x²y", "xy"), ("東京", "京都")])
def test_other_letters_are_other_answers(answer, gold):
    assert exact_match(answer, (gold,), "unicode") == 0.0


@given(st.text(), st.sampled_from(NORMALIZATIONS))
def test_a_text_equals_itself_and_becomes_blank_only_if_it_is(text, normalization):
    # A text of nothing but invisible characters is blank to a reader
    assert bool(normalize_answer(text, normalization)) == bool(text.split())
    assert exact_match(text, (text,), normalization) == float(bool(text.strip()))


@given(
    st.text(string.ascii_letters + string.digits + string.punctuation + " "),
    st.text(string.ascii_letters + string.digits + string.punctuation + " "),
)
def test_the_rules_agree_on_ascii(answer, gold):
    assert exact_match(answer, (gold,)) == exact_match(answer, (gold,), "unicode")


@pytest.mark.parametrize("normalization, reward", [("squad", 0.0), ("unicode", 1.0)])
def test_the_environment_counts_by_the_rule_of_its_configuration(normalization, reward):
    environment = SearchEnvironment(SearchConfig(name="search", normalization=normalization))
    question = Question("0", "when?", ("1914-1918",))
    assert asyncio.run(environment.reward(question, Outcome("1914–1918"))) == reward
    assert environment.supports(question, ["The war of 1914–1918."]) is bool(reward)


def test_public_golds_equal_themselves(public_data):
    from megatron_drmas.data.questions import load_questions

    for name in ("bamboogle", "musique", "2wiki"):
        for question in load_questions(str(public_data / f"{name}.jsonl"), "data.eval"):
            for gold in question.answers:
                for normalization in NORMALIZATIONS:
                    assert exact_match(gold, question.answers, normalization) == 1.0
                    assert not any(exact_match(answer, question.answers, normalization) for answer in ("?", "", "...", "—"))
