"""Draws a sweep: each metric from level to level, and the limits of the format.

Two plots of one tensor: six panels with every figure, and a summary of three beside a box of statistics. No global
state of matplotlib is touched, so that plots can be drawn from any thread.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ranktape.analyze.advice.verdict import is_lossless, verdict_of
from ranktape.analyze.legacy.outputs.axes import drawable, is_drawable, linear_scale, log_scale, ratio_scale, wrapped
from ranktape.analyze.legacy.outputs.words import figure_text, limits_of, number_of, statistics_lines
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.analyze.views.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from ranktape.analyze.views.plots.style import DOTS_PER_INCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ranktape.analyze.numerics.sweeps.metrics import Level
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

MARKS = ("o", "s", "^")
"""Of the first, second and third line of a panel."""

MAX_MARKED_LEVELS = 60
"""Levels up to which marks do not run together."""

TITLE_WIDTH, MAX_TITLE_LINES = 100, 2
"""Characters of a tensor's name that fit into a line of the title, and lines of them."""

MARGIN = 0.04
"""Of the levels' width, left and right of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLine:
    """One figure in a panel."""

    figure: Callable[[Level], float]
    """What is drawn of each level."""
    label: str
    """What the legend calls it; empty where the panel has one line."""
    color: str
    """From Okabe and Ito."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPanel:
    """One panel: figures in the same unit."""

    title: str
    """Above it."""
    unit: str
    """Beside its axis."""
    lines: tuple[MetricLine, ...]
    """What is drawn."""
    scale: Callable[[Axes, Sequence[float]], None]
    """How the axis is divided, given all figures that are drawn."""


MSE = MetricPanel(
    title="Mean squared error (MSE)",
    unit="squared unit of the tensor",
    lines=(MetricLine(figure=lambda level: level.mse, label="", color=BLUE),),
    scale=log_scale,
)
COSINE = MetricPanel(
    title="Cosine similarity",
    unit="1: same direction",
    lines=(MetricLine(figure=lambda level: level.cosine, label="", color=BLUE),),
    scale=linear_scale,
)
PSNR = MetricPanel(
    title="Peak signal-to-noise ratio (PSNR)",
    unit="dB",
    lines=(MetricLine(figure=lambda level: level.psnr, label="", color=BLUE),),
    scale=linear_scale,
)
PANELS = (
    MSE,
    COSINE,
    MetricPanel(
        title="Signal-to-noise ratios",
        unit="dB",
        lines=(
            MetricLine(figure=lambda level: level.psnr, label="PSNR: peak", color=BLUE),
            MetricLine(figure=lambda level: level.sqnr, label="SQNR: mean square", color=VERMILION),
        ),
        scale=linear_scale,
    ),
    MetricPanel(
        title="Absolute errors",
        unit="unit of the tensor",
        lines=(
            MetricLine(figure=lambda level: level.max_abs_error, label="largest", color=VERMILION),
            MetricLine(figure=lambda level: level.rmse, label="root mean square (RMSE)", color=PURPLE),
            MetricLine(figure=lambda level: level.mae, label="mean (MAE)", color=BLUE),
        ),
        scale=log_scale,
    ),
    MetricPanel(
        title="Relative error",
        unit="MAE in % of mean |x|",
        lines=(MetricLine(figure=lambda level: 100 * level.relative_error, label="", color=BLUE),),
        scale=log_scale,
    ),
    MetricPanel(
        title="Beyond the format's limits",
        unit="share of values",
        lines=(
            MetricLine(figure=lambda level: verdict_of(level).overflow_ratio, label="overflow", color=VERMILION),
            MetricLine(figure=lambda level: verdict_of(level).underflow_ratio, label="underflow", color=BLUE),
            MetricLine(figure=lambda level: verdict_of(level).flushed_ratio, label="flushed to zero", color=ORANGE),
        ),
        scale=ratio_scale,
    ),
)
"""From left to right and from top to bottom."""


