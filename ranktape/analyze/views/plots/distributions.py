"""Draws how the values of groups are distributed: their shape, the binades that they reach, their density.

Groups of very different size are drawn in one panel: for the shape each is moved and scaled to mean 0 and standard
deviation 1, for the range magnitudes are counted by binade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ranktape.analyze.numerics.bins import linear_bins
from ranktape.analyze.numerics.distances import fit_normal
from ranktape.analyze.views.palette import GREY
from ranktape.analyze.views.plots.axes import (
    band_handles,
    draw_bands,
    mark_limits,
    scale_numbers,
    scale_powers,
    scale_shares,
)
from ranktape.analyze.views.plots.groups import Group, groups_of, page_of
from ranktape.analyze.views.plots.style import empty, key, name
from ranktape.analyze.views.plots.tallies import LOWEST, binade_counts, exponents, filled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest
    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

    Bins = tuple[NDArray[np.float64], NDArray[np.float64]]
    """Edges, and what is between each two of them."""

MAX_DEVIATIONS, SMALLEST_DENSITY = 8.0, 1e-5
"""The ends of the shape: standard deviations to either side, and its foot."""

NUM_BINS = 128
"""Bins of a linear axis; few values make fewer of a shape."""

MAX_CODES, MIN_REPEATS = 2048, 8
"""Values are of few bits where there are no more of them than that, each so many times on average."""

NO_VALUES, ONLY_ZEROS = "no finite values are known", "no finite values other than zero are known"
IN_THE_CENTRE = "From the 1st to the 99th percentile of the values."


def distributions(data: PlotData, row: Plot) -> Figure:
    """Shape and range of each group; groups without finite values are named in the legend all the same."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(data, row, 1, 2, width=5.6, height=4.0, notes=[note])
    page.handles += [group.handle() for group in groups]
    if _draw_shapes(page.panels[0, 0], groups):
        page.handles.append(_dotted("normal distribution", linewidth=1))
    _draw_ranges(page.panels[0, 1], groups)
    return page.finish()


def _draw_shapes(axes: Axes, groups: Sequence[Group]) -> bool:
    """Whether any group has a shape."""
    name(axes, title="shape, in units of each group's own standard deviation")
    known = [(group, group.digest) for group in groups if group.digest is not None and group.digest.has_values]
    shapes = [(group, standardised(digest)) for group, digest in known if digest.statistics.std]
    if not shapes:
        empty(axes, NO_VALUES if all(group.digest is None for group in groups) else "no values that differ")
        return False
    for group, (edges, density) in shapes:
        axes.stairs(np.where(density > 0, density, np.nan), edges, **group.line, linewidth=1.7, baseline=None)
    _draw_normal(axes, np.linspace(-MAX_DEVIATIONS, MAX_DEVIATIONS, 201), linewidth=1)
    axes.set_xlim(-MAX_DEVIATIONS, MAX_DEVIATIONS)
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST_DENSITY, max(1.0, *(2 * float(density.max(initial=0.0)) for _, (_, density) in shapes)))
    axes.yaxis.set_minor_locator(NullLocator())
    scale_numbers(axes, "x", max_ticks=10)
    name(axes, x="(x - mean) / standard deviation", y="density")
    return True


def _draw_ranges(axes: Axes, groups: Sequence[Group]) -> None:
    name(axes, title="range, by binade", pad=20)
    known = [(group, shares) for group in groups if (shares := binade_shares(group.digest)) is not None]
    held = [(group, shares, filled(shares)) for group, shares in known if shares.any()]
    if not held:
        empty(axes, ONLY_ZEROS if known else NO_VALUES)
        return
    for group, shares, inside in held:
        places = exponents()[inside] + 0.5
        axes.plot(places, shares[inside], **group.line, marker=group.mark, markersize=3.5, linewidth=1.6)
    scale_powers(axes, "x", [min(one.start for *_, one in held) + LOWEST, max(one.stop for *_, one in held) + LOWEST])
    scale_shares(axes, "y", np.concatenate([shares[shares > 0] for _, shares in known]))
    name(axes, x="|x|", y="share of values")
    mark_limits(axes, "x", min_distance=0.24)


def _draw_normal(axes: Axes, places: NDArray[np.float64], *, mean: float = 0, std: float = 1, linewidth: float) -> None:
    fitted = np.exp(-(((places - mean) / std) ** 2) / 2) / std / math.sqrt(2 * math.pi)
    axes.plot(places, fitted, color=GREY, linewidth=linewidth, linestyle=":")


