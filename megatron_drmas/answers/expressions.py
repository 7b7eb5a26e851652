r"""From a LaTeX or plain expression to sympy, strictly: what has two readings is refused, and no number is rounded.

    sum      := [+-] product ((+|-) product)*
    product  := factors ((\cdot | \times | * | / | \div) factors)*
    factors  := postfix postfix*         not after a slash (`1/2x` is refused), and no number but after a factorial (`x2` is)
    postfix  := atom (^ script | ! | ')*
    atom     := number | symbol [_ script] | function | \frac | \sqrt | \binom | matrix | ( sum ) | { sum } | |sum|

`2\frac{1}{3}` and `2 1/3` are mixed numbers where the fraction is a proper one.  A letter before parentheses is a function of
what they hold if that is one symbol or number (`I(0)`, `f(x)`), or if it is f, g, h, F, G or P; otherwise a product.
`e` is Euler's number and `i` the imaginary unit; `4.5e33` is 4.5 times ten to the 33rd.

Sums, products, integrals and limits are not of this grammar; math-verify's parser reads them.
"""

import re

import sympy
from sympy import I, Integer, MatrixBase, Rational, Symbol

from megatron_drmas.answers.arithmetic import Expression, Unreadable, binomial, factorial, power, read_number, times
from megatron_drmas.answers.calculus import CALCULUS, read_calculus
from megatron_drmas.answers.vocabulary import (
    ACCENTS,
    ALWAYS_FUNCTIONS,
    CLOSERS,
    DEGREE,
    DIVIDED,
    FUNCTIONS,
    INVERSES,
    NAMES,
    TIMES,
    TRIGONOMETRIC,
    Token,
    tokens,
)


def _scaled(sign: int, value: Expression) -> Expression:
    return value if sign == 1 else -value


