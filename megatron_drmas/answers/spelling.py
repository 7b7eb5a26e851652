r"""One spelling of what LaTeX and plain text write in many: `\dfrac`, `\tfrac`, `\left(`, `½`, `−`, `1{,}234`."""

import re
import unicodedata

OPENING = ("(", "[", "{", "\\{", "\\langle", "\\lvert", "\\lfloor", "\\lceil")
CLOSING = (")", "]", "}", "\\}", "\\rangle", "\\rvert", "\\rfloor", "\\rceil")
PIECE = re.compile(r"\\begin\s*\{[a-z]+\*?\}|\\end\s*\{[a-z]+\*?\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ",
    "÷": "\\div ", "∗": "*", "√": "\\sqrt ", "∞": "\\infty ", "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ",
    "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∓": "\\mp ", "°": "^\\circ ", "º": "^\\circ ", "∪": "\\cup ",
    "∩": "\\cap ", "∅": "\\emptyset ", "∈": "\\in ", "∖": "\\setminus ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "⟨": "\\langle ", "⟩": "\\rangle ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ",
    "∠": "\\angle ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    "⁄": "/", "∕": "/", "…": "\\ldots ", "\u200b": "", "\ufeff": "", "\u2061": "", "\u2062": "",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "φ": "phi", "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda",
    "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "µ": "mu",
}  # fmt: skip
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "leqslant": "le",
    "geq": "ge", "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "varnothing": "emptyset", "lbrace": "{",
    "rbrace": "}", "lbrack": "[", "rbrack": "]", "backslash": "setminus", "degree": "^\\circ", "varphi": "phi",
    "varepsilon": "epsilon", "vartheta": "theta", "ast": "cdot", "bullet": "cdot", "dots": "ldots", "cdots": "ldots",
    "simeq": "approx", "lor": "text{or}", "land": "text{and}", "wedge": "text{and}", "vee": "text{or}", "mid": "|",
    "vert": "|", "R": "mathbb{R}", "Z": "mathbb{Z}", "N": "mathbb{N}", "Q": "mathbb{Q}", "C": "mathbb{C}",
    "reals": "mathbb{R}", "colon": ":", "arcsinh": "arsinh", "lg": "log_{10}", "infin": "infty", "percent": "%",
}  # fmt: skip
_DELIMITER = r"\s*(\\[a-zA-Z]+|\\.|.)"
_SIZED = re.compile(r"\\(left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])" + _DELIMITER, re.DOTALL)
_COLORED = re.compile(r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}\s*(?=\{)|\\color\s*\{[^{}]*\}|\\underline(?=\s*\{)")
_ORDINAL = re.compile(
    r"(?<=\d)(?:\s*\^\s*\{?\s*\\text\{(?:st|nd|rd|th)\}\s*\}?|\\text\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)(?![a-zA-Z])|\^\{(?:st|nd|rd|th)\})"
)
_CHOSEN = re.compile(r"(?:\{\})?\s*[_^]\s*\{?(\d+)\}?\s*(?:C|\\text\{C\})\s*_\s*\{?(\d+)\}?|(?<![a-zA-Z\\])C\((\d+),\s*(\d+)\)")
_IGNORED = re.compile(
    r"\\(tiny|small|large|Large|LARGE|huge|Huge|bfseries|itshape|displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|strut|rm|bf|it|hfill|hline|mathopen|mathclose)(?![a-zA-Z])"
)
_SPACES = re.compile(r"\\(?:quad|qquad|thinspace|enspace|space)(?![a-zA-Z])|\\hspace\*?\{[^}]*\}|(?<!\\)\\[;:,> ]|~")
_TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal|up|md|sc|sl)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|operatorname\*?)\s*\{((?:[^{}]|\^\{-?\d+\})*)\}"
)
_MATH = re.compile(r"\s*(?:\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\])\s*\.?\s*", re.DOTALL)
_GROUPED = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:\{,\}|,?\\!,?|\\[,;: ]|~|[\u00a0\u2009\u202f])\d{3})+)(?!\d)")
_GROUPED_BY_SPACES = re.compile(r"(?<![\d.\s])(?<!\d\s)([1-9]\d{0,2})((?: \d{3})+)(?![\d/]| *[/\d])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")


def _delimiter(match: re.Match) -> str:
    side, delimiter = match.groups()
    if delimiter == ".":
        return " "
    if delimiter in ("|", "\\vert"):
        return {"left": "\\lvert ", "right": "\\rvert "}.get(side, {"l": "\\lvert ", "r": "\\rvert "}.get(side[-1], "|"))
    return delimiter + (" " if delimiter[-1].isalpha() else "")


def _text(match: re.Match) -> str:
    content = " ".join(
        re.sub(r"\\[,;:! ]|~|\$|[{}]", " ", re.sub(r"\^\{(-?\d+)\}", r"^\1", match.group(1).replace("**", ""))).split()
    )
    if content in ("e", "i") and match.group(0).startswith("\\mathrm"):
        return content
    return f"\\text{{{content}}}" if content else " "


