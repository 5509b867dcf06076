"""The makers of plots of a survey, and what each needs that a selection may not have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.views.plots import boxes, lines
from ranktape.analyze.views.plots.bands import draw_occupancy, draw_octave_map
from ranktape.analyze.views.plots.boxes import draw_boxes
from ranktape.analyze.views.plots.distributions import (
    draw_distributions,
    octave_shares,
)
from ranktape.analyze.views.plots.groups import Grouping, group_by
from ranktape.analyze.views.plots.heat_maps import OUTSIDE, Grid, Scale, draw_heat_maps
from ranktape.analyze.views.plots.kinds import KINDS
from ranktape.analyze.views.plots.lines import draw_lines
from ranktape.analyze.views.plots.losses import draw_loss_bars, draw_upper_against_lower
from ranktape.analyze.views.plots.needs import BF16, Reason, gradient_names, needs_several
from ranktape.analyze.views.plots.neighbours import draw_neighbouring_layers, draw_sample_differences
from ranktape.analyze.views.plots.pairs import draw_pairs, matched, read_pairs, two_quant_types
from ranktape.analyze.views.plots.ranks import rank_deviations, rank_distances
from ranktape.analyze.views.plots.style import Heading, plain
from ranktape.analyze.views.plots.subject import subject_line
from ranktape.analyze.views.plots.survey import pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a plot is made."""

    draw: Callable[[Survey, Heading], Figure]
    """Of a survey that has what is needed."""
    needs: Callable[[Survey], Reason] = lambda _: ""
    """What is missing; asked of the catalogue alone."""
    family: str = ""
    """What it has in common with others that draw the same of other groups; empty where none does."""
    fields: tuple[str, ...] = ()
    """The fields that make its groups."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """The values that its records have in some fields."""

    def content(self, survey: Survey) -> Hashable:
        """What tells plots of one family apart: which records are together in a group; None of no family."""
        if not self.family:
            return None
        columns = [survey.codes(name) for name in self.fields]
        _, numbers = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        numbers = np.where(survey.mask(**self.chosen), numbers.reshape(-1), -1)
        # By the order in which groups come, whatever their values are called.
        _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
        return self.family, (numbers < 0).tobytes(), firsts[places].tobytes()


def compared(family: str, *fields: str, **chosen: Any) -> Recipe:
    """A plot that compares the groups of the first field, of which there must be two; others part them further."""
    makers: dict[str, Callable[..., Callable[[Survey, Heading], Figure]]] = {
        "distributions": distributions_of,
        "boxes": boxes_of,
        "loss bars": loss_bars_of,
    }
    return Recipe(
        draw=makers[family](*fields, **chosen),
        needs=needs_several(fields[0], fields[0].replace("_", " ")),
        family=family,
        fields=fields,
        chosen=chosen,
    )


COUNTED = frozenset(
    name
    for name in KINDS
    if "overflow" in name or "underflow" in name or name in {"statistics_by_iteration", "rank_figures"}
)
"""Plots that count what is beyond limits, and say whose."""


def heading_of(name: str, survey: Survey, *, notes: Sequence[str] = ()) -> Heading:
    """The title of a plot, and on which tensors it is."""
    kept = tuple(note for note in notes if note)
    return Heading(title=KINDS[name].title, subtitle=subject_line(survey, with_limits=name in COUNTED), notes=kept)


def _noted(heading: Heading, *notes: str) -> Heading:
    return Heading(title=heading.title, subtitle=heading.subtitle, notes=(*heading.notes, *filter(None, notes)))


def distributions_of(*fields: str, **chosen: Any) -> Callable[[Survey, Heading], Figure]:
    """Shape and range of the groups that fields make."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        found = group_by(survey, *fields, with_values=True, **chosen)
        return draw_distributions(found.groups, heading=_noted(heading, found.note))

    return recipe


def boxes_of(
    *fields: str, panels: Sequence[boxes.BoxPanel] = boxes.GENERAL, **chosen: Any
) -> Callable[[Survey, Heading], Figure]:
    """Box plots of figures over the tensors of each group."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        found = group_by(survey, *fields, max_groups=boxes.MAX_BOXES, **chosen)
        return draw_boxes(survey, found.groups, panels=panels, heading=_noted(heading, found.note))

    return recipe


def occupancy_of(*fields: str, **chosen: Any) -> Callable[[Survey, Heading], Figure]:
    """Shares of octaves of each group, above the ranges of formats."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        found = group_by(survey, *fields, with_values=True, **chosen)
        drawn = [(group, octave_shares(group.digest)) for group in found.groups]
        return draw_occupancy(drawn, heading=_noted(heading, found.note))

    return recipe


