r"""Sums, products, integrals and limits, read by math-verify's parser and computed by sympy."""

import re

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from megatron_drmas.answers.arithmetic import Expression, Unreadable, read_number

_CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
CALCULUS = re.compile(r"\\(?:sum|prod|i?int|lim)(?![a-zA-Z])")
# What math-verify's parser reads otherwise than it is meant: `2 3` as 5, `10_8` as 10, `30^\circ` as 30, text as a product
_MISREAD = re.compile(r"\d\s+\d|\d\s*_|\\circ|\\text|\d[eE]|'|,|=.*=|\\pm|\\mp|[<>]|\\(?:frac|sqrt)\s*\d")


def read_calculus(text: str) -> Expression:
    """The exact value of a cleaned text that contains one of `CALCULUS`.

    Raises:
        Unreadable: it has none, or the parser would misread it.
    """
    if _MISREAD.search(text):
        raise Unreadable("two readings of a sum, a product, an integral or a limit")
    exact = re.sub(
        r"\d+\.\d+|\.\d+", lambda match: "\\frac{{{}}}{{{}}}".format(*read_number(match.group()).as_numer_denom()), text
    )
    try:
        value = latex2sympy(exact, is_real=True, normalization_config=None, conversion_config=_CONVERSION).doit()
    except MemoryError:
        raise
    except Exception as error:  # the parser raises bare Exception, and whatever its own mistakes raise
        raise Unreadable(f"math-verify's parser refuses it: {error}") from error
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo, sympy.Float):
        raise Unreadable("it has no exact value")
    return value
