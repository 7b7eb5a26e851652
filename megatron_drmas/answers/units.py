r"""What follows a number and is not part of its value: `5\text{ cm}`, `12 inches`, `\$10`, `3\text{ hours}`."""

import re
from typing import NamedTuple

_NAMES = {
    "meter": "m metre", "centimeter": "cm centimetre", "millimeter": "mm millimetre", "kilometer": "km kilometre",
    "micrometer": "um micron", "nanometer": "nm", "inch": "in inches", "foot": "ft feet", "yard": "yd yds", "mile": "mi",
    "gram": "g", "kilogram": "kg kgs kilo", "milligram": "mg", "ton": "tonne", "pound": "lb lbs", "ounce": "oz",
    "liter": "l litre", "milliliter": "ml millilitre", "gallon": "gal", "quart": "qt", "cup": "", "second": "s sec secs",
    "millisecond": "ms", "minute": "min mins", "hour": "h hr hrs", "day": "", "week": "wk", "month": "", "year": "yr yrs",
    "degree": "deg", "radian": "rad rads", "dollar": "$ usd", "cent": "¢", "euro": "€ eur", "sterling": "£ gbp", "yen": "¥",
    "mph": "miles/hour mi/h mi/hr", "km/h": "kph kmh kilometers/hour km/hr", "m/s": "meters/second", "ft/s": "feet/second",
    "m/s^2": "meters/second^2", "joule": "j joules", "kilojoule": "kj", "newton": "n", "watt": "w", "kilowatt": "kw",
    "volt": "v", "ampere": "a amps amp", "ohm": "", "hertz": "hz", "pascal": "pa", "kelvin": "k",
    "celsius": "^\\circc degc", "fahrenheit": "^\\circf degf", "mole": "mol", "electronvolt": "ev", "angstrom": "",
    "light-year": "ly", "parsec": "pc", "am": "a.m", "pm": "p.m", "square": "", "unit": "", "person": "people",
    "man": "men", "woman": "women", "child": "children kid", "pen": "", "cat": "", "dog": "", "egg": "", "way": "",
    "time": "", "per": "", "bit": "", "erg": "ergs", "mev": "", "kev": "", "gev": "", "mhz": "", "khz": "", "ghz": "",
    "kpc": "", "mpc": "", "gpa": "", "mpa": "", "kpa": "", "atm": "", "rpm": "", "ppm": "",
}  # fmt: skip
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# Words after a number that change its value, or make it something else: no units
_MEANINGFUL = re.compile(
    r"\b(hundred|thousand|million|billion|trillion|dozen|half|halves|quarters?|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?"
    r"|(?:hundred|thousand|million|billion)ths?|plus|minus|times|over|divided|squared|cubed|factorial|point|negative|below|under|more|less|mod|modulo|choose|remainder|base"
    r"|and|or|not|to|through|pi|root)s?\b",
    re.IGNORECASE,
)
_MEASURES = set(list(_NAMES)[: list(_NAMES).index("square")])  # of which one is not another; the rest are counted things
_UNITS = {alias: name for name, aliases in _NAMES.items() for alias in (name, name + "s", *aliases.split())}
_SHORT = ("cm", "mm", "km", "kg", "mg", "ml", "mph", "lbs", "hrs")
_GLUED = "|".join(
    sorted((unit for unit in _UNITS if unit.isalpha() and (len(unit) >= 4 or unit in _SHORT)), key=len, reverse=True)
)


_IN_TEXT = re.compile(
    r"(?P<value>.*?[^\s\\])\s*(?P<unit>(?:(?:\s*(?:/|\\cdot)\s*)?\\text\{[^{}]*\}(?:\s*\^\s*\{?\s*-?[1-9]\s*\}?)?\s*)+)",
    re.DOTALL,
)
_WORD = r"[A-Za-z$€£¥¢][A-Za-z.'-]*(?:\^\{?[23]\}?)?"
_PLAIN = re.compile(
    rf"(?P<value>.*[\d}})%])(?:\s+(?P<unit>{_WORD}(?:\s*/\s*{_WORD}|\s+{_WORD})*)|\s*(?P<glued>(?:{_GLUED})(?:\^\{{?[23]\}}?)?))",
    re.DOTALL,
)
_CURRENCY = re.compile(r"(?P<sign>[+-]?)\s*(?P<unit>\\\$|[€£¥])\s*(?P<value>.+)", re.DOTALL)
_AFTER = re.compile(r"(?P<value>.*\d)\s*(?P<unit>\\\$|[€£¥¢])", re.DOTALL)
_TEMPERATURE = re.compile(r"(?P<value>.*\S)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?P<unit>[CF]|\\text\{[CF]\})", re.DOTALL)
_PERCENT = re.compile(
    r"(?P<value>.*\S)\s*(?:%|\\text\{(?:%|percent|per cent|percentage|pct)\}|(?<![a-zA-Z])(?:percent|per cent|pct))", re.DOTALL
)


class Measured(NamedTuple):
    """A text's value and what it is counted in."""

    value: str
    times: int = 1  # of "5 million"
    percent: bool = False
    unit: str | None = None  # a known measure; none where none is given and where a thing is counted


def _unit_name(text: str) -> str | None:
    words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().replace("\\$", "$").replace("\\cdot", " ")
    words = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", re.sub(r"\s*(/|\bper\b)\s*", "/", words))
    words = re.sub(r"\b(square|sq\.?)\s+([a-z]+)", r"\2^2", re.sub(r"\b(cubic|cu\.?)\s+([a-z]+)", r"\2^3", words)).strip(" .")
    if words in _UNITS:
        return _UNITS[words]
    factors = []
    for factor in words.split("/"):
        name, _, exponent = factor.strip(" .").partition("^")
        factors.append(_UNITS.get(name.strip(), "") + (f"^{exponent}" if exponent else ""))
    name = "/".join(factors)
    return _UNITS.get(name, name) if all(factor.partition("^")[0] in _MEASURES for factor in factors) else None


def measured(text: str) -> Measured:
    """A cleaned text without the percent sign, the currency and the units around its value."""
    if match := _PERCENT.fullmatch(text):
        return Measured(match["value"], percent=True)
    if match := _CURRENCY.fullmatch(text):
        return measured(match["sign"] + match["value"])._replace(unit=_unit_name(match["unit"]))
    if match := _AFTER.fullmatch(text):
        return Measured(match["value"], unit=_unit_name(match["unit"]))
    if match := _TEMPERATURE.fullmatch(text):
        return Measured(match["value"], unit="celsius" if "C" in match["unit"] else "fahrenheit")
    if (match := _IN_TEXT.fullmatch(text)) and not match["value"].endswith(("_", "^", "{", "(", "\\")):
        return _with_unit(text, match["value"], match["unit"])
    if match := _PLAIN.fullmatch(text):
        unit = match["unit"] or match["glued"]
        first = re.split(r"[\s/^]", unit.lower())[0].rstrip(".")
        if (first in _UNITS and len(first) > 1) or len(first) >= 4 or first in ("sq", "cu"):
            return _with_unit(text, match["value"], unit)
    return Measured(text)


def _with_unit(text: str, value: str, unit: str) -> Measured:
    words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", unit).split()
    times = _MULTIPLES.get(words[0].lower(), 1) if words else 1
    if times != 1:
        unit = " ".join(words[1:])
    if _MEANINGFUL.search(unit):
        return Measured(text)
    inner = measured(value)
    return Measured(inner.value, inner.times * times, inner.percent, inner.unit or _unit_name(unit))
