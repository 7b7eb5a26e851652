r"""From an answer's text to what it says: numbers with their units, lists, tuples, sets, equations, words.

Commas, semicolons, "and" and "or" outside brackets separate the members of a list, whose order does not matter; `1,234` is a
number, and so is it in no brackets.  `\pm 3` is the list of 3 and -3.
"""

import re
from dataclasses import dataclass
from typing import TypeGuard

import sympy

from megatron_drmas.answers.arithmetic import Expression, Unreadable
from megatron_drmas.answers.expressions import DEGREE, read_expression
from megatron_drmas.answers.spelling import CLOSING, OPENING, canonical, clean, pieces, split_at
from megatron_drmas.answers.units import measured

MAX_MEMBERS = 100  # of a list, tuple or set
MAX_DEPTH = 50  # of brackets in brackets


@dataclass(frozen=True)
class Words:
    """What is compared as text: words, and what cannot be read otherwise."""

    text: str


@dataclass(frozen=True)
class Numeral:
    """Digits with their base, as in `1011_2`."""

    digits: str
    base: int


@dataclass(frozen=True)
class Quantity:
    """An expression; `percent` if a percent sign follows it, `unit` if a known measure does."""

    value: Expression
    percent: bool = False
    unit: str | None = None


@dataclass(frozen=True)
class Several:
    """Members between `left` and `right`: a list without brackets ("", ""), a set (`{`, `}`), a tuple, vector or interval."""

    left: str
    right: str
    members: tuple["Answer", ...]

    @property
    def ordered(self) -> bool:
        return self.left not in ("", "\\{")


@dataclass(frozen=True)
class RealSet:
    """A set of real numbers: an interval with other sets, or the solutions of an inequality."""

    value: sympy.Set
    symbol: str | None = None  # the inequality's


@dataclass(frozen=True)
class Relation:
    """`left` operator `right`; an equation's left side is a `name` if nothing but the thing asked for can be there."""

    operator: str  # = | < | \\le | \\ne
    left: "Answer"
    right: "Answer"
    name: str | None = None


Answer = Words | Numeral | Quantity | Several | RealSet | Relation

_RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\in", "\\equiv", "\\sim", "\\cong")
_SETS = ("\\cup", "\\cap", "\\setminus")
_SEPARATORS = (",", ";", "\\text{and}", "\\text{or}", "\\text{, and}", "\\text{, or}", "\\text{,}")
_CONJUNCTION = re.compile(r"(?<=[\s,;}\])\d])\s*\b(and|or)\b(?=[\s\\({\[])")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)")
_NUMERAL = re.compile(
    r"\(?\s*(?:\\text\{([0-9A-Za-z]+)\}|([0-9A-Z](?:[0-9A-Z\s]*[0-9A-Z])?))\s*\)?\s*_\s*\{?\s*(?:\\text\{)?\s*([a-z]+|\d+)\s*\}?\s*\}?"
)
_BASES = {name: base for base, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)} | {
    "sixteen": 16
}
_WORD = re.compile(r"[A-Za-z][A-Za-z'. -]*[A-Za-z.']|[A-Za-z]")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_CHOICE = re.compile(r"\\text\{\(?([A-J])[).:]?\}\)?\s*(.+)", re.DOTALL)
_LETTERED = re.compile(r"^([A-J])\)$")
_OPEN_ENDED = re.compile(r"\]([^\[\]]*),([^\[\]]*)\[")
_NAMED = {"\\mathbb{R}": sympy.Reals, "\\emptyset": sympy.EmptySet, "\\{\\}": sympy.EmptySet}
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


