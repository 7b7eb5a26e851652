"""Numbers are equal if and only if they are exactly equal, however they are written."""

import math
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_drmas.answers.equality import same_answer

INTEGERS = st.one_of(st.integers(-20, 20), st.integers(-(10**12), 10**12), st.integers(0, 40).map(lambda e: 10**e))
FRACTIONS = st.builds(
    Fraction, INTEGERS, st.one_of(st.integers(1, 30), st.integers(1, 10**6), st.integers(0, 30).map(lambda e: 10**e))
)
# Differences that a tolerance would not see
NUDGES = st.one_of(
    st.sampled_from([Fraction(0), Fraction(1), Fraction(-1)]),
    st.integers(1, 400).map(lambda e: Fraction(1, 10**e)),
    st.integers(1, 400).map(lambda e: Fraction(1, 2**e)),
)


def decimal(value: Fraction) -> str | None:
    """The digits of a fraction that has finitely many, and few."""
    scale = next((places for places in range(450) if (value * 10**places).denominator == 1), None)
    if scale is None:
        return None
    digits = str(abs(value.numerator * 10**scale // value.denominator)).rjust(scale + 1, "0")
    return ("-" if value < 0 else "") + digits[: len(digits) - scale] + ("." + digits[len(digits) - scale :] if scale else "")


def spellings(value: Fraction) -> list[str]:
    """Ways to write a number, of every kind that answers use but the percent sign."""
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    found = [
        f"{sign}\\frac{{{above}}}{{{below}}}",
        f"{sign}{above}/{below}",
        f"\\dfrac{{{sign}{above}}}{{{below}}}",
        f"{sign}{3 * above}/{3 * below}",
        f"${sign}\\tfrac{{{above}}}{{{below}}}$",
        f"{sign}\\left(\\frac{{{above}}}{{{below}}}\\right)",
        f"{sign}{above} \\div {below}",
        f"{value.numerator + 7 * below}/{below} - 7",
        f"x = {sign}\\frac{{{2 * above}}}{{{2 * below}}}",
    ]
    whole, rest = divmod(above, below)
    if whole and rest:
        found += [f"{sign}{whole}\\frac{{{rest}}}{{{below}}}", f"{sign}{whole} {rest}/{below}"]
    if (digits := decimal(value)) is not None:
        found += [digits, f"{digits}\\text{{ cm}}", f"\\text{{{digits}}}", f"{digits}0" if "." in digits else f"{digits}.0"]
        exponent = math.floor(math.log10(above or 1)) - math.floor(math.log10(below))
        mantissa = decimal(value / Fraction(10) ** exponent)
        found += [f"{mantissa}{e}{exponent}" for e in "eE"] + [
            f"{mantissa} \\{times} 10^{{{exponent}}}" for times in ("times", "cdot")
        ]
        if exponent > 0:
            found += [f"{mantissa}e+{exponent}", f"{mantissa}*10^{exponent}"]
    if below == 1:
        found += [
            f"{value.numerator}",
            f"{sign}{above:,}",
            f"{sign}{above:,}".replace(",", "{,}"),
            f"{value.numerator}.",
            f"{sign}0{above}",
        ]
    return found


@given(FRACTIONS, st.data())
@settings(max_examples=400, deadline=None)
def test_two_spellings_of_a_number_are_equal(value, data):
    answer, gold = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    assert same_answer(answer, gold)


@given(FRACTIONS, FRACTIONS, NUDGES, st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_spellings_are_equal_exactly_when_their_numbers_are(gold, other, nudge, near, data):
    answer = gold + nudge if near else other
    texts = [data.draw(st.sampled_from(spellings(value))) for value in (answer, gold)]
    assert same_answer(*texts) == (answer == gold)


@given(FRACTIONS, NUDGES, st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_percentage_is_its_value_or_the_number_before_its_sign_and_nothing_else(value, nudge, divided, data):
    percentage = data.draw(
        st.sampled_from(["\\%", "%", " \\%", "\\text{ percent}"]).map(
            lambda sign: f"{decimal(value) or spellings(value)[0]}{sign}"
        )
    )
    other = (value / 100 if divided else value) + nudge
    text = data.draw(st.sampled_from(spellings(other)).filter(lambda text: "cm" not in text))
    expected = other in (value, value / 100)
    assert same_answer(percentage, text) == same_answer(text, percentage) == expected


@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 50), st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_powers(base, exponent, other_base, other_exponent):
    texts = (f"\\frac{{1}}{{{base}^{{{exponent}}}}}", f"{other_base}^{{-{other_exponent}}}")
    assert same_answer(*texts) == (base**exponent == other_base**other_exponent)
    assert same_answer(f"{base}^{{{exponent}}}", str(base**exponent)) and not same_answer(
        f"{base}^{{{exponent}}}", str(base**exponent + 1)
    )


@given(st.integers(2, 200), st.integers(1, 300), st.integers(2, 200), st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_roots(radicand, factor, other, other_factor):
    texts = f"{factor}\\sqrt{{{radicand}}}", f"\\sqrt{{{other_factor**2 * other}}}"
    assert same_answer(*texts) == (factor**2 * radicand == other_factor**2 * other)


@given(st.integers(0, 10**6), st.integers(2, 10), st.integers(2, 10))
def test_a_numeral_equals_itself_alone(number, base, other):
    digits, rest = "", number
    while rest or not digits:
        digits, rest = str(rest % base) + digits, rest // base
    assert same_answer(f"{digits}_{{{base}}}", f"{digits}_{base}" if base < 10 else f"{digits}_{{10}}")
    assert not same_answer(digits, f"{digits}_{{{base}}}") and same_answer(f"{digits}_{{{other}}}", f"{digits}_{{{base}}}") == (
        base == other
    )


@st.composite
def expressions(draw, depth: int = 3) -> tuple[str, Fraction]:
    """A LaTeX expression and its value."""
    kind = draw(st.sampled_from(["number"] if not depth else ["number", "+", "-", "times", "frac", "/", "^", "mixed", "!"]))
    if kind == "number":
        value = draw(st.builds(Fraction, st.integers(0, 50), st.sampled_from([1, 2, 4, 10])))
        return decimal(value), value
    if kind == "mixed":
        whole, below = draw(st.integers(1, 9)), draw(st.integers(2, 9))
        above = draw(st.integers(1, below - 1))
        return f"({whole}\\frac{{{above}}}{{{below}}})", whole + Fraction(above, below)
    if kind == "!":
        number = draw(st.integers(0, 9))
        return f"{number}!", Fraction(math.factorial(number))
    (left, a), (right, b) = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    if kind == "^":
        exponent = draw(st.integers(0, 3))
        return f"\\left({left}\\right)^{{{exponent}}}", a**exponent
    if kind in ("frac", "/"):
        assume(b)
        return (f"\\frac{{{left}}}{{{right}}}" if kind == "frac" else f"({left})/({right})"), a / b
    if kind == "times":
        sign = draw(st.sampled_from(["\\cdot ", "\\times ", "*", ""]))
        return f"({left}){sign}({right})", a * b
    return f"({left} {kind} {right})", a + b if kind == "+" else a - b


@given(expressions(), NUDGES)
@settings(max_examples=300, deadline=None)
def test_an_expression_has_its_value_and_no_other(expression, nudge):
    text, value = expression
    assert same_answer(text, f"\\frac{{{value.numerator}}}{{{value.denominator}}}")
    near = value + nudge
    assert same_answer(text, f"\\frac{{{near.numerator}}}{{{near.denominator}}}") == (nudge == 0)
