"""Draws heat maps: layers against ranks, iterations, samples or binades, and modules against recipes.

Cells without data, zeros, infinities and NaN have colours of their own, which the colour scale does not contain. If
there are too many rows or columns, neighbours are combined into one, with the most extreme of their metrics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ranktape.analyze.identity import natural, places_of
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.views import INFINITE_COLOR, MISSING_COLOR, NAN_COLOR, ZERO_COLOR
from ranktape.analyze.views.plots.axes import (
    band_handles,
    draw_bands,
    factor_text,
    power_text,
    powers_between,
    set_ticks,
    share_text,
    thinned,
)
from ranktape.analyze.views.plots.data import exponents, filled
from ranktape.analyze.views.plots.groups import page_of
from ranktape.analyze.views.plots.style import (
    INK,
    SEQUENTIAL,
    SMALL_SIZE,
    TEXT_SIZE,
    diverging,
    empty,
    key,
    name,
    plain,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.style import Page
    from ranktape.analyze.views.plots.table import Plot

MAX_ROWS, MAX_COLUMNS = 160, 256
"""The largest numbers of rows and columns that are drawn. If there are more, neighbours are combined."""

MAX_WRITTEN_ROWS, MAX_WRITTEN_COLUMNS = 48, 8
"""The largest numbers of rows and columns with metrics written into the cells."""

MAX_MODULES = 48
"""The largest number of modules with a row each. If there are more, each row is a layer."""

ROW_INCHES, LETTER_INCHES = 0.2, 0.075
"""The approximate height of a row with a name, and width of a letter, in inches."""

MIN_CORNER_POINTS = 20
"""The size of a cell, in points, above which the mark for NaN is above the number instead of in the middle."""

OUTSIDE = "outside"
"""The name of the row for tensors outside of the layer stack."""


class Scale(NamedTuple):
    """The meaning of the colours of a heat map, and the label of the colour bar.

    The kind is `share`, `magnitude`, `factor` (as its base-2 logarithm), or `decibel` (a ratio).
    """

    kind: str
    label: str

    @property
    def is_log(self) -> bool:
        """Whether the scale is logarithmic; zero and infinity have colours of their own then."""
        return self.kind in {"share", "magnitude"}

    def logs(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values on the colour scale, or their logarithms."""
        if not self.is_log:
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log10(values) if self.kind == "share" else np.log2(values))

    def has_color(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each value has a colour of the scale."""
        return np.isfinite(values) & (values > 0) if self.is_log else ~np.isnan(values)

    def norm(self, values: NDArray[np.float64]) -> Normalize:
        """The limits of the colour scale for these values."""
        known = self.logs(values[self.has_color(values)])
        known = known[np.isfinite(known)]
        if self.kind == "factor":
            reach = max(1.0, float(np.abs(known).max(initial=0.0)))
            return Normalize(-reach, reach)
        low, high = (float(known.min()), float(known.max())) if known.size else (-1.0, 0.0)
        # Has a minimum width, so that small differences do not look large.
        least = {"magnitude": 1.0, "decibel": 6.0}.get(self.kind, 0.3)
        if high - low < least:
            both = low + high
            low, high = (high - least, high) if self.kind == "share" else ((both - least) / 2, (both + least) / 2)
        return Normalize(low, high)

    def ticks(self, norm: Normalize) -> tuple[list[float], list[str]]:
        """The positions and labels of the ticks of the colour bar."""
        low, high = norm.vmin or 0.0, norm.vmax or 0.0
        if self.kind == "decibel":
            found = MaxNLocator(8, integer=True).tick_values(low, high)
            places = [float(place) for place in found if low <= place <= high]
        else:
            places = [*map(float, powers_between(low, high, max_ticks=9))]
            # Fewer than three powers do not show the scale between them.
            places = places if len(places) > 2 else [low, (low + high) / 2, high]  # noqa: PLR2004
        return places, [self._word(place) for place in places]

    def _word(self, place: float) -> str:
        if self.kind in {"share", "decibel"}:
            return share_text(10.0**place) if self.kind == "share" else f"{place:.0f}"
        if not place.is_integer():
            return f"{2.0**place:.3g}{' x' if self.kind == 'factor' else ''}"
        return factor_text(int(place)) if self.kind == "factor" else power_text(int(place))

    def text(self, value: float) -> str:
        """A metric as text for its cell."""
        if self.kind == "share":
            return share_text(value)
        if self.kind == "decibel":
            return f"{value:.1f}"
        return f"{2**value:.3g} x" if self.kind == "factor" and abs(value) < 1000 else f"{value:.3g}"  # noqa: PLR2004

    def ink(self, value: float, norm: Normalize) -> str:
        """A text colour that is legible on the colour of a metric."""
        if self.is_log and not (0 < value < math.inf):
            return INK
        part = float(norm(float(self.logs(np.array(value)))))
        is_dark = abs(part - 0.5) > 0.3 if self.kind == "factor" else part < 0.6  # noqa: PLR2004 - ends of the maps
        return "white" if is_dark else INK

    @property
    def colors(self) -> Colormap:
        """The colour map, from low to high."""
        return diverging() if self.kind == "factor" else mpl.colormaps[SEQUENTIAL]

    def standing_out(self, values: NDArray[np.float64], starts: NDArray[np.int64], axis: int) -> NDArray[np.float64]:
        """The metric of combined neighbours: the lowest ratio in dB, otherwise the value of largest magnitude."""
        largest, smallest = (ufunc.reduceat(values, starts, axis=axis) for ufunc in (np.fmax, np.fmin))
        return smallest if self.kind == "decibel" else np.where(-smallest > largest, smallest, largest)


CELLS: Mapping[str, tuple[str, Scale]] = {
    "underflow": ("underflow", Scale("share", "share of the cell's elements")),
    "absmax": ("overflow.absmax", Scale("magnitude", "largest magnitude")),
}
"""The metrics of heat maps: the name in `PlotData.pooled`, and the colour scale."""


class Grid(NamedTuple):
    """A panel: its title, metrics (NaN if there is no data), and the names of rows and columns."""

    title: str
    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    nan: NDArray[np.bool_] | None = None
    """Whether the tensors of each cell contain NaN, which metrics ignore; None if none does."""

    @property
    def has_nan(self) -> NDArray[np.bool_]:
        """Whether the tensors of each cell contain NaN."""
        return np.zeros(self.values.shape, dtype=bool) if self.nan is None else self.nan

    @property
    def is_unknown(self) -> NDArray[np.bool_]:
        """Whether each cell has no data."""
        return np.isnan(self.values) & ~self.has_nan

    def thinned(self, scale: Scale) -> Grid:
        """The grid with neighbours combined, if there are more rows or columns than can be drawn."""
        found = self
        for axis, most in enumerate((MAX_ROWS, MAX_COLUMNS)):
            size = math.ceil(found.values.shape[axis] / most)
            if size > 1:
                found = found.together(scale, np.arange(0, found.values.shape[axis], size), axis)
        return found

    def together(self, scale: Scale, starts: NDArray[np.int64], axis: int = 0) -> Grid:
        """The grid with the rows or columns from each start to the next combined under the name of the first."""
        names = [self.rows, self.columns]
        names[axis] = [names[axis][start] for start in starts.tolist()]
        has_nan = np.logical_or.reduceat(self.has_nan, starts, axis=axis)
        return Grid(self.title, scale.standing_out(self.values, starts, axis), names[0], names[1], has_nan)

    @property
    def is_written(self) -> bool:
        """Whether metrics are written into the cells."""
        return len(self.rows) <= MAX_WRITTEN_ROWS and len(self.columns) <= MAX_WRITTEN_COLUMNS

    @property
    def is_upright(self) -> bool:
        """Whether the names of columns are texts, which are drawn vertically."""
        return self.is_written and any(not one[:1].isdigit() for one in self.columns)


def layer_map(data: PlotData, row: Plot, *, field: str, metric: str) -> Figure:
    """A metric of layers against an integer field, or against samples."""
    pool, scale = CELLS[metric]
    operations, rows = data.operations(), layer_names(data.values_of("layer_idx"))
    if field == "sample":
        columns, label = data.samples.labels()
        found = [Grid(one, data.samples.grid(one), rows, columns, data.samples.has_nan(one)) for one in operations]
        grids = [grid for grid in found if not np.isnan(grid.values).all()] or found[:1]
    else:
        columns, label = [str(int(column)) for column in data.values_of(field)], field
        grids = [
            Grid(one, grid_of(data, pool, field=field, operation=one), rows, columns, _nan_in(data, field, one))
            for one in operations
        ]
    page = page_of(data, row, 1, len(grids), **size_of(grids, scale), with_limits=scale.kind == "share")
    return draw_heat_maps(page, grids, scale=scale, labels=("layer", label), unit=f"{field}s")


def layer_names(layers: Sequence[int]) -> list[str]:
    """The names of rows of layers."""
    return [OUTSIDE if layer < 0 else str(layer) for layer in layers]


def grid_of(data: PlotData, metric: str, *, field: str, operation: str) -> NDArray[np.float64]:
    """A metric of `PlotData.pooled` for each layer and each value of an integer field."""
    num_rows, num_columns = (len(data.values_of(one)) for one in ("layer_idx", field))
    numbers = data.codes("layer_idx") * num_columns + data.codes(field)
    chosen = np.where(data.mask(operation=operation), numbers, -1)
    return data.pooled(metric, chosen, num_groups=num_rows * num_columns).reshape(num_rows, num_columns)


def _nan_in(data: PlotData, field: str, operation: str) -> NDArray[np.bool_]:
    return np.asarray(grid_of(data, "nan", field=field, operation=operation) > 0)


def rank_deviation(data: PlotData, row: Plot) -> Figure:
    """The absmax of each rank relative to the median rank, by layer."""
    layers, ranks = data.values_of("layer_idx"), [str(rank) for rank in data.values_of("rank")]
    has_nan = np.logical_or.reduce([_nan_in(data, "rank", one) for one in data.operations()])
    title = "all tensors that several ranks recorded"
    grids = [Grid(title, rank_deviations(data, layers=layers), layer_names(layers), ranks, has_nan)]
    scale = Scale("factor", "absmax over that of the median rank")
    page = page_of(data, row, 1, 1, **size_of(grids, scale))
    return draw_heat_maps(page, grids, scale=scale, labels=("layer", "rank"), unit="ranks")


SITE_OF_RANKS = ("iteration", "microbatch", "call", "module", "operation", "phase", "tensor_name", "layer_idx")
"""The fields that identify a tensor across ranks."""


def rank_deviations(data: PlotData, *, layers: Sequence[int]) -> NDArray[np.float64]:
    """For each layer and rank, the base-2 logarithm of absmax over the median rank's, for the most extreme tensor.

    NaN if no other rank has the same tensor.
    """
    sites, site_of = data.combined(*SITE_OF_RANKS)
    logs = np.full((len(sites), len(data.values_of("rank"))), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        known = np.log2(data.metric("absmax"))
    logs[site_of, data.codes("rank")] = np.where(np.isfinite(known), known, np.nan)
    found = np.full((len(layers), logs.shape[1]), np.nan)
    rows = {layer: row for row, layer in enumerate(layers)}
    for site in np.flatnonzero((~np.isnan(logs)).sum(axis=1) > 1).tolist():
        apart, row = logs[site] - np.nanmedian(logs[site]), found[rows[sites[site][-1]]]
        is_farther = np.isnan(row) | (np.abs(apart) > np.abs(row))
        row[is_farther & ~np.isnan(apart)] = apart[is_farther & ~np.isnan(apart)]
    return found


SQNR = Scale("decibel", "SQNR, dB")


def recipe_map(data: PlotData, row: Plot) -> Figure:
    """A panel for each product: modules, or layers of large models, against recipes.

    A cell is the signal-to-noise ratio of a product of quantised operands relative to that of the recorded operands.
    Squares of products and errors are summed over all calls. The ratio is infinite if nothing is lost.
    """
    replayed = data.replayed
    modules = sorted(set(replayed.column("module")), key=lambda module: (natural(module), module))
    groups = {tuple(one.key.values()): one.exact for one in replayed.groups(("product", "recipe", "module"))}
    recipes = [*replayed.recipes, *([RECORDED] if RECORDED in replayed.column("recipe") else [])]
    rows, columns = ([plain(one) for one in names] for names in (modules, recipes))
    grids, note = [], ""
    for product in (group.key["product"] for group in replayed.groups(["product"])):
        cells = [[groups.get((product, recipe, module)) for recipe in recipes] for module in modules]
        # The ratio is infinite if nothing is lost, and None if there is only NaN.
        values = [[math.nan if one is None or one.sqnr is None else one.sqnr for one in own] for own in cells]
        has_nan = [[one is not None and one.num_lost > 0 for one in own] for own in cells]
        grids.append(Grid(product, np.array(values), rows, columns, np.array(has_nan)))
    if len(modules) > MAX_MODULES:
        grids = [_by_layer(data, grid, modules) for grid in grids]
        size = math.ceil(len(grids[0].rows) / MAX_ROWS)
        note = f"Each row is {'a layer' if size == 1 else f'{size} neighbouring layers'}, and shows its worst module."
    # The limits exclude the recorded products, whose ratio is far above that of all recipes.
    tried = np.stack([grid.values for grid in grids])[..., [recipe != RECORDED for recipe in recipes]]
    page = page_of(data, row, 1, len(grids), notes=[note], **size_of(grids, SQNR), sharey=True)
    return draw_heat_maps(page, grids, scale=SQNR, labels=("", ""), unit="recipes", norm=SQNR.norm(tried))


def _by_layer(data: PlotData, grid: Grid, modules: Sequence[str]) -> Grid:
    """The grid with a row for each layer, which shows its worst module."""
    layer_of = dict(zip(data.records.column("module").tolist(), places_of(data.records), strict=True))
    found = [layer_of[module] for module in modules]
    order = sorted(range(len(found)), key=lambda index: found[index])
    layers = [found[index] for index in order]
    ordered = Grid(grid.title, grid.values[order], layer_names(layers), grid.columns, grid.has_nan[order])
    return ordered.together(SQNR, np.flatnonzero(np.diff(layers, prepend=-2)))


def size_of(grids: Sequence[Grid], scale: Scale) -> dict[str, Any]:
    """The size of each of the panels side by side, in inches."""
    drawn = [grid.thinned(scale) for grid in grids]
    first = drawn[0]
    num_rows, num_columns = (max(grid.values.shape[axis] for grid in drawn) for axis in (0, 1))
    # The names of rows are to the left of the first panel, the colour bar to the right of the last one.
    beside = LETTER_INCHES * max(len(one) for one in (*first.rows, OUTSIDE)) + 0.4
    below = LETTER_INCHES * max(len(one) for one in first.columns) if first.is_upright else 0.0
    if first.is_written:
        longest = max((len(scale.text(value)) for grid in drawn for value in grid.values.flat), default=1)
        inside = 0.4 + max(0.5, LETTER_INCHES * longest + 0.12) * num_columns
        height, most = 0.7 + ROW_INCHES * num_rows, 12.0
    else:
        inside, height, most = 2.6 + 0.055 * num_columns, 1.5 + 0.075 * num_rows, 7.0
    # Leaves room for the heading above all panels, and for the labels of the colour bar.
    width = max(6.4 / len(grids), inside + (beside + 0.9) / len(grids))
    return {"width": min(8.0, width), "height": min(most, max(3.0, height)) + below}


def draw_heat_maps(
    page: Page,
    grids: Sequence[Grid],
    *,
    scale: Scale,
    labels: tuple[str, str],
    unit: str,
    norm: Normalize | None = None,
) -> Figure:
    """Panels side by side with a common colour scale, whose limits are `norm`, or those of the metrics if None.

    `labels` are the labels of rows and columns; `unit` is the noun for columns that are combined.
    """
    drawn, size = [grid.thinned(scale) for grid in grids], size_of(grids, scale)
    shown = np.concatenate([grid.values.reshape(-1) for grid in drawn])
    # Magnitudes of forward and backward differ widely, so each panel has its own scale.
    has_own = scale.kind == "magnitude"
    norms = [norm or scale.norm(grid.values if has_own else shown) for grid in drawn]
    for index, (axes, grid, own) in enumerate(zip(page.panels[0], drawn, norms, strict=True)):
        draw_cells(axes, grid, scale=scale, norm=own)
        name(axes, title=grid.title, x=labels[1], y=labels[0] if index == 0 else "")
        if grid.is_upright:
            set_ticks(axes.xaxis, range(len(grid.columns)), grid.columns)
            axes.tick_params(axis="x", labelrotation=90)
        else:
            room = int(0.75 * size["width"] / ((max(map(len, grid.columns), default=1) + 2) * LETTER_INCHES))
            set_ticks(axes.xaxis, *thinned(grid.columns, max_names=max(1, room)))
        _name_rows(axes, grid.rows, height=size["height"])
        if grid.is_written:
            _write_metrics(axes, grid, scale=scale, norm=own)
        if has_own and scale.has_color(grid.values).any():
            add_colorbar(page.figure, [axes], norm=own, scale=scale)
        if grid.is_unknown.all():
            say(axes, "no data")
    if not has_own and scale.has_color(shown).any():
        add_colorbar(page.figure, list(page.panels[0]), norm=norms[0], scale=scale)
    which = {"factor": "the one farthest from 1 x", "decibel": "the lowest"}.get(scale.kind, "the largest")
    for axis, (thing, things, most) in enumerate((("row", "rows", MAX_ROWS), ("column", unit, MAX_COLUMNS))):
        count = max(math.ceil(grid.values.shape[axis] / most) for grid in grids)
        if count > 1:
            page.notes.insert(0, f"Each {thing} is {count} neighbouring {things}: {which} of their metrics.")
    page.handles += special_handles(drawn, scale)
    return page.finish()


def draw_cells(axes: Axes, grid: Grid, *, scale: Scale, norm: Normalize, extent: Any = None) -> None:
    """Draw the cells: first those with special colours, then the others."""
    place: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "upper", "extent": extent}
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("0.7")
    axes.patch.set(facecolor=MISSING_COLOR, hatch="////", edgecolor="white")
    values = grid.values
    special = np.full(values.shape, np.nan)
    if scale.is_log:
        special = np.where(np.isinf(values), 1.0, np.where(values == 0, 0.0, np.nan))
    # A cell in which all values are NaN has no metric; a cell with some NaN gets a mark.
    is_nan = grid.has_nan & np.isnan(values)
    special[is_nan] = 2.0
    own = ListedColormap([ZERO_COLOR, INFINITE_COLOR, NAN_COLOR])
    axes.imshow(np.ma.masked_invalid(special), cmap=own, vmin=0, vmax=2, **place)
    # An infinite ratio is drawn like the best one, since it is not a problem.
    placed = np.minimum(values, norm.vmax or 0.0) if scale.kind == "decibel" else scale.logs(values)
    axes.imshow(np.ma.masked_where(~scale.has_color(values) | is_nan, placed), cmap=scale.colors, norm=norm, **place)
    rows, columns = np.nonzero(grid.has_nan & ~is_nan)
    if rows.size:
        box = axes.get_window_extent()
        size = min(box.width / values.shape[1], box.height / values.shape[0]) * 72 / axes.figure.dpi
        heights = rows - 0.32 if size > MIN_CORNER_POINTS else rows
        mark: dict[str, Any] = {"marker": "X", "color": NAN_COLOR, "edgecolors": "white", "linewidths": 0.6}
        axes.scatter(columns, heights, s=min(30.0, (0.5 * size) ** 2), **mark)


def add_colorbar(figure: Figure, panels: Sequence[Axes], *, norm: Normalize, scale: Scale) -> None:
    """Draw the colour bar to the right of the panels."""
    # Makes it as high as the panels.
    aspect = 8 * panels[0].get_window_extent().height / figure.dpi
    mappable = ScalarMappable(norm=norm, cmap=scale.colors)
    bar = figure.colorbar(mappable, ax=list(panels), pad=0.02, fraction=0.05, aspect=aspect)
    bar.set_label(scale.label, fontsize=TEXT_SIZE)
    set_ticks(bar.ax.yaxis, *scale.ticks(norm))
    bar.ax.tick_params(labelsize=SMALL_SIZE)


def special_handles(grids: Sequence[Grid], scale: Scale, *, zero: str = "exactly 0") -> list[Any]:
    """Legend entries for the special colours that occur."""

    def occurs(is_so: Callable[[Grid], Any]) -> bool:
        return any(is_so(grid).any() for grid in grids)

    patch = functools.partial(Patch, edgecolor="0.75")
    known: list[tuple[bool, Any, str]] = [
        (
            occurs(lambda grid: grid.is_unknown),
            Patch(facecolor=MISSING_COLOR, hatch="////", edgecolor="white"),
            "no record",
        ),
        (scale.is_log and occurs(lambda grid: grid.values == 0), patch(facecolor=ZERO_COLOR), zero),
        (scale.is_log and occurs(lambda grid: np.isinf(grid.values)), patch(facecolor=INFINITE_COLOR), "infinite"),
        (occurs(lambda grid: grid.has_nan & np.isnan(grid.values)), patch(facecolor=NAN_COLOR), "NaN"),
        (
            occurs(lambda grid: grid.has_nan & ~np.isnan(grid.values)),
            Line2D([], [], linestyle="", markersize=6, marker="X", color=NAN_COLOR),
            "NaN among the values",
        ),
    ]
    return [key(artist, words) for is_there, artist, words in known if is_there]


def _name_rows(axes: Axes, names: Sequence[str], *, height: float) -> None:
    """Label as many rows as fit into the height, in inches."""
    # The row for tensors outside of the stack is always labelled.
    extra = [0] if len(names) > 1 and names[0] == OUTSIDE else []
    places, shown = thinned(names[len(extra) :], max_names=max(2, int(height / ROW_INCHES)))
    named = {place + len(extra): one for place, one in zip(places, shown, strict=True)}
    if extra:
        room = ROW_INCHES * len(names) / height
        named = {0: names[0]} | {place: one for place, one in named.items() if place >= room}
    set_ticks(axes.yaxis, list(named), list(named.values()))


def _write_metrics(axes: Axes, grid: Grid, *, scale: Scale, norm: Normalize) -> None:
    """Write the metrics into the cells."""
    for (row, column), value in np.ndenumerate(grid.values):
        place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_SIZE - 1}
        if math.isnan(value) and grid.has_nan[row, column]:
            axes.text(column, row, "NaN", color="white", **place)
        elif not math.isnan(value):
            axes.text(column, row, scale.text(value), color=scale.ink(value, norm), **place)


def binade_map(data: PlotData, row: Plot) -> Figure:
    """For each layer, the share of its values in each binade, with the ranges of formats below."""
    names, operations = layer_names(data.values_of("layer_idx")), data.operations()
    height = min(4.5, max(2.4, 1.2 + 0.09 * len(names)))
    ratios: dict[str, Any] = {"height_ratios": (height, 2.3), "sharex": "col"}
    page = page_of(data, row, 2, len(operations), width=5.6, height=(height + 2.3) / 2, **ratios)
    found = [data.binade_shares(one) for one in operations]
    shown = np.concatenate(found)
    positive = shown[shown > 0]
    scale = Scale("share", "share of the row's values")
    if not positive.size:
        for axes, bands in page.panels.T:
            empty(axes, "no finite values other than zero are known")
            bands.set_axis_off()
        return page.finish()
    norm = Normalize(max(-7.0, math.log10(float(positive.min()))), math.log10(float(positive.max())))
    inside = filled(np.nan_to_num(shown))
    places = exponents()[inside]
    grids = [Grid(one, shares[:, inside], names, ()) for one, shares in zip(operations, found, strict=True)]
    for grid, (axes, bands) in zip(grids, page.panels.T, strict=True):
        is_first = grid is grids[0]
        draw_cells(axes, grid, scale=scale, norm=norm, extent=(places[0], places[-1] + 1, len(names) - 0.5, -0.5))
        draw_bands(axes, bands, places, is_named=is_first)
        _name_rows(axes, names, height=height)
        axes.tick_params(labelbottom=False)
        name(axes, title=grid.title, y="layer" if is_first else "")
    add_colorbar(page.figure, list(page.panels[0]), norm=norm, scale=scale)
    page.handles += [*special_handles(grids, scale, zero="no value"), *band_handles()]
    return page.finish()
