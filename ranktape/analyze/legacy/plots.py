"""Draws a sweep: each metric over the levels, and the limits of the format.

There are two plots of a tensor: six panels with all metrics, and a summary of three panels with a box of statistics.
Plots do not change global state of matplotlib, so they can be drawn in any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ranktape.analyze.legacy.text import MODE_WORDS, exponent_text, limits_of, number_of, statistics_lines
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.analyze.questions.advice import Verdict, is_lossless
from ranktape.analyze.views import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from ranktape.analyze.views.plots.axes import scale_decades, scale_shares
from ranktape.analyze.views.plots.style import Page, empty, plain, say
from ranktape.analyze.views.plots.style import name as entitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ranktape.analyze.numerics.sweeps.metrics import Level
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

MARKS = ("o", "s", "^")
"""The markers of the first, second and third line of a panel."""

MAX_MARKED_LEVELS = 60
"""The largest number of levels with markers; those of more levels would overlap."""

MAX_NAME_LETTERS = 200
"""The longest name of a tensor in the title; the middle of a longer name is cut out."""

MARGIN = 0.04
"""The margin on both sides of the levels, relative to their range."""

SMALLEST_DRAWN, LARGEST_DRAWN = 1e-280, 1e280
"""The range of values that a logarithmic axis can show with a margin."""

MANY_TIMES, FEW_TICKS = 300.0, 3
"""The ratio of limits from which powers of ten suffice as ticks, and the smallest useful number of ticks."""


def is_drawable(metric: float) -> bool:
    """Whether a logarithmic axis can show the metric."""
    return SMALLEST_DRAWN <= metric <= LARGEST_DRAWN


def log_scale(axes: Axes, metrics: Sequence[float]) -> None:
    """A logarithmic axis for errors over a wide or a narrow range; without positive errors, an axis without ticks.

    Ticks are powers of ten; for narrower ranges 1, 2 and 5 times powers of ten, or round numbers.
    """
    positive = list(filter(is_drawable, metrics))
    if not positive:
        _no_scale(axes)
        return
    lowest, highest = math.log10(min(positive)), math.log10(max(positive))
    margin = max(0.1, 0.08 * (highest - lowest))
    low, high = 10 ** (lowest - margin), 10 ** (highest + margin)
    scale_decades(axes)
    axes.set_ylim(low, high)
    if high / low < MANY_TIMES:
        ticks: list[float] = []
        for locator in (LogLocator(subs=(1.0, 2.0, 5.0)), MaxNLocator(4, steps=[1, 2, 5, 10])):
            ticks = [tick for tick in np.asarray(locator.tick_values(low, high)).tolist() if low <= tick <= high]
            if len(ticks) >= FEW_TICKS:
                break
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_major_formatter(FixedFormatter([f"{tick:.6g}" for tick in ticks]))


def linear_scale(axes: Axes, metrics: Sequence[float]) -> None:
    """A linear axis, with enough digits to distinguish the ticks."""
    finite = [metric for metric in metrics if math.isfinite(metric)]
    if not finite:
        _no_scale(axes)
        return
    lowest, highest = min(finite), max(finite)
    margin = 0.08 * (highest - lowest) or 0.05 * max(abs(highest), 1e-300)
    axes.set_ylim(lowest - margin, highest + margin)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.9g}"))


def _no_scale(axes: Axes) -> None:
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(NullLocator())


def ratio_scale(axes: Axes, metrics: Sequence[float]) -> None:
    """A logarithmic axis up to 100 % that starts at zero."""
    scale_shares(axes, "y", metrics)


class MetricLine(NamedTuple):
    """One metric of each level in a panel; a single line has no label."""

    metric: Callable[[Level], float]
    label: str = ""
    color: str = BLUE


class MetricPanel(NamedTuple):
    """Metrics in the same unit, and the function that scales their axis, given all values."""

    title: str
    unit: str
    scale: Callable[[Axes, Sequence[float]], None]
    lines: tuple[MetricLine, ...]


MSE = MetricPanel(
    "Mean squared error (MSE)", "squared unit of the tensor", log_scale, (MetricLine(lambda level: level.mse),)
)
COSINE = MetricPanel("Cosine similarity", "1: same direction", linear_scale, (MetricLine(lambda level: level.cosine),))
PSNR = MetricPanel("Peak signal-to-noise ratio (PSNR)", "dB", linear_scale, (MetricLine(lambda level: level.psnr),))
RATIOS = (
    MetricLine(lambda level: level.psnr, "PSNR: peak"),
    MetricLine(lambda level: level.sqnr, "SQNR: mean square", VERMILION),
)
ERRORS = (
    MetricLine(lambda level: level.max_abs_error, "largest", VERMILION),
    MetricLine(lambda level: level.rmse, "root mean square (RMSE)", PURPLE),
    MetricLine(lambda level: level.mae, "mean (MAE)"),
)
LOSSES = (
    MetricLine(lambda level: Verdict(level).ratio("overflow"), "overflow", VERMILION),
    MetricLine(lambda level: Verdict(level).ratio("underflow"), "underflow"),
    MetricLine(lambda level: Verdict(level).ratio("flushed"), "flushed to zero", ORANGE),
)
PANELS = (
    MSE,
    COSINE,
    MetricPanel("Signal-to-noise ratios", "dB", linear_scale, RATIOS),
    MetricPanel("Absolute errors", "unit of the tensor", log_scale, ERRORS),
    MetricPanel(
        "Relative error", "MAE in % of mean |x|", log_scale, (MetricLine(lambda level: 100 * level.relative_error),)
    ),
    MetricPanel("Beyond the format's limits", "share of values", ratio_scale, LOSSES),
)
"""The panels, row by row."""


def draw_panels(sweep: ScaleSweep, *, name: str) -> Figure:
    """Six panels with all metrics of every level of a tensor.

    If the sweep has no levels, each panel shows the reason.
    """
    page = _page(sweep, name, 2, 3, width=5.5, height=4.2)
    for panel, axes in zip(PANELS, page.panels.flat, strict=True):
        _draw_panel(axes, panel, sweep=sweep, is_labelled=axes in page.panels[-1])
    return page.finish()


def draw_summary(sweep: ScaleSweep, *, name: str) -> Figure:
    """MSE, cosine and PSNR of every level of a tensor, with a box of statistics."""
    page = _page(sweep, name, 3, 2, width=6.5, height=3.1, width_ratios=(2.6, 1))
    for panel, axes in zip((MSE, COSINE, PSNR), page.panels[:, 0], strict=True):
        _draw_panel(axes, panel, sweep=sweep, is_labelled=panel is PSNR)
    place = page.panels[0, 1].get_gridspec()
    for axes in page.panels[:, 1]:
        axes.remove()
    box = page.figure.add_subplot(place[:, 1])
    box.set_axis_off()
    frame = {"boxstyle": "round,pad=0.8", "facecolor": "0.97", "edgecolor": "0.7"}
    place_of_text: dict[str, Any] = {"transform": box.transAxes, "va": "top", "ha": "left", "fontsize": 9}
    text = box.text(0.02, 0.98, "\n".join(statistics_lines(sweep)), bbox=frame, **place_of_text)
    figure = page.finish()
    # The columns of the box need a monospace font, which the page does not set.
    text.set_fontfamily("monospace")
    return figure


def _draw_panel(axes: Axes, panel: MetricPanel, *, sweep: ScaleSweep, is_labelled: bool) -> None:
    whose = ", original counts" if sweep.mode is SweepMode.LEGACY and panel.scale is ratio_scale else ""
    entitle(axes, title=panel.title + whose, y=panel.unit, pad=20 if len(panel.lines) > 1 else 6)
    if not sweep.levels:
        empty(axes, f"no level: {sweep.note}")
        return
    panel.scale(axes, [line.metric(level) for line in panel.lines for level in sweep.levels])
    left, right = _ends(sweep)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    if is_labelled:
        entitle(axes, x=_levels_label(sweep))
    for limit in limits_of(sweep):
        if left <= limit.place <= right:
            axes.axvline(limit.place, color=_LIMIT_COLORS[limit.kind], linestyle="--", linewidth=1.2, zorder=1)
    if sweep.recommended is not None:
        axes.axvline(sweep.recommended.exponent, color=GREEN, linewidth=1.2, alpha=0.7, zorder=1)
    for index, line in enumerate(panel.lines):
        _draw_line(axes, line, sweep=sweep, index=index, is_log=panel.scale is log_scale)
    if panel.scale is ratio_scale and not any(line.metric(level) for line in panel.lines for level in sweep.levels):
        say(axes, "no values are beyond the limits")
        return
    if len(panel.lines) > 1 and axes.get_legend_handles_labels()[0]:
        # The legend is above the panel, since no position within it is free of points for all tensors.
        place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
        axes.legend(fontsize=8, frameon=False, ncols=len(panel.lines), **place)


def _draw_line(axes: Axes, line: MetricLine, *, sweep: ScaleSweep, index: int, is_log: bool) -> None:
    places = [level.exponent for level in sweep.levels]
    metrics = [line.metric(level) for level in sweep.levels]
    drawn = [metric if (is_drawable(metric) if is_log else math.isfinite(metric)) else math.nan for metric in metrics]
    mark = MARKS[index] if len(places) <= MAX_MARKED_LEVELS else ""
    style: dict[str, Any] = {"color": line.color, "marker": mark or ("o" if len(places) == 1 else None)}
    style |= {"markersize": 5 - index, "linewidth": 1.8 - 0.3 * index, "clip_on": False}
    if not all(map(math.isnan, drawn)):
        axes.plot(places, drawn, **style, label=line.label)
    # Lossless levels are drawn at one edge, and values that are too large or too small at their own edge.
    missing = [level for level, metric in zip(sweep.levels, drawn, strict=True) if math.isnan(metric)]
    exact = [level.exponent for level in missing if is_lossless(level)]
    edge, shape = (0.0, "v") if is_log else (1.0, "^")
    at_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "linestyle": "", "clip_on": False}
    hollow: dict[str, Any] = {"marker": shape, "markersize": 7, "markerfacecolor": "white", "zorder": 4}
    if exact:
        axes.plot(exact, [edge] * len(exact), **at_edge, **hollow, color=line.color)
    beyond = [(level.exponent, float(line.metric(level) > 1)) for level in missing if not is_lossless(level)]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), **at_edge, marker="x", markersize=6, color=line.color)
    if len(missing) == len(places) and index == 0:
        say(axes, "outside the range of float64 at every level" if beyond else "no error at any level")
    chosen = sweep.recommended
    assert chosen is not None
    if len(places) == 1:
        return
    star: dict[str, Any] = {"marker": "*", "markersize": 13, "color": GREEN, "markeredgecolor": "white", "zorder": 5}
    height = drawn[sweep.levels.index(chosen)]
    if math.isnan(height):
        axes.plot([chosen.exponent], [dict(beyond).get(chosen.exponent, edge)], **at_edge, **star)
    else:
        axes.plot([chosen.exponent], [height], **star, clip_on=False)


def _ends(sweep: ScaleSweep) -> tuple[float, float]:
    """The limits of the axis of levels."""
    places = [level.exponent for level in sweep.levels]
    margin = max(0.5, MARGIN * (max(places) - min(places)))
    return min(places) - margin, max(places) + margin


_LIMIT_COLORS = {"largest": VERMILION, "normal": PURPLE, "flush": ORANGE, "rule": "0.45"}


def _page(sweep: ScaleSweep, name: str, num_rows: int, num_columns: int, **grid: Any) -> Page:
    """Empty panels under the name of the tensor, with a legend below."""
    what = MODE_WORDS[sweep.mode].partition(", ")[0]
    if sweep.mode is SweepMode.MX:
        what += f" of {sweep.scheme.block_size}"
    counts = f"{number_of(sweep.num_elements, 'element')}, {number_of(len(sweep.levels), 'level')}"
    title = plain(name, max_letters=MAX_NAME_LETTERS)
    page = Page(num_rows, num_columns, title=title, subtitle=f"{sweep.scheme.name}, {what}: {counts}", **grid)
    chosen = sweep.recommended
    if chosen is None:
        return page

    def explain(label: str, **style: Any) -> None:
        page.handles.append(Line2D([], [], label=label, **style))

    recommended = f"recommended: {exponent_text(chosen.exponent)} (scale factor {chosen.scale:.6g})"
    explain(recommended, color=GREEN, marker="*", markersize=11, linewidth=1.2)
    left, right = _ends(sweep)
    for limit in limits_of(sweep):
        # Limits outside of the plot are only listed in the legend.
        where = "" if left <= limit.place <= right else ", outside"
        label = f"{limit.text}: at {exponent_text(limit.place)}{where}"
        explain(label, color=_LIMIT_COLORS[limit.kind], linestyle="--", linewidth=1.2)
    if any(map(is_lossless, sweep.levels)):
        edge: dict[str, Any] = {"marker": "^", "markersize": 7, "markerfacecolor": "white"}
        explain("no error: infinite ratio", linestyle="", color="0.3", **edge)
    if any(not is_lossless(level) and not is_drawable(level.mse) for level in sweep.levels):
        beyond = "outside the range of float64: too large or too small to be drawn"
        explain(beyond, linestyle="", color="0.3", marker="x", markersize=6)
    return page


def _levels_label(sweep: ScaleSweep) -> str:
    if sweep.scheme.has_tensor_scale:
        return "offset to the exponent of the tensor's scale"
    return "offset to the exponent of each scale" if sweep.has_offsets else "exponent e of the scale 2^e"
