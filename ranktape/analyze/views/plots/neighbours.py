"""How does each layer differ from the one before it, and each sample from the others of its batch?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator

from ranktape.analyze.layer_stacks import stack_of
from ranktape.analyze.views.plots.axes import (
    powers_between,
    scale_layers,
    share_text,
    thinned,
)
from ranktape.analyze.views.plots.groups import Group
from ranktape.analyze.views.plots.lines import ABSMAX, STD, line_values
from ranktape.analyze.views.plots.style import (
    COLORS,
    INK,
    MARKS,
    PANEL_SIZE,
    TEXT_SIZE,
    Heading,
    empty,
    finish,
    key,
    page,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData

MAX_MARKS = 40
"""Places along an axis up to which points do not run together."""


def draw_neighbouring_layers(data: PlotData, groups: Sequence[Group], *, heading: Heading) -> Figure:
    """Factors from each layer to the next, of deviation and absmax, and the distance of the shares of octaves."""
    figure, panels = page(3, 1, panel_width=9.6, panel_height=2.3)
    layers = [layer for layer in data.values_of("layer_idx") if layer >= 0]
    later = layers[1:]
    # The first layer of another stack does not follow the last one of this.
    is_next = np.array([stack_of(one) == stack_of(other) for one, other in itertools.pairwise(layers)], dtype=bool)
    for axes, panel, words in zip(panels[:2, 0], (STD, ABSMAX), ("standard deviation", "absmax"), strict=True):
        axes.set_title(f"{words} over that of the layer before", fontsize=PANEL_SIZE)
        drawn = []
        for group in groups:
            values = line_values(data, group, panel.figure, field="layer_idx")
            factors = np.where(is_next, steps(values[-len(layers) :]), np.nan)
            drawn.append(factors)
            _draw(axes, later, factors, group)
        scale_factors(axes, np.concatenate(drawn))
        scale_layers(axes, later, is_labelled=False)
    axes = panels[2, 0]
    axes.set_title("share of values that lie in another octave than in the layer before", fontsize=PANEL_SIZE)
    for group in groups:
        distances = octave_distances(data, group.label, num_layers=len(layers))
        _draw(axes, later, np.where(is_next, distances, np.nan), group)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.yaxis.set_major_formatter(FixedFormatter([share_text(tick / 4) for tick in range(5)]))
    scale_layers(axes, later)
    return finish(figure, heading, handles=[group.handle(has_mark=True) for group in groups])


def steps(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """log2 of each value over the one before; NaN where either is not known, zero or infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(values)
        return np.diff(np.where(np.isfinite(logs), logs, np.nan))


def octave_distances(data: PlotData, operation: str, *, num_layers: int) -> NDArray[np.float64]:
    """Part of the values that would have to move to another octave, from each layer to the next, zeros being one.

    Of the last layers, so many, which are those of the stack. NaN where a layer has no values.
    """
    shares = data.passed.octaves["layer_idx"].shares(operation, with_zeros=True)[-num_layers:]
    return np.asarray(np.abs(np.diff(shares, axis=0)).sum(axis=1) / 2)


def _draw(axes: Axes, layers: Sequence[int], values: NDArray[np.float64], group: Group) -> None:
    mark: dict[str, Any] = {"marker": group.mark, "markersize": 5} if len(layers) <= MAX_MARKS else {}
    axes.plot(layers, values, color=group.color, linestyle=group.dashes, linewidth=1.8, **mark)


def scale_factors(axes: Axes, logs: NDArray[np.float64]) -> None:
    """A vertical axis of log2 of factors, with the same room above and below a line at no difference."""
    known = logs[np.isfinite(logs)]
    reach = max(1.0, float(np.abs(known).max(initial=0.0))) * 1.08
    axes.set_ylim(-reach, reach)
    ticks = powers_between(-reach, reach, max_ticks=6)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([factor_text(tick) for tick in ticks]))
    axes.axhline(0, color=INK, linewidth=0.9)
    if not known.size:
        empty(axes, "nothing to compare")


def factor_text(power: int) -> str:
    """A power of two as a factor."""
    if abs(power) > 6:  # noqa: PLR2004 - short enough to be read at once
        return f"$2^{{{power}}}$ x"
    return f"{2**power} x" if power >= 0 else f"1/{2**-power} x"


def draw_sample_differences(
    ratios: Sequence[tuple[str, NDArray[np.float64]]], *, names: Sequence[str], label: str, heading: Heading
) -> Figure:
    """For each operation and sample a point at the mean factor, and a line from the lowest to the highest.

    The columns of each array are mean, lowest and highest log2; one row for each of `names`.
    """
    figure, panels = page(len(ratios), 1, panel_width=9.6, panel_height=2.7)
    for index, (axes, (operation, found)) in enumerate(zip(panels[:, 0], ratios, strict=True)):
        axes.set_title(operation, fontsize=PANEL_SIZE)
        places = np.arange(len(names))
        known = np.isfinite(found[:, 0])
        color = COLORS[index]
        size = 6.0 if len(names) <= MAX_MARKS else 2.5
        axes.vlines(
            places[known],
            found[known, 1],
            found[known, 2],
            color=color,
            alpha=0.45,
            linewidth=min(3.0, 200 / len(names)),
        )
        axes.plot(places[known], found[known, 0], MARKS[index], color=color, markersize=size, linestyle="")
        scale_factors(axes, found)
        longest = max(map(len, names))
        shown, words = thinned(names, max_names=max(1, int(8.6 / ((longest + 2) * 0.085))))
        axes.xaxis.set_major_locator(FixedLocator(shown))
        axes.xaxis.set_major_formatter(FixedFormatter(words))
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylabel("absmax over the median sample's", fontsize=TEXT_SIZE)
        axes.set_xlabel(label if index == len(ratios) - 1 else "", fontsize=TEXT_SIZE)
    handles = [
        key(Line2D([], [], color=INK, marker="o", linestyle="", markersize=5), "mean over tensors"),
        key(Line2D([], [], color=INK, alpha=0.45, linewidth=3), "from the lowest to the highest tensor"),
    ]
    return finish(figure, heading, handles=handles)
