"""How are the values of groups of tensors distributed: which shape do they have, and over which octaves do they reach?

Groups of very different size are drawn in one panel: for the shape each is moved and scaled to mean 0 and standard
deviation 1, for the range magnitudes are counted by octave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ranktape.analyze.numerics.distributions.bins import linear_bins
from ranktape.analyze.numerics.distributions.normal_fit import fit_normal
from ranktape.analyze.views.palette import GREY
from ranktape.analyze.views.plots.axes import mark_limits, scale_numbers, scale_powers, scale_shares
from ranktape.analyze.views.plots.octaves import LOWEST, octave_counts
from ranktape.analyze.views.plots.style import PANEL_SIZE, TEXT_SIZE, Heading, empty, finish, key, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.analyze.views.plots.groups import Group

MAX_DEVIATIONS = 8.0
"""The shape is drawn up to so many standard deviations to either side."""

SMALLEST_DENSITY = 1e-5
"""At the foot of the shape."""

NUM_BINS = 128
"""Bins of a linear axis."""

CENTRE = (0.01, 0.99)
"""Parts of the values between which raw densities are drawn."""

MAX_CODES, MIN_REPEATS = 2048, 8
"""Values are of few bits where there are no more of them than that, each so many times on average."""

NO_VALUES = "no finite values are known"


def draw_distributions(groups: Sequence[Group], *, heading: Heading) -> Figure:
    """Shape and range of each group; groups without finite values are named in the legend all the same."""
    figure, panels = page(1, 2, panel_width=5.6, panel_height=4.0)
    shape, octaves = panels[0]
    _draw_shapes(shape, groups)
    _draw_octaves(octaves, groups)
    handles = [group.handle() for group in groups]
    if any(_is_spread(group.digest) for group in groups):
        handles.append(key(Line2D([], [], color=GREY, linewidth=1, linestyle=":"), "normal distribution"))
    return finish(figure, heading, handles=handles)


def _draw_shapes(axes: Axes, groups: Sequence[Group]) -> None:
    axes.set_title("shape, in units of each group's own standard deviation", fontsize=PANEL_SIZE)
    drawn = [group for group in groups if _is_spread(group.digest)]
    if not drawn:
        empty(axes, NO_VALUES if all(group.digest is None for group in groups) else "no values that differ")
        return
    highest = 0.0
    for group in drawn:
        edges, density = standardised(group.digest)
        highest = max(highest, float(density.max(initial=0.0)))
        shown = np.where(density > 0, density, np.nan)
        axes.stairs(shown, edges, color=group.color, linestyle=group.dashes, linewidth=1.7, baseline=None)
    places = np.linspace(-MAX_DEVIATIONS, MAX_DEVIATIONS, 201)
    axes.plot(places, np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi), color=GREY, linewidth=1, linestyle=":")
    axes.set_xlim(-MAX_DEVIATIONS, MAX_DEVIATIONS)
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST_DENSITY, max(1.0, 2 * highest))
    axes.yaxis.set_minor_locator(NullLocator())
    scale_numbers(axes, "x", max_ticks=10)
    axes.set_xlabel("(x - mean) / standard deviation", fontsize=TEXT_SIZE)
    axes.set_ylabel("density", fontsize=TEXT_SIZE)


def num_bins(num_values: int) -> int:
    """How many bins so many values fill: few values make wide ones."""
    return min(NUM_BINS, max(16, 4 * round(math.cbrt(num_values))))


def standardised(digest: Digest | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Edges of bins in standard deviations from the mean, and the density of all finite values there."""
    assert digest is not None
    mean, std = digest.statistics.mean, digest.statistics.std
    assert mean is not None
    assert std
    is_finite = np.isfinite(digest.values)
    counts = digest.counts[is_finite]
    edges = np.linspace(-MAX_DEVIATIONS, MAX_DEVIATIONS, num_bins(int(counts.sum())) + 1)
    found, _ = np.histogram((digest.values[is_finite] - mean) / std, bins=edges, weights=counts)
    kept, held = joined(digest, edges, found)
    return kept, held / max(1, int(counts.sum())) / np.diff(kept)


