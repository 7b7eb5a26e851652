"""Line charts as SVG text: they follow the page's light or dark colors, and show values under the pointer without a script.

Colors are CSS classes `c0` … `c7` of the page that embeds the chart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 24, 24
MAX_POINTS = 120  # points of a line; more steps than these are drawn in equal bins


@dataclass
class Series:
    """One line: `points` are (step, value), value None where it was not finite."""

    name: str
    color: int
    points: list[tuple[int, float | None]]


def line_chart(
    series: Sequence[Series], log: bool = False, bounds: tuple[float, float] | None = None, bins: str = "mean"
) -> Markup:
    """An SVG chart of some lines over steps.

    Args:
        series: the lines; empty ones are left out.
        log: logarithmic axis; values that are not positive are left out.
        bounds: minimum range of the axis; wider where values go beyond.
        bins: what represents many steps in one bin: "mean" or "max".
    """
    lines = [Series(line.name, line.color, _binned(_drawable(line.points, log), bins)) for line in series]
    lines = [line for line in lines if line.points]
    steps = sorted({step for line in lines for step, _ in line.points})
    finite = [value for line in lines for _, value in line.points if value is not None]
    if not finite:
        return Markup('<p class="empty">nothing finite was logged</p>')
    ticks, place_y = _log_axis(finite) if log else _linear_axis(finite, bounds)
    span = max(steps[-1] - steps[0], 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - steps[0]) / span if len(steps) > 1 else 0.5)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * place_y(value)

    names = escape(", ".join(line.name for line in lines))
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{names} by step">']
    for value, label in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 3.5:.1f}" text-anchor="end">{label}</text>')
    for step in _step_ticks(steps[0], steps[-1]):
        parts.append(f'<text class="tick" x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step}</text>')
    parts += [_line(line, x, y) for line in lines]
    parts += _readouts(lines, steps, x, y)
    return Markup("".join(parts) + "</svg>")


def short(value: float | None) -> str:
    """A number in few characters."""
    if value is None:
        return "not finite"
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3f}".rstrip("0").rstrip(".")


def _drawable(points: list[tuple[int, float | None]], log: bool) -> list[tuple[int, float | None]]:
    return [(step, value) for step, value in points if value is None or not log or value > 0]


def _binned(points: list[tuple[int, float | None]], bins: str) -> list[tuple[int, float | None]]:
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    binned: list[tuple[int, float | None]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if value is not None]
        whole = len(values) == len(part)
        binned.append((part[-1][0], (max(values) if bins == "max" else sum(values) / len(values)) if whole else None))
    return binned


def _linear_axis(
    values: list[float], bounds: tuple[float, float] | None
) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    low, high = min(values + list(bounds or ())), max(values + list(bounds or ()))
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, math.ceil(-math.log10(step) - 1e-9) + (step / unit == 2.5))
    fixed = decimals <= 4 and max(abs(first), abs(last)) * step < 1e5
    ticks = [(index * step, f"{index * step:.{decimals}f}" if fixed else short(index * step)) for index in range(first, last + 1)]
    return ticks, lambda value: (value - first * step) / ((last - first) * step)


def _log_axis(values: list[float]) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = math.ceil((high - low) / 5)
    ticks = [(10.0**exponent, short(10.0**exponent)) for exponent in range(low, high + 1, every)]
    return ticks, lambda value: (math.log10(value) - low) / (high - low)


def _step_ticks(first: int, last: int) -> list[int]:
    raw = (last - first) / 5
    if raw <= 0:
        return [first]
    unit = 10 ** math.floor(math.log10(raw)) if raw >= 1 else 1
    step = next((int(factor * unit) for factor in (1, 2, 5, 10) if factor * unit >= raw), 1)
    return list(range(math.ceil(first / step) * step, last + 1, step))


def _line(line: Series, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    parts, run = [], []
    for step, value in [*line.points, (0, None)]:
        if value is not None:
            run.append(f"{x(step):.1f},{y(value):.1f}")
            continue
        if len(run) == 1:
            cx, cy = run[0].split(",")
            parts.append(f'<circle class="c{line.color} dot" cx="{cx}" cy="{cy}" r="2.5"/>')
        elif run:
            parts.append(f'<polyline class="c{line.color} line" points="{" ".join(run)}"/>')
        run = []
    parts += [
        f'<text class="bad" x="{x(step):.1f}" y="{TOP + 4}" text-anchor="middle">×</text>'
        for step, value in line.points
        if value is None
    ]
    return "".join(parts)


def _readouts(lines: list[Series], steps: list[int], x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """For every step a transparent column that, under the pointer, shows a rule, dots and the values."""
    values = [dict(line.points) for line in lines]
    parts = []
    for index, step in enumerate(steps):
        left = x((steps[index - 1] + step) / 2) if index else LEFT
        right = x((steps[index + 1] + step) / 2) if index + 1 < len(steps) else WIDTH - RIGHT
        shown = [(line, found[step]) for line, found in zip(lines, values, strict=True) if step in found]
        dots = "".join(
            f'<circle class="c{line.color} dot" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>'
            for line, value in shown
            if value is not None
        )
        text = "".join(f'<tspan class="c{line.color} value" dx="7">{short(value)}</tspan>' for line, value in shown)
        parts.append(
            f'<g class="at"><rect x="{left:.1f}" y="0" width="{right - left:.1f}" height="{HEIGHT}"/><g class="tip">'
            f'<line class="rule" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{dots}'
            f'<text class="readout" x="{WIDTH - RIGHT}" y="13" text-anchor="end">step {step}{text}</text></g></g>'
        )
    return parts
