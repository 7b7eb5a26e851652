"""Markdown tables, and numbers in them."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from scipy.stats import t

LEVEL = 0.95


def table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def number(value: float | None) -> str:
    """Three digits, or a dash for a value that is missing."""
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of independent values (Student's t); nan with fewer than two."""
    if len(values) < 2:
        return math.nan
    return float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float | None], signed: bool = False) -> str:
    """Mean ± `half_width`, missing values left out."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    sign = "+" if signed else ""
    mean = f"{fmean(known):{sign}.3f}"
    return f"{mean} ± {half_width(known):.3f}" if len(known) > 1 else mean
