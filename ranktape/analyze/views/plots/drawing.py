"""Draws each row of the table: finds its groups and metrics, and hands them to what draws such panels.

A function draws all plots that differ in their fields and metrics alone; its arguments are the selection, the row of
the table, and the row's options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.views.plots import boxes as box_plots
from ranktape.analyze.views.plots import lines as line_plots
from ranktape.analyze.views.plots.bands import draw_occupancy, draw_octave_map
from ranktape.analyze.views.plots.data import pooled
from ranktape.analyze.views.plots.distributions import (
    draw_distributions,
    draw_normal_fit,
    draw_normalised,
    draw_raw,
    draw_raw_against_normalised,
    octave_shares,
)
from ranktape.analyze.views.plots.groups import Grouping, group_by, subject_line
from ranktape.analyze.views.plots.heat_maps import OUTSIDE, Grid, Scale, draw_heat_maps
from ranktape.analyze.views.plots.losses import draw_loss_bars, draw_ratio_histogram, draw_upper_against_lower
from ranktape.analyze.views.plots.neighbours import draw_neighbouring_layers, draw_sample_differences
from ranktape.analyze.views.plots.overflow_layers import draw_overflow, table_of
from ranktape.analyze.views.plots.pairs import draw_pairs, read_pairs
from ranktape.analyze.views.plots.ranks import rank_deviations, rank_distances
from ranktape.analyze.views.plots.style import Heading, plain
from ranktape.analyze.views.plots.table import PLOTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

CELLS: Mapping[str, tuple[str, Scale]] = {
    "overflow": ("overflow", Scale(kind="share", label="share of the cell's elements")),
    "underflow": ("underflow", Scale(kind="share", label="share of the cell's elements")),
    "absmax": ("extreme", Scale(kind="magnitude", label="largest magnitude, unit of the tensor")),
    "std": ("std", Scale(kind="magnitude", label="standard deviation, unit of the tensor")),
}
"""Metrics of heat maps: what `pooled` calls them, and what the colours mean."""


def draw(name: str, data: PlotData) -> Figure:
    """The plot of that name, of a selection that has what it needs."""
    row = PLOTS[name]
    figure: Figure = globals()[row.function](data, row, **row.options)
    return figure


def heading_of(data: PlotData, row: Plot, *notes: str, with_limits: bool = False, title: str = "") -> Heading:
    """The title of a plot, and on which tensors it is; plots that count what is beyond limits say whose."""
    kept = tuple(note for note in notes if note)
    return Heading(title=title or row.title, subtitle=subject_line(data, with_limits=with_limits), notes=kept)


def distributions(data: PlotData, row: Plot) -> Figure:
    """Shape and range of each group."""
    found = group_by(data, *row.by, with_values=True, **row.of)
    return draw_distributions(found.groups, heading=heading_of(data, row, found.note))


def boxes(data: PlotData, row: Plot, *, panels: Sequence[box_plots.BoxPanel] = box_plots.GENERAL) -> Figure:
    """Box plots of metrics over the tensors of each group."""
    found = group_by(data, *row.by, max_groups=box_plots.MAX_BOXES, **row.of)
    return box_plots.draw_boxes(data, found.groups, panels=panels, heading=heading_of(data, row, found.note))


def box_shapes(data: PlotData, row: Plot) -> Figure:
    """Box plots of variance, skewness and kurtosis."""
    return boxes(data, row, panels=box_plots.SHAPES)


def lines(data: PlotData, row: Plot, *, field: str) -> Figure:
    """Metrics of each group along a field of whole numbers; those of layers are shapes, others what is lost too."""
    found = group_by(data, *row.by)
    is_shapes = field == "layer_idx"
    panels = line_plots.SHAPES if is_shapes else line_plots.LOSSES
    heading = heading_of(data, row, found.note, with_limits=not is_shapes)
    return line_plots.draw_lines(data, found.groups, field=field, panels=panels, heading=heading)


def occupancy(data: PlotData, row: Plot) -> Figure:
    """Shares of octaves of each group, above the ranges of formats."""
    return _occupancy(data, row, row.of)


def gradients(data: PlotData, row: Plot) -> Figure:
    """Shares of octaves of each gradient."""
    return _occupancy(data, row, {"tensor_name": data.gradient_names()})


def _occupancy(data: PlotData, row: Plot, of: Mapping[str, Any]) -> Figure:
    found = group_by(data, *row.by, with_values=True, **of)
    drawn = [(group, octave_shares(group.digest)) for group in found.groups]
    return draw_occupancy(drawn, heading=heading_of(data, row, found.note))


def octave_map(data: PlotData, row: Plot, *, field: str) -> Figure:
    """Shares of octaves of each value of a field of whole numbers."""
    octaves = data.passed.octaves[field]
    values = data.values_of(field)
    names = layer_names(values) if field == "layer_idx" else [str(int(value)) for value in values]
    grids = [
        Grid(title=operation, values=octaves.shares(operation), rows=names, columns=())
        for operation in data.operations()
    ]
    return draw_octave_map(grids, row_label={"layer_idx": "layer"}.get(field, field), heading=heading_of(data, row))


def heat_map(data: PlotData, row: Plot, *, field: str, metric: str) -> Figure:
    """A metric of layers against a field of whole numbers."""
    columns = [str(int(column)) for column in data.values_of(field)]
    grids = {one: grid_of(data, CELLS[metric][0], field=field, operation=one) for one in data.operations()}
    return _layer_map(data, row, grids, columns=columns, metric=metric, label=field, unit=f"{field}s")


def sample_map(data: PlotData, row: Plot, *, metric: str) -> Figure:
    """A metric of layers against samples."""
    layers, name = data.values_of("layer_idx"), CELLS[metric][0]
    samples = data.sample_metrics(name)
    grids = {one: samples.grid(name, operation=one, layers=layers) for one in data.operations()}
    known = {one: values for one, values in grids.items() if not np.isnan(values).all()}
    shown = known or dict(list(grids.items())[:1])
    return _layer_map(
        data, row, shown, columns=sample_names(data), metric=metric, label=sample_label(data), unit="samples"
    )


def _layer_map(
    data: PlotData,
    row: Plot,
    values: Mapping[str, np.ndarray[Any, Any]],
    *,
    columns: Sequence[str],
    metric: str,
    label: str,
    unit: str,
) -> Figure:
    layers = layer_names(data.values_of("layer_idx"))
    grids = [Grid(title=title, values=cells, rows=layers, columns=columns) for title, cells in values.items()]
    scale = CELLS[metric][1]
    heading = heading_of(data, row, with_limits=scale.kind == "share")
    return draw_heat_maps(grids, scale=scale, row_label="layer", column_label=label, unit=unit, heading=heading)


def layer_names(layers: Sequence[int]) -> list[str]:
    """What rows of layers are called."""
    return [OUTSIDE if layer < 0 else str(layer) for layer in layers]


def grid_of(data: PlotData, metric: str, *, field: str, operation: str) -> np.ndarray[Any, Any]:
    """A metric of `data.pooled` for each layer and value of a field of whole numbers."""
    num_rows, num_columns = (len(data.values_of(one)) for one in ("layer_idx", field))
    numbers = data.codes("layer_idx") * num_columns + data.codes(field)
    chosen = np.where(data.mask(operation=operation), numbers, -1)
    return pooled(data, metric, chosen, num_groups=num_rows * num_columns).reshape(num_rows, num_columns)


def sample_names(data: PlotData) -> list[str]:
    """What samples are called: the user's ids, or rank and place, or place."""
    return [
        plain(name, max_letters=12) if rank is None else f"{rank}:{name}"
        for rank, name in data.passed.samples.ordered()
    ]


