"""Draws metrics along layers, iterations or samples: a panel for each metric, a line for each group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D

from ranktape.analyze.views.plots.axes import (
    mark_limits,
    scale_factors,
    scale_layers,
    scale_numbers,
    scale_powers,
    scale_shares,
    scale_whole,
    set_ticks,
    share_text,
    thinned,
    with_gap,
)
from ranktape.analyze.views.plots.data import largest_of
from ranktape.analyze.views.plots.groups import Group, group_by, groups_of, page_of
from ranktape.analyze.views.plots.style import COLORS, INK, MARKS, key, name, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.table import Plot

MAX_MARKS, MAX_THICK = 40, 200
"""The largest numbers of points along an axis with markers, and with thick lines."""

WORST: dict[str, Any] = {"linestyle": ":", "linewidth": 1.2, "marker": "o", "markersize": 2}
"""The style of the lines of the worst tensors."""

MANY_ZEROS = 0.1
"""The share of zeros in a layer from which zeros have a panel: values that were flushed in a cast are zeros, and do not
count as underflow."""


class LinePanel(NamedTuple):
    """A panel with a metric of `PlotData.pooled`; its axis is for a `magnitude`, a `share` or a `number`."""

    metric: str
    title: str
    kind: str = "magnitude"
    has_limits: bool = False

    def scale(self, axes: Axes, values: NDArray[np.float64]) -> None:
        """Scale the vertical axis, with a note if there are no values."""
        known = values[np.isfinite(values)]
        if self.kind == "share":
            scale_shares(axes, "y", known)
        elif self.kind == "number":
            scale_numbers(axes, "y", max_ticks=5)
            axes.set_ylim(0, max(1.0, 1.1 * float(known.max(initial=0.0))))
        else:
            scale_powers(axes, "y", self.drawn(values), pad=0.8)
        if not known.size:
            axes.set_ylim(0, 1)
            axes.set_yticks([])
            say(axes, "not available for any tensor")
        elif self.has_limits:
            mark_limits(axes, "y", min_distance=0.12)

    def drawn(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values as drawn: base-2 logarithms of magnitudes."""
        if self.kind != "magnitude":
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log2(values))


STD = LinePanel("std", "standard deviation of all values")
ABSMAX = LinePanel("overflow.absmax", "absmax", has_limits=True)
OVERFLOW = LinePanel("overflow", "overflow: share of elements", kind="share")
UNDERFLOW = LinePanel("underflow", "underflow: share of elements", kind="share")
FLUSHED = LinePanel("flushed", "rounded to zero: share of elements", kind="share")
ZEROS = LinePanel("zero", "zeros: share of elements", kind="share")

PANELS = {
    "losses": (STD, ABSMAX, OVERFLOW, UNDERFLOW),
    "shapes": (
        *(STD, ABSMAX),
        LinePanel("kurtosis", "largest kurtosis of a tensor (normal: 3)"),
        LinePanel("log2_range", "largest range of a tensor, in binades", kind="number"),
    ),
    "overflow": (OVERFLOW, UNDERFLOW, FLUSHED, ZEROS),
}
"""The panels that rows of the table choose by name. `overflow` has a column for each operation, and worst tensors."""


def lines(data: PlotData, row: Plot, *, field: str, panels: str) -> Figure:
    """Metrics of each group along an integer field.

    A point combines all records of the group at one value; dotted lines show the worst tensor among them.
    """
    groups, note = groups_of(data, row)
    if panels == "overflow":
        return _by_operation(data, row, groups, field=field, note=note)
    page = page_of(data, row, 2, 2, width=5.6, height=2.9, notes=[note], with_limits=panels == "losses")
    for axes, panel in zip(page.panels.flat, PANELS[panels], strict=True):
        name(axes, title=panel.title)
        found = [line_values(data, group, panel.metric, field=field) for group in groups]
        for group, values in zip(groups, found, strict=True):
            _draw_along(axes, data, field, panel.drawn(values), **_style(group, values))
        _scale_along(axes, data, field, is_labelled=axes in page.panels[-1])
        panel.scale(axes, np.concatenate(found) if found else np.zeros(0))
        if panel.kind == "share" and not any(values[np.isfinite(values)].any() for values in found):
            say(axes, f"no {panel.metric}")
    page.handles += [group.handle(has_mark=True) for group in groups]
    return page.finish()