def _dotted(label: str, *, linewidth: float = 1.2) -> Any:
    return key(Line2D([], [], color=GREY, linewidth=linewidth, linestyle=":"), label)


def standardised(digest: Digest) -> Bins:
    """Edges of bins in standard deviations from the mean, and the density of all finite values there."""
    mean, std = digest.statistics.mean, digest.statistics.std
    assert mean is not None
    assert std
    is_finite = np.isfinite(digest.values)
    counts = digest.counts[is_finite]
    total = int(counts.sum())
    num_bins = min(NUM_BINS, max(16, 4 * round(math.cbrt(total))))
    edges = np.linspace(-MAX_DEVIATIONS, MAX_DEVIATIONS, num_bins + 1)
    found, _ = np.histogram((digest.values[is_finite] - mean) / std, bins=edges, weights=counts)
    kept, held = _joined(digest, edges, found)
    return kept, held / max(1, total) / np.diff(kept)


def _joined(digest: Digest, edges: NDArray[np.float64], counts: NDArray[Any]) -> Bins:
    """The bins as they are; of numbers of few bits without empty ones between others, whose halves the others get.

    Bins narrower than the distance of a format's numbers would show a comb, which is of the bins and not of the values.
    """
    values = digest.values[np.isfinite(digest.values)]
    held = np.flatnonzero(counts)
    if values.size > MAX_CODES or digest.tallies.num_elements < MIN_REPEATS * values.size or held.size < 2:  # noqa: PLR2004
        return edges, counts
    between = (edges[held[:-1] + 1] + edges[held[1:]]) / 2
    return np.concatenate([edges[held[:1]], between, edges[held[-1:] + 1]]), counts[held]


def binade_shares(digest: Digest | None) -> NDArray[np.float64] | None:
    """Part of all elements in each binade from `LOWEST` on; None where no value is known."""
    if digest is None or not digest.has_values:
        return None
    return binade_counts(digest) / max(1, digest.tallies.num_elements)


def occupancy(data: PlotData, row: Plot) -> Figure:
    """Part of the values of each group in each binade, and below it the binades that formats reach."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(data, row, 2, 1, width=10.0, height=3.1, height_ratios=(1.25, 1), sharex=True, notes=[note])
    axes, bands = page.panels[:, 0]
    shares = [(group, binade_shares(group.digest)) for group in groups]
    known = [(group, held) for group, held in shares if held is not None and held.any()]
    if not known:
        empty(axes, ONLY_ZEROS)
        bands.set_axis_off()
        return page.finish()
    everything = np.stack([held for _, held in known])
    inside = filled(everything)
    places = exponents()[inside]
    for group, held in known:
        drawn = np.where(held[inside] > 0, held[inside], np.nan)
        axes.plot(places + 0.5, drawn, **group.line, marker=group.mark, markersize=4, linewidth=1.7)
    draw_bands(axes, bands, places)
    axes.tick_params(labelbottom=False)
    scale_shares(axes, "y", everything[everything > 0])
    name(axes, y="share of values")
    page.handles += [*(group.handle(has_mark=True) for group in groups), *band_handles()]
    return page.finish()


def raw_densities(data: PlotData, row: Plot) -> Figure:
    """The density of the values themselves: one panel for each group, as their units differ."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(
        data, row, 1, len(groups), width=max(4.6, 10.0 / len(groups)), height=4.0, notes=[IN_THE_CENTRE, note]
    )
    for axes, group in zip(page.panels[0], groups, strict=True):
        name(axes, title=group.label)
        if not _draw_density(axes, group, central_bins(group.digest), y="density, for one unit of the value"):
            continue
        assert group.digest is not None
        mean, std = group.digest.statistics.mean, group.digest.statistics.std
        if mean is not None and std:
            ends = axes.get_xlim()
            _draw_normal(axes, np.linspace(ends[0], ends[1], 400), mean=mean, std=std, linewidth=1.2)
            axes.set_xlim(*ends)
            axes.set_ylim(bottom=0)
    page.handles.append(_dotted("normal distribution of the same deviation"))
    return page.finish()


