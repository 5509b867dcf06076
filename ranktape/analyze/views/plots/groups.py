"""Puts tensors into groups, gives each a look, compares ranks, and begins a plot with a line on what it is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from ranktape.analyze.engine.values import View
from ranktape.analyze.views.plots.style import COLORS, DASHES, MARKS, MAX_GROUPS, Page, key, plain

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest
    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

MAX_NAMED = 4
"""Values of a field that are named, before they are counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Tensors that are drawn as one; its place among the groups gives it a look."""

    label: str
    """Its name, `plain` already."""
    index: int
    """Its place among the groups."""
    mask: NDArray[np.bool_]
    """Which records of the data are in it."""
    digest: Digest | None = None
    """All its values; None where they are not needed, or of no record known."""

    @property
    def color(self) -> str:
        """From Okabe and Ito."""
        return COLORS[self.index % MAX_GROUPS]

    @property
    def mark(self) -> str:
        """The shape of its points."""
        return MARKS[self.index % MAX_GROUPS]

    @property
    def line(self) -> dict[str, Any]:
        """The colour of its lines, and how they are broken."""
        return {"color": self.color, "linestyle": DASHES[self.index % MAX_GROUPS]}

    def handle(self, *, has_mark: bool = False) -> Artist:
        """Its entry in a legend: a line, or with a mark a line with points."""
        mark: dict[str, Any] = {"marker": self.mark, "markersize": 5} if has_mark else {}
        return key(Line2D([], [], **self.line, linewidth=2, **mark), self.label)


def groups_of(data: PlotData, row: Plot, **options: Any) -> tuple[list[Group], str]:
    """The groups that a row of the table asks for; `options` are those of `group_by`."""
    return group_by(data, *row.by, **options, **row.chosen(data))


def group_by(
    data: PlotData, *fields: str, max_groups: int = MAX_GROUPS, with_values: bool = False, **chosen: Any
) -> tuple[list[Group], str]:
    """One group for each combination of values of fields; of too many, those with the most elements, and a note.

    `chosen` are fields and the values that records must have to be in any. The order is that of the values.
    """
    allowed = data.mask(**chosen)
    keys, numbers = data.combined(*fields)
    numbers = np.where(allowed, numbers, -1)
    totals = np.bincount(numbers[allowed], weights=data.column("numel")[allowed], minlength=len(keys))
    sizes = {number: totals[number] for number in np.unique(numbers[allowed]).tolist()}
    largest = sorted(sizes, key=lambda number: -sizes[number])[:max_groups]
    ordered = sorted(largest, key=lambda number: _order(fields, keys[number]))
    groups = [
        Group(
            label=label_of(fields, keys[number]),
            index=index,
            mask=numbers == number,
            digest=data.distribution(**chosen | dict(zip(fields, keys[number], strict=True))) if with_values else None,
        )
        for index, number in enumerate(ordered)
    ]
    note = f"The {len(groups)} largest of {len(sizes)} groups are drawn." if len(sizes) > len(groups) else ""
    return groups, note


def label_of(fields: Sequence[str], values: Sequence[Any]) -> str:
    """What people call a group; of numbers with the name of the field."""
    words = {"batch_size": "batch size", "layer_idx": "layer", "iteration": "iteration", "rank": "rank"}
    parts = [
        f"{words[field]} {'not known' if value is None else value}" if field in words else plain(value, max_letters=32)
        for field, value in zip(fields, values, strict=True)
    ]
    return ", ".join(parts)


def _order(fields: Sequence[str], values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    # Forward comes before backward, as it does in time; what is missing comes last.
    return [
        (value is None, value != "forward" if field == "operation" else False, 0 if value is None else value)
        for field, value in zip(fields, values, strict=True)
    ]


def page_of(
    data: PlotData,
    row: Plot,
    num_rows: int = 1,
    num_columns: int = 1,
    *,
    notes: Iterable[str] = (),
    with_limits: bool = False,
    **size: Any,
) -> Page:
    """A page under the title of a row; plots that count what is beyond limits say whose."""
    subtitle = subject_line(data, with_limits=with_limits)
    return Page(num_rows, num_columns, title=row.title_of(data), subtitle=subtitle, notes=notes, **size)


def subject_line(data: PlotData, *, with_limits: bool = True) -> str:
    """The iterations, ranks, layers and dtypes, how many tensors and values, and against which limits they count."""
    spans = []
    for field in ("iteration", "rank"):
        values = data.values_of(field)
        is_one = len(values) == 1
        spans.append(f"{field} {values[0]}" if is_one else f"{len(values)} {field}s from {values[0]} to {values[-1]}")
    size = float(data.column("numel").sum())
    count = f"{len(data):,} tensor{'s' if len(data) != 1 else ''}, {_short_count(size)} values"
    line = ", ".join([*spans, _names(data, "dtype"), _names(data, "quant_type"), count])
    if not with_limits:
        return line
    target = data.target
    if target is None:
        return f"{line}; limits of the values' own dtype{' as captured' if data.view is View.SEEN else ''}"
    element = target.element
    largest, smallest = f"largest value {element.maximum:.4g}", f"smallest normal {element.min_normal:.3g}"
    return f"{line}; limits of {target.title}: {largest}, {smallest}"


def _short_count(number: float) -> str:
    """A count with three digits."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{number:,.0f}"


