"""Which octaves hold the values, above the ranges that formats can hold?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.patches import Patch

from ranktape.analyze.numerics.distributions.occupancy import NARROW_FORMATS
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.views.palette import BLUE, SKY
from ranktape.analyze.views.plots.axes import name_rows, scale_powers, scale_shares
from ranktape.analyze.views.plots.heat_maps import Grid, Scale, add_colorbar, draw_cells, name_rows_of, special_handles
from ranktape.analyze.views.plots.octaves import exponents, filled
from ranktape.analyze.views.plots.style import PANEL_SIZE, SEQUENTIAL, TEXT_SIZE, Heading, empty, finish, key, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.groups import Group

BANDS = tuple(name for name in NARROW_FORMATS if name != "int8")
"""Formats whose ranges are drawn; those of integers depend on their scale alone."""


def draw_occupancy(groups: Sequence[tuple[Group, NDArray[np.float64] | None]], *, heading: Heading) -> Figure:
    """Part of the values of each group in each octave, and below it the octaves that formats reach.

    The numbers are those of `distributions.octave_shares`; None where no value is known.
    """
    figure, panels = page(2, 1, panel_width=10.0, panel_height=3.1, height_ratios=(1.25, 1), share_x=True)
    axes, bands = panels[:, 0]
    known = [(group, shares) for group, shares in groups if shares is not None and shares.any()]
    if not known:
        empty(axes, "no finite values other than zero are known")
        bands.set_axis_off()
        return finish(figure, heading)
    everything = np.stack([shares for _, shares in known])
    inside = filled(everything)
    places = exponents()[inside]
    for group, shares in known:
        held = np.where(shares[inside] > 0, shares[inside], np.nan)
        axes.plot(
            places + 0.5,
            held,
            color=group.color,
            linestyle=group.dashes,
            marker=group.mark,
            markersize=4,
            linewidth=1.7,
        )
    _finish_bands(axes, bands, low=int(places[0]), high=int(places[-1]) + 1)
    axes.tick_params(labelbottom=False)
    scale_shares(axes, "y", everything[everything > 0])
    axes.set_ylabel("share of values", fontsize=TEXT_SIZE)
    return finish(figure, heading, handles=[*(group.handle(has_mark=True) for group, _ in groups), *_band_handles()])


def draw_octave_map(grids: Sequence[Grid], *, row_label: str, heading: Heading) -> Figure:
    """For each row the part of its values in each octave, one panel beside the other, and below what formats reach.

    `values` of the grids are over all octaves of `octaves.exponents`; of columns without names.
    """
    num_rows = max(len(grid.rows) for grid in grids)
    height = min(4.5, max(2.4, 1.2 + 0.09 * num_rows))
    figure, panels = page(
        2,
        len(grids),
        panel_width=5.6,
        panel_height=(height + 2.3) / 2,
        height_ratios=(height, 2.3),
        share_x="col",
    )
    shown = np.concatenate([grid.values for grid in grids])
    positive = shown[shown > 0]
    scale = Scale(kind="share", label="share of the row's values")
    if not positive.size:
        for axes, bands in panels.T:
            empty(axes, "no finite values other than zero are known")
            bands.set_axis_off()
        return finish(figure, heading)
    norm = Normalize(max(-7.0, math.log10(float(positive.min()))), math.log10(float(positive.max())))
    inside = filled(np.nan_to_num(shown))
    places = exponents()[inside]
    for index, (grid, (axes, bands)) in enumerate(zip(grids, panels.T, strict=True)):
        part = Grid(title=grid.title, values=grid.values[:, inside], rows=grid.rows, columns=())
        extent = (places[0], places[-1] + 1, len(grid.rows) - 0.5, -0.5)
        colors = mpl.colormaps[SEQUENTIAL]
        draw_cells(axes, part, scale=scale, norm=norm, colors=colors, extent=extent)
        axes.set_title(grid.title, fontsize=PANEL_SIZE)
        _finish_bands(axes, bands, low=int(places[0]), high=int(places[-1]) + 1, is_named=index == 0)
        name_rows_of(axes, grid.rows, height=height)
        axes.tick_params(labelbottom=False)
        axes.set_ylabel(row_label if index == 0 else "", fontsize=TEXT_SIZE)
    add_colorbar(figure, list(panels[0]), norm=norm, colors=mpl.colormaps[SEQUENTIAL], scale=scale)
    return finish(
        figure, heading, handles=[*special_handles(shown[:, inside], scale, zero="no value"), *_band_handles()]
    )


def draw_bands(axes: Axes, *, low: float, high: float, is_named: bool = True) -> None:
    """From where to where formats reach without a scale: normal numbers dark, subnormal ones light."""
    for row, name in enumerate(BANDS):
        one = FORMATS[name]
        ends = [math.log2(value) for value in (one.min_subnormal, one.min_normal, one.maximum)]
        subnormal, normal, largest = (min(max(end, low), high) for end in ends)
        axes.barh(row, normal - subnormal, left=subnormal, height=0.62, color=SKY, hatch="////", edgecolor="white")
        axes.barh(row, largest - normal, left=normal, height=0.62, color=BLUE, edgecolor="white")
    name_rows(axes, BANDS if is_named else [""] * len(BANDS))


def _band_handles() -> list[Patch]:
    normal, subnormal = Patch(facecolor=BLUE), Patch(facecolor=SKY, hatch="////", edgecolor="white")
    key(normal, "normal numbers of a format")
    key(subnormal, "its subnormal ones")
    return [normal, subnormal]


def _finish_bands(axes: Axes, bands: Axes, *, low: int, high: int, is_named: bool = True) -> None:
    for one in (axes, bands):
        scale_powers(one, "x", [low, high])
    draw_bands(bands, low=bands.get_xlim()[0], high=bands.get_xlim()[1], is_named=is_named)
    bands.set_xlabel("|x|", fontsize=TEXT_SIZE)
