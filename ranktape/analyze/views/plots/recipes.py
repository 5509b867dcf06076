"""Draws what recipes keep of the products of layers, by module.

A number is the signal to noise ratio of a product of quantised operands against that of the recorded ones, of several
calls together: squares of products and of errors are added up. What loses nothing is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.identity import natural, places_of
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.views.plots.axes import set_ticks
from ranktape.analyze.views.plots.groups import page_of
from ranktape.analyze.views.plots.heat_maps import Grid, Scale, add_colorbar, draw_cells, layer_names, special_handles
from ranktape.analyze.views.plots.style import SMALL_SIZE, name, plain, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

SQNR = Scale("decibel", "SQNR, dB")
"""What the colours of the heat maps are."""

MAX_MODULES, MAX_LAYERS = 48, 160
"""Modules, and layers, that have a row each: of more modules a row is a layer, of more layers it is neighbours."""

ROW_INCHES, CELL_INCHES, LETTER_INCHES = 0.2, 0.55, 0.065
"""Height of a row with a name, width of a cell with a number, and of a small letter, roughly."""


def by_module(data: PlotData, row: Plot) -> Figure:
    """A panel for each product: modules, or layers of large models, against recipes."""
    modules = sorted(set(data.replayed.column("module")), key=lambda module: (natural(module), module))
    groups = {tuple(one.key.values()): one.exact for one in data.replayed.groups(("product", "recipe", "module"))}
    recipes = [*data.replayed.recipes, *([RECORDED] if RECORDED in data.replayed.column("recipe") else [])]
    grids = []
    for product in (group.key["product"] for group in data.replayed.groups(["product"])):
        cells = [[groups.get((product, recipe, module)) for recipe in recipes] for module in modules]
        # A ratio that is infinite loses nothing; of NaN alone there is none.
        values = [[math.nan if one is None or one.sqnr is None else one.sqnr for one in row] for row in cells]
        has_nan = [[one is not None and one.num_lost > 0 for one in row] for row in cells]
        grids.append(Grid(product, np.array(values), modules, recipes, np.array(has_nan)))
    note = ""
    if len(modules) > MAX_MODULES:
        grids = [_of_layers(data, grid) for grid in grids]
        size = math.ceil(len(grids[0].rows) / MAX_LAYERS)
        note = f"Each row is {'a layer' if size == 1 else f'{size} neighbouring layers'}: the worst module of it."
        grids = [_together(grid, np.arange(len(grid.rows)) // size) for grid in grids]
    return _draw_maps(data, row, grids, note)


def _of_layers(data: PlotData, grid: Grid) -> Grid:
    """One row for each layer, of its worst module."""
    layer_of = dict(zip(data.records.column("module").tolist(), places_of(data.records), strict=True))
    layers = [layer_of[module] for module in grid.rows]
    known = sorted(set(layers))
    order = np.argsort([known.index(layer) for layer in layers], kind="stable")
    names = [layer_names([layers[place]])[0] for place in order]
    assert grid.has_nan is not None
    ordered = Grid(grid.title, grid.values[order], names, grid.columns, grid.has_nan[order])
    return _together(ordered, np.array([known.index(layers[place]) for place in order]))


def _together(grid: Grid, groups: NDArray[np.int64]) -> Grid:
    """Rows that follow one another and have one number as one, under the name of the first: the lowest of each."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    names = [grid.rows[start] for start in starts.tolist()]
    assert grid.has_nan is not None
    has_nan = np.logical_or.reduceat(grid.has_nan, starts, axis=0)
    return Grid(grid.title, np.fmin.reduceat(grid.values, starts, axis=0), names, grid.columns, has_nan)


def _draw_maps(data: PlotData, row: Plot, grids: Sequence[Grid], note: str) -> Figure:
    """The panels side by side in the same colours, with the numbers where each row has room for its name."""
    rows, columns = ([plain(one) for one in names] for names in (grids[0].rows, grids[0].columns))
    has_room = len(rows) <= MAX_MODULES
    beside, below = (LETTER_INCHES * max(map(len, names)) + 0.4 for names in (rows, columns))
    inside = max(1.6, CELL_INCHES * len(columns))
    # The names of rows stand beside the first panel, the colours beside the last one.
    size: dict[str, Any] = {
        "width": inside + (beside + 0.9) / len(grids),
        "height": max(2.4, 0.5 + below + (ROW_INCHES * len(rows) if has_room else 8.0)),
    }
    page = page_of(data, row, 1, len(grids), notes=[note], sharey=True, **size)
    shown = np.stack([grid.values for grid in grids])
    # What the training's own rounding costs is far above all recipes.
    norm = SQNR.norm(shown[..., [recipe != RECORDED for recipe in grids[0].columns]])
    step = 1 if has_room else math.ceil(len(rows) / MAX_MODULES)
    for axes, grid in zip(page.panels[0], grids, strict=True):
        # What loses nothing is as good as the best: infinite is no alarm here.
        values = np.minimum(grid.values, norm.vmax or 0.0)
        draw_cells(axes, values, scale=SQNR, norm=norm, has_nan=grid.has_nan)
        name(axes, title=grid.title)
        set_ticks(axes.xaxis, range(len(columns)), columns)
        set_ticks(axes.yaxis, range(0, len(rows), step), rows[::step])
        axes.tick_params(axis="x", labelrotation=90)
        axes.tick_params(length=0)
        for (y, x), value in np.ndenumerate(grid.values) if has_room else ():
            if not math.isnan(value):
                place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_SIZE - 1}
                axes.text(x, y, SQNR.text(value), color=SQNR.ink(float(values[y, x]), norm), **place)
        if np.isnan(grid.values).all():
            say(axes, "nothing is known of any cell")
    if SQNR.has_color(shown).any():
        add_colorbar(page.figure, list(page.panels[0]), norm=norm, scale=SQNR)
    lost = np.stack([grid.has_nan for grid in grids if grid.has_nan is not None])
    page.handles += special_handles(np.where(np.isinf(shown), 0.0, shown), SQNR, has_nan=lost)
    return page.finish()