def _operations(survey: Survey) -> list[str]:
    return sorted(survey.values_of("operation"), key=lambda name: (name != "forward", name))


def layer_names(layers: Sequence[int]) -> list[str]:
    """What rows of layers are called."""
    return [OUTSIDE if layer < 0 else str(layer) for layer in layers]


FIGURES: Mapping[str, tuple[str, Scale]] = {
    "overflow": ("overflow", Scale(kind="share", label="share of the cell's elements")),
    "underflow": ("underflow", Scale(kind="share", label="share of the cell's elements")),
    "absmax": ("extreme", Scale(kind="magnitude", label="largest magnitude, unit of the tensor")),
    "std": ("std", Scale(kind="magnitude", label="standard deviation, unit of the tensor")),
}
"""Figures of heat maps by the end of the name: what `pooled` calls them, and what the colours mean."""


def heat_map_of(field: str, figure: str) -> Callable[[Survey, Heading], Figure]:
    """A figure of layers against a field of whole numbers."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        layers, columns = survey.values_of("layer_idx"), survey.values_of(field)
        grids = [
            Grid(
                title=operation,
                values=grid_of(survey, FIGURES[figure][0], field=field, operation=operation),
                rows=layer_names(layers),
                columns=[str(int(column)) for column in columns],
            )
            for operation in _operations(survey)
        ]
        words: dict[str, Any] = {"row_label": "layer", "column_label": field, "unit": f"{field}s"}
        return draw_heat_maps(grids, scale=FIGURES[figure][1], **words, heading=heading)

    return recipe


def grid_of(survey: Survey, figure: str, *, field: str, operation: str) -> np.ndarray[Any, Any]:
    """A figure of `survey.pooled` for each layer and value of a field of whole numbers."""
    num_rows, num_columns = (len(survey.values_of(one)) for one in ("layer_idx", field))
    numbers = survey.codes("layer_idx") * num_columns + survey.codes(field)
    chosen = np.where(survey.mask(operation=operation), numbers, -1)
    return pooled(survey, figure, chosen, num_groups=num_rows * num_columns).reshape(num_rows, num_columns)


def sample_map_of(figure: str) -> Callable[[Survey, Heading], Figure]:
    """A figure of layers against samples."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        layers = survey.values_of("layer_idx")
        samples = survey.sample_figures(FIGURES[figure][0])
        grids = [
            Grid(
                title=operation,
                values=samples.grid(FIGURES[figure][0], operation=operation, layers=layers),
                rows=layer_names(layers),
                columns=sample_names(survey),
            )
            for operation in _operations(survey)
        ]
        kept = [grid for grid in grids if not np.isnan(grid.values).all()] or grids[:1]
        words: dict[str, Any] = {"row_label": "layer", "column_label": sample_label(survey), "unit": "samples"}
        return draw_heat_maps(kept, scale=FIGURES[figure][1], **words, heading=heading)

    return recipe


def sample_names(survey: Survey) -> list[str]:
    """What samples are called: the user's ids, or rank and place, or place."""
    return [
        plain(name, max_letters=12) if rank is None else f"{rank}:{name}"
        for rank, name in survey.passed.samples.ordered()
    ]


def sample_label(survey: Survey) -> str:
    """What stands below an axis of samples."""
    return "rank : place in the batch" if survey.passed.samples.is_by_rank else "sample"


def sample_differences_picture(survey: Survey, heading: Heading) -> Figure:
    """Each sample against the median sample."""
    samples = survey.passed.samples
    found = [(operation, samples.ratios(operation)) for operation in _operations(survey)]
    known = [(operation, ratios) for operation, ratios in found if not np.isnan(ratios).all()] or found[:1]
    return draw_sample_differences(
        known, names=sample_names(survey) or ["none"], label=sample_label(survey), heading=heading
    )


def octave_map_of(field: str) -> Callable[[Survey, Heading], Figure]:
    """Shares of octaves of each value of a field of whole numbers."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        octaves = survey.passed.octaves[field]
        values = survey.values_of(field)
        names = layer_names(values) if field == "layer_idx" else [str(int(value)) for value in values]
        grids = [
            Grid(title=operation, values=octaves.shares(operation), rows=names, columns=())
            for operation in _operations(survey)
        ]
        return draw_octave_map(grids, row_label={"layer_idx": "layer"}.get(field, field), heading=heading)

    return recipe


def lines_of(
    field: str, *fields: str, panels: Sequence[lines.LinePanel] = lines.LOSSES
) -> Callable[[Survey, Heading], Figure]:
    """Figures of each group along a field of whole numbers."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        found = group_by(survey, *fields)
        return draw_lines(survey, found.groups, field=field, panels=panels, heading=_noted(heading, found.note))

    return recipe