class _Parser:
    def __init__(self, found: list[Token]):
        self.tokens = found
        self.at = 0
        self.bars = 0  # open |

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead].text if self.at + ahead < len(self.tokens) else ""

    def kind(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead].kind if self.at + ahead < len(self.tokens) else ""

    def take(self) -> str:
        if self.at >= len(self.tokens):
            raise Unreadable("ends too early")
        self.at += 1
        return self.tokens[self.at - 1].text

    def expect(self, text: str) -> None:
        if (found := self.take()) != text:
            raise Unreadable(f"{found} where {text} should be")

    def sum(self) -> Expression:
        signs = {"+": 1, "-": -1}
        sign = signs[self.take()] if self.peek() in signs else 1
        total = _scaled(sign, self.product())
        while self.peek() in signs:
            sign = signs[self.take()]
            term = _scaled(sign, self.product())
            if isinstance(total, MatrixBase) != isinstance(term, MatrixBase) or (
                isinstance(total, MatrixBase) and total.shape != term.shape
            ):
                raise Unreadable("a sum of different shapes")
            total = total + term
        return total

    def product(self) -> Expression:
        value = self.factors()
        while self.peek() in TIMES or self.peek() in DIVIDED:
            operator = self.take()
            sign = -1 if self.peek() == "-" else 1
            if self.peek() in ("-", "+"):
                self.take()
            start = self.at
            if operator in TIMES:
                factor = self.factors()
            else:
                factor = self.postfix()
                if self.starts_factor():
                    raise Unreadable("a product after a slash has two readings")
                if self.at - start == 0 or isinstance(factor, MatrixBase) or factor == 0:
                    raise Unreadable("no number to divide by")
                factor = 1 / factor
            value = times(value, _scaled(sign, factor))
        return value

    def starts_factor(self) -> bool:
        text, kind = self.peek(), self.kind()
        if kind == "sign":
            return text in ("(", "[", "{") or (text == "|" and self.bars == 0)
        if kind == "command":
            return (
                text not in TIMES
                and text not in DIVIDED
                and text not in ("\\}", "\\rvert", "\\rfloor", "\\rceil", "\\choose", "\\over", "\\\\")
            )
        return kind in ("letter", "text") or (kind == "env" and text.startswith("\\begin"))

    def factors(self) -> Expression:
        whole = Integer(self.peek()) if self.kind() == "number" and self.peek().isdigit() else None
        value = self.postfix()
        if whole is not None and value == whole and (fraction := self.proper_fraction()) is not None:
            value = whole + fraction
        while self.starts_factor() or (self.kind() == "number" and self.tokens[self.at - 1].text == "!"):
            value = times(value, self.postfix())
        if self.kind() == "number":
            raise Unreadable("a number after a factor")
        return value

    def proper_fraction(self) -> Rational | None:
        """The fraction of a mixed number, taken if it is one."""
        start = self.at
        if self.peek() == "\\frac":
            self.take()
            above, below = self.argument(), self.argument()
        elif (
            self.kind() == "number"
            and self.peek().isdigit()
            and self.tokens[self.at].spaced
            and self.peek(1) == "/"
            and self.peek(2).isdigit()
        ):
            above, below = Integer(self.take()), (self.take(), Integer(self.take()))[1]
        else:
            return None
        if not (isinstance(above, Integer) and isinstance(below, Integer)) or above < 0 or below <= 0:
            self.at = start
            return None
        if above >= below or self.peek() == "^":
            raise Unreadable("a whole number before an improper fraction has two readings")
        return Rational(above, below)

    def postfix(self) -> Expression:
        value = self.atom()
        raised = False
        while self.peek() in ("^", "!", "'"):
            mark = self.take()
            if mark == "!":
                if self.peek() == "!":
                    raise Unreadable("a double factorial")
                value = factorial(value)
            elif mark == "'":
                value = self.primed(value)
            elif self.peek() == "\\circ" or [self.peek(i) for i in range(3)] == ["{", "\\circ", "}"]:
                for _ in range(3 if self.peek() == "{" else 1):
                    self.take()
                value = times(value, DEGREE)
            elif self.peek() == "\\prime" or [self.peek(i) for i in range(3)] == ["{", "\\prime", "}"]:
                for _ in range(3 if self.peek() == "{" else 1):
                    self.take()
                value = self.primed(value)
            elif raised:
                raise Unreadable("two exponents")
            else:
                value, raised = power(value, self.script()), True
        return value

    def primed(self, value: Expression) -> Symbol:
        if not isinstance(value, Symbol):
            raise Unreadable("a prime after what is not a symbol")
        return Symbol(f"{value.name}'", real=True)

    def script(self) -> Expression:
        """What follows `^`: a group, or a number, symbol or command with its arguments, with or without a sign."""
        if self.peek() in ("-", "+"):
            sign = -1 if self.take() == "-" else 1
            return _scaled(sign, self.script())
        if self.peek() == "{":
            return self.group()
        return self.atom()

    def argument(self) -> Expression:
        r"""The argument of a command: a group, one digit (`\frac12`) or one symbol."""
        if self.peek() == "{":
            return self.group()
        if self.kind() == "number":
            token = self.tokens[self.at]
            if len(token.text) > 1:
                self.tokens[self.at : self.at + 1] = [
                    Token("number", token.text[0], token.spaced),
                    Token("number", token.text[1:], False),
                ]
            return read_number(self.take())
        return self.atom()

    def group(self) -> Expression:
        """A parenthesis, bracket, brace group or pair of bars."""
        opening = self.take()
        bars, self.bars = self.bars, 0
        value = self.sum()
        if opening == "{" and self.peek() in ("\\choose", "\\over"):
            command = self.take()
            value = binomial(value, self.sum()) if command == "\\choose" else times(value, 1 / self.sum())
        self.expect(CLOSERS[opening])
        self.bars = bars
        return value

    def name(self) -> str:
        """A symbol's name with its subscript."""
        text = self.take()
        name = text.removeprefix("\\text{").removesuffix("}") if text.startswith("\\text") else text.lstrip("\\")
        if name in ACCENTS and text.startswith("\\"):
            name = f"{name} {self.raw()}"
        if self.peek() == "_":
            self.take()
            name += f"_{self.raw()}"
        return name

    def raw(self) -> str:
        """A group, or one token, as text."""
        text = self.take()
        if text != "{":
            return re.sub(r"\\text\{(.*)\}", r"\1", text)
        parts, depth = [], 1
        while depth:
            text = self.take()
            depth += (text == "{") - (text == "}")
            parts.append(re.sub(r"\\text\{(.*)\}", r"\1", text))
        return "".join(parts[:-1])

    def atom(self) -> Expression:
        """A number, a symbol, a group or a command."""
        text, kind = self.peek(), self.kind()
        if kind == "number":
            if self.peek(1) == "_":
                raise Unreadable("a number with a subscript")
            return read_number(self.take())
        if text in ("(", "[", "{"):
            return self.group()
        if text in ("|", "\\lvert"):
            self.take()
            self.bars += text == "|"
            value = self.sum()
            self.expect(CLOSERS[text])
            self.bars -= text == "|"
            return value.det() if isinstance(value, MatrixBase) else sympy.Abs(value)
        if text in ("\\lfloor", "\\lceil"):
            self.take()
            value = self.sum()
            self.expect(CLOSERS[text])
            return sympy.floor(value) if text == "\\lfloor" else sympy.ceiling(value)
        if kind == "env":
            return self.matrix()
        if kind == "command":
            return self.command()
        if kind in ("letter", "text"):
            return self.symbol()
        raise Unreadable(f"{text or 'the end'} where a number or a symbol should be")

    def command(self) -> Expression:
        """What a LaTeX command denotes, its arguments taken."""
        name = self.peek()[1:]
        if name == "frac":
            self.take()
            above, below = self.argument(), self.argument()
            if isinstance(below, MatrixBase) or below == 0:
                raise Unreadable("a fraction of nothing")
            return times(above, 1 / below)
        if name == "sqrt":
            self.take()
            index = self.group() if self.peek() == "[" else Integer(2)
            radicand = self.argument()
            # Of a negative number the real root, if it has one: that is what \sqrt[3]{-8} means
            if isinstance(index, Integer) and index > 0 and index % 2 and radicand.is_real and radicand.is_negative:
                return -power(-radicand, 1 / index)
            return power(radicand, 1 / index)
        if name == "binom":
            self.take()
            return binomial(self.argument(), self.argument())
        if name == "pi":
            self.take()
            return sympy.pi
        if name == "infty":
            self.take()
            return sympy.oo
        if name in FUNCTIONS and not (name in NAMES and self.peek(1) != "("):
            return self.function(self.take()[1:])
        if name in NAMES or name in ACCENTS:
            return self.symbol()
        raise Unreadable(f"\\{name} is not known")

    def function(self, name: str) -> Expression:
        """A function applied to what follows, such as sin x or log_2 8."""
        apply, exponent = FUNCTIONS[name], None
        if name == "log" and self.peek() == "_":
            self.take()
            base = self.argument()

            def apply(x: Expression) -> Expression:
                return sympy.log(x) / sympy.log(base)

        if self.peek() == "^":
            self.take()
            exponent = self.script()
            if exponent == -1:
                if name not in INVERSES:
                    raise Unreadable(f"\\{name}^{{-1}} has two readings")
                apply, exponent = INVERSES[name], None
        if self.peek() in ("(", "[", "{"):
            opening = self.take()
            bars, self.bars = self.bars, 0
            arguments = [self.sum()]
            while self.peek() == "," and name in ("max", "min", "gcd", "lcm"):
                self.take()
                arguments.append(self.sum())
            self.expect(CLOSERS[opening])
            self.bars = bars
        else:
            arguments = [self.function_argument()]
        if name in TRIGONOMETRIC:
            arguments = [argument.subs(DEGREE, sympy.pi / 180) for argument in arguments]
        value = apply(*arguments)
        return value if exponent is None else power(value, exponent)

    def function_argument(self) -> Expression:
        r"""An argument without parentheses: the factors up to the next function or operator, as in `\sin 2x \cos x`."""
        value = self.postfix()
        while self.starts_factor() and self.peek()[1:] not in FUNCTIONS and self.peek() not in ("(", "[", "\\text"):
            value = times(value, self.postfix())
        if self.kind() == "number":
            raise Unreadable("a number after a factor")
        return value

    def symbol(self) -> Expression:
        kind = self.kind()
        name = self.name()
        if kind == "letter" and name == "e":
            return sympy.E
        if kind == "letter" and name == "i":
            return I
        if kind != "text" and self.peek() == "(" and (argument := self.application(name)) is not None:
            return sympy.Function(name)(argument)
        return Symbol(name, real=True)

    def application(self, name: str) -> Expression | None:
        """The argument, if the parentheses after a symbol make it a function."""
        start = self.at
        try:
            value = self.group()
        except Unreadable:
            if name in ALWAYS_FUNCTIONS:
                raise
            value = None
        if value is not None and (name in ALWAYS_FUNCTIONS or value.is_number or isinstance(value, Symbol)):
            return value
        self.at = start
        return None

    def matrix(self) -> Expression:
        """A matrix environment, row by row."""
        opening = re.sub(r"\s", "", self.take())
        kind = opening[len("\\begin{") : -1].rstrip("*")
        if kind not in ("matrix", "pmatrix", "bmatrix", "vmatrix", "smallmatrix", "array"):
            raise Unreadable(f"{kind} is not a matrix")
        if kind == "array":
            self.raw()
        rows: list[list[Expression]] = [[]]
        while not self.peek().startswith("\\end"):
            if self.peek() == "\\\\":
                self.take()
                if not self.peek().startswith("\\end"):
                    rows.append([])
            elif self.peek() == "&":
                self.take()
            rows[-1].append(self.sum()) if not self.peek().startswith("\\end") else None
        if re.sub(r"\s", "", self.take()) != opening.replace("begin", "end", 1):
            raise Unreadable("a matrix that is not closed")
        if len({len(row) for row in rows}) != 1 or any(isinstance(entry, MatrixBase) for row in rows for entry in row):
            raise Unreadable("rows of different lengths")
        matrix = sympy.ImmutableMatrix(rows)
        return matrix.det() if kind == "vmatrix" else matrix


def read_expression(text: str) -> Expression:
    """The value of a cleaned text (`spelling.clean`) as a sympy expression or matrix; numbers are exact.

    Raises:
        Unreadable: see there.
    """
    if CALCULUS.search(text):
        return read_calculus(text)
    parser = _Parser(tokens(text))
    try:
        value = parser.sum()
    except Unreadable:
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, NotImplementedError) as error:
        raise Unreadable(f"sympy refuses it: {error}") from error  # such as the logarithm of a matrix
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{parser.peek()} is left over")
    if not isinstance(value, (sympy.Expr, MatrixBase)) or value.has(sympy.nan, sympy.zoo):
        raise Unreadable("it has no value")
    return value
