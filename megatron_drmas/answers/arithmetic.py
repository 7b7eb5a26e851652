"""Exact arithmetic on sympy's expressions and matrices, refused where a number would be too large or undefined."""

import math
from typing import TypeAlias

import sympy
from sympy import Integer, MatrixBase, Pow, Rational, S

MAX_BITS = 500_000  # of a power, a factorial or a number in e-notation

Expression: TypeAlias = sympy.Expr | MatrixBase


class Unreadable(ValueError):
    """The text is not an expression of the grammar, or has two readings, or a number of it is too large."""


def read_number(text: str) -> Rational:
    """The exact value of a decimal number, with or without an exponent of ten.

    Raises:
        Unreadable: the exponent is too large.
    """
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 7 or abs(int(exponent or 0)) * 3.33 > MAX_BITS:
        raise Unreadable(f"{text} is too large")
    whole, _, decimals = mantissa.partition(".")
    return Rational(int(whole + decimals or "0")) * Integer(10) ** (int(exponent or 0) - len(decimals))


def power(base: Expression, exponent: Expression) -> Expression:
    """`base` to the power of `exponent`, unless that is a number too large to compute with.

    Raises:
        Unreadable: it is, or it is undefined.
    """
    if isinstance(base, MatrixBase):
        if not (isinstance(exponent, Integer) and abs(int(exponent)) <= 1000):
            raise Unreadable("a matrix to such a power")
        return base ** int(exponent)
    if base.is_number and exponent.is_Rational:
        bits = max(int(base.p).bit_length(), int(base.q).bit_length()) if base.is_Rational else 64
        if base not in (S.One, S.NegativeOne, S.Zero) and bits * abs(exponent) > MAX_BITS:
            raise Unreadable("a power is too large")
    if base == 0 and exponent.is_number and not exponent.is_positive:
        raise Unreadable("zero to a power that is not positive")
    return Pow(base, exponent)


def times(left: Expression, right: Expression) -> Expression:
    """A product of what can be multiplied.

    Raises:
        Unreadable: matrices whose shapes do not fit.
    """
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase) and left.shape[1] != right.shape[0]:
        raise Unreadable("matrices that do not fit")
    return left * right


def factorial(value: Expression) -> Expression:
    """n! of a number small enough, or of an expression.

    Raises:
        Unreadable: the number is too large, negative or not whole.
    """
    if isinstance(value, MatrixBase) or (value.is_number and not (isinstance(value, Integer) and value >= 0)):
        raise Unreadable("the factorial of what is not a whole number")
    if isinstance(value, Integer) and int(value) * math.log2(int(value) + 1) > MAX_BITS:
        raise Unreadable("a factorial is too large")
    return sympy.factorial(value)


def binomial(above: Expression, below: Expression) -> Expression:
    """The binomial coefficient of numbers small enough, or of expressions.

    Raises:
        Unreadable: a number is too large.
    """
    if any(isinstance(value, MatrixBase) or (value.is_number and abs(value) > MAX_BITS) for value in (above, below)):
        raise Unreadable("a binomial coefficient is too large")
    return sympy.binomial(above, below)
