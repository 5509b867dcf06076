"""Draws what recipes keep of the products of layers: by module, over the iterations, and against bits.

A number is the signal to noise ratio of a product of quantised operands against that of the recorded ones, of several
calls together: squares of products and of errors are added up. What loses nothing is infinite.
"""

# Shapes: S = iterations, M = modules.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ranktape.analyze.identity import natural, places_of
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.views.plots.axes import scale_numbers, scale_whole, set_ticks
from ranktape.analyze.views.plots.groups import page_of
from ranktape.analyze.views.plots.heat_maps import Grid, Scale, add_colorbar, draw_cells, layer_names, special_handles
from ranktape.analyze.views.plots.style import COLORS, INK, MARKS, MAX_GROUPS, SMALL_SIZE, key, name, plain, say

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
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

SIDE_BITS = 0.12
"""Distance of two recipes along the axis of bits, at least."""

BAND = 0.13
"""How dark what lies between the worst and the best module is."""

Ratios = Mapping[tuple[Any, ...], float]
"""The ratio in dB of each group, by the values of its fields; groups of which nothing is known are not there."""


def by_module(data: PlotData, row: Plot) -> Figure:
    """A panel for each product: modules, or layers of large models, against recipes."""
    modules, found = modules_of(data), ratios_of(data, "product", "recipe", "module")
    recipes = [*data.replayed.recipes, *([RECORDED] if RECORDED in data.replayed.column("recipe") else [])]
    grids = []
    for product in products_of(data):
        columns = [_row(found, (product, recipe), modules) for recipe in recipes]
        grids.append(Grid(product, np.array(columns).T, modules, recipes))
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
    ordered = Grid(grid.title, grid.values[order], [layer_names([layers[place]])[0] for place in order], grid.columns)
    return _together(ordered, np.array([known.index(layers[place]) for place in order]))


