"""What overflows and what underflows, where, and against which limits?

Against the limits of their own dtype, tensors were counted when they were written: the catalogue answers and
no value is read. Against another format, every value is read once.

A value overflows in a format if rounding to nearest takes it beyond the largest value: from half a step above
it on. (The tool of the seeds counts everything above the largest value, also what rounds back to it: for
fp8_e4m3 that is from 448 to 464.) It underflows if it is not zero and below the smallest normal value, and is
flushed if it rounds to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.analyze.formats import Coding
from ranktape.analyze.histograms.histogram import Histogram, Limits, own_limits, scan, scan_histogram
from ranktape.analyze.identity import group_columns, group_row, identity_columns, identity_rows
from ranktape.analyze.quantization.schemes import Scaling, parse_scheme
from ranktape.analyze.table import Column, Kind, Table
from ranktape.analyze.values import View, read_numbers, viewed_dtype
from ranktape.errors import UsageError
from ranktape.storage.dtypes import dtype_row, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.formats import Format
    from ranktape.storage import Record, Records

KINDS = ("upper", "lower", "underflow", "flushed", "nan", "inf", "zero")
"""What is counted, in the order of the columns; `flushed` against a format only."""

EXTREMES = ("minimum", "maximum", "absmax")
"""The extreme values that are shown, NaN left out."""

Counts = Mapping[str, "NDArray[Any]"]
"""For each of `elements`, `KINDS` and `EXTREMES` one number for each record; NaN where there is no extreme."""


def overflow(
    records: Records,
    *,
    by: Sequence[str] = (),
    format: str | None = None,  # noqa: A002 - the option's name
    view: View | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """Counts and ratios of what is beyond the limits: one row for each record, with `by` one for each group.

    NaN counts as NaN alone; infinities count as infinite, and as overflow too. The ratios of an empty tensor
    are 0. Without `format` the limits are those of the dtype that was captured and no value is read, unless
    `view` asks for the dtype that was computed with. With `format`, that dtype is what values are rounded to
    first, unless `view` says otherwise. `on_record` is called after each record that was read.

    Raises:
        UsageError: the format is not known, is one of scales, or one of blocks with scales of their own.
        UnknownFieldError: `by` names no field of a record.
    """
    target = None if format is None else _parse_target(format)
    chosen = view or (View.SEEN if target is None else View.COMPUTE)
    groups = records.group_by(list(by))
    counter = _Counter(target=target, view=chosen, on_record=on_record)
    if not by:
        columns, rows = identity_columns(), _record_rows(records, counter)
    else:
        columns, rows = group_columns(by), [_group_row(key, members, counter) for key, members in groups]
    return Table(
        title=_title(target, view=chosen),
        columns=(*columns, *_count_columns(counter.kinds)),
        rows=tuple(rows),
    )


def _parse_target(name: str) -> Format:
    """The format of that name, whose limits are those of values without a scale."""
    scheme = parse_scheme(name)
    element = scheme.element
    if scheme.scaling is Scaling.BLOCK and element.name != scheme.name:
        raise UsageError(
            f"format {name!r} has no limits of its own: it puts elements of {element.name} into blocks with scales; "
            f"give --format {element.name} for what they hold without a scale, or see 'ranktape analyze sweep "
            f"--format {name}'"
        )
    if element.coding is Coding.EXPONENT:
        raise UsageError(
            f"format {name!r} is one of scales: it has neither zero nor a sign; give one of values, such as fp8_e4m3"
        )
    return element


def largest_value(dtype: str) -> float:
    """The largest finite value of an element type; of a complex one, that of its parts."""
    row = dtype_row(dtype)
    if row.is_floating or row.is_complex:
        return float(ml_dtypes.finfo(row.numpy_dtype).max)  # type: ignore[no-untyped-call]
    return 1.0 if dtype == "bool" else float(np.iinfo(row.numpy_dtype).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counter:
    """Counts records against the limits that were asked for."""

    target: Format | None
    """The format whose limits count; those of the elements' own type if None."""
    view: View
    """Which values are counted."""
    on_record: Callable[[], object]
    """Called after each record that was read."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is counted; nothing is flushed that is stored already."""
        return KINDS if self.target is not None else tuple(kind for kind in KINDS if kind != "flushed")

    def limits_of(self, records: Records) -> list[str]:
        """For each record the type or format whose limits count."""
        if self.target is not None:
            return [self.target.name] * len(records)
        pairs = zip(records.column("dtype").tolist(), records.column("compute_dtype").tolist(), strict=True)
        return [viewed_dtype(dtype=dtype, compute_dtype=compute, view=self.view) for dtype, compute in pairs]

    def counts(self, records: Records) -> Counts:
        """The numbers of each record; values are read where the catalogue does not hold the answer."""
        if self.target is None and self.limits_of(records) == records.column("dtype").tolist():
            names = {kind: f"overflow.{kind}.count" for kind in self.kinds}
            names |= {extreme: f"overflow.{extreme}" for extreme in EXTREMES} | {"elements": "numel"}
            return {key: records.column(name) for key, name in names.items()}
        rows = [self._count(record) for record in records]
        return {key: np.array([row[key] for row in rows]) for key in ("elements", *self.kinds, *EXTREMES)}

    def _count(self, record: Record) -> dict[str, float]:
        dtype = viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=self.view)
        numbers, limits = read_numbers(record, view=self.view), self._limits(dtype)
        if isinstance(numbers, Histogram):
            tallies = scan_histogram(numbers, limits=limits)
        else:
            tallies = scan(numbers, limits=limits)
        self.on_record()
        extremes = {name: getattr(tallies, name) for name in EXTREMES}
        return {
            "elements": tallies.num_elements,
            **{kind: getattr(tallies, kind) for kind in self.kinds},
            **{name: math.nan if value is None else value for name, value in extremes.items()},
        }

    def _limits(self, dtype: str) -> Limits:
        if self.target is None:
            return own_limits(numpy_dtype(dtype))
        return Limits(
            overflow_start=self.target.overflow_start,
            min_normal=self.target.min_normal,
            flush_limit=self.target.flush_limit,
        )