def _repeating(match: re.Match) -> str:
    whole, fixed, once, digit = match.groups()
    repeated = once or digit
    nines = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    return f"(\\frac{{{int(whole + fixed + repeated or 0) - int(whole + fixed or 0)}}}{{{nines}}})"


def unwrap_math(text: str) -> str:
    r"""`text` without `$…$`, `\(…\)` or `\[…\]` around the whole of it."""
    while (match := _MATH.fullmatch(text)) and "$" not in (
        content := next(group for group in match.groups() if group is not None)
    ).replace("\\$", ""):
        text = content
    return text


def clean(text: str) -> str:
    r"""`text` in one spelling: ASCII LaTeX without sizes, styles and thin spaces, every kind of text as `\text{…}`."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: f"_{{{run.group().translate(_SUBSCRIPTS)}}}", text)
    text = _GROUPED.sub(lambda match: match.group(1) + "".join(re.findall(r"\d", match.group(2))), text)
    text = _GROUPED_BY_SPACES.sub(lambda match: match.group().replace(" ", ""), text)
    characters = []
    for char in text:
        if char in _CHARACTERS:
            char = _CHARACTERS[char]
        elif char in _GREEK:
            char = f"\\{_GREEK[char]} "
        elif unicodedata.decomposition(char).startswith("<fraction>"):
            above, below = unicodedata.normalize("NFKC", char).split("⁄")
            char = f"\\frac{{{above}}}{{{below}}}"
        elif ord(char) > 127:
            char = unicodedata.normalize("NFKC", char)
        characters.append(char)
    text = unwrap_math(re.sub(r"^\s*\*\*(.*)\*\*\s*$", r"\1", "".join(characters), flags=re.DOTALL))
    if "\\begin" not in text:  # where two backslashes are not the end of a row, they are one, escaped once too often
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
    text = _COLORED.sub(" ", text)
    text = re.sub(r"\{\s*\\(rm|bf|it)\s+([^{}]*)\}", r"\\text{\2}", text)
    text = re.sub(r"(?<!\\)\$", "", text).replace("\\!", "")
    text = _SIZED.sub(_delimiter, text)
    while (shorter := _TEXT.sub(_text, text)) != text:
        text = shorter
    text = _CHOSEN.sub(
        lambda match: "\\binom{{{}}}{{{}}}".format(*(group for group in match.groups() if group)), _ORDINAL.sub("", text)
    )
    text = _IGNORED.sub(" ", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\\([a-zA-Z]+)", lambda name: _synonym(name.group(1)), text)
    text = text.replace("**", "^").replace("\\%", "%").replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ")
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "\\\\times ", text)
    text = re.sub(r"(?<![a-zA-Z\\])infinity\b", "\\\\infty ", text)
    text = re.sub(r"(?<![a-zA-Z\\])(sqrt|pi|infty|sin|cos|tan|ln|log)(?![a-zA-Z])", r"\\\1 ", text)
    text = _REPEATING.sub(_repeating, text)
    return " ".join(text.split())


def _synonym(name: str) -> str:
    other = _SYNONYMS.get(name)
    if other is None:
        return f"\\{name}"
    if other in ("<", ">", "[", "]", "|", ":", "%", "^\\circ"):
        return other
    return f"\\{other}"


def pieces(text: str) -> list[tuple[int, str, int]]:
    r"""The commands and characters of a cleaned text as (depth, piece, position); a bracket has the depth outside it."""
    found, depth = [], 0
    for match in PIECE.finditer(text):
        piece = match.group()
        if piece in CLOSING or piece.startswith("\\end"):
            depth -= 1
        found.append((depth, piece, match.start()))
        if piece in OPENING or piece.startswith("\\begin"):
            depth += 1
    return found


def split_at(text: str, separators: tuple[str, ...]) -> list[tuple[str, str]]:
    """The parts of a cleaned text between separators outside all brackets, each with the separator before it."""
    parts, start, before = [], 0, ""
    for depth, piece, position in pieces(text):
        if depth == 0 and piece in separators:
            parts.append((before, text[start:position]))
            before, start = piece, position + len(piece)
    parts.append((before, text[start:]))
    return [(separator, part.strip()) for separator, part in parts]


def canonical(text: str) -> str:
    r"""A cleaned text by which two that cannot be read are compared: without spaces and needless braces."""
    text = re.sub(r"\\text\{([^{}]*)\}", lambda match: match.group(1).lower(), text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\{\s*(\w|\\[a-zA-Z]+)\s*\}", r"{\1}", text)
    text = re.sub(r"([_^])\s*(\w)", r"\1{\2}", text)
    kept = re.sub(r"(?<=\d)\s+(?=\d)|(?<=[a-zA-Z])\s+(?=[a-zA-Z])", "\0", text)  # `2 3` is not 23, nor `\sin x` \sinx
    return re.sub(r"\s+", "", kept).replace("\0", " ").rstrip(".")
