"""Which scale does each tensor of a selection need in a format, and what does it lose with it?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.formats import parse_format
from ranktape.analyze.histogram import Histogram
from ranktape.analyze.identity import group_columns, group_row, identity_columns, identity_rows
from ranktape.analyze.scale_sweep import sweep_array, sweep_histogram
from ranktape.analyze.scaling import scale_of
from ranktape.analyze.table import Column, Kind, Table
from ranktape.analyze.values import View, read_numbers
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.formats import Format
    from ranktape.analyze.metrics import Level
    from ranktape.analyze.scale_sweep import ScaleSweep, SweepOptions
    from ranktape.storage import Record, Records


def sweep(
    records: Records,
    *,
    format: str,  # noqa: A002 - the option's name
    by: Sequence[str] = (),
    view: View = View.COMPUTE,
    options: SweepOptions | None = None,
    with_levels: bool = False,
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """The recommended scale of every record and what is lost with it; with `by`, one row for each group.

    Records are read one after the other. A record without a finite number other than zero has a row without
    figures. `with_levels` gives one row for each record and level instead. `on_record` is called after each
    record.

    Raises:
        UsageError: the format or an option is not allowed; `by` and `with_levels` exclude each other.
        UnknownFieldError: `by` names no field of a record.
    """
    target = parse_format(format)
    if by and with_levels:
        raise UsageError("--levels and --by exclude each other: give one")

    def answer(record: Record) -> ScaleSweep:
        numbers = read_numbers(record, view=view)
        on_record()
        if isinstance(numbers, Histogram):
            return sweep_histogram(numbers, target=target, options=options)
        return sweep_array(numbers, target=target, options=options)

    answers = [
        _Answer(key=key, records=members, sweeps=[answer(record) for record in members])
        for key, members in records.group_by(list(by))
    ]
    if by:
        return _group_table(answers, by=by, target=target)
    table = _levels_table if with_levels else _records_table
    return table(records, [found for answer in answers for found in answer.sweeps], target=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The sweeps of one group of records."""

    key: dict[str, Any]
    """The values of the fields that were grouped by."""
    records: Records
    """The group."""
    sweeps: list[ScaleSweep]
    """One for each record."""


LEVEL_COLUMNS = (
    Column(name="exponent", kind=Kind.FLOAT),
    Column(name="scale", kind=Kind.FLOAT, is_detail=True),
    Column(name="mse", kind=Kind.FLOAT),
    Column(name="rmse", kind=Kind.FLOAT, is_detail=True),
    Column(name="mae", kind=Kind.FLOAT, is_detail=True),
    Column(name="max_abs_error", kind=Kind.FLOAT, is_detail=True),
    Column(name="relative_error", head="rel. error", kind=Kind.RATIO),
    Column(name="cosine", kind=Kind.COSINE),
    Column(name="psnr", kind=Kind.FLOAT, unit="dB"),
    Column(name="sqnr", kind=Kind.FLOAT, unit="dB"),
    Column(name="overflow_count", kind=Kind.INTEGER, is_detail=True),
    Column(name="overflow_ratio", head="overflow", kind=Kind.RATIO),
    Column(name="underflow_count", kind=Kind.INTEGER, is_detail=True),
    Column(name="underflow_ratio", head="underflow", kind=Kind.RATIO),
    Column(name="flushed_count", kind=Kind.INTEGER, is_detail=True),
    Column(name="flushed_ratio", head="flushed", kind=Kind.RATIO),
    Column(name="score", kind=Kind.FLOAT),
)
"""The fields of `Level`."""

TENSOR_COLUMNS = (
    Column(name="elements", kind=Kind.INTEGER, is_detail=True),
    Column(name="nan", kind=Kind.INTEGER, is_detail=True),
    Column(name="inf", kind=Kind.INTEGER, is_detail=True),
    Column(name="zero", kind=Kind.INTEGER, is_detail=True),
    Column(name="best_mse_exponent", kind=Kind.FLOAT, is_detail=True),
    Column(name="best_cosine_exponent", kind=Kind.FLOAT, is_detail=True),
    Column(name="best_psnr_exponent", kind=Kind.FLOAT, is_detail=True),
)
"""What is said of a tensor beside its recommended level."""