def _by_operation(data: PlotData, row: Plot, groups: Sequence[Group], *, field: str, note: str) -> Figure:
    """A row of panels for each share, a column for each operation, and lines of the worst tensor of each group."""
    operations, num_places = data.operations(), len(data.values_of(field))
    parts = [
        [replace(group, mask=group.mask & data.mask(operation=operation)) for group in groups]
        for operation in operations
    ]
    zeros = [line_values(data, part, ZEROS.metric, field=field) for own in parts for part in own]
    absent = {FLUSHED} if data.target is None else set()
    if not any(np.nan_to_num(values).max(initial=0) >= MANY_ZEROS for values in zeros):
        absent.add(ZEROS)
    panels = [panel for panel in PANELS["overflow"] if panel not in absent]
    width = min(8.0, max(4.8, 2.5 + 0.06 * num_places))
    page = page_of(data, row, len(panels), len(operations), width=width, height=2.3, notes=[note], with_limits=True)
    for panel, axes_of_panel in zip(panels, page.panels, strict=True):
        shares, found = data.share(panel.metric), []
        for operation, own, axes in zip(operations, parts, axes_of_panel, strict=True):
            axes.grid(visible=False, axis="x")
            numbers = [np.where(part.mask, data.codes(field), -1) for part in own]
            worst = [largest_of(shares, places, num_groups=num_places) for places in numbers]
            for part, largest in zip(own, worst, strict=True):
                values = line_values(data, part, panel.metric, field=field)
                _draw_along(axes, data, field, largest, **WORST, color=part.color, clip_on=False)
                _draw_along(axes, data, field, values, **_style(part, values) | {"linestyle": "-", "clip_on": False})
            _scale_along(axes, data, field, is_labelled=panel is panels[-1])
            name(axes, title=operation if panel is panels[0] else "")
            if not np.nan_to_num(np.stack(worst)).any():
                say(axes, "none")
            found += worst
        for axes in axes_of_panel:
            panel.scale(axes, np.concatenate(found))
            axes.tick_params(labelleft=axes is axes_of_panel[0])
        name(axes_of_panel[0], y=panel.title.replace(": ", "\n"))
    page.handles += [group.handle(has_mark=True) for group in groups]
    page.handles.append(key(Line2D([], [], **WORST, color=INK), "the worst tensor of the layer"))
    return page.finish()


def _scale_along(axes: Axes, data: PlotData, field: str, *, is_labelled: bool) -> None:
    """Scale the horizontal axis for the values of a field."""
    if field == "layer_idx":
        scale_layers(axes, data.values_of(field), is_labelled=is_labelled)
    else:
        scale_whole(axes, data.values_of(field), max_ticks=9)
        name(axes, x=field if is_labelled else "")


def _draw_along(axes: Axes, data: PlotData, field: str, values: NDArray[np.float64], **style: Any) -> None:
    """Draw a line through the finite values, one for each value of the field."""
    known, places = np.isfinite(values), data.values_of(field)
    kept = [place for place, is_known in zip(places, known.tolist(), strict=True) if is_known]
    if kept:
        shown = values[known].tolist()
        is_layers = field == "layer_idx"
        axes.plot(*(with_gap(kept, shown, all_layers=places) if is_layers else ([*map(float, kept)], shown)), **style)


def line_values(data: PlotData, group: Group, metric: str, *, field: str) -> NDArray[np.float64]:
    """The combined metric of the group's records at each value of the field; NaN if there is none."""
    numbers = np.where(group.mask, data.codes(field), -1)
    return data.pooled(metric, numbers, num_groups=len(data.values_of(field)))


def _style(group: Group, values: NDArray[np.float64]) -> dict[str, Any]:
    """The style of a group's line: later ones are finer, so that they do not hide the lines below."""
    num_points = int(np.isfinite(values).sum())
    mark: dict[str, Any] = {"marker": group.mark, "markersize": max(2.5, 6.5 - 0.7 * group.index)}
    fineness = max(1.0, 2.2 - 0.25 * group.index) if num_points <= MAX_THICK else 0.8
    return {**group.line, "linewidth": fineness, **(mark if num_points <= MAX_MARKS else {})}


