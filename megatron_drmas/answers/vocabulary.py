"""The tokens and the names of the grammar of `expressions`."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import sympy
from sympy import MatrixBase, Symbol

from megatron_drmas.answers.arithmetic import Expression, Unreadable

DEGREE = Symbol("^\\circ", positive=True)
LOG_BASE = Symbol("base of log", positive=True)  # of `\log` without one: 10 or e, as the text does not say


def _determinant(matrix: Expression) -> sympy.Expr:
    if not isinstance(matrix, MatrixBase) or matrix.shape[0] != matrix.shape[1]:
        raise Unreadable("a determinant of what is not a square matrix")
    return matrix.det()


FUNCTIONS: dict[str, Callable] = {
    name: getattr(sympy, name) for name in "sin cos tan cot sec csc sinh cosh tanh coth exp gamma erf re im arg gcd lcm".split()
} | {
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot, "arsinh": sympy.asinh,
    "arcosh": sympy.acosh, "artanh": sympy.atanh, "ln": sympy.log, "log": lambda x: sympy.log(x) / LOG_BASE,
    "Gamma": sympy.gamma, "Re": sympy.re, "Im": sympy.im, "det": _determinant, "max": sympy.Max, "min": sympy.Min,
}  # fmt: skip
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
INVERSES = {
    "sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan, "cot": sympy.acot, "sec": sympy.asec, "csc": sympy.acsc,
    "sinh": sympy.asinh, "cosh": sympy.acosh, "tanh": sympy.atanh,
}  # fmt: skip
NAMES = set(  # commands that are symbols
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell nabla partial aleph square triangle angle Box".split()
)
ACCENTS = set(  # commands that make another symbol of one
    "hat vec bar dot ddot tilde overline widehat widetilde mathcal mathscr mathfrak overrightarrow underline".split()
)
ALWAYS_FUNCTIONS = set("fghFGP") | {"delta", "phi", "Phi", "zeta", "psi"}
TIMES = ("\\cdot", "\\times", "*")
DIVIDED = ("/", "\\div")
CLOSERS = {"(": ")", "[": "]", "\\lvert": "\\rvert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "{": "}", "|": "|"}

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<text>\\text\{[^{}]*\})|(?P<env>\\(?:begin|end)\s*\{[a-z]+\*?\})|(?P<bb>\\mathbb\s*\{?[A-Z]\}?)"
    r"|(?P<command>\\[a-zA-Z]+|\\.)|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)|(?P<letter>[a-zA-Z])|(?P<sign>.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """One token of a cleaned text."""

    kind: str  # text | env | bb | command | number | letter | sign
    text: str
    spaced: bool  # white space before it


def tokens(text: str) -> list[Token]:
    """A cleaned text's tokens."""
    found, spaced = [], False
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "space":
            spaced = True
        else:
            found.append(Token(match.lastgroup or "", match.group(), spaced))
            spaced = False
    return found
