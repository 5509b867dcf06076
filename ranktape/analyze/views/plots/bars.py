"""Draws boxes, bars and points of groups of tensors: the spread of metrics, losses, and pairs of quant types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ranktape.analyze.engine.sweep_measure import sweep_record
from ranktape.analyze.engine.values import read_values
from ranktape.analyze.legacy.plots import draw_panels
from ranktape.analyze.questions.sweep import parse_jobs
from ranktape.analyze.views import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from ranktape.analyze.views.plots.axes import (
    lowest_decade,
    mark_limits,
    name_rows,
    scale_numbers,
    scale_powers,
    scale_shares,
    share_text,
)
from ranktape.analyze.views.plots.data import DEFAULT_FORMAT, PlotData
from ranktape.analyze.views.plots.groups import Group, groups_of, page_of
from ranktape.analyze.views.plots.style import (
    HATCHES,
    INK,
    MAX_GROUPS,
    SMALL_SIZE,
    TEXT_SIZE,
    empty,
    key,
    name,
    plain,
    say,
)
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.table import Plot

NOTE = (
    "Boxes: quartiles and median; whiskers: 5th and 95th percentile; points: tensors beyond them. "
    "Zeros are left out, because the axis is logarithmic."
)

MAX_POINTS = 300
"""The largest number of outliers of a box that are drawn. Of more, an even selection by size with both ends is."""

MAX_BOXES = 16
"""The largest number of groups with a box. Each is next to its name, so that colours can repeat."""


class BoxPanel(NamedTuple):
    """A panel with a metric of `PlotData.metric`.

    Magnitudes are drawn as base-2 logarithms. `has_limits` marks the limits of formats, and `normal` is the position of
    the value for a normal distribution.
    """

    metric: str
    title: str
    is_magnitude: bool = True
    has_limits: bool = False
    normal: float | None = None


MEAN = BoxPanel("mean", "|mean|")
STD = BoxPanel("std", "standard deviation")
KURTOSIS = BoxPanel("kurtosis", "kurtosis (normal: 3)", normal=math.log2(3.0))

PANELS: Mapping[str, tuple[BoxPanel, ...]] = {
    "general": (MEAN, STD, BoxPanel("absmax", "absmax", has_limits=True), KURTOSIS),
    "shapes": (
        BoxPanel("variance", "variance"),
        BoxPanel("skewness", "skewness (normal: 0)", is_magnitude=False, normal=0.0),
        KURTOSIS,
    ),
    "ends": (
        *(MEAN, STD),
        *(BoxPanel(end, f"|{end}|", has_limits=True) for end in ("minimum", "maximum")),
    ),
}
"""The panels that rows of the table choose by name."""


def boxes(data: PlotData, row: Plot, *, panels: str = "general") -> Figure:
    """A panel for each metric with a box for each group; group names are to the left."""
    groups, left_out = groups_of(data, row, max_groups=MAX_BOXES)
    chosen = PANELS[panels]
    num_columns = 2 if len(chosen) == 4 else len(chosen)  # noqa: PLR2004 - two rows of two
    size: dict[str, Any] = {"width": max(4.2, 10.4 / num_columns), "height": max(2.1, 1.25 + 0.42 * len(groups))}
    page = page_of(data, row, math.ceil(len(chosen) / num_columns), num_columns, **size, notes=[left_out, NOTE])
    for place, (axes, panel) in enumerate(zip(page.panels.flat, chosen, strict=True)):
        rows = [box_values(data, group, panel) for group in groups]
        name(axes, title=panel.title, pad=20 if panel.has_limits else 6)
        if not any(values.size for values in rows):
            empty(axes, "not available for any tensor")
            continue
        for number, (group, values) in enumerate(zip(groups, rows, strict=True)):
            _draw_box(axes, values, row=number, group=group)
        name_rows(axes, [group.label if place % num_columns == 0 else "" for group in groups])
        _scale_boxes(axes, np.concatenate(rows), panel)
    return page.finish()


def box_values(data: PlotData, group: Group, panel: BoxPanel) -> NDArray[np.float64]:
    """The finite metrics of the group's tensors, as drawn: base-2 logarithms of magnitudes, without zeros."""
    values = data.metric(panel.metric)[group.mask]
    if panel.is_magnitude:
        with np.errstate(divide="ignore"):
            values = np.log2(np.abs(values))
    return values[np.isfinite(values)]


