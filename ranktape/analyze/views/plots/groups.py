"""Divides tensors into groups with a style each, and creates pages with a line about the selection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    from ranktape.analyze.views.plots.table import Plot

MAX_NAMED = 4
"""The largest number of values of a field that are named; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Tensors that are drawn together, in a style that depends on the index of the group."""

    label: str
    """Name of the group, already `plain`."""
    index: int
    """Index of the group."""
    mask: NDArray[np.bool_]
    """Whether each record of the data is in the group."""
    digest: Digest | None = None
    """Digest of all its values; None if it is not needed, or if no values are stored."""

    @property
    def color(self) -> str:
        """The colour of the group."""
        return COLORS[self.index % MAX_GROUPS]

    @property
    def mark(self) -> str:
        """The marker of its points."""
        return MARKS[self.index % MAX_GROUPS]

    @property
    def line(self) -> dict[str, Any]:
        """The colour and dashes of its lines."""
        return {"color": self.color, "linestyle": DASHES[self.index % MAX_GROUPS]}

    def handle(self, *, has_mark: bool = False) -> Artist:
        """Its legend entry: a line, with a marker if `has_mark`."""
        mark: dict[str, Any] = {"marker": self.mark, "markersize": 5} if has_mark else {}
        return key(Line2D([], [], **self.line, linewidth=2, **mark), self.label)


def groups_of(data: PlotData, row: Plot, **options: Any) -> tuple[list[Group], str]:
    """The groups of a row of the table, and a note; `options` are those of `group_by`."""
    return group_by(data, *row.by, **options, **row.chosen(data))


def group_by(
    data: PlotData, *fields: str, max_groups: int = MAX_GROUPS, with_values: bool = False, **chosen: Any
) -> tuple[list[Group], str]:
    """A group for each combination of values of fields, in the order of values, and a note.

    If there are too many, only the groups with the most elements are returned, and the note says so. `chosen` restricts
    the records to those with the given values.
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
    """The label of a group. Numbers have the name of their field before them."""
    words = {"batch_size": "batch size", "layer_idx": "layer", "iteration": "iteration", "rank": "rank"}
    parts = [
        f"{words[field]} {'unknown' if value is None else value}" if field in words else plain(value, max_letters=32)
        for field, value in zip(fields, values, strict=True)
    ]
    return ", ".join(parts)


def _order(fields: Sequence[str], values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    # Forward comes before backward, as in time; missing values come last.
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
    """A page with the title of a row; if `with_limits`, the subtitle names the limits for overflow and underflow."""
    subtitle = subject_line(data, with_limits=with_limits)
    return Page(num_rows, num_columns, title=row.title_of(data), subtitle=subtitle, notes=notes, **size)


def subject_line(data: PlotData, *, with_limits: bool = True) -> str:
    """The iterations, ranks, types, and numbers of tensors and values; if `with_limits`, also the limits that apply."""
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
    """A count with three significant digits and a unit prefix; counts below 10,000 in full."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{number:,.0f}"


def _names(data: PlotData, field: str) -> str:
    values, words = data.values_of(field), field.replace("_", " ")
    if len(values) > MAX_NAMED:
        return f"{len(values)} {words}s"
    return f"{words}{'s' if len(values) > 1 else ''} {'/'.join(plain(value, max_letters=24) for value in values)}"