def _count_columns(kinds: Sequence[str]) -> tuple[Column, ...]:
    def pair(count: str, ratio: str, *, head: str) -> tuple[Column, Column]:
        return (
            Column(name=count, kind=Kind.INTEGER, head=f"{head} count", is_detail=True),
            Column(name=ratio, kind=Kind.RATIO, head=head),
        )

    pairs = {kind: pair(f"overflow.{kind}.count", f"overflow.{kind}.ratio", head=kind) for kind in kinds}
    return (
        Column(name="limits_of", kind=Kind.TEXT, head="limits of", is_key=True),
        Column(name="largest_value", kind=Kind.FLOAT, head="largest value", is_detail=True),
        Column(name="elements", kind=Kind.INTEGER),
        *pairs.pop("upper"),
        *pairs.pop("lower"),
        *pair("overflow.total", "overflow.ratio", head="overflow"),
        *(column for both in pairs.values() for column in both),
        *(Column(name=f"overflow.{name}", kind=Kind.FLOAT, head=name, is_detail=name != "absmax") for name in EXTREMES),
    )


def _record_rows(records: Records, counter: _Counter) -> list[tuple[Any, ...]]:
    counts = {name: column.tolist() for name, column in counter.counts(records).items()}
    limits_of = counter.limits_of(records)
    return [
        (
            *identity,
            *_limit_cells([limits_of[index]], target=counter.target),
            *_count_cells({name: column[index] for name, column in counts.items()}),
        )
        for index, identity in enumerate(identity_rows(records))
    ]


def _group_row(key: dict[str, Any], members: Records, counter: _Counter) -> tuple[Any, ...]:
    counts = counter.counts(members)
    together: dict[str, float] = {name: int(column.sum()) for name, column in counts.items() if name not in EXTREMES}
    for name in EXTREMES:
        known = counts[name][~np.isnan(counts[name])]
        ends = known.min if name == "minimum" else known.max
        together[name] = float(ends()) if known.size else math.nan
    return (
        *group_row(key, num_records=len(members)),
        *_limit_cells(sorted(set(counter.limits_of(members))), target=counter.target),
        *_count_cells(together),
    )


def _limit_cells(names: Sequence[str], *, target: Format | None) -> tuple[str, float | None]:
    """The name of the limits, and the largest value if all have the same."""
    largest = {target.maximum} if target is not None else {largest_value(name) for name in names}
    return " ".join(names), largest.pop() if len(largest) == 1 else None


def _count_cells(numbers: Mapping[str, float]) -> tuple[Any, ...]:
    elements = int(numbers["elements"])
    cells: list[Any] = [elements]

    def add(count: float) -> None:
        cells.extend((int(count), int(count) / max(1, elements)))

    add(numbers["upper"])
    add(numbers["lower"])
    add(numbers["upper"] + numbers["lower"])
    for kind in KINDS[2:]:
        if kind in numbers:
            add(numbers[kind])
    cells += [None if math.isnan(numbers[name]) else float(numbers[name]) for name in EXTREMES]
    return tuple(cells)


def _title(target: Format | None, *, view: View) -> str:
    if target is None:
        whose = "the dtype that was captured" if view is View.SEEN else "the dtype that was computed with"
        return f"overflow and underflow against the limits of {whose}"
    return (
        f"overflow and underflow in {target.name} without scaling: largest value {target.maximum:.6g}, "
        f"smallest normal {target.min_normal:.6g}, smallest subnormal {target.min_subnormal:.6g}"
    )
