"""Draws the distributions of the values of groups: their shape, their range in binades, and their density.

Groups with values of very different sizes share a panel: for the shape, they are normalized to mean 0 and standard
deviation 1; for the range, magnitudes are counted by binade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from ranktape.analyze.numerics.distributions import fit_normal, linear_bins
from ranktape.analyze.views import GREY
from ranktape.analyze.views.plots.axes import (
    band_handles,
    draw_bands,
    mark_limits,
    scale_decades,
    scale_numbers,
    scale_powers,
    scale_shares,
)
from ranktape.analyze.views.plots.data import binade_counts, exponents, filled
from ranktape.analyze.views.plots.groups import Group, groups_of, page_of
from ranktape.analyze.views.plots.style import empty, key, name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest
    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.table import Plot

    Bins = tuple[NDArray[np.float64], NDArray[np.float64]]
    """Edges of bins, and the value of each bin."""

MAX_DEVIATIONS, SMALLEST_DENSITY = 8.0, 1e-5
"""The limits of the shape: standard deviations to both sides, and the smallest density."""

NUM_BINS = 128
"""The number of bins of a linear axis. A shape of few values has fewer."""

MAX_CODES, MIN_REPEATS = 2048, 8
"""Values count as low-precision if they have at most this many distinct values, each repeated so often on average."""

NO_VALUES, ONLY_ZEROS = "no finite values are known", "no finite values other than zero are known"


def distributions(data: PlotData, row: Plot) -> Figure:
    """Shape and range of each group; the legend also lists groups without finite values."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(data, row, 1, 2, width=5.6, height=4.0, notes=[note])
    page.handles += [group.handle() for group in groups]
    if _draw_shapes(page.panels[0, 0], groups):
        page.handles.append(_dotted("normal distribution"))
    _draw_ranges(page.panels[0, 1], groups)
    return page.finish()


def _draw_shapes(axes: Axes, groups: Sequence[Group]) -> bool:
    """Draw the shapes; returns whether any group has one."""
    name(axes, title="shape, in units of each group's own standard deviation")
    known = [(group, group.digest) for group in groups if group.digest is not None and group.digest.has_values]
    shapes = [(group, standardised(digest)) for group, digest in known if digest.statistics.std]
    if not shapes:
        empty(axes, NO_VALUES if all(group.digest is None for group in groups) else "all values are equal")
        return False
    for group, (edges, density) in shapes:
        axes.stairs(np.where(density > 0, density, np.nan), edges, **group.line, linewidth=1.7, baseline=None)
    _draw_normal(axes, np.linspace(-MAX_DEVIATIONS, MAX_DEVIATIONS, 201))
    axes.set_xlim(-MAX_DEVIATIONS, MAX_DEVIATIONS)
    scale_decades(axes)
    axes.set_ylim(SMALLEST_DENSITY, max(1.0, *(2 * float(density.max(initial=0.0)) for _, (_, density) in shapes)))
    scale_numbers(axes, "x", max_ticks=10)
    name(axes, x="(x - mean) / standard deviation", y="density")
    return True


def _draw_ranges(axes: Axes, groups: Sequence[Group]) -> None:
    name(axes, title="range, by binade", pad=20)
    if not any(group.digest is not None and group.digest.has_values for group in groups):
        empty(axes, NO_VALUES)
        return
    if (inside := _draw_binades(axes, groups)) is None:
        empty(axes, ONLY_ZEROS)
        return
    scale_powers(axes, "x", [inside[0], inside[-1] + 1])
    name(axes, x="|x|", y="share of values")
    mark_limits(axes, "x", min_distance=0.24)


def occupancy(data: PlotData, row: Plot) -> Figure:
    """The share of each group's values in each binade, with the ranges of formats below."""
    groups, note = groups_of(data, row, with_values=True)
    page = page_of(data, row, 2, 1, width=10.0, height=3.1, height_ratios=(1.25, 1), sharex=True, notes=[note])
    axes, bands = page.panels[:, 0]
    if (inside := _draw_binades(axes, groups)) is None:
        empty(axes, ONLY_ZEROS)
        bands.set_axis_off()
        return page.finish()
    draw_bands(axes, bands, inside)
    axes.tick_params(labelbottom=False)
    name(axes, y="share of values")
    page.handles += [*(group.handle(has_mark=True) for group in groups), *band_handles()]
    return page.finish()


def _draw_binades(axes: Axes, groups: Sequence[Group]) -> NDArray[np.int64] | None:
    """Draw a line for each group through the share of its elements in each binade.

    Returns the exponents from the first binade with values to the last; None if all are empty.
    """
    known = [
        (group, binade_counts(group.digest) / max(1, group.digest.tallies.num_elements))
        for group in groups
        if group.digest is not None and group.digest.has_values
    ]
    everything = np.stack([shares for _, shares in known]) if known else np.zeros((0, 1))
    if not everything.any():
        return None
    inside = filled(everything)
    for group, shares in known:
        drawn = np.where(shares[inside] > 0, shares[inside], np.nan)
        axes.plot(exponents()[inside] + 0.5, drawn, **group.line, marker=group.mark, markersize=3.5, linewidth=1.6)
    scale_shares(axes, "y", everything[everything > 0])
    return exponents()[inside]


def _draw_normal(axes: Axes, places: NDArray[np.float64], *, mean: float = 0, std: float = 1) -> None:
    fitted = np.exp(-(((places - mean) / std) ** 2) / 2) / std / math.sqrt(2 * math.pi)
    axes.plot(places, fitted, color=GREY, linewidth=1.2, linestyle=":")