def normalised_densities(data: PlotData, row: Plot) -> Figure:
    """The same densities with values and densities in [0, 1], all in one panel."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(data, row, width=8.0, height=4.4, notes=[IN_THE_CENTRE, note])
    axes = page.panels[0, 0]
    known = [(group, bins) for group in groups if (bins := central_bins(group.digest)) is not None]
    for group, bins in known:
        edges, density = _normalised(bins)
        axes.stairs(density, edges, **group.line, linewidth=1.7, baseline=None)
    if known:
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05)
        name(axes, x="value: 0 is the first bin's edge, 1 the last one's", y="density over its largest")
    else:
        empty(axes, NO_VALUES)
    page.handles += [group.handle() for group in groups]
    return page.finish()


def both_densities(data: PlotData, row: Plot) -> Figure:
    """For each group the raw density, the normalised one, and one against the other bin by bin."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(data, row, len(groups), 3, width=4.2, height=3.0, notes=[IN_THE_CENTRE, note])
    for (raw, unit, both), group in zip(page.panels, groups, strict=True):
        bins = central_bins(group.digest)
        _draw_density(raw, group, bins)
        _draw_density(unit, group, bins and _normalised(bins), x="value, in [0, 1]", y="density, in [0, 1]")
        if bins is None:
            empty(both, NO_VALUES)
        else:
            both.plot(bins[1], _normalised(bins)[1], group.mark, color=group.color, markersize=3.5)
            both.set_xlim(left=0)
            both.set_ylim(0, 1.05)
            scale_numbers(both, "x", max_ticks=4)
            name(both, x="raw density", y="normalised density")
        for axes, words in ((raw, "raw"), (unit, "normalised"), (both, "one against the other")):
            name(axes, title=f"{group.label}: {words}")
    return page.finish()


def _draw_density(axes: Axes, group: Group, bins: Bins | None, *, x: str = "value", y: str = "density") -> bool:
    """Whether there is one."""
    if bins is None:
        empty(axes, NO_VALUES)
        return False
    edges, density = bins
    axes.stairs(density, edges, fill=True, color=group.color, alpha=0.35)
    axes.stairs(density, edges, color=group.color, linewidth=1.4, baseline=None)
    axes.set_xlim(float(edges[0]), float(edges[-1]))
    axes.set_ylim(bottom=0)
    for which in ("x", "y"):
        scale_numbers(axes, which, max_ticks=5)
    name(axes, x=x, y=y)
    return True


def central_bins(digest: Digest | None) -> Bins | None:
    """Edges and density of bins that hold all but a hundredth of the finite values at either end; None without any.

    A few values far away would squeeze all others into one bin. The density is that of all finite values.
    """
    if digest is None or not digest.has_values or not np.isfinite(digest.values).any():
        return None
    is_finite = np.isfinite(digest.values)
    values, ends = digest.values[is_finite], np.cumsum(digest.counts[is_finite])
    low, high = (float(values[np.searchsorted(ends, part * ends[-1])]) for part in (0.01, 0.99))
    bins = linear_bins(digest, NUM_BINS, low=low, high=high)
    edges, held = _joined(digest, bins.edges, bins.counts)
    return edges, held / int(ends[-1]) / np.diff(edges)


def _normalised(bins: Bins) -> Bins:
    """Bins moved to [0, 1], and the density over its largest."""
    edges, density = bins
    return (edges - edges[0]) / (edges[-1] - edges[0]), density / (float(density.max(initial=0.0)) or 1.0)


def normal_fit(data: PlotData, row: Plot) -> Figure:
    """Quantiles of each group against those of the normal distribution of its mean and deviation, in deviations."""
    groups, _ = groups_of(data, row, with_values=True)
    num_columns = min(2, len(groups))
    page = page_of(data, row, math.ceil(len(groups) / num_columns), num_columns, width=4.8, height=3.8)
    for axes in page.panels.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, group in zip(page.panels.flat, groups, strict=False):
        fit = None if group.digest is None else fit_normal(group.digest)
        if fit is None or not fit.observed.size or fit.mean is None or not fit.std:
            name(axes, title=group.label)
            empty(axes, "no values that differ")
            continue
        expected, observed = ((points - fit.mean) / fit.std for points in (fit.theoretical, fit.observed))
        axes.axline((0, 0), slope=1, color=GREY, linewidth=1.2, linestyle=":")
        axes.plot(expected, observed, group.mark, color=group.color, markersize=4)
        words = f"largest distance of the cumulative distributions: {fit.ks_distance:.3g}"
        name(axes, title=f"{group.label}\n{words}")
        name(axes, x="quantile of a normal distribution, in deviations", y="quantile of the values, in deviations")
        for which in ("x", "y"):
            scale_numbers(axes, which)
    page.handles.append(_dotted("a normal distribution lies on this line"))
    return page.finish()