def _draw_box(axes: Axes, values: NDArray[np.float64], *, row: int, group: Group) -> None:
    """Draw a box of the quartiles, with whiskers to the 5th and the 95th percentile and points beyond them."""
    if not values.size:
        axes.text(0.02, row, "none", transform=axes.get_yaxis_transform(), va="center", fontsize=TEXT_SIZE, color="0.4")
        return
    low, first, middle, third, high = np.percentile(values, [5, 25, 50, 75, 95]).tolist()
    beyond = np.sort(values[(values < low) | (values > high)])
    if beyond.size > MAX_POINTS:
        beyond = beyond[np.unique(np.linspace(0, beyond.size - 1, MAX_POINTS).astype(int))]
    hatch = HATCHES[group.index % MAX_GROUPS]
    points = {"marker": group.mark, "markersize": 2.8, "markerfacecolor": group.color, "alpha": 0.6}
    axes.bxp(
        [{"whislo": low, "q1": first, "med": middle, "q3": third, "whishi": high, "fliers": beyond}],
        positions=[row],
        widths=0.55,
        orientation="horizontal",
        manage_ticks=False,
        patch_artist=True,
        boxprops={"facecolor": group.color, "alpha": 0.55, "hatch": hatch, "edgecolor": INK},
        flierprops=points | {"markeredgecolor": "none"},
        medianprops={"color": INK, "linewidth": 2},
        whiskerprops={"color": INK},
        capprops={"color": INK},
    )


def _scale_boxes(axes: Axes, values: NDArray[np.float64], panel: BoxPanel) -> None:
    if panel.is_magnitude:
        scale_powers(axes, "x", values)
    else:
        magnitudes = np.abs(values[values != 0])
        if magnitudes.size and np.log2(magnitudes.max() / magnitudes.min()) > 12 and magnitudes.max() > 10:  # noqa: PLR2004
            axes.set_xscale("symlog", linthresh=1.0)
        low, high = float(values.min()), float(values.max())
        margin = 0.06 * (high - low) or max(0.5, 0.1 * abs(high))
        axes.set_xlim(low - margin, high + margin)
        if axes.get_xscale() == "linear":
            scale_numbers(axes, "x", max_ticks=5)
    ends = axes.get_xlim()
    if panel.normal is not None and ends[0] < panel.normal < ends[1]:
        axes.axvline(panel.normal, color=INK, linewidth=0.9, linestyle=":", zorder=0.5)
    if panel.has_limits:
        mark_limits(axes, "x", min_distance=0.3)


SIDES = (
    ("upper", "beyond the upper limit", VERMILION, ""),
    ("lower", "beyond the lower limit", BLUE, "///"),
    ("underflow", "below the smallest normal", ORANGE, "..."),
    ("flushed", "rounded to zero", PURPLE, "xxx"),
    ("nan", "NaN", GREEN, "\\\\\\"),
)
"""The kinds of loss, with text, colour and hatch. `flushed` is drawn only with a target, and NaN only if it occurs."""

MAX_DRAWN_POINTS = 20_000
"""The largest number of points in a scatter plot. Of more, the largest are drawn."""


