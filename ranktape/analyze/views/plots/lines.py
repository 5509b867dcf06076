"""Draws how metrics move along layers, iterations, ranks or samples: one panel for each, one line for each group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
from ranktape.analyze.views.plots.groups import Group, groups_of, page_of, pooled
from ranktape.analyze.views.plots.style import COLORS, INK, MARKS, key, name, say
from ranktape.analyze.views.plots.tallies import sample_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

MAX_MARKS, MAX_THICK = 40, 200
"""Places along an axis up to which points do not run together, and lines are thick."""


class LinePanel(NamedTuple):
    """One metric of `pooled`, and how its axis is divided: as `magnitude`, `share` or `number`."""

    metric: str
    title: str
    kind: str = "magnitude"
    has_limits: bool = False

    def scale(self, axes: Axes, values: NDArray[np.float64]) -> None:
        """Divide the vertical axis."""
        known = values[np.isfinite(values)]
        if self.kind == "share":
            scale_shares(axes, "y", known)
            if known.size and not known.any():
                say(axes, f"no {self.metric}")
        elif self.kind == "number":
            scale_numbers(axes, "y", max_ticks=5)
            axes.set_ylim(0, max(1.0, 1.1 * float(known.max(initial=0.0))))
        else:
            scale_powers(axes, "y", self.drawn(values), pad=0.8)
        if not known.size:
            axes.set_ylim(0, 1)
            axes.set_yticks([])
            say(axes, "no tensor has one")
        elif self.has_limits:
            mark_limits(axes, "y", min_distance=0.12)

    def drawn(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values as they are placed along the axis."""
        if self.kind != "magnitude":
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log2(values))


STD = LinePanel("std", "standard deviation of all values")
ABSMAX = LinePanel("extreme", "absmax", has_limits=True)
LOSSES = (
    STD,
    ABSMAX,
    LinePanel("overflow", "overflow: share of elements", kind="share"),
    LinePanel("underflow", "underflow: share of elements", kind="share"),
)
SHAPES = (
    STD,
    ABSMAX,
    LinePanel("kurtosis", "largest kurtosis of a tensor (normal: 3)"),
    LinePanel("log2_range", "largest range of a tensor, in binades", kind="number"),
)


def lines(data: PlotData, row: Plot, *, field: str) -> Figure:
    """Metrics of each group along a field of whole numbers; those of layers are shapes, others what is lost too.

    A point is of all records of the group there together.
    """
    groups, note = groups_of(data, row)
    is_layers = field == "layer_idx"
    page = page_of(data, row, 2, 2, width=5.6, height=2.9, notes=[note], with_limits=not is_layers)
    places = data.values_of(field)
    for axes, panel in zip(page.panels.flat, SHAPES if is_layers else LOSSES, strict=True):
        name(axes, title=panel.title)
        found = [line_values(data, group, panel.metric, field=field) for group in groups]
        for group, values in zip(groups, found, strict=True):
            _draw_line(axes, panel.drawn(values), places=places, group=group, is_layers=is_layers)
        is_lowest = axes in page.panels[-1]
        if is_layers:
            scale_layers(axes, places, is_labelled=is_lowest)
        else:
            scale_whole(axes, places, max_ticks=9)
            name(axes, x=field if is_lowest else "")
        panel.scale(axes, np.concatenate(found) if found else np.zeros(0))
    page.handles += [group.handle(has_mark=True) for group in groups]
    return page.finish()


def line_values(data: PlotData, group: Group, metric: str, *, field: str) -> NDArray[np.float64]:
    """The metric of all records of the group together at each value of the field; NaN where there is none."""
    numbers = np.where(group.mask, data.codes(field), -1)
    return pooled(data, metric, numbers, num_groups=len(data.values_of(field)))


def _draw_line(
    axes: Axes, values: NDArray[np.float64], *, places: Sequence[Any], group: Group, is_layers: bool
) -> None:
    known = np.isfinite(values)
    if not known.any():
        return
    kept = [place for place, is_known in zip(places, known.tolist(), strict=True) if is_known]
    shown = values[known].tolist()
    xs, ys = with_gap(kept, shown, all_layers=places) if is_layers else ([float(place) for place in kept], shown)
    mark: dict[str, Any] = {"marker": group.mark, "markersize": max(2.5, 6.5 - 0.7 * group.index)}
    fineness = max(1.0, 2.2 - 0.25 * group.index) if len(kept) <= MAX_THICK else 0.8
    axes.plot(xs, ys, **group.line, linewidth=fineness, **(mark if len(kept) <= MAX_MARKS else {}))


def neighbouring_layers(data: PlotData, row: Plot) -> Figure:
    """Factors from each layer to the next, of deviation and absmax, and the distance of the shares of binades."""
    groups, _ = groups_of(data, row)
    page = page_of(data, row, 3, 1, width=9.6, height=2.3)
    layers = [layer for layer in data.values_of("layer_idx") if layer >= 0]
    # The first layer of another stack does not follow the last one of this.
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
    # The part that would have to move to another binade from each layer to the next, zeros being one.
    shares = (data.passed.binades.shares(group.label, with_zeros=True)[-len(layers) :] for group in groups)
    distances = [np.abs(np.diff(one, axis=0)).sum(axis=1) / 2 for one in shares]
    draw(axes, "share of values that lie in another binade than in the layer before", distances)
    axes.set_ylim(0, 1.02)
    set_ticks(axes.yaxis, [0, 0.25, 0.5, 0.75, 1], [share_text(tick / 4) for tick in range(5)])
    scale_layers(axes, layers[1:])
    page.handles += [group.handle(has_mark=True) for group in groups]
    return page.finish()


def _steps(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """log2 of each value over the one before; NaN where either is not known, zero or infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(values)
        return np.diff(np.where(np.isfinite(logs), logs, np.nan))


def sample_differences(data: PlotData, row: Plot) -> Figure:
    """For each operation and sample a point at the mean factor over the median sample, and a line from end to end."""
    samples = data.passed.samples
    found = [(operation, samples.ratios(operation)) for operation in data.operations()]
    ratios = [(operation, one) for operation, one in found if not np.isnan(one).all()] or found[:1]
    names, label = sample_names(samples)
    names = names or ["none"]
    page = page_of(data, row, len(ratios), 1, width=9.6, height=2.7)
    places = np.arange(len(names))
    shown, words = thinned(names, max_names=max(1, int(8.6 / ((max(map(len, names)) + 2) * 0.085))))
    for index, (axes, (operation, one)) in enumerate(zip(page.panels[:, 0], ratios, strict=True)):
        is_last = index == len(ratios) - 1
        name(axes, title=operation, x=label if is_last else "", y="absmax over the median sample's")
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
