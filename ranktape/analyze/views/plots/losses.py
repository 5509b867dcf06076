"""Which groups of tensors overflow and underflow, on which side, and how many tensors how much?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ranktape.analyze.views.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from ranktape.analyze.views.plots.axes import name_rows, scale_shares, share_text
from ranktape.analyze.views.plots.data import pooled
from ranktape.analyze.views.plots.style import (
    INK,
    PANEL_SIZE,
    SMALL_SIZE,
    TEXT_SIZE,
    Heading,
    empty,
    finish,
    key,
    page,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.groups import Group

SIDES = (
    ("upper", "beyond the upper limit", VERMILION, ""),
    ("lower", "beyond the lower limit", BLUE, "///"),
    ("underflow", "below the smallest normal", ORANGE, "..."),
    ("flushed", "rounded to zero", PURPLE, "xxx"),
    ("nan", "NaN", GREEN, "\\\\\\"),
)
"""Kinds of loss: name, words, colour and hatch; `flushed` against a format only, NaN only where there is any."""

MAX_DRAWN_POINTS = 20_000
"""Points of a scatter plot: of more, the largest are drawn."""

BINS_PER_DECADE = 4
"""Of a histogram of ratios."""


def draw_loss_bars(data: PlotData, groups: Sequence[Group], *, heading: Heading) -> Figure:
    """For each group one bar for each kind of loss: the part of all its elements."""
    kinds = kinds_of(data)
    height = max(2.2, 1.0 + len(groups) * (0.2 + 0.17 * len(kinds)))
    figure, panels = page(1, 1, panel_width=9.0, panel_height=height)
    axes = panels[0][0]
    shares = loss_shares(data, groups, [name for name, *_ in kinds])
    width = 0.8 / len(kinds)
    for index, (_, _, color, hatch) in enumerate(kinds):
        places = np.arange(len(groups)) - 0.4 + width * (index + 0.5)
        known = np.nan_to_num(shares[index])
        axes.barh(places, known, height=width * 0.9, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
        for place, share, drawn in zip(places.tolist(), shares[index].tolist(), known.tolist(), strict=True):
            text = "not known" if share != share else share_text(share)  # noqa: PLR0124 - NaN
            _beside(axes, text, x=drawn, y=place)
    name_rows(axes, [group.label for group in groups])
    scale_shares(axes, "x", shares)
    # Room for the figures beside the longest bars.
    axes.set_xlim(0, 5)
    axes.set_xlabel("share of all elements of the group", fontsize=TEXT_SIZE)
    handles = [key(Patch(facecolor=color, hatch=hatch, edgecolor="white"), words) for _, words, color, hatch in kinds]
    return finish(figure, heading, handles=handles)


def _beside(axes: Axes, text: str, *, x: float, y: float) -> None:
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "ha": "left"}
    axes.annotate(text, (x, y), **place, fontsize=SMALL_SIZE - 1, color=INK)


def kinds_of(data: PlotData) -> list[tuple[str, str, str, str]]:
    """The kinds of loss that are drawn of a data."""
    wanted = {"upper", "lower", "underflow"}
    wanted |= {"flushed"} if data.target is not None else set()
    wanted |= {"nan"} if np.nansum(data.metric("nan")) else set()
    return [kind for kind in SIDES if kind[0] in wanted]


def loss_shares(data: PlotData, groups: Sequence[Group], names: Sequence[str]) -> NDArray[np.float64]:
    """For each name a row, for each group a column: the part of the group's elements."""
    numbers = np.full(len(data), -1)
    for index, group in enumerate(groups):
        numbers[group.mask] = index
    return np.stack([pooled(data, name, numbers, num_groups=len(groups)) for name in names])


