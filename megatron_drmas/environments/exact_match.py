"""Exact match of short answers after normalization, as question-answering benchmarks count it."""

import re
import string
import unicodedata

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
# ASCII's, and signs typed for punctuation whose Unicode category is another: minus, acute accent, modifier letters
_PUNCTUATION_MARKS = set(string.punctuation + "\u2212\u00b4\u02bc\u02b9\u02bb")
NORMALIZATIONS = ("squad", "unicode")


def normalize_answer(text: str, normalization: str = "squad") -> str:
    """The form in which two answers are compared.

    squad: lower case, no ASCII punctuation, no articles, single spaces: the rule of SQuAD's evaluation, by which published
        figures are counted.  `1914–1918` with an en dash is not `1914-1918`.
    unicode: the same after Unicode's compatibility composition (NFKC) and case folding, without punctuation of any script
        (dashes, curly quotes, 「」), minus signs and invisible characters.

    Unlike in SQuAD's own script nothing normalizes to an empty text, or the answer "A" would equal "the" and "?": a step
    that would leave nothing is left out.
    """
    if normalization == "unicode":
        # Twice, as NFKC takes some signs apart (an acute accent on its own) and makes others into punctuation
        stages = [_folded(text), _without_punctuation(_folded(_without_punctuation(text)))]
    else:
        stages = [text.lower(), text.lower().translate(PUNCTUATION)]
    stages.append(ARTICLES.sub(" ", stages[-1]))
    return next((short for stage in reversed(stages) if (short := " ".join(stage.split()))), "")


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _without_punctuation(text: str) -> str:
    return "".join(
        char
        for char in text
        if char not in _PUNCTUATION_MARKS and unicodedata.category(char)[0] != "P" and unicodedata.category(char) != "Cf"
    )


def exact_match(answer: str | None, accepted: tuple[str, ...], normalization: str = "squad") -> float:
    """1.0 if the normalized answer is not blank and equals any normalized accepted answer, else 0.0."""
    if answer is None or not answer.strip():
        return 0.0
    return float(normalize_answer(answer, normalization) in {normalize_answer(gold, normalization) for gold in accepted})