def loss_bars(data: PlotData, row: Plot) -> Figure:
    """For each group, a bar for each kind of loss: the share of all elements of the group."""
    groups, note = groups_of(data, row)
    absent = {"flushed"} if data.target is None else set()
    absent |= set() if np.nansum(data.metric("nan")) else {"nan"}
    kinds = [kind for kind in SIDES if kind[0] not in absent]
    height = max(2.2, 1.0 + len(groups) * (0.2 + 0.17 * len(kinds)))
    page = page_of(data, row, width=9.0, height=height, notes=[note], with_limits=True)
    axes = page.panels[0, 0]
    numbers = np.select([group.mask for group in groups], range(len(groups)), default=-1)
    shares = np.stack([data.pooled(kind, numbers, num_groups=len(groups)) for kind, *_ in kinds])
    width = 0.8 / len(kinds)
    for index, (_, words, color, hatch) in enumerate(kinds):
        places = np.arange(len(groups)) - 0.4 + width * (index + 0.5)
        known = np.nan_to_num(shares[index])
        axes.barh(places, known, height=width * 0.9, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
        for place, share, drawn in zip(places.tolist(), shares[index].tolist(), known.tolist(), strict=True):
            text = "unknown" if math.isnan(share) else share_text(share)
            _note(axes, text, (drawn, place), (4, 0), va="center", ha="left", fontsize=SMALL_SIZE - 1)
        page.handles.append(key(Patch(facecolor=color, hatch=hatch, edgecolor="white"), words))
    name_rows(axes, [group.label for group in groups])
    scale_shares(axes, "x", shares)
    # Leaves room for the numbers next to the longest bars.
    axes.set_xlim(0, 5)
    name(axes, x="share of all elements of the group")
    return page.finish()


def _note(axes: Axes, text: str, place: tuple[float, float], offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, place, xytext=offset, textcoords="offset points", color=INK, **style)


def upper_against_lower(data: PlotData, row: Plot) -> Figure:
    """A point for each tensor with overflow; tensors without are only counted."""
    groups, note = groups_of(data, row)
    upper, lower = data.share("upper"), data.share("lower")
    num_clean = int(((upper == 0) & (lower == 0)).sum())
    clean = f"{num_clean:,} of {len(data):,} tensors do not overflow and are not drawn."
    page = page_of(data, row, width=6.6, height=5.6, notes=[clean, note], with_limits=True)
    axes = page.panels[0, 0]
    ends = np.concatenate([upper, lower])
    for which in ("x", "y"):
        scale_shares(axes, which, ends[np.isfinite(ends)])
    axes.plot([0, 1.4], [0, 1.4], color="0.75", linewidth=1, linestyle=":")
    largest = np.argsort(-np.nan_to_num(np.maximum(upper, lower)), kind="stable")[:MAX_DRAWN_POINTS]
    is_drawn = np.zeros(len(data), dtype=bool)
    is_drawn[largest] = True
    for group in groups:
        chosen = group.mask & is_drawn & ((upper > 0) | (lower > 0))
        # An empty line without clipping would be laid out as one at the corner of the plot.
        if chosen.any():
            style: dict[str, Any] = {"color": group.color, "markersize": 5, "alpha": 0.7, "clip_on": False}
            axes.plot(upper[chosen], lower[chosen], group.mark, linestyle="", **style)
    if num_clean == len(data):
        say(axes, "no tensor overflows")
    name(axes, x="share beyond the upper limit", y="share beyond the lower limit")
    axes.tick_params(axis="x", labelsize=SMALL_SIZE - 1)
    page.handles += [group.handle(has_mark=True) for group in groups]
    return page.finish()


def ratio_histogram(data: PlotData, row: Plot) -> Figure:
    """Histograms of the overflow and the underflow ratios of tensors, with a separate bar for a ratio of zero."""
    page = page_of(data, row, 1, 2, width=5.2, height=3.6, with_limits=True)
    words = (("overflow", data.share("overflow"), VERMILION), ("underflow", data.share("underflow"), ORANGE))
    for axes, (title, shares, color) in zip(page.panels[0], words, strict=True):
        name(axes, title=title)
        known = shares[np.isfinite(shares)]
        if not known.size:
            empty(axes, "unknown for all tensors")
            continue
        edges, counts, num_zero = ratio_counts(known)
        scale_shares(axes, "x", known)
        linear = float(edges[0])
        axes.bar(linear / 2, num_zero, width=linear * 0.8, color="0.6", hatch="///", edgecolor="white")
        if counts.any():
            style: dict[str, Any] = {"color": color, "edgecolor": "white", "linewidth": 0.5}
            axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", **style)
        _note(axes, f"none: {num_zero:,}", (linear / 2, num_zero), (0, 3), fontsize=SMALL_SIZE, ha="center")
        axes.set_ylim(0, 1.15 * max(num_zero, int(counts.max(initial=0)), 1))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        name(axes, x=f"{title} ratio of a tensor", y="tensors")
    page.handles.append(key(Patch(facecolor="0.6", hatch="///", edgecolor="white"), "ratio of exactly 0"))
    return page.finish()


def ratio_counts(shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """Logarithmically spaced edges up to 1, the number of shares between each two, and the number of zeros.

    The first edge is the start of the logarithmic part of `scale_shares`.
    """
    positive, lowest = shares[shares > 0], lowest_decade(shares)
    edges = 10.0 ** np.linspace(lowest, 0, 4 * -lowest + 1)
    counts, _ = np.histogram(np.clip(positive, edges[0], 1.0), bins=edges)
    return edges, counts, int((shares == 0).sum())


MAX_PAIRS, VALUES_OF_PAIR = 48, 400
"""The largest numbers of pairs whose values are read, and of values drawn of each. Of more, every n-th is used."""


class TensorPair(NamedTuple):
    """A tensor in two quant types: some of the values that are finite in both, and the correlation of all of them."""

    one: NDArray[np.float64]
    other: NDArray[np.float64]
    correlation: float


def read_pairs(data: PlotData, types: tuple[str, str]) -> list[TensorPair]:
    """The values of evenly selected pairs, whose tensors are read once more."""
    places = data.matched(types)
    found = []
    for pair in places[:: math.ceil(len(places) / MAX_PAIRS) or 1]:
        arrays = [read_values(data.records[place], view=data.view) for place in pair]
        # Of complex values, only the real part is used.
        values = np.stack([array.real.astype(np.float64).reshape(-1) for array in arrays])
        first, second = values[:, np.isfinite(values).all(axis=0)]
        step = math.ceil(first.size / VALUES_OF_PAIR) or 1
        found.append(TensorPair(first[::step], second[::step], correlation(first, second)))
    return found


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Pearson's correlation; NaN if all values of either are equal."""
    if one.size < 2 or one.min() == one.max() or other.min() == other.max():  # noqa: PLR2004 - of fewer there is none
        return math.nan
    # Scales values first, because their squares could overflow.
    scaled = [(array - array.mean()) / np.abs(array).max() for array in (one / 2, other / 2)]
    norms = math.sqrt(float(scaled[0] @ scaled[0]) * float(scaled[1] @ scaled[1]))
    return float(scaled[0] @ scaled[1]) / norms if norms else math.nan


def pairs(data: PlotData, row: Plot) -> Figure:
    """Left, the values of one type against those of the other, relative to the largest; right, the correlations."""
    types = data.two_quant_types()
    assert types is not None
    drawn, total = read_pairs(data, types), len(data.matched(types))
    note = (
        f"{len(drawn)} of {total:,} tensors that were recorded in both, evenly selected." if total > len(drawn) else ""
    )
    page = page_of(data, row, 1, 2, width=5.4, height=4.6, notes=[note])
    scatter, bars = page.panels[0]
    name(scatter, title="values relative to the tensor's largest")
    points = [
        (pair.one / largest, pair.other / largest)
        for pair in drawn
        if pair.one.size
        for largest in [max(float(np.abs(pair.one).max()), float(np.abs(pair.other).max())) or 1.0]
    ]
    if points:
        one, other = (np.concatenate(values) for values in zip(*points, strict=True))
        scatter.axline((0, 0), slope=1, color=GREY, linewidth=1.2, linestyle=":")
        scatter.plot(one, other, "o", color=BLUE, markersize=2.2, alpha=0.35, markeredgecolor="none")
        for which in ("x", "y"):
            scale_numbers(scatter, which)
        name(scatter, x=plain(types[0]), y=plain(types[1]))
    else:
        empty(scatter, "no value is finite in both")
    known = np.array(sorted(pair.correlation for pair in drawn if not math.isnan(pair.correlation)))
    name(bars, title="correlation of each tensor")
    if known.size:
        # The axis goes from the lowest correlation to 1.
        edges = np.linspace(min(float(known.min()), 1 - 1e-6), max(1.0, float(known.max())), 13)
        bars.hist(known, bins=edges, color=VERMILION, edgecolor="white", hatch="//")
        scale_numbers(bars, "x", max_ticks=4)
        scale_numbers(bars, "y", max_ticks=5)
        words = f"median {np.median(known):.6f}, lowest {known[0]:.6f}"
        name(bars, title=f"correlation of each tensor\n{words}", y="tensors")
        name(bars, x="correlation (1: equal up to a factor and an offset)")
    else:
        empty(bars, "no tensor has a defined correlation")
    return page.finish()


def sweep(data: PlotData, _: Plot) -> Figure:
    """Six panels of the sweep of one record with one scale for the tensor; the record is read once more.

    It is the first of the records with the widest range of finite magnitudes.

    Raises:
        UsageError: only statistics of the records are stored.
    """
    is_kept = data.records.column("keep") != Keep.STATISTICS
    # Records without values come after those without a range.
    ranges = np.where(is_kept, np.nan_to_num(data.metric("log2_range"), nan=-1.0), -2.0)
    place = int(ranges.argmax())
    if not is_kept[place]:
        raise UsageError("all tensors store only statistics: no scale can be tried")
    record = data.records[place]
    (found,) = sweep_record(
        record, parse_jobs(DEFAULT_FORMAT if data.target is None else data.target.name), view=data.view
    )
    title = f"{record.module or record.layer_type} {record.tensor_name}, {record.operation} {record.phase}"
    return draw_panels(found, name=f"{title}, iteration {record.iteration}, rank {record.rank}")