def read(text: str) -> Answer:
    """What an answer, or a gold one, says."""
    text = clean(text)
    if match := re.fullmatch(r"\\text\{([^{}]*)\}\s*\.?", text):
        text = clean(match.group(1))
    text = _CONJUNCTION.sub(lambda match: f" \\text{{{match.group(1)}}} ", text)
    text = _trimmed(_without_thousands(text))
    if not text or any(depth > MAX_DEPTH for depth, _, _ in pieces(text)):
        return Words(canonical(text))
    parts = split_at(text, _SEPARATORS)
    members = [(separator, part) for separator, part in parts if part]
    if len(members) == 1 or len(members) > MAX_MEMBERS:
        return _element(members[0][1]) if len(members) == 1 else Words(canonical(text))
    read_members = [_element(part) for _, part in members]
    sets = [member for member in read_members if isinstance(member, RealSet)]
    if len(sets) == len(read_members):
        joined = {separator for separator, _ in members[1:]}
        symbols = {member.symbol for member in sets}
        if len(symbols) == 1 and joined in ({"\\text{or}"}, {"\\text{and}"}):
            together = sympy.Union if joined == {"\\text{or}"} else sympy.Intersection
            return RealSet(together(*(member.value for member in sets)), symbols.pop())
    flat: list[Answer] = []
    for member in read_members:
        flat.extend(member.members if isinstance(member, Several) and not member.left else [member])
    return Several("", "", tuple(flat))


def _trimmed(text: str) -> str:
    return re.sub(r"^(?:[=:\s\"`]|\\approx(?![a-zA-Z]))+|(?:[\s.,;:\"`]|\\\\|\\$)+$", "", text)


def _without_thousands(text: str) -> str:
    """`1,234` outside brackets as 1234; inside them a comma separates members."""
    depth, outside = 0, set()
    for _, piece, position in pieces(text):
        if piece not in ("{", "}"):
            depth += (piece in OPENING) - (piece in CLOSING)
        if piece == "," and depth == 0:
            outside.add(position)

    def joined(match: re.Match) -> str:
        return match.group().replace(",", "") if match.start() + match.group().index(",") in outside else match.group()

    return _THOUSANDS.sub(joined, text)


def _element(text: str) -> Answer:
    text = _trimmed(text)
    if match := re.fullmatch(r"\\text\{([^{}]*)\}", text):
        inner = _trimmed(clean(match.group(1)))
        return Words(inner.lower()) if _is_words(inner) else _element(inner) if "\\text" not in inner else Words(canonical(inner))
    if not text:
        return Words("")
    if _is_words(text):
        return Words(text.lower().rstrip("."))
    text = _LETTERED.sub(r"\1", text)
    if (match := _CHOICE.fullmatch(text)) and _trimmed(match.group(2)):
        return Several("choice", "", (Quantity(sympy.Symbol(match.group(1), real=True)), _element(match.group(2))))
    if (match := _NUMERAL.fullmatch(text)) and (numeral := _numeral(match)) is not None:
        return numeral
    if (named := _NAMED.get(text.replace(" ", ""))) is not None:
        return RealSet(named)
    for reader in (_relation, _set_operation, _brackets, _plus_minus):
        if (answer := reader(text)) is not None:
            return answer
    return _quantity(text)


def _is_words(text: str) -> bool:
    """Whether letters are words and not a product of symbols: one has four of them or more, or two or more with a vowel."""
    words = re.findall("[A-Za-z]+", text) if _WORD.fullmatch(text) else []
    return any(len(word) >= 4 or (len(word) >= 2 and re.search("[aeiou]", word, re.IGNORECASE)) for word in words)


def _numeral(match: re.Match) -> Numeral | None:
    digits = (match.group(1) or match.group(2)).replace(" ", "").upper()
    base = int(match.group(3)) if match.group(3).isdigit() else _BASES.get(match.group(3), 0)
    if not 2 <= base <= 36 or not digits.isalnum() or (not any(char.isdigit() for char in digits) and base <= 10):
        return None
    return Numeral(digits.lstrip("0") or "0", base)


def _quantity(text: str) -> Answer:
    found = measured(text)
    try:
        value = read_expression(found.value)
    except Unreadable:
        return _phrase(text)
    value, unit = value * found.times, found.unit
    if isinstance(value, sympy.Expr) and DEGREE in value.free_symbols and DEGREE not in (value / DEGREE).free_symbols:
        value, unit = value / DEGREE, unit or "degree"
    return Quantity(value, found.percent, unit)