def _records_table(records: Records, sweeps: Sequence[ScaleSweep], *, target: Format) -> Table:
    rows = []
    for identity, found in zip(identity_rows(records), sweeps, strict=True):
        bests = (
            found.best(lambda level: -level.mse),
            found.best(lambda level: level.cosine),
            found.best(lambda level: level.psnr),
        )
        tensor = (
            found.num_elements,
            found.nan,
            found.inf,
            found.zero,
            *(None if level is None else level.exponent for level in bests),
        )
        rows.append((*identity, *tensor, *_level_row(found.recommended), found.note))
    return Table(
        title=f"recommended scale of each tensor in {target.name}: the level with the best score",
        columns=(*identity_columns(), *TENSOR_COLUMNS, *LEVEL_COLUMNS, Column(name="note", kind=Kind.TEXT)),
        rows=tuple(rows),
        notes=_notes(sweeps),
    )


def _levels_table(records: Records, sweeps: Sequence[ScaleSweep], *, target: Format) -> Table:
    rows = []
    for identity, found in zip(identity_rows(records), sweeps, strict=True):
        for level in found.levels:
            mark = "recommended" if level is found.recommended else ""
            rows.append((*identity, *_level_row(level), mark))
        if not found.levels:
            rows.append((*identity, *_level_row(None), found.note))
    return Table(
        title=f"every level in {target.name}",
        columns=(*identity_columns(), *LEVEL_COLUMNS, Column(name="note", kind=Kind.TEXT)),
        rows=tuple(rows),
        notes=_notes(sweeps),
    )


def _level_row(level: Level | None) -> tuple[Any, ...]:
    return tuple(None if level is None else getattr(level, column.name) for column in LEVEL_COLUMNS)


def _figure(name: str, *, head: str = "", kind: Kind = Kind.FLOAT, unit: str = "", is_detail: bool = False) -> Column:
    return Column(name=name, head=head or name.replace("_", " "), kind=kind, unit=unit, is_detail=is_detail)


GROUP_COLUMNS: tuple[tuple[Column, Callable[[Level], float], Callable[[Sequence[float]], float]], ...] = (
    (_figure("lowest_exponent", head="exponent from"), lambda level: level.exponent, min),
    (_figure("median_exponent", head="median"), lambda level: level.exponent, statistics.median),
    (_figure("highest_exponent", head="to"), lambda level: level.exponent, max),
    (_figure("median_mse", is_detail=True), lambda level: level.mse, statistics.median),
    (_figure("worst_cosine", kind=Kind.COSINE), lambda level: level.cosine, min),
    (_figure("worst_psnr", unit="dB"), lambda level: level.psnr, min),
    (_figure("median_psnr", unit="dB"), lambda level: level.psnr, statistics.median),
    (_figure("worst_sqnr", unit="dB", is_detail=True), lambda level: level.sqnr, min),
    (_figure("median_sqnr", unit="dB", is_detail=True), lambda level: level.sqnr, statistics.median),
    (_figure("worst_overflow_ratio", head="overflow", kind=Kind.RATIO), lambda level: level.overflow_ratio, max),
    (_figure("worst_flushed_ratio", head="flushed", kind=Kind.RATIO), lambda level: level.flushed_ratio, max),
)
"""What is said of a group: a figure of the recommended level of each tensor, and what is made of all of them."""


def _group_table(answers: Sequence[_Answer], *, by: Sequence[str], target: Format) -> Table:
    rows = []
    for answer in answers:
        chosen = [found.recommended for found in answer.sweeps]
        levels = [level for level in chosen if level is not None]
        figures = (
            combine([figure(level) for level in levels]) if levels else None for _, figure, combine in GROUP_COLUMNS
        )
        rows.append((*group_row(answer.key, num_records=len(answer.records)), *figures))
    return Table(
        title=f"recommended scales in {target.name}, each tensor with its own scale",
        columns=(*group_columns(by), *(column for column, _, _ in GROUP_COLUMNS)),
        rows=tuple(rows),
        notes=_notes([found for answer in answers for found in answer.sweeps]),
    )


def _notes(sweeps: Sequence[ScaleSweep]) -> tuple[str, ...]:
    notes = []
    exponents = [level.exponent for found in sweeps if (level := found.recommended) is not None]
    if len(exponents) > 1:
        median = statistics.median(exponents)
        notes.append(
            f"recommended exponents of {len(exponents)} tensors: median {median:.4g} (scale {scale_of(median):.4g}), "
            f"from {min(exponents):.4g} to {max(exponents):.4g}"
        )
    num_special = sum(1 for found in sweeps if found.nan or found.inf)
    if num_special:
        notes.append(f"{num_special} of {len(sweeps)} tensors hold NaN or Inf, which are left out of the figures")
    num_without = len(sweeps) - len(exponents)
    if num_without:
        notes.append(f"{num_without} of {len(sweeps)} tensors hold no finite number other than zero: no scale")
    return tuple(notes)