def joined(
    digest: Digest, edges: NDArray[np.float64], counts: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """The bins as they are; of numbers of few bits without empty ones between others, whose halves the others get.

    Bins narrower than the distance of a format's numbers would show a comb, which is of the bins and not of the values.
    """
    values = digest.values[np.isfinite(digest.values)]
    held = np.flatnonzero(counts)
    if values.size > MAX_CODES or digest.tallies.num_elements < MIN_REPEATS * values.size or held.size < 2:  # noqa: PLR2004
        return edges, counts
    between = (edges[held[:-1] + 1] + edges[held[1:]]) / 2
    return np.concatenate([edges[held[:1]], between, edges[held[-1:] + 1]]), counts[held]


def _draw_octaves(axes: Axes, groups: Sequence[Group]) -> None:
    axes.set_title("range, by octave", fontsize=PANEL_SIZE, pad=20)
    known = [(group, shares) for group in groups if (shares := octave_shares(group.digest)) is not None]
    if not any(shares.any() for _, shares in known):
        empty(axes, "no finite values other than zero are known" if known else NO_VALUES)
        return
    shown = np.concatenate([shares for _, shares in known])
    exponents: list[int] = []
    for group, shares in known:
        held = np.flatnonzero(shares)
        if not held.size:
            continue
        inside = slice(int(held[0]), int(held[-1]) + 1)
        places = np.arange(inside.start, inside.stop) + LOWEST
        exponents += places.tolist()
        style: dict[str, Any] = {"color": group.color, "linestyle": group.dashes, "marker": group.mark}
        axes.plot(places + 0.5, shares[inside], **style, markersize=3.5, linewidth=1.6)
    scale_powers(axes, "x", [min(exponents), max(exponents) + 1])
    scale_shares(axes, "y", shown[shown > 0])
    axes.set_xlabel("|x|", fontsize=TEXT_SIZE)
    axes.set_ylabel("share of values", fontsize=TEXT_SIZE)
    mark_limits(axes, "x", min_distance=0.24)


def octave_shares(digest: Digest | None) -> NDArray[np.float64] | None:
    """Part of all elements in each octave from `octaves.LOWEST` on; None where no value is known."""
    if digest is None or not digest.has_values:
        return None
    return octave_counts(digest) / max(1, digest.tallies.num_elements)


def _is_spread(digest: Digest | None) -> bool:
    return digest is not None and digest.has_values and bool(digest.statistics.std)


def draw_raw(groups: Sequence[Group], *, heading: Heading) -> Figure:
    """The density of the values themselves: one panel for each group, as their units differ."""
    figure, panels = page(1, len(groups), panel_width=max(4.6, 10.0 / len(groups)), panel_height=4.0)
    for axes, group in zip(panels[0], groups, strict=True):
        axes.set_title(group.label, fontsize=PANEL_SIZE)
        if not _draw_density(axes, group, is_normalised=False):
            continue
        axes.set_xlabel("value", fontsize=TEXT_SIZE)
        axes.set_ylabel("density, for one unit of the value", fontsize=TEXT_SIZE)
        assert group.digest is not None
        statistics = group.digest.statistics
        if statistics.mean is not None and statistics.std:
            ends = axes.get_xlim()
            places = np.linspace(ends[0], ends[1], 400)
            fitted = np.exp(-(((places - statistics.mean) / statistics.std) ** 2) / 2)
            axes.plot(
                places, fitted / statistics.std / math.sqrt(2 * math.pi), color=GREY, linewidth=1.2, linestyle=":"
            )
            axes.set_xlim(*ends)
            axes.set_ylim(bottom=0)
    handle = key(Line2D([], [], color=GREY, linewidth=1.2, linestyle=":"), "normal distribution of the same deviation")
    return finish(figure, heading, handles=[handle])


def _draw_density(axes: Axes, group: Group, *, is_normalised: bool) -> bool:
    bins = None if group.digest is None else central_bins(group.digest)
    if bins is None:
        empty(axes, NO_VALUES)
        return False
    edges, density = normalised(*bins) if is_normalised else bins
    axes.stairs(density, edges, fill=True, color=group.color, alpha=0.35)
    axes.stairs(density, edges, color=group.color, linewidth=1.4, baseline=None)
    axes.set_xlim(float(edges[0]), float(edges[-1]))
    axes.set_ylim(bottom=0)
    scale_numbers(axes, "x", max_ticks=5)
    scale_numbers(axes, "y", max_ticks=5)
    return True


def central_bins(digest: Digest) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Edges and density of bins that hold all but a hundredth of the finite values at either end; None without any.

    A few values far away would squeeze all others into one bin. The density is that of all finite values.
    """
    is_finite = np.isfinite(digest.values)
    values, counts = digest.values[is_finite], digest.counts[is_finite]
    if not digest.has_values or not values.size:
        return None
    ends = np.cumsum(counts)
    low, high = (float(values[np.searchsorted(ends, part * ends[-1])]) for part in CENTRE)
    bins = linear_bins(digest, NUM_BINS, low=low, high=high)
    edges, held = joined(digest, bins.edges, bins.counts)
    return edges, held / int(ends[-1]) / np.diff(edges)


def normalised(
    edges: NDArray[np.float64], density: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bins moved to [0, 1], and the density over its largest."""
    return (edges - edges[0]) / (edges[-1] - edges[0]), density / (float(density.max(initial=0.0)) or 1.0)


def draw_normalised(groups: Sequence[Group], *, heading: Heading) -> Figure:
    """The same densities with values and densities in [0, 1], all in one panel."""
    figure, panels = page(1, 1, panel_width=8.0, panel_height=4.4)
    axes = panels[0][0]
    drawn = 0
    for group in groups:
        bins = None if group.digest is None else central_bins(group.digest)
        if bins is None:
            continue
        edges, density = normalised(*bins)
        axes.stairs(density, edges, color=group.color, linestyle=group.dashes, linewidth=1.7, baseline=None)
        drawn += 1
    if not drawn:
        empty(axes, NO_VALUES)
    else:
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("value: 0 is the first bin's edge, 1 the last one's", fontsize=TEXT_SIZE)
        axes.set_ylabel("density over its largest", fontsize=TEXT_SIZE)
    return finish(figure, heading, handles=[group.handle() for group in groups])


def draw_raw_against_normalised(groups: Sequence[Group], *, heading: Heading) -> Figure:
    """For each group the raw density, the normalised one, and one against the other bin by bin."""
    figure, panels = page(len(groups), 3, panel_width=4.2, panel_height=3.0)
    for row, group in zip(panels, groups, strict=True):
        for axes, is_normalised in zip(row[:2], (False, True), strict=True):
            if _draw_density(axes, group, is_normalised=is_normalised):
                axes.set_xlabel("value, in [0, 1]" if is_normalised else "value", fontsize=TEXT_SIZE)
                axes.set_ylabel("density, in [0, 1]" if is_normalised else "density", fontsize=TEXT_SIZE)
        bins = None if group.digest is None else central_bins(group.digest)
        if bins is None:
            empty(row[2], NO_VALUES)
        else:
            row[2].plot(bins[1], normalised(*bins)[1], group.mark, color=group.color, markersize=3.5)
            row[2].set_xlim(left=0)
            row[2].set_ylim(0, 1.05)
            scale_numbers(row[2], "x", max_ticks=4)
            row[2].set_xlabel("raw density", fontsize=TEXT_SIZE)
            row[2].set_ylabel("normalised density", fontsize=TEXT_SIZE)
        for axes, words in zip(row, ("raw", "normalised", "one against the other"), strict=True):
            axes.set_title(f"{group.label}: {words}", fontsize=PANEL_SIZE)
    return finish(figure, heading)


def draw_normal_fit(groups: Sequence[Group], *, heading: Heading) -> Figure:
    """Quantiles of each group against those of the normal distribution of its mean and deviation, in deviations."""
    num_columns = min(2, len(groups))
    figure, panels = page(math.ceil(len(groups) / num_columns), num_columns, panel_width=4.8, panel_height=3.8)
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, group in zip(panels.flat, groups, strict=False):
        axes.set_title(group.label, fontsize=PANEL_SIZE)
        fit = None if group.digest is None else fit_normal(group.digest)
        if fit is None or not fit.observed.size or fit.mean is None or not fit.std:
            empty(axes, "no values that differ")
            continue
        expected, observed = ((points - fit.mean) / fit.std for points in (fit.theoretical, fit.observed))
        axes.axline((0, 0), slope=1, color=GREY, linewidth=1.2, linestyle=":")
        axes.plot(expected, observed, group.mark, color=group.color, markersize=4)
        axes.set_xlabel("quantile of a normal distribution, in deviations", fontsize=TEXT_SIZE)
        axes.set_ylabel("quantile of the values, in deviations", fontsize=TEXT_SIZE)
        scale_numbers(axes, "x")
        scale_numbers(axes, "y")
        words = f"largest distance of the cumulative distributions: {fit.ks_distance:.3g}"
        axes.set_title(f"{group.label}\n{words}", fontsize=PANEL_SIZE)
    handle = key(Line2D([], [], color=GREY, linewidth=1.2, linestyle=":"), "a normal distribution lies on this line")
    return finish(figure, heading, handles=[handle])
