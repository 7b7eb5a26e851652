r"""Whether an answer says the same as a gold one.

Numbers are equal if they are exactly equal: no rounding, no tolerance, so 0.333 is not `\frac13` and 3.14 is not `\pi`.
Expressions are equal if sympy proves their difference to be zero; two that merely agree in every digit looked at are not.

- A percentage equals its value (`50\%` is 0.5) and, as in the MATH data set's own grading, the number before the sign
  (`50\%` is 50), on whichever side the sign is.
- A unit, a currency and a degree sign may be missing on one side.  Two measures that are both known must agree (5 cm is not 5 m,
  and nothing is converted); what is counted (`12\text{ apples}`) does not matter.
- `1011_2` equals the same digits in the same base, and nothing else.
- Members of a list or a set may come in any order, those of a tuple, vector or interval may not; brackets must agree, but
  `1 < x \le 2`, `x \in (1, 2]` and `(1, 2]` are one set.  A set is not a tuple, and `\{5\}` is not 5.
- `x = 5` equals 5 and not `y = 5`; two equations are equal if their sides' differences are proportional.
- Words are compared without their case, symbols with it.
"""

import math

import sympy
from sympy import MatrixBase, Rational

from megatron_drmas.answers.arithmetic import Expression
from megatron_drmas.answers.reading import Answer, Numeral, Quantity, RealSet, Relation, Several, Words, as_set, read

DIGITS = 40  # to which a difference is looked at before a proof that it is zero is tried


def same_answer(answer: str, gold: str) -> bool:
    """Whether `answer` equals `gold`; both are LaTeX or plain text, and neither is trusted to be well-formed.

    It may take any time and any memory: run it where both are limited.
    """
    if not answer.strip() or not gold.strip():
        return False
    if answer.strip() == gold.strip():
        return True
    return equal(read(gold), read(answer))


def equal(gold: Answer, answer: Answer) -> bool:
    """Whether two answers say the same."""
    if isinstance(gold, Words) or isinstance(answer, Words):
        return isinstance(gold, Words) and isinstance(answer, Words) and gold == answer and bool(gold.text)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _equal_relations(gold, answer)
    if isinstance(gold, Numeral) or isinstance(answer, Numeral):
        return gold == answer
    if isinstance(gold, RealSet) or isinstance(answer, RealSet):
        return _equal_sets(gold, answer)
    if isinstance(gold, Several) or isinstance(answer, Several):
        return _equal_members(gold, answer)
    return _equal_quantities(gold, answer)


def _equal_quantities(gold: Quantity, answer: Quantity) -> bool:
    if gold.unit is not None and answer.unit is not None and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return equal_expressions(gold.value, answer.value)
    percent, other = (gold, answer) if gold.percent else (answer, gold)
    return equal_expressions(percent.value, other.value) or equal_expressions(percent.value / 100, other.value)


def _equal_members(gold: Answer, answer: Answer) -> bool:
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Several) and one.left == "choice" and not (isinstance(other, Several) and other.left == "choice"):
            return any(equal(member, other) for member in one.members)
    if not isinstance(gold, Several) or not isinstance(answer, Several):
        return False
    if gold.ordered or answer.ordered:
        return (
            (gold.left, gold.right, len(gold.members)) == (answer.left, answer.right, len(answer.members))
            and all(map(equal, gold.members, answer.members))
        )  # fmt: skip
    if gold.left or answer.left:  # a set holds each member once
        return all(any(equal(one, other) for other in answer.members) for one in gold.members) and all(
            any(equal(one, other) for one in gold.members) for other in answer.members
        )
    if len(gold.members) != len(answer.members):
        return False
    left = list(answer.members)
    for member in gold.members:
        found = next((other for other in left if equal(member, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _equal_sets(gold: Answer, answer: Answer) -> bool:
    symbols = {one.symbol for one in (gold, answer) if isinstance(one, RealSet)} - {None}
    left, right = as_set(gold), as_set(answer)
    if len(symbols) > 1 or left is None or right is None:
        return False
    return left == right or all(difference == sympy.EmptySet for difference in (left - right, right - left))


def _equal_relations(gold: Answer, answer: Answer) -> bool:
    if not isinstance(gold, Relation) or not isinstance(answer, Relation):
        relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
        if not isinstance(relation, Relation) or relation.operator != "=":
            return False
        # Either the left side names what was asked for, or the equation is a true statement such as 2 + 3 = 5
        if isinstance(other, RealSet) and other.symbol is not None and relation.name != other.symbol:
            return False
        return (relation.name is not None or equal(relation.left, relation.right)) and equal(relation.right, other)
    if gold.operator != answer.operator:
        return False
    if gold.operator == "=" and gold.name is not None and gold.name == answer.name:
        return equal(gold.right, answer.right)
    if equal(gold.left, answer.left) and equal(gold.right, answer.right):
        return True
    differences = []
    for relation in (gold, answer):
        values = [
            side.value
            for side in (relation.left, relation.right)
            if isinstance(side, Quantity) and not side.percent and isinstance(side.value, sympy.Expr)
        ]
        if len(values) < 2:
            return False
        differences.append(values[0] - values[1])
    if not all(difference.free_symbols for difference in differences):
        return False
    ratio = sympy.cancel(differences[0] / differences[1])
    if not ratio.is_number or ratio.is_finite is not True or ratio.is_zero is not False:
        return False
    return gold.operator in ("=", "\\ne") or ratio.is_positive is True


def equal_expressions(gold: Expression, answer: Expression) -> bool:
    """Whether two expressions, or matrices entry by entry, are provably equal."""
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        if not (isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase)) or gold.shape != answer.shape:
            return False
        return all(map(equal_expressions, gold, answer))
    if gold == answer:
        return True
    if (
        (isinstance(gold, Rational) and isinstance(answer, Rational))
        or gold.has(sympy.oo, -sympy.oo)
        or answer.has(sympy.oo, -sympy.oo)
    ):
        return False
    return _is_zero(gold - answer)


def _is_zero(difference: sympy.Expr) -> bool:
    if difference.is_zero is not None:
        return difference.is_zero
    if not _may_be_zero(difference):
        return False
    if sympy.expand(difference) == 0 or sympy.cancel(sympy.together(difference)) == 0:
        return True
    if difference.is_number and difference.is_algebraic:
        x = sympy.Symbol("x")
        return sympy.minimal_polynomial(difference, x) == x
    if sympy.simplify(difference) == 0:
        return True
    logarithms = sympy.expand_log(sympy.expand_power_base(difference), factor=True)
    return sympy.simplify(logarithms) == 0


def _may_be_zero(difference: sympy.Expr) -> bool:
    """False if the expression is certainly not zero at one of two places; True says nothing yet."""
    unknown = sorted(difference.free_symbols | difference.atoms(sympy.core.function.AppliedUndef), key=sympy.default_sort_key)
    for first in (Rational(7, 11), Rational(19, 13)):
        value: sympy.Expr | None = difference.subs(
            {symbol: first + Rational(2 * at, 17) for at, symbol in enumerate(unknown)}
        ).evalf(DIGITS)
        parts = value.as_real_imag() if value is not None and value.is_number else ()
        # A precision of 1 is sympy's mark of digits that cancelled
        if any(
            (part.is_Float and part._prec > 1 and part != 0 and math.isfinite(part)) or (part.is_Rational and part != 0)
            for part in parts
        ):
            return False
    return True
