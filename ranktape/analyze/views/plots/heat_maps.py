"""Heat maps of figures in the cells of two fields: layers against ranks, iterations, samples or octaves.

Cells of which nothing is known, zeros and infinities have colours of their own, so that the scale is left to the rest.
Where a plot has more columns than can be seen, neighbours are drawn as one, with the largest of their figures: what
stands out stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from ranktape.analyze.views.plots.axes import powers_between, share_text, thinned
from ranktape.analyze.views.plots.style import (
    INFINITE_COLOR,
    INK,
    MISSING_COLOR,
    PANEL_SIZE,
    SEQUENTIAL,
    SMALL_SIZE,
    TEXT_SIZE,
    ZERO_COLOR,
    Heading,
    diverging,
    finish,
    key,
    page,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MAX_COLUMNS, MAX_ROWS = 256, 160
"""Cells that are drawn; of more, neighbours are one."""

MAX_WRITTEN_COLUMNS, MAX_WRITTEN_ROWS = 6, 12
"""Cells up to which the figures are written into them."""

LIGHT_FROM = 0.6
"""Part of the colour map from which letters on it are dark."""

ROW_INCHES = 0.3
"""Distance of two names beside a vertical axis, at least."""

MIN_TICKS = 3
"""Beside the colours: two of a logarithmic scale do not say what lies between them."""

OUTSIDE = "outside"
"""What the row of all that is outside of the stack is called."""

LETTER_INCHES = 0.085
"""Width of a letter beside an axis, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What the colours of a heat map mean."""

    kind: str
    """`share` of a whole, `magnitude`, `factor`, as its log2, or `octaves`, a distance."""
    label: str
    """Beside the colours."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """One panel: figures of rows and columns."""

    title: str
    """Above it."""
    values: NDArray[np.float64]
    """NaN where nothing is known."""
    rows: Sequence[str]
    """Names from top to bottom."""
    columns: Sequence[str]
    """Names from left to right."""


def draw_heat_maps(
    grids: Sequence[Grid], *, scale: Scale, row_label: str, column_label: str, heading: Heading, unit: str = "columns"
) -> Figure:
    """Panels side by side in the same colours; `unit` is what columns that are drawn as one are called."""
    drawn = [_thinned_out(grid) for grid in grids]
    num_rows, num_columns = (max(grid.values.shape[axis] for grid in drawn) for axis in (0, 1))
    width = min(8.0, max(4.6, 2.6 + 0.055 * num_columns))
    height = min(7.0, max(3.0, 1.5 + 0.075 * num_rows))
    figure, panels = page(1, len(drawn), panel_width=width, panel_height=height)
    shown = np.concatenate([grid.values.reshape(-1) for grid in drawn])
    colors = _colors(scale)
    # Magnitudes of forward and backward have little in common: each has colours of its own.
    parts = [grid.values for grid in drawn] if scale.kind == "magnitude" else [shown] * len(drawn)
    norms = [_norm(values, scale) for values in parts]
    for index, (axes, grid, norm) in enumerate(zip(panels[0], drawn, norms, strict=True)):
        draw_cells(axes, grid, scale=scale, norm=norm, colors=colors)
        axes.set_title(grid.title, fontsize=PANEL_SIZE)
        axes.set_xlabel(column_label, fontsize=TEXT_SIZE)
        axes.set_ylabel(row_label if index == 0 else "", fontsize=TEXT_SIZE)
        _name_columns(axes, grid.columns, width=width)
        name_rows_of(axes, grid.rows, height=height)
        _write_figures(axes, grid, scale=scale, norm=norm)
        if scale.kind == "magnitude" and _is_colored(grid.values, scale).any():
            add_colorbar(figure, [axes], norm=norm, colors=colors, scale=scale)
        if np.isnan(grid.values).all():
            say(axes, "nothing is known of any cell")
    if scale.kind != "magnitude" and _is_colored(shown, scale).any():
        add_colorbar(figure, list(panels[0]), norm=norms[0], colors=colors, scale=scale)
    size = max(math.ceil(before.values.shape[1] / MAX_COLUMNS) for before in grids)
    which = "the one farthest from 1 x" if scale.kind == "factor" else "the largest of their figures"
    note: tuple[str, ...] = (f"Each column is {size} neighbouring {unit}: {which}.",) if size > 1 else ()
    row_size = max(math.ceil(before.values.shape[0] / MAX_ROWS) for before in grids)
    note += (f"Each row is {row_size} neighbouring ones: {which}.",) if row_size > 1 else ()
    marked = Heading(title=heading.title, subtitle=heading.subtitle, notes=(*note, *heading.notes))
    return finish(figure, marked, handles=special_handles(shown, scale))


def draw_cells(axes: Axes, grid: Grid, *, scale: Scale, norm: Normalize, colors: Colormap, extent: Any = None) -> None:
    """The cells: first those with colours of their own, then the others."""
    values = grid.values
    place: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "upper", "extent": extent}
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("0.7")
    axes.patch.set(facecolor=MISSING_COLOR, hatch="////", edgecolor="0.85")
    special = np.where(np.isinf(values) & (scale.kind != "factor"), 1.0, np.where(values == 0, 0.0, np.nan))
    if scale.kind == "factor":
        special = np.full(values.shape, np.nan)
    axes.imshow(
        np.ma.masked_invalid(special), cmap=ListedColormap([ZERO_COLOR, INFINITE_COLOR]), vmin=0, vmax=1, **place
    )
    is_colored = _is_colored(values, scale)
    axes.imshow(np.ma.masked_where(~is_colored, _transformed(values, scale)), cmap=colors, norm=norm, **place)


def add_colorbar(figure: Figure, panels: Sequence[Axes], *, norm: Normalize, colors: Colormap, scale: Scale) -> None:
    """The colours and what they mean, right of the panels."""
    # As long as the panels are high.
    aspect = 8 * panels[0].get_window_extent().height / figure.dpi
    mappable = ScalarMappable(norm=norm, cmap=colors)
    bar = figure.colorbar(mappable, ax=list(panels), pad=0.02, fraction=0.05, aspect=aspect)
    bar.set_label(scale.label, fontsize=TEXT_SIZE)
    low, high = norm.vmin or 0.0, norm.vmax or 1.0
    if scale.kind == "share":
        powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if low - 1e-9 <= power <= high + 1e-9]
        ticks: list[float] = [*map(float, powers[:: max(1, len(powers) // 7)])]
        names = [share_text(10.0**tick) for tick in ticks]
        if len(ticks) < MIN_TICKS:
            ticks = [low, (low + high) / 2, high]
            names = [share_text(10.0**tick) for tick in ticks]
    elif scale.kind == "octaves":
        ticks = [low + (high - low) * part / 4 for part in range(5)]
        names = [f"{tick:.3g}" for tick in ticks]
    else:
        ticks = [float(power) for power in powers_between(low, high, max_ticks=9)]
        names = [_power_name(int(tick), scale) for tick in ticks]
        if len(ticks) < MIN_TICKS:
            ticks = [low, (low + high) / 2, high]
            names = [f"{2.0**tick:.3g}" for tick in ticks]
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_major_formatter(FixedFormatter(names))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=SMALL_SIZE)


def special_handles(values: NDArray[np.float64], scale: Scale, *, zero: str = "exactly 0") -> list[Any]:
    """Entries of the legend for the colours beside the scale that occur."""
    handles: list[Any] = []
    if np.isnan(values).any():
        handles.append(key(Patch(facecolor=MISSING_COLOR, hatch="////", edgecolor="0.75"), "no record"))
    if scale.kind != "factor":
        if (values == 0).any():
            handles.append(key(Patch(facecolor=ZERO_COLOR, edgecolor="0.75"), zero))
        if np.isinf(values).any():
            handles.append(key(Patch(facecolor=INFINITE_COLOR, edgecolor="0.75"), "infinite"))
    return handles


def _power_name(power: int, scale: Scale) -> str:
    if scale.kind == "factor" and abs(power) <= 6:  # noqa: PLR2004 - short enough to be read at once
        return f"{2**power:g} x" if power >= 0 else f"1/{2**-power} x"
    return f"$2^{{{power}}}$"


def _transformed(values: NDArray[np.float64], scale: Scale) -> NDArray[np.float64]:
    if scale.kind in {"factor", "octaves"}:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log10(values) if scale.kind == "share" else np.log2(values))


def _is_colored(values: NDArray[np.float64], scale: Scale) -> NDArray[np.bool_]:
    if scale.kind == "factor":
        return ~np.isnan(values)
    return np.isfinite(values) & (values > 0)


def _norm(values: NDArray[np.float64], scale: Scale) -> Normalize:
    known = _transformed(values[_is_colored(values, scale)], scale)
    known = known[np.isfinite(known)]
    if scale.kind == "factor":
        reach = max(1.0, float(np.abs(known).max(initial=0.0)))
        return Normalize(-reach, reach)
    low, high = (float(known.min()), float(known.max())) if known.size else (-1.0, 0.0)
    if scale.kind == "octaves":
        return Normalize(0.0, max(high, 1e-6))
    # Of figures that hardly differ, a difference must not look like a large one.
    least = 1.0 if scale.kind == "magnitude" else 0.3
    if high - low < least:
        low, high = (
            (high - least, high) if scale.kind == "share" else ((low + high - least) / 2, (low + high + least) / 2)
        )
    return Normalize(low, high)


def _colors(scale: Scale) -> Colormap:
    return diverging() if scale.kind == "factor" else mpl.colormaps[SEQUENTIAL]


def _thinned_out(grid: Grid) -> Grid:
    values, rows, columns = grid.values, list(grid.rows), list(grid.columns)
    for axis, most in ((1, MAX_COLUMNS), (0, MAX_ROWS)):
        size = math.ceil(values.shape[axis] / most)
        if size <= 1:
            continue
        starts = np.arange(0, values.shape[axis], size)
        # Of factors the one that is farthest from none, whichever way.
        largest, smallest = (ufunc.reduceat(values, starts, axis=axis) for ufunc in (np.fmax, np.fmin))
        values = np.where(-smallest > largest, smallest, largest)
        names = rows if axis == 0 else columns
        names[:] = [names[start] for start in starts]
    return Grid(title=grid.title, values=values, rows=rows, columns=columns)


def _name_columns(axes: Axes, names: Sequence[str], *, width: float) -> None:
    longest = max(map(len, names), default=1)
    places, shown = thinned(names, max_names=max(1, int(0.75 * width / ((longest + 2) * LETTER_INCHES))))
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_major_formatter(FixedFormatter(shown))


def name_rows_of(axes: Axes, names: Sequence[str], *, height: float) -> None:
    """Names of some rows, as many as fit into so many inches."""
    # The first row stands for itself where it is outside of the stack.
    extra = [0] if len(names) > 1 and names[0] == OUTSIDE else []
    places, shown = thinned(names[len(extra) :], max_names=max(2, int(height / 0.3)))
    named = {place + len(extra): name for place, name in zip(places, shown, strict=True)}
    if extra:
        room = ROW_INCHES * len(names) / height
        named = {0: names[0]} | {place: name for place, name in named.items() if place >= room}
    axes.yaxis.set_major_locator(FixedLocator(list(named)))
    axes.yaxis.set_major_formatter(FixedFormatter(list(named.values())))


def _write_figures(axes: Axes, grid: Grid, *, scale: Scale, norm: Normalize) -> None:
    """The figures themselves, where there are few cells."""
    if grid.values.shape[1] > MAX_WRITTEN_COLUMNS or grid.values.shape[0] > MAX_WRITTEN_ROWS:
        return
    for (row, column), value in np.ndenumerate(grid.values):
        if math.isnan(value):
            continue
        is_special = scale.kind != "factor" and (value == 0 or math.isinf(value))
        part = 1.0 if is_special else float(norm(float(_transformed(np.array(value), scale))))
        is_dark = part < LIGHT_FROM if scale.kind != "factor" else abs(part - 0.5) > 0.3  # noqa: PLR2004 - its ends
        color = "white" if is_dark else INK
        axes.text(column, row, cell_text(value, scale), ha="center", va="center", fontsize=SMALL_SIZE, color=color)


def cell_text(value: float, scale: Scale) -> str:
    """A figure as it is written into its cell."""
    if scale.kind == "share":
        return share_text(value)
    return f"{2**value:.3g} x" if scale.kind == "factor" and abs(value) < 1000 else f"{value:.3g}"  # noqa: PLR2004