def draw_panels(sweep: ScaleSweep, *, name: str) -> Figure:
    """Six panels: every figure of every level of a tensor of that name.

    A sweep without levels says in each panel that there is nothing to draw.
    """
    figure = Figure(figsize=(16.5, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 3)
    for panel, axes in zip(PANELS, grid.flat, strict=True):
        _draw_panel(axes, panel, sweep=sweep, is_labelled=axes in grid[-1])
    _finish(figure, sweep=sweep, name=name, num_columns=3)
    return figure


def draw_summary(sweep: ScaleSweep, *, name: str) -> Figure:
    """MSE, cosine and PSNR of every level of a tensor of that name, beside a box of statistics."""
    figure = Figure(figsize=(13, 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, 2, width_ratios=(2.6, 1), squeeze=False)
    for panel, axes in zip((MSE, COSINE, PSNR), grid[:, 0], strict=True):
        _draw_panel(axes, panel, sweep=sweep, is_labelled=panel is PSNR)
    place = grid[0, 1].get_gridspec()
    for axes in grid[:, 1]:
        axes.remove()
    box = figure.add_subplot(place[:, 1])
    box.set_axis_off()
    text = "\n".join(statistics_lines(sweep))
    frame = {"boxstyle": "round,pad=0.8", "facecolor": "0.97", "edgecolor": "0.7"}
    box.text(0.02, 0.98, text, transform=box.transAxes, va="top", ha="left", family="monospace", fontsize=9, bbox=frame)
    _finish(figure, sweep=sweep, name=name, num_columns=2)
    return figure


def png_of(figure: Figure) -> bytes:
    """The plot as the bytes of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DOTS_PER_INCH)
    return stream.getvalue()


def _draw_panel(axes: Axes, panel: MetricPanel, *, sweep: ScaleSweep, is_labelled: bool) -> None:
    whose = ", as the original counts" if sweep.mode is SweepMode.LEGACY and panel.scale is ratio_scale else ""
    axes.set_title(panel.title + whose, fontsize=11, pad=20 if len(panel.lines) > 1 else 6)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.grid(visible=True, color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    if not sweep.levels:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, f"no level: {sweep.note}", transform=axes.transAxes, ha="center", va="center")
        return
    panel.scale(axes, [line.figure(level) for line in panel.lines for level in sweep.levels])
    _scale_levels(axes, sweep)
    if is_labelled:
        axes.set_xlabel(_levels_label(sweep), fontsize=9)
    _mark_limits(axes, sweep)
    for index, line in enumerate(panel.lines):
        _draw_line(axes, line, sweep=sweep, index=index, is_log=panel.scale is log_scale)
    if panel.scale is ratio_scale and not any(line.figure(level) for line in panel.lines for level in sweep.levels):
        axes.text(0.5, 0.5, "nothing is beyond them", transform=axes.transAxes, ha="center", va="center")
        return
    if len(panel.lines) > 1 and axes.get_legend_handles_labels()[0]:
        # Above the panel: within it no place is free of points for all tensors.
        place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
        axes.legend(fontsize=8, frameon=False, ncols=len(panel.lines), **place)


def _draw_line(axes: Axes, line: MetricLine, *, sweep: ScaleSweep, index: int, is_log: bool) -> None:
    places = [level.exponent for level in sweep.levels]
    figures = [line.figure(level) for level in sweep.levels]
    drawn = [figure if (is_drawable(figure) if is_log else math.isfinite(figure)) else math.nan for figure in figures]
    mark = MARKS[index] if len(places) <= MAX_MARKED_LEVELS else ""
    style: dict[str, Any] = {"color": line.color, "marker": mark or ("o" if len(places) == 1 else None)}
    style |= {"markersize": 5 - index, "linewidth": 1.8 - 0.3 * index, "clip_on": False}
    if not all(map(math.isnan, drawn)):
        axes.plot(places, drawn, **style, label=line.label)
    # What is better than an axis can say lies at one edge, what is too large or too small at its own.
    missing = [level for level, figure in zip(sweep.levels, drawn, strict=True) if math.isnan(figure)]
    exact = [level.exponent for level in missing if is_lossless(level)]
    edge, shape = (0.0, "v") if is_log else (1.0, "^")
    at_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "linestyle": "", "clip_on": False}
    hollow: dict[str, Any] = {
        "marker": shape,
        "markersize": 7,
        "color": line.color,
        "markerfacecolor": "white",
        "zorder": 4,
    }
    if exact:
        axes.plot(exact, [edge] * len(exact), **at_edge, **hollow)
    beyond = [(level.exponent, float(line.figure(level) > 1)) for level in missing if not is_lossless(level)]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), **at_edge, marker="x", markersize=6, color=line.color)
    if len(missing) == len(places) and index == 0:
        what = "beyond float64, or nearly so, at every level" if beyond else "nothing is lost at any level"
        frame = {"facecolor": "white", "edgecolor": "none"}
        axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", bbox=frame)
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


def _scale_levels(axes: Axes, sweep: ScaleSweep) -> None:
    axes.set_xlim(*_ends(sweep))
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))


def _ends(sweep: ScaleSweep) -> tuple[float, float]:
    """From where to where levels are drawn."""
    places = [level.exponent for level in sweep.levels]
    margin = max(0.5, MARGIN * (max(places) - min(places)))
    return min(places) - margin, max(places) + margin


def _mark_limits(axes: Axes, sweep: ScaleSweep) -> None:
    left, right = _ends(sweep)
    for limit in limits_of(sweep):
        if left <= limit.place <= right:
            axes.axvline(limit.place, color=_LIMIT_COLORS[limit.kind], linestyle="--", linewidth=1.2, zorder=1)
    if sweep.recommended is not None:
        axes.axvline(sweep.recommended.exponent, color=GREEN, linewidth=1.2, alpha=0.7, zorder=1)


_LIMIT_COLORS = {"largest": VERMILION, "normal": PURPLE, "flush": ORANGE, "rule": "0.45"}


def _finish(figure: Figure, *, sweep: ScaleSweep, name: str, num_columns: int) -> None:
    """The title, and below everything what the marks mean."""
    shown = wrapped(name, width=TITLE_WIDTH, num_lines=MAX_TITLE_LINES)
    figure.suptitle("\n".join([*map(drawable, shown.splitlines()), _title(sweep)]), fontsize=12)
    chosen = sweep.recommended
    if chosen is None:
        return
    handles = [
        Line2D(
            [],
            [],
            color=GREEN,
            marker="*",
            markersize=11,
            linewidth=1.2,
            label=f"recommended: {figure_text(chosen.exponent)} (scale factor {chosen.scale:.6g})",
        )
    ]
    left, right = _ends(sweep)
    for limit in limits_of(sweep):
        # What lies outside of the plot is said, not drawn.
        where = "" if left <= limit.place <= right else ", outside"
        handles.append(
            Line2D(
                [],
                [],
                color=_LIMIT_COLORS[limit.kind],
                linestyle="--",
                linewidth=1.2,
                label=f"{limit.text}: at {figure_text(limit.place)}{where}",
            )
        )
    if any(map(is_lossless, sweep.levels)):
        edge: dict[str, Any] = {
            "linestyle": "",
            "marker": "^",
            "markersize": 7,
            "markerfacecolor": "white",
            "color": "0.3",
        }
        handles.append(Line2D([], [], **edge, label="nothing is lost: infinite ratio, error 0"))
    if any(not is_lossless(level) and not is_drawable(level.mse) for level in sweep.levels):
        cross: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 6, "color": "0.3"}
        handles.append(
            Line2D([], [], **cross, label="beyond float64, or nearly so: too large or too small to be drawn")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=9)


def _levels_label(sweep: ScaleSweep) -> str:
    if sweep.scheme.has_tensor_scale:
        return "offset to the exponent of the tensor's scale"
    return "offset to the exponent of each scale" if sweep.has_offsets else "exponent e of the scale $2^e$"


def _title(sweep: ScaleSweep) -> str:
    size = sweep.scheme.block_size
    counts = f"{number_of(sweep.num_elements, 'element')}, {number_of(len(sweep.levels), 'level')}"
    what = {
        "mx": f"scales of blocks of {size}",
        "tensor": "one scale for the tensor",
        "channel": "one scale for each channel",
        "legacy": "one scale for the tensor, in bfloat16 arithmetic",
    }[sweep.mode.value]
    return f"{sweep.scheme.name}, {what}: {counts}"
