"""Figures: curves over steps and points with intervals, one panel each, as PNG and SVG."""

import math
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from tools.ablation.tables import half_width

LOG_SPAN = 1e4  # of a log axis: where nothing can be learned a norm is rounding, or 0


def curve_figure(path: Path, panels: dict[str, dict[str, list[list[float]]]], columns: int) -> None:
    """Write the figure, a panel for each title.

    Args:
        path: of the PNG; the SVG goes beside it.
        panels: title -> label -> series over steps, one of each seed: their mean, and a band from the least to the largest.
            Titles that hold "norm" have a log axis.
    """
    figure, axes = _panels(len(panels), columns)
    for axis, (title, curves) in zip(axes, panels.items()):
        for label, series in curves.items():
            curve(axis, series, label)
        axis.set(title=title, xlabel="step")
        if "norm" in title:
            axis.set_yscale("log")
            axis.set_ylim(bottom=axis.get_ylim()[1] / LOG_SPAN)
        axis.legend(fontsize="x-small")
    _save(figure, path)


def point_figure(
    path: Path, panels: dict[str, dict[str, list[tuple[float, list[float]]]]], columns: int, xlabel: str, ylabel: str
) -> None:
    """Write the figure, a panel for each title.

    Args:
        path: of the PNG; the SVG goes beside it.
        panels: title -> label -> (x, shares over seeds): their mean and its 95 % interval.
        xlabel, ylabel: of every panel; x has a log axis.
    """
    figure, axes = _panels(len(panels), columns)
    for axis, (title, lines) in zip(axes, panels.items()):
        for place, (label, points) in enumerate(lines.items()):
            shift = 1 + 0.025 * (place - (len(lines) - 1) / 2)  # so that error bars do not hide one another
            x = [at * shift for at, _ in points]
            errors = [half_width(values) for _, values in points]
            axis.errorbar(
                x,
                [fmean(values) for _, values in points],
                np.nan_to_num(errors),
                label=label,
                marker="o",
                markersize=3,
                capsize=2,
            )
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel, xscale="log")
        ticks = sorted({at for points in lines.values() for at, _ in points})
        axis.set_xticks(ticks, [f"{at:g}" for at in ticks])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, 0.0), min(high, 1.0))
        axis.legend(fontsize="x-small")
    _save(figure, path)


def curve(axis: Axes, series: list[list[float]], label: str) -> None:
    """The mean of the series that have values, over the steps that all of them have, with a band from least to largest."""
    length = min((len(values) for values in series if values), default=0)
    if not length:
        return
    values = np.array([values[:length] for values in series if values], dtype=float)
    steps = np.arange(1, length + 1)
    line = axis.plot(steps, np.nanmean(values, axis=0), label=label)[0]
    if len(values) > 1:
        axis.fill_between(steps, np.nanmin(values, axis=0), np.nanmax(values, axis=0), color=line.get_color(), alpha=0.12)


def _panels(count: int, columns: int) -> tuple:
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, axes.flat


def _save(figure: Figure, path: Path) -> None:
    for suffix in (".png", ".svg"):
        temp_path = path.with_suffix(f".part{suffix}")
        figure.savefig(temp_path, dpi=120)
        temp_path.replace(path.with_suffix(suffix))
    plt.close(figure)