def _together(grid: Grid, groups: NDArray[np.int64]) -> Grid:
    """Rows that follow one another and have one number as one, under the name of the first: the lowest of each."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    names = [grid.rows[start] for start in starts.tolist()]
    return Grid(grid.title, np.fmin.reduceat(grid.values, starts, axis=0), names, grid.columns)


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
        draw_cells(axes, values, scale=SQNR, norm=norm)
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
    page.handles += special_handles(np.where(np.isinf(shown), 0.0, shown), SQNR)
    return page.finish()


def over_iterations(data: PlotData, row: Plot) -> Figure:
    """A panel for each product: of each recipe the median module, the range of all, and its worst one, which is named.

    A point is of all calls of an iteration together; the worst module is so over all iterations.
    """
    recipes, note = _first(data)
    modules, steps = modules_of(data), sorted(set(data.replayed.column("iteration")))
    products = products_of(data)
    found = ratios_of(data, "product", "recipe", "iteration", "module")
    whole = ratios_of(data, "product", "recipe", "module")
    page = page_of(data, row, 1, len(products), width=4.4, height=3.4, notes=[note], sharey=True)
    for panel, (axes, product) in enumerate(zip(page.panels[0], products, strict=True)):
        name(axes, title=product, x="iteration", y="" if panel else SQNR.label)
        worst: dict[str, list[str]] = {}
        for index, recipe in enumerate(recipes):
            total = np.array(_row(whole, (product, recipe), modules))
            values_SM = np.array([_row(found, (product, recipe, step), modules) for step in steps])
            if not np.isfinite(values_SM).any():
                continue
            lowest = int(np.nanargmin(total))
            worst.setdefault(modules[lowest], []).append(recipe)
            _draw_course(axes, steps, values_SM, worst=lowest, index=index)
        scale_whole(axes, steps, max_ticks=7)
        scale_numbers(axes, "y")
        said = [f"{plain(one)} in {', '.join(map(plain, some))}" for one, some in worst.items()]
        page.notes.append(f"Worst module of {product}: {'; '.join(said)}." if said else f"{product}: nothing is known.")
    page.handles += [_handle(index, recipe) for index, recipe in enumerate(recipes)]
    page.handles += [
        key(Line2D([], [], color=INK, linewidth=1.6), "median module"),
        key(Line2D([], [], color=INK, linewidth=1.2, linestyle=":"), "worst module"),
        key(Patch(facecolor=INK, alpha=BAND), "from the worst to the best"),
    ]
    return page.finish()


def _draw_course(axes: Axes, steps: Sequence[int], values_SM: NDArray[np.float64], *, worst: int, index: int) -> None:
    finite = np.where(np.isfinite(values_SM), values_SM, np.nan)
    known = ~np.isnan(finite).all(axis=1)
    places, shown = np.array(steps)[known], finite[known]
    look: dict[str, Any] = {"color": COLORS[index], "marker": MARKS[index]}
    axes.fill_between(places, *np.nanpercentile(shown, [0, 100], axis=1), alpha=BAND, linewidth=0, color=COLORS[index])
    axes.plot(places, np.nanmedian(shown, axis=1), linewidth=1.6, markersize=5, **look)
    axes.plot(places, shown[:, worst], linewidth=1.2, linestyle=":", markersize=3, **look)


def against_bits(data: PlotData, row: Plot) -> Figure:
    """A panel for each product: for each recipe a mark at its bits, and how far its modules spread."""
    recipes, note = _first(data)
    products, modules = products_of(data), modules_of(data)
    place_of = _places({recipe.name: recipe.bits for recipe in data.recipes})
    found = ratios_of(data, "product", "recipe", "module")
    reading = "A mark is the median module; the thick line holds half of the modules, the thin one all."
    page = page_of(data, row, 1, len(products), width=4.0, height=3.4, notes=[note, reading], sharey=True)
    for panel, (axes, product) in enumerate(zip(page.panels[0], products, strict=True)):
        name(axes, title=product, x="bits of an element, with its scales", y="" if panel else SQNR.label)
        for index, recipe in enumerate(recipes):
            values = np.array(_row(found, (product, recipe), modules))
            if not np.isfinite(values).any():
                continue
            low, first, middle, third, high = np.percentile(values[np.isfinite(values)], [0, 25, 50, 75, 100])
            place, color = place_of[recipe], COLORS[index]
            axes.vlines(place, low, high, linewidth=1.0, color=color)
            axes.vlines(place, first, third, linewidth=4.0, alpha=0.5, color=color)
            axes.plot([place], [middle], MARKS[index], color=color, markersize=7, markeredgecolor="white", zorder=3)
        scale_whole(axes, range(math.floor(min(place_of.values())), math.ceil(max(place_of.values())) + 1), max_ticks=9)
        scale_numbers(axes, "y")
    page.handles += [_handle(index, recipe) for index, recipe in enumerate(recipes)]
    return page.finish()


def _places(bits_of: Mapping[str, float]) -> dict[str, float]:
    """Where along the axis of bits recipes are drawn: those with nearly the same side by side."""
    found: dict[str, float] = {}
    for recipe in sorted(bits_of, key=bits_of.__getitem__):
        found[recipe] = max(bits_of[recipe], max(found.values(), default=0.0) + SIDE_BITS)
    return found


def modules_of(data: PlotData) -> list[str]:
    """The modules whose products were replayed, layers.8 before layers.73."""
    return sorted(set(data.replayed.column("module")), key=lambda module: (natural(module), module))


def products_of(data: PlotData) -> list[str]:
    """The products that were computed again."""
    return [group.key["product"] for group in data.replayed.groups(["product"])]


def ratios_of(data: PlotData, *fields: str) -> Ratios:
    """The ratio in dB of all calls of each group together; infinite where nothing is lost."""
    groups = {tuple(group.key.values()): group.exact.sqnr for group in data.replayed.groups(fields)}
    return {key: ratio for key, ratio in groups.items() if ratio is not None}


def _row(found: Ratios, start: tuple[Any, ...], modules: Sequence[str]) -> list[float]:
    return [found.get((*start, module), math.nan) for module in modules]


def _first(data: PlotData) -> tuple[Sequence[str], str]:
    """As many recipes as can be told apart, and what is said of the others."""
    names = data.replayed.recipes
    return names[:MAX_GROUPS], f"The first {MAX_GROUPS} of {len(names)} recipes." if len(names) > MAX_GROUPS else ""


def _handle(index: int, recipe: str) -> Artist:
    return key(Line2D([], [], color=COLORS[index], marker=MARKS[index], linewidth=1.6, markersize=5), plain(recipe))
