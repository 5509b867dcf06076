"""Draws how metrics of tensors spread within groups: box plots, one panel for each metric.

A box reaches from the first to the third quartile with a line at the median, its whiskers from the 5th to the 95th
percentile; points are the tensors beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.views.plots.axes import mark_limits, name_rows, scale_numbers, scale_powers
from ranktape.analyze.views.plots.groups import Group, groups_of, page_of
from ranktape.analyze.views.plots.style import HATCHES, INK, MAX_GROUPS, TEXT_SIZE, empty, name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

NOTE = (
    "Boxes: quartiles and median; whiskers: 5th and 95th percentile; points: tensors beyond them. "
    "Zeros have no place on an axis of powers of two and are left out."
)

MAX_POINTS = 300
"""Points of one box; of more, every n-th from the smallest to the largest, and both ends."""


class BoxPanel(NamedTuple):
    """One metric of `PlotData.metric`.

    Whether it is never negative and drawn by binade, whether formats limit it, and what it is of a normal distribution.
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
"""What rows of the table choose from."""


def boxes(data: PlotData, row: Plot, *, panels: str = "general") -> Figure:
    """One panel for each metric, one box for each group; both share the names at the left."""
    # Each box stands beside its name, and needs no colour of its own.
    groups, left_out = groups_of(data, row, max_groups=16)
    chosen = PANELS[panels]
    num_columns = 2 if len(chosen) == 4 else len(chosen)  # noqa: PLR2004 - two rows of two
    page = page_of(
        data,
        row,
        math.ceil(len(chosen) / num_columns),
        num_columns,
        width=max(4.2, 10.4 / num_columns),
        height=max(2.1, 1.25 + 0.42 * len(groups)),
        notes=[left_out, NOTE],
    )
    for place, (axes, panel) in enumerate(zip(page.panels.flat, chosen, strict=True)):
        rows = [box_values(data, group, panel) for group in groups]
        name(axes, title=panel.title, pad=20 if panel.has_limits else 6)
        if not any(values.size for values in rows):
            empty(axes, "no tensor has one")
            continue
        for number, (group, values) in enumerate(zip(groups, rows, strict=True)):
            _draw_box(axes, values, row=number, group=group)
        name_rows(axes, [group.label if place % num_columns == 0 else "" for group in groups])
        _scale(axes, np.concatenate(rows), panel)
    return page.finish()


def box_values(data: PlotData, group: Group, panel: BoxPanel) -> NDArray[np.float64]:
    """The metrics of the group's tensors as they are drawn: of magnitudes log2, without zeros; no NaN, no infinity."""
    values = data.metric(panel.metric)[group.mask]
    if panel.is_magnitude:
        with np.errstate(divide="ignore"):
            values = np.log2(np.abs(values))
    return values[np.isfinite(values)]


def _draw_box(axes: Axes, values: NDArray[np.float64], *, row: int, group: Group) -> None:
    if not values.size:
        axes.text(0.02, row, "none", transform=axes.get_yaxis_transform(), va="center", fontsize=TEXT_SIZE, color="0.4")
        return
    low, first, middle, third, high = np.percentile(values, [5, 25, 50, 75, 95]).tolist()
    beyond = np.sort(values[(values < low) | (values > high)])
    if beyond.size > MAX_POINTS:
        beyond = beyond[np.unique(np.linspace(0, beyond.size - 1, MAX_POINTS).astype(int))]
    numbers = {"whislo": low, "q1": first, "med": middle, "q3": third, "whishi": high, "fliers": beyond}
    flat = {"facecolor": group.color, "alpha": 0.55, "hatch": HATCHES[group.index % MAX_GROUPS], "edgecolor": INK}
    points = {"marker": group.mark, "markersize": 2.8, "markerfacecolor": group.color}
    lines: dict[str, Any] = {
        "medianprops": {"color": INK, "linewidth": 2},
        "whiskerprops": {"color": INK},
        "capprops": {"color": INK},
    }
    axes.bxp(
        [numbers],
        positions=[row],
        widths=0.55,
        orientation="horizontal",
        manage_ticks=False,
        patch_artist=True,
        boxprops=flat,
        flierprops=points | {"markeredgecolor": "none", "alpha": 0.6},
        **lines,
    )


def _scale(axes: Axes, values: NDArray[np.float64], panel: BoxPanel) -> None:
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
