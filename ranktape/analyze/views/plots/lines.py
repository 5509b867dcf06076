"""How do figures move along layers, iterations or ranks: one panel for each figure, one line for each group?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.views.plots.axes import (
    mark_limits,
    scale_layers,
    scale_numbers,
    scale_powers,
    scale_shares,
    scale_whole,
    with_gap,
)
from ranktape.analyze.views.plots.data import pooled
from ranktape.analyze.views.plots.style import PANEL_SIZE, TEXT_SIZE, Heading, finish, page, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.groups import Group

MAX_MARKS = 40
"""Places along an axis up to which points do not run together."""


MAX_THICK = 200
"""Places up to which lines are thick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePanel:
    """One figure."""

    figure: str
    """Its name in `data.pooled`."""
    title: str
    """Above the panel."""
    kind: str = "magnitude"
    """`magnitude`, `share` or `number`: how its axis is divided."""
    has_limits: bool = False
    """Whether formats limit it."""


STD = LinePanel(figure="std", title="standard deviation of all values")
ABSMAX = LinePanel(figure="extreme", title="absmax", has_limits=True)
OVERFLOW = LinePanel(figure="overflow", title="overflow: share of elements", kind="share")
UNDERFLOW = LinePanel(figure="underflow", title="underflow: share of elements", kind="share")
KURTOSIS = LinePanel(figure="kurtosis", title="largest kurtosis of a tensor (normal: 3)")
RANGE = LinePanel(figure="log2_range", title="largest range of a tensor, in octaves", kind="number")

LOSSES = (STD, ABSMAX, OVERFLOW, UNDERFLOW)
SHAPES = (STD, ABSMAX, KURTOSIS, RANGE)


def draw_lines(
    data: PlotData,
    groups: Sequence[Group],
    *,
    field: str,
    panels: Sequence[LinePanel] = LOSSES,
    heading: Heading,
) -> Figure:
    """Two rows of two panels over a field of whole numbers; a point is of all records of the group there together."""
    figure, grid = page(2, 2, panel_width=5.6, panel_height=2.9)
    places = data.values_of(field)
    label = {"layer_idx": "layer"}.get(field, field)
    for axes, panel in zip(grid.flat, panels, strict=True):
        axes.set_title(panel.title, fontsize=PANEL_SIZE)
        lines = [line_values(data, group, panel.figure, field=field) for group in groups]
        shown = np.concatenate(lines) if lines else np.zeros(0)
        for group, values in zip(groups, lines, strict=True):
            _draw_line(axes, values, places=places, group=group, panel=panel, is_layers=field == "layer_idx")
        _scale_values(axes, shown, panel)
        is_lowest = axes in grid[-1]
        if field == "layer_idx":
            scale_layers(axes, places, is_labelled=is_lowest)
        else:
            scale_whole(axes, "x", places, max_ticks=9)
            axes.set_xlabel(label if is_lowest else "", fontsize=TEXT_SIZE)
        if panel.has_limits and np.isfinite(shown).any():
            mark_limits(axes, "y", min_distance=0.12)
    return finish(figure, heading, handles=[group.handle(has_mark=True) for group in groups])


def line_values(data: PlotData, group: Group, figure: str, *, field: str) -> NDArray[np.float64]:
    """The figure of all records of the group together at each value of the field; NaN where there is none."""
    numbers = np.where(group.mask, data.codes(field), -1)
    return pooled(data, figure, numbers, num_groups=len(data.values_of(field)))


def _draw_line(
    axes: Axes, values: NDArray[np.float64], *, places: Sequence[int], group: Group, panel: LinePanel, is_layers: bool
) -> None:
    drawn = _axis_values(values, panel)
    known = np.isfinite(drawn)
    if not known.any():
        return
    kept = [place for place, is_known in zip(places, known.tolist(), strict=True) if is_known]
    shown = drawn[known].tolist()
    xs, ys = with_gap(kept, shown, all_layers=places) if is_layers else ([float(place) for place in kept], shown)
    mark: dict[str, Any] = {"marker": group.mark, "markersize": max(2.5, 6.5 - 0.7 * group.index)}
    few = mark if len(kept) <= MAX_MARKS else {}
    fineness = max(1.0, 2.2 - 0.25 * group.index) if len(kept) <= MAX_THICK else 0.8
    axes.plot(xs, ys, color=group.color, linestyle=group.dashes, linewidth=fineness, **few)


def _axis_values(values: NDArray[np.float64], panel: LinePanel) -> NDArray[np.float64]:
    if panel.kind != "magnitude":
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log2(values))


def _scale_values(axes: Axes, values: NDArray[np.float64], panel: LinePanel) -> None:
    known = values[np.isfinite(values)]
    if panel.kind == "share":
        scale_shares(axes, "y", known)
        if known.size and not known.any():
            say(axes, f"no {panel.figure}")
    elif panel.kind == "number":
        scale_numbers(axes, "y", max_ticks=5)
        axes.set_ylim(0, max(1.0, 1.1 * float(known.max(initial=0.0))))
    else:
        scale_powers(axes, "y", _axis_values(values, panel), pad=0.8)
    if not known.size:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        say(axes, "no tensor has one")