def _dotted(label: str) -> Any:
    return key(Line2D([], [], color=GREY, linewidth=1.2, linestyle=":"), label)


def standardised(digest: Digest) -> Bins:
    """The edges of bins, in standard deviations from the mean, and the density of all finite values in them."""
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
    """The bins; for low-precision values, each empty bin between others is divided among its neighbours.

    Otherwise, bins narrower than the spacing of a format's numbers would show a comb that is not in the values.
    """
    values = digest.values[np.isfinite(digest.values)]
    held = np.flatnonzero(counts)
    if values.size > MAX_CODES or digest.tallies.num_elements < MIN_REPEATS * values.size or held.size < 2:  # noqa: PLR2004
        return edges, counts
    between = (edges[held[:-1] + 1] + edges[held[1:]]) / 2
    return np.concatenate([edges[held[:1]], between, edges[held[-1:] + 1]]), counts[held]


def densities(data: PlotData, row: Plot, *, panels: Sequence[str]) -> Figure:
    """For each group, the density of its values, the density normalised to [0, 1], or one against the other.

    Each group has panels of its own, since their units differ. If only normalised densities are drawn, all groups share
    a panel.
    """
    groups, note = groups_of(data, row, with_values=True)
    is_one = panels == ("normalised",)
    num_rows, num_columns = (len(groups), len(panels)) if len(panels) > 1 else (1, 1 if is_one else len(groups))
    size: dict[str, Any] = {
        "width": max(4.2, 10.0 / num_columns) if not is_one else 8.0,
        "height": 3.0 if len(panels) > 1 else 4.0,
    }
    notes = ["From the 1st to the 99th percentile of the values.", note]
    page = page_of(data, row, num_rows, num_columns, notes=notes, **size)
    cells = [(group, panel) for group in groups for panel in panels]
    every = [page.panels[0, 0]] * len(cells) if is_one else page.panels.flat
    for axes, (group, panel) in zip(every, cells, strict=True):
        bins = central_bins(group.digest)
        if not is_one:
            name(axes, title=f"{group.label}: {_PANEL_WORDS[panel]}" if len(panels) > 1 else group.label)
        if bins is None:
            if not axes.lines and not axes.patches:
                empty(axes, NO_VALUES)
            continue
        edges, density = bins
        unit = (edges - edges[0]) / (edges[-1] - edges[0]), density / (float(density.max(initial=0.0)) or 1.0)
        if panel == "both":
            axes.plot(density, unit[1], group.mark, color=group.color, markersize=3.5)
            axes.set_xlim(left=0)
            name(axes, x="raw density", y="normalised density")
        else:
            drawn, density = bins if panel == "raw" else unit
            axes.stairs(density, drawn, **group.line, linewidth=1.6, baseline=None)
            axes.set_xlim(float(drawn[0]), float(drawn[-1]))
            is_raw = panel == "raw"
            name(axes, x="value" if is_raw else "value, in [0, 1]", y="density" if is_raw else "density, in [0, 1]")
        if panel == "raw":
            axes.stairs(density, edges, fill=True, color=group.color, alpha=0.35)
            _draw_normal_of(axes, group.digest)
            scale_numbers(axes, "y", max_ticks=5)
        axes.set_ylim(0, None if panel == "raw" else 1.05)
        scale_numbers(axes, "x", max_ticks=5)
    page.handles += [group.handle() for group in groups] if is_one else []
    page.handles += [_dotted("normal distribution with the same standard deviation")] if "raw" in panels else []
    return page.finish()


_PANEL_WORDS = {"raw": "raw", "normalised": "normalised", "both": "one against the other"}


def _draw_normal_of(axes: Axes, digest: Digest | None) -> None:
    """Draw the normal distribution with the same mean and standard deviation, unless that is 0."""
    if digest is not None and digest.statistics.mean is not None and digest.statistics.std:
        places = np.linspace(*axes.get_xlim(), 400)
        _draw_normal(axes, places, mean=digest.statistics.mean, std=digest.statistics.std)
        axes.set_xlim(places[0], places[-1])


def central_bins(digest: Digest | None) -> Bins | None:
    """Edges and density of bins between the 1st and the 99th percentile; None if there are no finite values.

    Otherwise, a few outliers would squeeze all other values into one bin. The density is relative to all finite values.
    """
    if digest is None or not digest.has_values or not np.isfinite(digest.values).any():
        return None
    is_finite = np.isfinite(digest.values)
    values, ends = digest.values[is_finite], np.cumsum(digest.counts[is_finite])
    low, high = (float(values[np.searchsorted(ends, part * ends[-1])]) for part in (0.01, 0.99))
    bins = linear_bins(digest, NUM_BINS, low=low, high=high)
    edges, held = _joined(digest, bins.edges, bins.counts)
    return edges, held / int(ends[-1]) / np.diff(edges)


def normal_fit(data: PlotData, row: Plot) -> Figure:
    """Quantiles of each group against those of a normal distribution, in standard deviations from the mean."""
    groups, _ = groups_of(data, row, with_values=True)
    num_columns = min(2, len(groups))
    page = page_of(data, row, math.ceil(len(groups) / num_columns), num_columns, width=4.8, height=3.8)
    for axes in page.panels.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, group in zip(page.panels.flat, groups, strict=False):
        fit = None if group.digest is None else fit_normal(group.digest)
        if fit is None or not fit.observed.size or fit.mean is None or not fit.std:
            name(axes, title=group.label)
            empty(axes, "all values are equal")
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