def sample_label(data: PlotData) -> str:
    """What stands below an axis of samples."""
    return "rank : place in the batch" if data.passed.samples.is_by_rank else "sample"


def sample_differences(data: PlotData, row: Plot) -> Figure:
    """Each sample against the median sample."""
    found = [(operation, data.passed.samples.ratios(operation)) for operation in data.operations()]
    known = [(operation, ratios) for operation, ratios in found if not np.isnan(ratios).all()] or found[:1]
    names = sample_names(data) or ["none"]
    return draw_sample_differences(known, names=names, label=sample_label(data), heading=heading_of(data, row))


def _two_types(data: PlotData, row: Plot, *notes: str) -> tuple[Grouping, Heading]:
    """The groups of two quant types, which are named in the title."""
    types = data.two_quant_types()
    assert types is not None
    found = group_by(data, "quant_type", "operation", with_values=True, quant_type=list(types))
    return found, heading_of(data, row, *notes, title=f"{row.title}: {plain(types[0])} and {plain(types[1])}")


def distributions_of_two(data: PlotData, row: Plot) -> Figure:
    """Shape and range of two quant types."""
    found, heading = _two_types(data, row)
    return draw_distributions(found.groups, heading=heading)


def boxes_of_two(data: PlotData, row: Plot) -> Figure:
    """Box plots of two quant types."""
    found, heading = _two_types(data, row)
    return box_plots.draw_boxes(data, found.groups, panels=box_plots.ENDS, heading=heading)