def draw_upper_against_lower(data: PlotData, groups: Sequence[Group], *, heading: Heading) -> Figure:
    """One point for each tensor; those without any overflow are all at the origin, and counted there."""
    figure, panels = page(1, 1, panel_width=6.6, panel_height=5.6)
    axes = panels[0][0]
    upper, lower = data.share("upper"), data.share("lower")
    ends = np.concatenate([upper, lower])
    for which in ("x", "y"):
        scale_shares(axes, which, ends[np.isfinite(ends)])
    axes.plot([0, 1.4], [0, 1.4], color="0.75", linewidth=1, linestyle=":")
    largest = np.argsort(-np.nan_to_num(np.maximum(upper, lower)), kind="stable")[:MAX_DRAWN_POINTS]
    is_drawn = np.zeros(len(data), dtype=bool)
    is_drawn[largest] = True
    for group in groups:
        chosen = group.mask & is_drawn & ((upper > 0) | (lower > 0))
        # An empty line that is not clipped counts as one at the corner of the plot.
        if not chosen.any():
            continue
        style: dict[str, Any] = {"color": group.color, "markersize": 5, "alpha": 0.7, "clip_on": False}
        axes.plot(upper[chosen], lower[chosen], group.mark, linestyle="", **style)
    num_clean = int(((upper == 0) & (lower == 0)).sum())
    if num_clean == len(data):
        say(axes, "no tensor overflows")
    axes.set_xlabel("share beyond the upper limit", fontsize=TEXT_SIZE)
    axes.set_ylabel("share beyond the lower limit", fontsize=TEXT_SIZE)
    axes.tick_params(axis="x", labelsize=SMALL_SIZE - 1)
    notes = (f"{num_clean:,} of {len(data):,} tensors overflow on neither side and are not drawn.", *heading.notes)
    marked = Heading(title=heading.title, subtitle=heading.subtitle, notes=notes)
    return finish(figure, marked, handles=[group.handle(has_mark=True) for group in groups])


def draw_ratio_histogram(data: PlotData, *, heading: Heading) -> Figure:
    """Tensors counted by their ratio of overflow and of underflow; those with none have a bar of their own."""
    figure, panels = page(1, 2, panel_width=5.2, panel_height=3.6)
    words = (("overflow", data.share("upper", "lower"), VERMILION), ("underflow", data.share("underflow"), ORANGE))
    for axes, (title, shares, color) in zip(panels[0], words, strict=True):
        axes.set_title(title, fontsize=PANEL_SIZE)
        known = shares[np.isfinite(shares)]
        if not known.size:
            empty(axes, "not known of any tensor")
            continue
        edges, counts, num_zero = ratio_counts(known)
        scale_shares(axes, "x", known)
        linear = float(edges[0])
        axes.bar(linear / 2, num_zero, width=linear * 0.8, color="0.6", hatch="///", edgecolor="white")
        if counts.any():
            axes.bar(
                edges[:-1], counts, width=np.diff(edges), align="edge", color=color, edgecolor="white", linewidth=0.5
            )
        axes.annotate(
            f"none: {num_zero:,}",
            (linear / 2, num_zero),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=SMALL_SIZE,
            color=INK,
            ha="center",
        )
        axes.set_ylim(0, 1.15 * max(num_zero, int(counts.max(initial=0)), 1))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel(f"{title} ratio of a tensor", fontsize=TEXT_SIZE)
        axes.set_ylabel("tensors", fontsize=TEXT_SIZE)
    return finish(figure, heading, handles=[key(Patch(facecolor="0.6", hatch="///", edgecolor="white"), "none at all")])


def ratio_counts(shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """Edges up to 1, equal on a logarithmic axis, how many shares lie between them, and how many are zero.

    The first edge is where `scale_shares` begins to be logarithmic.
    """
    positive = shares[shares > 0]
    smallest = max(1e-12, float(positive.min())) if positive.size else 0.01
    lowest = min(-2, int(np.floor(np.log10(smallest))))
    edges = 10.0 ** np.linspace(lowest, 0, BINS_PER_DECADE * -lowest + 1)
    counts, _ = np.histogram(np.clip(positive, edges[0], 1.0), bins=edges)
    return edges, counts, int((shares == 0).sum())