def _names(data: PlotData, field: str) -> str:
    values, words = data.values_of(field), field.replace("_", " ")
    if len(values) > MAX_NAMED:
        return f"{len(values)} {words}s"
    return f"{words}{'s' if len(values) > 1 else ''} {'/'.join(plain(value, max_letters=24) for value in values)}"


SHARES: Mapping[str, Sequence[str]] = {
    "overflow": ("upper", "lower"),
    **{name: (name,) for name in ("upper", "lower", "underflow", "flushed", "nan", "zero")},
}
"""Parts of a record's elements, and the counts that each is made of."""


def pooled(data: PlotData, name: str, groups: NDArray[np.int64], *, num_groups: int) -> NDArray[np.float64]:
    """A metric of all records of each group together, for `groups` that number each record's, negative for none.

    Shares (`overflow`, `underflow`, `flushed`, `nan`, `zero`) are of all elements of the group, `std` of all its finite
    values; `extreme` is the largest. NaN where a group has no record, or none of which it is known.
    """
    inside = groups >= 0
    places = groups[inside]

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        added = np.bincount(places, weights=np.nan_to_num(values[inside]), minlength=num_groups)
        return added.astype(np.float64)

    if name in SHARES:
        counted = sum((data.metric(one) for one in SHARES[name]), start=np.zeros(len(data)))
        is_known = ~np.isnan(counted)
        elements = total(np.where(is_known, data.metric("num_elements"), 0.0))
        known = np.bincount(places, weights=is_known[inside], minlength=num_groups)
        return np.where(known > 0, total(counted) / np.maximum(1, elements), np.nan)
    if name == "std":
        sizes, own = data.metric("num_finite"), data.metric("mean")
        count = total(sizes)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = total(sizes * own) / np.maximum(1, count)
            shifts = np.where(inside, own - mean[np.maximum(groups, 0)], 0.0)
            moment = total(sizes * (data.metric("std") ** 2 + shifts**2))
            return np.where(count > 0, np.sqrt(moment / np.maximum(1, count)), np.nan)
    found = np.full(num_groups, np.nan)
    np.fmax.at(found, places, data.metric(name)[inside])
    return found


SITE_OF_RANKS = ("iteration", "microbatch", "call", "module", "operation", "phase", "tensor_name")
"""What is the same of a tensor on all ranks."""


def _rank_logs(data: PlotData, metric: str) -> tuple[NDArray[np.float64], list[int]]:
    """log2 of a metric for each site and rank, NaN where there is none; and the layer of each site."""
    sites = list(zip(*(data.column(field).tolist() for field in (*SITE_OF_RANKS, "layer_idx")), strict=True))
    index = {site: number for number, site in enumerate(dict.fromkeys(sites))}
    grid = np.full((len(index), len(data.values_of("rank"))), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(data.metric(metric))
    grid[[index[site] for site in sites], data.codes("rank")] = np.where(np.isfinite(logs), logs, np.nan)
    return grid, [site[-1] for site in index]


def rank_deviations(data: PlotData, *, layers: Sequence[int]) -> NDArray[np.float64]:
    """For each layer and rank log2 of absmax over that of the median rank: of the tensor that is farthest off.

    NaN where no other rank has the same tensor.
    """
    logs, layer_of = _rank_logs(data, "absmax")
    found = np.full((len(layers), logs.shape[1]), np.nan)
    rows = {layer: row for row, layer in enumerate(layers)}
    shared = np.flatnonzero((~np.isnan(logs)).sum(axis=1) > 1)
    if not shared.size:
        return found
    deviations = logs[shared] - np.nanmedian(logs[shared], axis=1, keepdims=True)
    for site, values in zip(shared.tolist(), deviations, strict=True):
        row = found[rows[layer_of[site]]]
        row[:] = np.where(np.isnan(row) | (np.abs(values) > np.abs(row)), np.where(np.isnan(values), row, values), row)
    return found
