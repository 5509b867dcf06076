"""Draws heat maps of metrics in the cells of two fields: layers against ranks, iterations, samples or binades.

Cells of which nothing is known, zeros, infinities and NaN have colours of their own, so that the scale is left to the
rest.
Where a plot has more columns than can be seen, neighbours are drawn as one, with the largest of their metrics: what
stands out stays.
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

from ranktape.analyze.views.palette import INFINITE_COLOR, MISSING_COLOR, NAN_COLOR, ZERO_COLOR
from ranktape.analyze.views.plots.axes import (
    band_handles,
    draw_bands,
    factor_text,
    powers_between,
    set_ticks,
    share_text,
    thinned,
)
from ranktape.analyze.views.plots.groups import page_of, pooled, rank_deviations
from ranktape.analyze.views.plots.style import (
    INK,
    SEQUENTIAL,
    SMALL_SIZE,
    TEXT_SIZE,
    diverging,
    empty,
    key,
    name,
    say,
)
from ranktape.analyze.views.plots.tallies import exponents, filled, sample_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot
    from ranktape.analyze.views.plots.style import Page

_MOST = ((1, 256), (0, 160))
"""Columns and rows that are drawn, by axis; of more, neighbours are one."""

MAX_WRITTEN_COLUMNS, MAX_WRITTEN_ROWS = 6, 12
"""Cells up to which the metrics are written into them."""

NAN_MARK: dict[str, Any] = {
    "marker": "X",
    "color": NAN_COLOR,
    "edgecolors": "white",
    "linewidths": 0.6,
}
"""A cell of whose values some are NaN."""

MIN_CORNER_POINTS = 20
"""Size of a cell from which the mark stands above the number in it, and not in the middle."""

LIGHT_FROM = 0.6
"""Part of the colour map from which letters on it are dark."""

ROW_INCHES, LETTER_INCHES = 0.3, 0.085
"""Distance of two names beside a vertical axis, at least, and width of a letter beside a horizontal one, roughly."""

OUTSIDE = "outside"
"""What the row of all that is outside of the stack is called."""


class Scale(NamedTuple):
    """What the colours of a heat map mean, and what stands beside them.

    `share` of a whole, `magnitude`, `factor`, as its log2, or `decibel`, a ratio.
    """

    kind: str
    label: str

    def logs(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values as they are placed among the colours."""
        if self.kind in {"factor", "decibel"}:
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log10(values) if self.kind == "share" else np.log2(values))

    def has_color(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which values have one of the scale's colours."""
        if self.kind == "factor":
            return ~np.isnan(values)
        return np.isfinite(values) & ((values > 0) | (not self.has_zero))

    @property
    def has_zero(self) -> bool:
        """Whether zero is no number of the scale, but nothing at all."""
        return self.kind not in {"factor", "decibel"}

    def norm(self, values: NDArray[np.float64]) -> Normalize:
        """From where to where the colours go for these values."""
        known = self.logs(values[self.has_color(values)])
        known = known[np.isfinite(known)]
        if self.kind == "factor":
            reach = max(1.0, float(np.abs(known).max(initial=0.0)))
            return Normalize(-reach, reach)
        low, high = (float(known.min()), float(known.max())) if known.size else (-1.0, 0.0)
        # Of metrics that hardly differ, a difference must not look like a large one.
        least = {"magnitude": 1.0, "decibel": 6.0}.get(self.kind, 0.3)
        if high - low < least:
            both = low + high
            low, high = (high - least, high) if self.kind == "share" else ((both - least) / 2, (both + least) / 2)
        return Normalize(low, high)

    def ticks(self, low: float, high: float) -> tuple[list[float], list[str]]:
        """What stands beside the colours, and where."""
        if self.kind == "decibel":
            places = [place for place in MaxNLocator(8, integer=True).tick_values(low, high) if low <= place <= high]
            return places, [f"{place:.0f}" for place in places]
        if self.kind == "share":
            powers = [one for one in range(math.floor(low), math.ceil(high) + 1) if low - 1e-9 <= one <= high + 1e-9]
            places = [*map(float, powers[:: max(1, len(powers) // 7)])]
            names = [share_text(10.0**place) for place in places]
        else:
            whole = powers_between(low, high, max_ticks=9)
            places = [*map(float, whole)]
            names = [factor_text(one) if self.kind == "factor" else f"$2^{{{one}}}$" for one in whole]
        if len(places) < 3:  # noqa: PLR2004 - two of a logarithmic scale do not say what lies between them
            places = [low, (low + high) / 2, high]
            names = [share_text(10.0**place) if self.kind == "share" else f"{2.0**place:.3g}" for place in places]
        return places, names

    def text(self, value: float) -> str:
        """A metric as it is written into its cell."""
        if self.kind == "share":
            return share_text(value)
        if self.kind == "decibel":
            return f"{value:.1f}"
        return f"{2**value:.3g} x" if self.kind == "factor" and abs(value) < 1000 else f"{value:.3g}"  # noqa: PLR2004

    def ink(self, value: float, norm: Normalize) -> str:
        """The colour of letters that can be read in the cell of a metric."""
        if (value == 0 and self.has_zero) or (math.isinf(value) and self.kind != "factor"):
            return INK
        part = float(norm(float(self.logs(np.array(value)))))
        is_dark = part < LIGHT_FROM if self.kind != "factor" else abs(part - 0.5) > 0.3  # noqa: PLR2004 - its ends
        return "white" if is_dark else INK

    @property
    def colors(self) -> Colormap:
        """From little to much."""
        return diverging() if self.kind == "factor" else mpl.colormaps[SEQUENTIAL]


CELLS: Mapping[str, tuple[str, Scale]] = {
    "underflow": ("underflow", Scale("share", "share of the cell's elements")),
    "absmax": ("extreme", Scale("magnitude", "largest magnitude, unit of the tensor")),
}
"""Metrics of heat maps: what `pooled` calls them, and what the colours mean."""


class Grid(NamedTuple):
    """One panel: its title, metrics (NaN where nothing is known), and the names of rows and columns."""

    title: str
    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    has_nan: NDArray[np.bool_] | None = None
    """In which cells values are NaN, which no metric shows; None for none."""

    def thinned(self) -> Grid:
        """The same with neighbours as one, where there are more than can be drawn."""
        values, names, has_nan = self.values, [list(self.rows), list(self.columns)], self.has_nan
        for axis, most in _MOST:
            size = math.ceil(values.shape[axis] / most)
            if size > 1:
                starts = np.arange(0, values.shape[axis], size)
                # Of factors the one that is farthest from none, whichever way.
                largest, smallest = (ufunc.reduceat(values, starts, axis=axis) for ufunc in (np.fmax, np.fmin))
                values = np.where(-smallest > largest, smallest, largest)
                has_nan = None if has_nan is None else np.logical_or.reduceat(has_nan, starts, axis=axis)
                names[axis] = [names[axis][start] for start in starts]
        return Grid(self.title, values, names[0], names[1], has_nan)


def heat_map(data: PlotData, row: Plot, *, field: str, metric: str) -> Figure:
    """A metric of layers against a field of whole numbers, or against samples."""
    pool, scale = CELLS[metric]
    operations, layers = data.operations(), data.values_of("layer_idx")
    spoiled: Callable[[str], NDArray[np.bool_]] = functools.partial(_nan_in, data, field)
    if field == "sample":
        samples = data.passed.samples
        spoiled = functools.partial(samples.has_nan, layers=layers)
        columns, label = sample_names(samples)
        found = {one: samples.grid(operation=one, layers=layers) for one in operations}
        known = {one: values for one, values in found.items() if not np.isnan(values).all()}
        grids = known or {operations[0]: found[operations[0]]}
    else:
        columns, label = [str(int(column)) for column in data.values_of(field)], field
        grids = {one: grid_of(data, pool, field=field, operation=one) for one in operations}
    drawn = [Grid(title, cells, layer_names(layers), columns, spoiled(title)) for title, cells in grids.items()]
    start = _page_of_maps(data, row, drawn, with_limits=scale.kind == "share")
    return draw_heat_maps(start, drawn, scale=scale, labels=("layer", label), unit=f"{field}s")


def rank_deviation(data: PlotData, row: Plot) -> Figure:
    """Each rank against the median rank."""
    layers = data.values_of("layer_idx")
    ranks = [str(rank) for rank in data.values_of("rank")]
    values = rank_deviations(data, layers=layers)
    has_nan = np.logical_or.reduce([_nan_in(data, "rank", one) for one in data.operations()])
    grid = Grid("all tensors that several ranks have", values, layer_names(layers), ranks, has_nan)
    scale = Scale("factor", "absmax over that of the median rank")
    return draw_heat_maps(_page_of_maps(data, row, [grid]), [grid], scale=scale, labels=("layer", "rank"), unit="ranks")


def _nan_in(data: PlotData, field: str, operation: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = grid_of(data, "nan", field=field, operation=operation) > 0
    return found


def layer_names(layers: Sequence[int]) -> list[str]:
    """What rows of layers are called."""
    return [OUTSIDE if layer < 0 else str(layer) for layer in layers]


def grid_of(data: PlotData, metric: str, *, field: str, operation: str) -> NDArray[np.float64]:
    """A metric of `data.pooled` for each layer and value of a field of whole numbers."""
    num_rows, num_columns = (len(data.values_of(one)) for one in ("layer_idx", field))
    numbers = data.codes("layer_idx") * num_columns + data.codes(field)
    chosen = np.where(data.mask(operation=operation), numbers, -1)
    return pooled(data, metric, chosen, num_groups=num_rows * num_columns).reshape(num_rows, num_columns)


def size_of(grids: Sequence[Grid]) -> dict[str, Any]:
    """Inches of panels side by side for grids of so many cells."""
    num_rows, num_columns = (max(grid.thinned().values.shape[axis] for grid in grids) for axis in (0, 1))
    return {
        "width": min(8.0, max(4.6, 2.6 + 0.055 * num_columns)),
        "height": min(7.0, max(3.0, 1.5 + 0.075 * num_rows)),
    }


def _page_of_maps(data: PlotData, row: Plot, grids: Sequence[Grid], **heading: Any) -> Page:
    return page_of(data, row, 1, len(grids), **size_of(grids), **heading)


def draw_heat_maps(page: Page, grids: Sequence[Grid], *, scale: Scale, labels: tuple[str, str], unit: str) -> Figure:
    """Panels side by side in the same colours.

    `labels` stand beside rows and columns; `unit` is what columns that are drawn as one are called.
    """
    drawn, size, figure = [grid.thinned() for grid in grids], size_of(grids), page.figure
    shown = np.concatenate([grid.values.reshape(-1) for grid in drawn])
    spoiled = np.concatenate([_spoiled(grid).reshape(-1) for grid in drawn])
    # Magnitudes of forward and backward have little in common: each has colours of its own.
    has_own = scale.kind == "magnitude"
    norms = [scale.norm(grid.values if has_own else shown) for grid in drawn]
    for index, (axes, grid, norm) in enumerate(zip(page.panels[0], drawn, norms, strict=True)):
        draw_cells(axes, grid.values, scale=scale, norm=norm, has_nan=grid.has_nan)
        name(axes, title=grid.title, x=labels[1], y=labels[0] if index == 0 else "")
        longest = max(map(len, grid.columns), default=1)
        max_names = max(1, int(0.75 * size["width"] / ((longest + 2) * LETTER_INCHES)))
        places, names = thinned(grid.columns, max_names=max_names)
        set_ticks(axes.xaxis, places, names)
        _name_rows(axes, grid.rows, height=size["height"])
        _write_metrics(axes, grid, scale=scale, norm=norm)
        if has_own and scale.has_color(grid.values).any():
            add_colorbar(figure, [axes], norm=norm, scale=scale)
        if np.isnan(grid.values).all() and not _spoiled(grid).any():
            say(axes, "nothing is known of any cell")
    if not has_own and scale.has_color(shown).any():
        add_colorbar(figure, list(page.panels[0]), norm=norms[0], scale=scale)
    which = "the one farthest from 1 x" if scale.kind == "factor" else "the largest of their metrics"
    sizes = [max(math.ceil(grid.values.shape[axis] / most) for grid in grids) for axis, most in _MOST]
    words = (f"column is {sizes[0]} neighbouring {unit}", f"row is {sizes[1]} neighbouring ones")
    page.notes[:0] = [f"Each {one}: {which}." for one, together in zip(words, sizes, strict=True) if together > 1]
    page.handles += special_handles(shown, scale, has_nan=spoiled)
    return page.finish()


def _spoiled(grid: Grid) -> NDArray[np.bool_]:
    return np.zeros(grid.values.shape, dtype=bool) if grid.has_nan is None else grid.has_nan


def draw_cells(
    axes: Axes,
    values: NDArray[np.float64],
    *,
    scale: Scale,
    norm: Normalize,
    extent: Any = None,
    has_nan: NDArray[np.bool_] | None = None,
) -> None:
    """The cells: first those with colours of their own, then the others."""
    place: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "upper", "extent": extent}
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("0.7")
    axes.patch.set(facecolor=MISSING_COLOR, hatch="////", edgecolor="white")
    special = np.where(np.isinf(values), 1.0, np.where((values == 0) & scale.has_zero, 0.0, np.nan))
    if scale.kind == "factor":
        special = np.full(values.shape, np.nan)
    some_nan = np.zeros(values.shape, dtype=bool) if has_nan is None else has_nan
    # Where all values are NaN, the metric is not known; where some are, a mark stands in the cell.
    is_nan = some_nan & np.isnan(values)
    special[is_nan] = 2.0
    own = ListedColormap([ZERO_COLOR, INFINITE_COLOR, NAN_COLOR])
    axes.imshow(np.ma.masked_invalid(special), cmap=own, vmin=0, vmax=2, **place)
    colored = np.ma.masked_where(~scale.has_color(values) | is_nan, scale.logs(values))
    axes.imshow(colored, cmap=scale.colors, norm=norm, **place)
    rows, columns = np.nonzero(some_nan & ~is_nan)
    if rows.size:
        box = axes.get_window_extent()
        size = min(box.width / values.shape[1], box.height / values.shape[0]) * 72 / axes.figure.dpi
        heights = rows - 0.32 if size > MIN_CORNER_POINTS else rows
        axes.scatter(columns, heights, s=min(30.0, (0.5 * size) ** 2), **NAN_MARK)


def add_colorbar(figure: Figure, panels: Sequence[Axes], *, norm: Normalize, scale: Scale) -> None:
    """The colours and what they mean, right of the panels."""
    # As long as the panels are high.
    aspect = 8 * panels[0].get_window_extent().height / figure.dpi
    mappable = ScalarMappable(norm=norm, cmap=scale.colors)
    bar = figure.colorbar(mappable, ax=list(panels), pad=0.02, fraction=0.05, aspect=aspect)
    bar.set_label(scale.label, fontsize=TEXT_SIZE)
    set_ticks(bar.ax.yaxis, *scale.ticks(norm.vmin or 0.0, norm.vmax or 1.0))
    bar.ax.tick_params(labelsize=SMALL_SIZE)


def special_handles(
    values: NDArray[np.float64], scale: Scale, *, zero: str = "exactly 0", has_nan: NDArray[np.bool_] | None = None
) -> list[Any]:
    """Entries of the legend for the colours beside the scale that occur."""
    handles: list[Any] = []
    is_nan = np.zeros(values.shape, dtype=bool) if has_nan is None else has_nan
    if (np.isnan(values) & ~is_nan).any():
        handles.append(key(Patch(facecolor=MISSING_COLOR, hatch="////", edgecolor="white"), "no record"))
    if scale.kind != "factor":
        if (values == 0).any() and scale.has_zero:
            handles.append(key(Patch(facecolor=ZERO_COLOR, edgecolor="0.75"), zero))
        if np.isinf(values).any():
            handles.append(key(Patch(facecolor=INFINITE_COLOR, edgecolor="0.75"), "infinite"))
    if (is_nan & np.isnan(values)).any():
        handles.append(key(Patch(facecolor=NAN_COLOR, edgecolor="0.75"), "NaN"))
    if (is_nan & ~np.isnan(values)).any():
        handles.append(
            key(Line2D([], [], linestyle="", markersize=6, marker="X", color=NAN_COLOR), "NaN among the values")
        )
    return handles


def _name_rows(axes: Axes, names: Sequence[str], *, height: float) -> None:
    """Names of some rows, as many as fit into so many inches."""
    # The first row stands for itself where it is outside of the stack.
    extra = [0] if len(names) > 1 and names[0] == OUTSIDE else []
    places, shown = thinned(names[len(extra) :], max_names=max(2, int(height / ROW_INCHES)))
    named = {place + len(extra): one for place, one in zip(places, shown, strict=True)}
    if extra:
        room = ROW_INCHES * len(names) / height
        named = {0: names[0]} | {place: one for place, one in named.items() if place >= room}
    set_ticks(axes.yaxis, list(named), list(named.values()))


def _write_metrics(axes: Axes, grid: Grid, *, scale: Scale, norm: Normalize) -> None:
    """The metrics themselves, where there are few cells."""
    values, is_nan = grid.values, _spoiled(grid)
    if values.shape[1] > MAX_WRITTEN_COLUMNS or values.shape[0] > MAX_WRITTEN_ROWS:
        return
    for (row, column), value in np.ndenumerate(values):
        place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_SIZE}
        if is_nan[row, column] and math.isnan(value):
            axes.text(column, row, "NaN", color="white", **place)
        elif not math.isnan(value):
            axes.text(column, row, scale.text(value), color=scale.ink(value, norm), **place)


def binade_map(data: PlotData, row: Plot) -> Figure:
    """For each layer the part of its values in each binade, and below what formats reach."""
    names = layer_names(data.values_of("layer_idx"))
    grids = {one: data.passed.binades.shares(one) for one in data.operations()}
    height = min(4.5, max(2.4, 1.2 + 0.09 * len(names)))
    ratios: dict[str, Any] = {"height_ratios": (height, 2.3), "sharex": "col"}
    page = page_of(data, row, 2, len(grids), width=5.6, height=(height + 2.3) / 2, **ratios)
    shown = np.concatenate(list(grids.values()))
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
    for index, ((title, shares), (axes, bands)) in enumerate(zip(grids.items(), page.panels.T, strict=True)):
        extent = (places[0], places[-1] + 1, len(names) - 0.5, -0.5)
        draw_cells(axes, shares[:, inside], scale=scale, norm=norm, extent=extent)
        draw_bands(axes, bands, places, is_named=index == 0)
        _name_rows(axes, names, height=height)
        axes.tick_params(labelbottom=False)
        name(axes, title=title, y="layer" if index == 0 else "")
    add_colorbar(page.figure, list(page.panels[0]), norm=norm, scale=scale)
    page.handles += [*special_handles(shown[:, inside], scale, zero="no value"), *band_handles()]
    return page.finish()