def _phrase(text: str) -> Words:
    """What cannot be read otherwise; without its case if it holds nothing but words and numbers (`June 20`)."""
    phrase = re.fullmatch(r"[\w\s.,:'-]*", text) and re.search(r"[A-Za-z]{3}", text)
    return Words(canonical(text.lower() if phrase else text))


def _plus_minus(text: str) -> Answer | None:
    if not _PLUS_MINUS.search(text):
        return None
    upper, lower = {"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"}
    texts = (_PLUS_MINUS.sub(lambda sign: upper[sign.group()], text), _PLUS_MINUS.sub(lambda sign: lower[sign.group()], text))
    return Several("", "", tuple(map(_element, texts)))


def _brackets(text: str) -> Answer | None:
    if match := _OPEN_ENDED.fullmatch(text):
        return Several("(", ")", tuple(_element(part) for part in match.groups()))
    found = pieces(text)
    left, right = found[0][1], found[-1][1]
    if (
        left not in ("(", "[", "\\{", "\\langle")
        or right not in (")", "]", "\\}", "\\rangle")
        or any(depth == 0 for depth, _, _ in found[1:-1])
    ):
        return None
    inner = text[len(left) : len(text) - len(right)]
    parts = [part for _, part in split_at(inner, _SEPARATORS)]
    if not all(parts) or len(parts) > MAX_MEMBERS:
        return Words(canonical(text))
    if left == "\\{":
        if len(described := split_at(inner, ("|", ":"))) > 1:
            condition = _element(described[-1][1])
            variable = re.sub(r"\s*\\in\s*\\mathbb\{R\}$", "", described[0][1])
            return (
                condition
                if len(described) == 2 and isinstance(condition, RealSet) and condition.symbol == variable
                else Words(canonical(text))
            )
        if right != "\\}":
            return Words(canonical(text))
    elif len(parts) == 1:
        return _element(inner) if (left, right) == ("(", ")") else None
    members: list[Answer] = []
    for part in parts:
        member = _element(part)
        members.extend(member.members if left == "\\{" and isinstance(member, Several) and not member.left else [member])
    return Several(left, right, tuple(members))


_SET_OPERATIONS = {"\\cup": sympy.Union, "\\cap": sympy.Intersection, "\\setminus": sympy.Complement}


def _set_operation(text: str) -> Answer | None:
    parts = split_at(text, _SETS)
    if len(parts) == 1:
        return None
    result: sympy.Set | None = None
    for operator, part in parts:
        value = as_set(_element(part)) if part else None
        if value is None:
            return Words(canonical(text))
        result = value if result is None else _SET_OPERATIONS[operator](result, value)
    return RealSet(result)


def as_set(answer: Answer) -> sympy.Set | None:
    """The set of real numbers that an answer may denote; None if it denotes none."""
    if isinstance(answer, RealSet):
        return answer.value
    if not isinstance(answer, Several):
        return None
    values = [
        sympy.nsimplify(member.value) if member.value.is_Float else member.value
        for member in answer.members
        if isinstance(member, Quantity) and not member.percent and not isinstance(member.value, sympy.MatrixBase)
    ]
    if len(values) < len(answer.members) or not all(value.is_number and value.is_extended_real for value in values):
        return None
    if answer.left == "\\{":
        return sympy.FiniteSet(*values)
    if len(values) != 2 or answer.left not in ("(", "[") or answer.right not in (")", "]") or (values[0] < values[1]) != True:  # noqa: E712  may be a symbolic relation
        return None
    return sympy.Interval(*values, left_open=answer.left == "(", right_open=answer.right == ")")