def neighbouring_layers(data: PlotData, row: Plot) -> Figure:
    """Factors of standard deviation and absmax from each layer to the next, and the distance of their distributions."""
    groups, _ = group_by(data, "operation")
    page = page_of(data, row, 3, 1, width=9.6, height=2.3)
    layers = [layer for layer in data.values_of("layer_idx") if layer >= 0]
    # The first layer of a stack does not follow the last layer of another stack.
    is_next = np.array([one.stack == other.stack for one, other in itertools.pairwise(layers)], dtype=bool)

    def draw(axes: Axes, title: str, values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        name(axes, title=title)
        drawn = np.where(is_next, np.stack(values), np.nan)
        for group, found in zip(groups, drawn, strict=True):
            mark: dict[str, Any] = {"marker": group.mark, "markersize": 5} if len(layers) - 1 <= MAX_MARKS else {}
            axes.plot(layers[1:], found, **group.line, linewidth=1.8, **mark)
        return drawn

    for axes, panel, words in zip(page.panels[:2, 0], (STD, ABSMAX), ("standard deviation", "absmax"), strict=True):
        found = [line_values(data, group, panel.metric, field="layer_idx")[-len(layers) :] for group in groups]
        scale_factors(axes, draw(axes, f"{words} over that of the layer before", [*map(_steps, found)]).reshape(-1))
        scale_layers(axes, layers[1:], is_labelled=False)
    axes = page.panels[2, 0]
    # The share of values that change their binade from each layer to the next, with zeros as a binade.
    shares = (data.binade_shares(one, with_zeros=True)[-len(layers) :] for one in data.operations())
    distances = [np.abs(np.diff(one, axis=0)).sum(axis=1) / 2 for one in shares]
    draw(axes, "share of values that lie in another binade than in the layer before", distances)
    axes.set_ylim(0, 1.02)
    set_ticks(axes.yaxis, [0, 0.25, 0.5, 0.75, 1], [share_text(tick / 4) for tick in range(5)])
    scale_layers(axes, layers[1:])
    page.handles += [group.handle(has_mark=True) for group in groups]
    return page.finish()


def _steps(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The base-2 logarithm of each value over the one before; NaN if either is NaN, zero or infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(values)
        return np.diff(np.where(np.isfinite(logs), logs, np.nan))


def sample_differences(data: PlotData, row: Plot) -> Figure:
    """For each operation and sample, the mean factor over the median sample as a point, and the range as a line."""
    found = [(operation, data.samples.ratios(operation)) for operation in data.operations()]
    ratios = [(operation, one) for operation, one in found if not np.isnan(one).all()] or found[:1]
    names, label = data.samples.labels()
    names = names or ["none"]
    page = page_of(data, row, len(ratios), 1, width=9.6, height=2.7)
    places = np.arange(len(names))
    shown, words = thinned(names, max_names=max(1, int(8.6 / ((max(map(len, names)) + 2) * 0.085))))
    for index, (axes, (operation, one)) in enumerate(zip(page.panels[:, 0], ratios, strict=True)):
        name(axes, title=operation, x=label if index == len(ratios) - 1 else "", y="absmax over the median sample's")
        known = np.isfinite(one[:, 0])
        width = min(3.0, 200 / len(names))
        axes.vlines(places[known], *one[known, 1:].T, color=COLORS[index], alpha=0.45, linewidth=width)
        point: dict[str, Any] = {"color": COLORS[index], "markersize": 6.0 if len(names) <= MAX_MARKS else 2.5}
        axes.plot(places[known], one[known, 0], MARKS[index], linestyle="", **point)
        scale_factors(axes, one)
        set_ticks(axes.xaxis, shown, words)
        axes.set_xlim(-0.6, len(names) - 0.4)
    page.handles += [
        key(Line2D([], [], color=INK, marker="o", linestyle="", markersize=5), "mean over tensors"),
        key(Line2D([], [], color=INK, alpha=0.45, linewidth=3), "from the lowest to the highest tensor"),
    ]
    return page.finish()