def normal_fit(data: PlotData, row: Plot) -> Figure:
    """How normal two quant types are."""
    found, heading = _two_types(data, row)
    return draw_normal_fit(found.groups, heading=heading)


def pairs(data: PlotData, row: Plot) -> Figure:
    """The same tensors in two quant types."""
    types = data.two_quant_types()
    assert types is not None
    drawn, total = read_pairs(data, types), len(data.matched(types))
    note = f"{len(drawn)} of {total:,} tensors that were recorded in both, evenly chosen." if total > len(drawn) else ""
    return draw_pairs(drawn, types=types, heading=_two_types(data, row, note)[1])


def densities(data: PlotData, row: Plot, *, which: str) -> Figure:
    """Densities of the values: raw, normalised, or both."""
    found = group_by(data, *row.by, with_values=True, **row.of)
    heading = heading_of(data, row, "From the 1st to the 99th percentile of the values.", found.note)
    drawn = {"raw": draw_raw, "normalised": draw_normalised, "both": draw_raw_against_normalised}[which]
    return drawn(found.groups, heading=heading)


def neighbouring_layers(data: PlotData, row: Plot) -> Figure:
    """Each layer against the one before it."""
    return draw_neighbouring_layers(data, group_by(data, *row.by).groups, heading=heading_of(data, row))


def rank_deviation(data: PlotData, row: Plot) -> Figure:
    """Each rank against the median rank."""
    layers = data.values_of("layer_idx")
    grid = Grid(
        title="all tensors that several ranks have",
        values=rank_deviations(data, layers=layers),
        rows=layer_names(layers),
        columns=[str(rank) for rank in data.values_of("rank")],
    )
    scale = Scale(kind="factor", label="absmax over that of the median rank")
    return draw_heat_maps(
        [grid], scale=scale, row_label="layer", column_label="rank", unit="ranks", heading=heading_of(data, row)
    )


def rank_against_rank(data: PlotData, row: Plot) -> Figure:
    """Each rank against each other."""
    distances, size = rank_distances(data)
    names = [str(rank) for rank in data.values_of("rank")][::size]
    note = f"Each row and column is {size} neighbouring ranks, by what is farthest from the median." if size > 1 else ""
    grid = Grid(title="standard deviations of the same tensors", values=distances, rows=names, columns=names)
    scale = Scale(kind="octaves", label="mean |log2| of their ratio, in octaves")
    return draw_heat_maps(
        [grid], scale=scale, row_label="rank", column_label="rank", unit="ranks", heading=heading_of(data, row, note)
    )


def loss_bars(data: PlotData, row: Plot) -> Figure:
    """Overflow and underflow of each group."""
    found = group_by(data, *row.by)
    return draw_loss_bars(data, found.groups, heading=heading_of(data, row, found.note, with_limits=True))


def upper_against_lower(data: PlotData, row: Plot) -> Figure:
    """Upper against lower overflow."""
    found = group_by(data, *row.by)
    return draw_upper_against_lower(data, found.groups, heading=heading_of(data, row, found.note, with_limits=True))


def ratio_histogram(data: PlotData, row: Plot) -> Figure:
    """Tensors by how much they overflow and underflow."""
    return draw_ratio_histogram(data, heading=heading_of(data, row, with_limits=True))


def overflow(data: PlotData, row: Plot) -> Figure:
    """Overflow and underflow by layer, of what is known already."""
    return draw_overflow(table_of(data), title=row.title)


def sweep(data: PlotData, _: Plot, *, is_summary: bool) -> Figure:
    """The sweep of one tensor."""
    from ranktape.analyze.views.plots.sweeps import draw_sweep

    return draw_sweep(data, is_summary=is_summary)