def _relation(text: str) -> Answer | None:
    parts = split_at(text, _RELATIONS)
    if len(parts) == 1:
        return None
    operators, sides = [operator for operator, _ in parts[1:]], [part for _, part in parts]
    if not all(sides):
        return Words(canonical(text))
    if operators == ["\\in"]:
        return Relation("=", _element(sides[0]), _element(sides[1]), name_of(sides[0]))
    if set(operators) <= {"=", "\\approx", "\\equiv"}:
        return _equation(sides, operators)
    if set(operators) <= {"<", "\\le"} or set(operators) <= {">", "\\ge"}:
        if operators[0] in (">", "\\ge"):
            operators, sides = [_FLIPPED[operator] for operator in reversed(operators)], sides[::-1]
        return _inequality(operators, [_element(side) for side in sides], text)
    if operators == ["\\ne"]:
        left, right = (_element(side) for side in sides)
        if _is_symbol(right):
            left, right = right, left
        if _is_symbol(left) and (excluded := _real_number(right)) is not None:
            return RealSet(sympy.Complement(sympy.Reals, sympy.FiniteSet(excluded)), left.value.name)
        return Relation("\\ne", left, right)
    return Words(canonical(text))


def _equation(sides: list[str], operators: list[str]) -> Answer:
    name = name_of(sides[0])
    if name is None and name_of(sides[-1]) is not None and len(sides) == 2:
        sides, name = sides[::-1], name_of(sides[-1])
    left = _element(sides[0])
    if name is None and operators[-1] == "\\approx":
        return left  # the exact value, not its approximation
    return Relation("=", left, _element(sides[-1]), name)


def name_of(text: str) -> str | None:
    r"""A side of an equation that names what was asked for: `x`, `f(2)`, `AB`, `\sin A`, `\text{Area}`, `(x, y)`, `a + b`.

    Not `2x`, `-x`, `x^2`, `|x|` or `\ln x`, whose values are not that of what they name.
    """
    text = re.sub(r"\s+", " ", text.strip())
    bare = re.sub(r"_\s*(\{[^{}]*\}|\w|\\text\{[^{}]*\})", "", text)
    bare = re.sub(r"^([a-zA-Z]'*)(\^\{-1\})?\s*\([^()]*\)$", r"\1", bare)
    bare = re.sub(r"^\\log [\d\w]+$", "x", re.sub(r"\^\s*\\circ", "", re.sub(r"\|[A-Z]{2}\|", "x", bare)))
    if (
        not re.search("[a-zA-Z]", bare)
        or re.search(r"\d|[!^|]|^\s*-|\\(infty|pi|sqrt|ln|log|exp|lvert)(?![a-zA-Z])", bare)
        or bare.strip() in ("e", "i")
    ):
        return None
    return canonical(text)


def _is_symbol(answer: Answer) -> TypeGuard[Quantity]:
    return isinstance(answer, Quantity) and isinstance(answer.value, sympy.Symbol) and answer.unit is None


def _real_number(answer: Answer) -> sympy.Expr | None:
    value = answer.value if isinstance(answer, Quantity) and not answer.percent else None
    return value if value is not None and isinstance(value, sympy.Expr) and value.is_number and value.is_extended_real else None


def _inequality(operators: list[str], sides: list[Answer], text: str) -> Answer:
    """`1 < x \\le 2` as an interval; what is not of this kind as a relation of its sides."""
    symbols = [position for position, side in enumerate(sides) if _is_symbol(side)]
    numbers = [_real_number(side) for side in sides]
    if len(symbols) == 1 and len(sides) <= 3 and all((number is None) == (at in symbols) for at, number in enumerate(numbers)):
        at = symbols[0]
        low, low_open = (numbers[at - 1], operators[at - 1] == "<") if at > 0 else (-sympy.oo, True)
        high, high_open = (numbers[at + 1], operators[at] == "<") if at < len(sides) - 1 else (sympy.oo, True)
        symbol = sides[at]
        if at <= 1 and len(sides) - at <= 2 and _is_symbol(symbol):
            return RealSet(sympy.Interval(low, high, low_open, high_open), symbol.value.name)
    if len(sides) == 2:
        return Relation(operators[0], sides[0], sides[1])
    return Words(canonical(text))
