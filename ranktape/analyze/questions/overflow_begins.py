"""Gives where it begins: in which iteration, at which layer, on which rank something is first beyond its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.identity import SAMPLE, are_files, group_columns, group_row
from ranktape.analyze.metrics.target import limit_cells, limit_columns
from ranktape.analyze.numerics.quantization.encoded import MODERATE_RATIO
from ranktape.analyze.table import Column, Kind, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.metrics.places import Places
    from ranktape.analyze.metrics.target import Target

PLACE_FIELDS = (
    "iteration",
    "rank",
    "counter",
    "microbatch",
    "module",
    "layer_type",
    "layer_stack",
    "layer_idx",
    "operation",
    "phase",
    "tensor_name",
)
"""The fields that say where it begins."""

_NUMBERS = frozenset({"iteration", "rank", "counter", "microbatch", "layer_idx"})

_ORDER = ("iteration", "attempt", "counter", "rank")
"""By which records come one after the other: ranks count for themselves what they record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Something that begins."""

    name: str
    """The word for it."""
    kind: str
    """What is counted of it."""
    above: float
    """The part of all elements that has to be exceeded."""


EVENTS = (
    Beginning(name="nan", kind="nan", above=0.0),
    Beginning(name="overflow", kind="total", above=0.0),
    Beginning(name="underflow", kind="underflow", above=MODERATE_RATIO),
    Beginning(name="flushed", kind="flushed", above=MODERATE_RATIO),
)
"""What is looked for; of underflow as much as the older tool warns of."""


def overflow_begins(places: Places, *, by: Sequence[str]) -> Table:
    """Where NaN, overflow and underflow begin: a row for each of them, for each target, and with `by` each group.

    That is the first iteration, in it the record with the lowest `counter`, which is the first in execution order,
    and of several ranks the lowest; `first.ranks` are all at which the same thing is seen at the same place and in the
    same iteration. NaN and overflow begin with the first value; underflow with more than 0.1 % of a record's elements.
    What never begins has a row that says so.
    """
    fields = {name: places.records.column(name)[places.owners] for name in {*PLACE_FIELDS, *_ORDER, "site"}}
    turns = np.argsort(np.lexsort([fields[name] for name in reversed(_ORDER)]))
    rows = []
    for key, members in places.groups(by):
        ordered = members[np.argsort(turns[members])]
        start = group_row(key, num_records=np.unique(places.owners[members]).size) if by else ()
        for target, counts in places.counted:
            limits = limit_cells(places.limits_of(members.tolist(), target), target=target)
            for event in _events(target):
                ratios = counts[event.kind] / np.maximum(counts["elements"], 1)
                found = ordered[ratios[ordered] > event.above]
                rows.append((*start, event.name, *limits, *_cells(places, fields, ratios, found)))
    return Table(
        title="where it begins: the first iteration, in it the first record in execution order, the lowest rank",
        columns=(
            *(group_columns(by) if by else ()),
            Column(name="kind", kind=Kind.TEXT),
            *limit_columns(places.targets),
            *_place_columns(places),
        ),
        rows=tuple(rows),
        notes=(*places.notes, f"underflow and flushed begin above {MODERATE_RATIO:.1%} of a record's elements"),
    )


def _events(target: Target | None) -> tuple[Beginning, ...]:
    """Nothing is flushed that is stored already."""
    return EVENTS if target is not None else tuple(event for event in EVENTS if event.kind != "flushed")


def _place_columns(places: Places) -> tuple[Column, ...]:
    details = {"counter", "microbatch", "layer_stack", "phase"}
    fields = (
        Column(
            name=f"first.{field}",
            kind=Kind.INTEGER if field in _NUMBERS else Kind.TEXT,
            head=field,
            is_detail=field in details,
        )
        for field in PLACE_FIELDS
    )
    sample = () if places.samples is None else (Column(name=f"first.{SAMPLE}", kind=Kind.TEXT, head=SAMPLE),)
    file = (Column(name="first.file", kind=Kind.TEXT, head="file", is_detail=True),)
    return (
        Column(name="affected", kind=Kind.INTEGER),
        *fields,
        *(file if are_files(places.records) else ()),
        *sample,
        Column(name="first.ratio", kind=Kind.RATIO, head="there"),
        Column(name="first.num_ranks", kind=Kind.INTEGER, head="ranks"),
        Column(name="first.ranks", kind=Kind.LIST, head="which", is_detail=True),
    )


def _cells(
    places: Places, fields: Mapping[str, NDArray[Any]], ratios: NDArray[np.float64], found: NDArray[np.int64]
) -> tuple[Any, ...]:
    """How many records are affected, and the first of `found`, which are in the order of execution."""
    names = (*PLACE_FIELDS, *(("site",) if are_files(places.records) else ()))
    if not found.size:
        return (0, *(None,) * (len(names) + int(places.samples is not None) + 3))
    first = int(found[0])
    same = ["iteration", "attempt", "site"]
    alike = np.all([fields[name][found] == fields[name][first] for name in same], axis=0)
    ranks = np.unique(fields["rank"][found[alike]]).tolist()
    return (
        np.unique(places.owners[found]).size,
        *(_plain(fields[name][first]) for name in names),
        *(() if places.samples is None else (str(places.samples[first]),)),
        float(ratios[first]),
        len(ranks),
        ranks,
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