def of_two_types(draw_it: Callable[[Survey, Heading, Grouping], Figure]) -> Callable[[Survey, Heading], Figure]:
    """A plot of two quant types, which are named in its title."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        types = two_quant_types(survey)
        assert types is not None
        title = f"{heading.title}: {plain(types[0])} and {plain(types[1])}"
        marked = Heading(title=title, subtitle=heading.subtitle, notes=heading.notes)
        found = group_by(survey, "quant_type", "operation", with_values=True, quant_type=list(types))
        return draw_it(survey, marked, found)

    return recipe


def pairs_picture(survey: Survey, heading: Heading, _: Grouping) -> Figure:
    """The same tensors in two quant types."""
    types = two_quant_types(survey)
    assert types is not None
    pairs, total = read_pairs(survey, types), len(matched(survey, types))
    note = f"{len(pairs)} of {total:,} tensors that were recorded in both, evenly chosen." if total > len(pairs) else ""
    return draw_pairs(pairs, types=types, heading=_noted(heading, note))


def of_bf16(draw_it: Callable[..., Figure]) -> Callable[[Survey, Heading], Figure]:
    """A plot of the values of the quant type bf16, forward and backward."""
    note = "From the 1st to the 99th percentile of the values."

    def recipe(survey: Survey, heading: Heading) -> Figure:
        found = group_by(survey, "operation", with_values=True, quant_type=BF16)
        return draw_it(found.groups, heading=_noted(heading, note, found.note))

    return recipe


def neighbours_picture(survey: Survey, heading: Heading) -> Figure:
    """Each layer against the one before it."""
    found = group_by(survey, "operation")
    return draw_neighbouring_layers(survey, found.groups, heading=heading)


def rank_deviation_picture(survey: Survey, heading: Heading) -> Figure:
    """Each rank against the median rank."""
    layers = survey.values_of("layer_idx")
    grid = Grid(
        title="all tensors that several ranks have",
        values=rank_deviations(survey, layers=layers),
        rows=layer_names(layers),
        columns=[str(rank) for rank in survey.values_of("rank")],
    )
    scale = Scale(kind="factor", label="absmax over that of the median rank")
    words: dict[str, Any] = {"row_label": "layer", "column_label": "rank", "unit": "ranks"}
    return draw_heat_maps([grid], scale=scale, **words, heading=heading)


def rank_against_rank_picture(survey: Survey, heading: Heading) -> Figure:
    """Each rank against each other."""
    distances, size = rank_distances(survey)
    names = [str(rank) for rank in survey.values_of("rank")][::size]
    note = f"Each row and column is {size} neighbouring ranks, by what is farthest from the median." if size > 1 else ""
    grid = Grid(title="standard deviations of the same tensors", values=distances, rows=names, columns=names)
    scale = Scale(kind="octaves", label="mean |log2| of their ratio, in octaves")
    words: dict[str, Any] = {"row_label": "rank", "column_label": "rank", "unit": "ranks"}
    return draw_heat_maps([grid], scale=scale, **words, heading=_noted(heading, note))


def upper_lower_picture(survey: Survey, heading: Heading) -> Figure:
    """Upper against lower overflow."""
    found = group_by(survey, "layer_type")
    return draw_upper_against_lower(survey, found.groups, heading=_noted(heading, found.note))


def loss_bars_of(*fields: str) -> Callable[[Survey, Heading], Figure]:
    """Overflow and underflow of each group."""

    def recipe(survey: Survey, heading: Heading) -> Figure:
        found = group_by(survey, *fields)
        return draw_loss_bars(survey, found.groups, heading=_noted(heading, found.note))

    return recipe


def sweep_of(*, is_summary: bool) -> Callable[[Survey, Heading], Figure]:
    """The sweep of one tensor."""

    def recipe(survey: Survey, _: Heading) -> Figure:
        from ranktape.analyze.views.plots.sweeps import draw_sweep

        return draw_sweep(survey, is_summary=is_summary)

    return recipe


def overflow_picture(survey: Survey, _: Heading) -> Figure:
    """Overflow and underflow by layer, of what is known already."""
    from ranktape.analyze.views.plots.overflow_layers import draw_overflow, survey_table

    return draw_overflow(survey_table(survey))


def gradients_picture(survey: Survey, heading: Heading) -> Figure:
    """Shares of octaves of each gradient."""
    return occupancy_of("tensor_name", tensor_name=gradient_names(survey))(survey, heading)
