"""Answers which scale each tensor of a selection needs in a format, and what it loses with it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.target import sweepable
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import SOURCE_COLUMN, are_files, group_columns, group_row, identity_columns, with_stacks
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.metrics import LOSSLESS, Level
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sums import scale_of
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.analyze.questions.advice import (
    DEFAULT_TARGET_SQNR,
    CommonScale,
    FormatChoice,
    best_format,
    best_format_of,
)
from ranktape.analyze.questions.swept import (
    BEST_BY,
    COUNTED,
    Swept,
    SweptCells,
    SweptGroup,
    answerable,
    grouped,
    parse_jobs,
    sweep_selection,
    swept_array,
    with_samples,
)
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import RanktapeError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage.records.records import Records

SCHEME_COLUMNS = (
    Column(name="format", kind=Kind.TEXT, is_key=True),
    Column(name="sweep_mode", head="levels", kind=Kind.TEXT, is_key=True),
)
"""What a row's levels are of."""

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

_INHERITED = {field.name for field in dataclasses.fields(Level)}

LEGACY_COLUMNS = tuple(
    Column(name=field.name, kind=Kind.INTEGER if field.name.endswith("_count") else Kind.FLOAT, is_detail=True)
    for field in dataclasses.fields(LegacyLevel)
    if field.name not in _INHERITED
)
"""What the legacy tool counted otherwise; in legacy sweeps."""

TENSOR_COLUMNS = (
    *(Column(name=name.removeprefix("num_"), kind=Kind.INTEGER, is_detail=True) for name in COUNTED),
    *(Column(name=f"best_{name}_exponent", kind=Kind.FLOAT, is_detail=True) for name in BEST_BY),
)
"""What is said of a tensor beside its recommended level."""

CHOICE_COLUMNS = (
    Column(name="best_format", kind=Kind.TEXT),
    Column(name="best_format_bits", head="bits", kind=Kind.FLOAT, is_detail=True),
    Column(name="best_format_sqnr", head="its SQNR", kind=Kind.FLOAT, unit="dB"),
    Column(name="meets_target", head="enough", kind=Kind.TEXT),
)
"""The narrowest of the formats that keeps the target SQNR, or else the one that keeps most."""

NOTE_COLUMN = Column(name="note", kind=Kind.TEXT)


def records_table(swept: Sequence[Swept], *, target_sqnr: float) -> Table:
    """One row for each record and format: its recommended level; of several formats also the best one."""
    shape = _Shape(swept)
    rows = []
    for record in swept:
        known = record.cells
        choice: tuple[Any, ...] = ()
        if shape.has_formats:
            best = [(one.scheme, one.best_sqnr) for one in known if one.best_sqnr is not None]
            choice = _choice_cells(best_format_of(best, target_sqnr=target_sqnr))
        for one in known:
            level = one.recommended
            if one.bests[0] is None:
                lost = LOSSLESS if one.best_sqnr is not None else {}
                level = tuple(lost.get(column.name) for column in shape.level_columns)
            rows.append((*shape.start(record, one), *one.counts, *one.bests, *level, *choice, one.note))
    return Table(
        title=f"recommended scale of each tensor in {shape.formats}: the level with the best score",
        columns=(
            *shape.start_columns,
            *TENSOR_COLUMNS,
            *shape.level_columns,
            *(CHOICE_COLUMNS if shape.has_formats else ()),
            NOTE_COLUMN,
        ),
        rows=tuple(rows),
        notes=tuple(_notes(swept)),
    )


def levels_table(swept: Sequence[Swept]) -> Table:
    """One row for each record, format and level."""
    shape = _Shape(swept)
    rows = []
    for record in swept:
        for found in record.sweeps:
            start, chosen = shape.start(record, found), found.recommended
            rows += [(*start, *shape.level(level), "recommended" if level is chosen else "") for level in found.levels]
            if not found.levels:
                rows.append((*start, *shape.level(None), found.note))
    return Table(
        title=f"every level in {shape.formats}",
        columns=(*shape.start_columns, *shape.level_columns, NOTE_COLUMN),
        rows=tuple(rows),
        notes=tuple(_notes(swept)),
    )


def _column(name: str, *, head: str = "", kind: Kind = Kind.FLOAT, unit: str = "", is_detail: bool = False) -> Column:
    return Column(name=name, head=head or name.replace("_", " "), kind=kind, unit=unit, is_detail=is_detail)


GROUP_COLUMNS: tuple[tuple[Column, Callable[[Level], float], Callable[[Sequence[float]], float]], ...] = (
    (_column("lowest_exponent", head="exponent from"), lambda level: level.exponent, min),
    (_column("median_exponent", head="median"), lambda level: level.exponent, statistics.median),
    (_column("highest_exponent", head="to"), lambda level: level.exponent, max),
    (_column("median_mse", is_detail=True), lambda level: level.mse, statistics.median),
    (_column("worst_cosine", kind=Kind.COSINE), lambda level: level.cosine, min),
    (_column("worst_psnr", unit="dB"), lambda level: level.psnr, min),
    (_column("median_psnr", unit="dB"), lambda level: level.psnr, statistics.median),
    (_column("worst_sqnr", unit="dB", is_detail=True), lambda level: level.sqnr, min),
    (_column("median_sqnr", unit="dB", is_detail=True), lambda level: level.sqnr, statistics.median),
    (_column("worst_overflow_ratio", head="overflow", kind=Kind.RATIO), lambda level: level.overflow_ratio, max),
    (_column("worst_flushed_ratio", head="flushed", kind=Kind.RATIO), lambda level: level.flushed_ratio, max),
)
"""What is said of a group: a metric of the recommended level of each tensor, and what is made of all of them."""

COMMON_COLUMNS = (
    _column("common_exponent", head="common exponent"),
    _column("common_scale", is_detail=True),
    _column("common_score", is_detail=True),
    _column("median_common_price", head="its median price", unit="dB"),
    _column("worst_common_price", head="worst price", unit="dB"),
)
"""The one scale, or the one offset, that all tensors of a group would bear best, and what sharing it costs in SQNR."""


def group_table(groups: Sequence[SweptGroup], *, by: Sequence[str], target_sqnr: float) -> Table:
    """One row for each group and format: its recommended levels, the best common one, and the best format."""
    swept = [record for group in groups for record in group.members]
    shape = _Shape(swept)
    rows = []
    for group in groups:
        choice = _choice_row(group.members, target_sqnr=target_sqnr)
        key = group_row(group.key, num_records=len(group.members))
        for index, common in enumerate(group.commons):
            sweeps = [record.sweeps[index] for record in group.members]
            levels = [level for found in sweeps if (level := found.recommended) is not None]
            metrics = (
                combine([metric(level) for level in levels]) if levels else None for _, metric, combine in GROUP_COLUMNS
            )
            rows.append((*key[:-1], *_scheme_row(sweeps[0]), key[-1], *metrics, *_common_row(common), *choice))
    keys = group_columns(by)
    return Table(
        title=f"recommended scales in {shape.formats}, each tensor with its own scale, and the best common scale",
        columns=(
            *keys[:-1],
            *SCHEME_COLUMNS,
            keys[-1],
            *(column for column, _, _ in GROUP_COLUMNS),
            *COMMON_COLUMNS,
            *CHOICE_COLUMNS,
        ),
        rows=tuple(rows),
        notes=(*_notes(swept), f"enough: an SQNR of {target_sqnr:g} dB with the best level of every tensor"),
    )


class _Shape:
    """Which columns the sweeps of these records have."""

    def __init__(self, swept: Sequence[Swept]) -> None:
        sweeps = swept[0].sweeps or swept[0].kept
        self.formats = ", ".join(found.scheme.name for found in sweeps)
        self.has_formats = len(sweeps) > 1
        self._has_sources = len({record.source for record in swept}) > 1
        self._is_legacy = sweeps[0].mode is SweepMode.LEGACY
        selections = [record.records for record in swept if record.records is not None]
        of_files = next(filter(are_files, selections), None) or next(iter(selections), None)
        self._identity = () if of_files is None else identity_columns(of_files)
        sources = (SOURCE_COLUMN,) if self._has_sources else ()
        self.start_columns = (*sources, *self._identity, *SCHEME_COLUMNS)
        self.level_columns = (*LEVEL_COLUMNS, *(LEGACY_COLUMNS if self._is_legacy else ()))

    def start(self, record: Swept, found: ScaleSweep | SweptCells) -> tuple[Any, ...]:
        """Which record and format a row is about."""
        source = (record.source,) if self._has_sources else ()
        # A run beside files has no names of files.
        nothing = (None,) * (len(self._identity) - len(record.identity))
        return (*source, *record.identity, *nothing, *_scheme_row(found))

    def level(self, level: Level | None) -> tuple[Any, ...]:
        """The metrics of a level; nothing known without one."""
        return tuple(None if level is None else getattr(level, column.name) for column in self.level_columns)


def _scheme_row(found: ScaleSweep | SweptCells) -> tuple[str, str]:
    return found.scheme.name, found.mode.value


def _common_row(common: CommonScale | None) -> tuple[float | None, ...]:
    if common is None:
        return (None,) * len(COMMON_COLUMNS)
    return common.exponent, scale_of(common.exponent), common.score, common.median_price, common.worst_price


def _choice_row(swept: Sequence[Swept], *, target_sqnr: float) -> tuple[Any, ...]:
    """What `CHOICE_COLUMNS` hold; nothing where no tensor needs a scale."""
    columns = zip(*(record.sweeps for record in swept), strict=True)
    return _choice_cells(best_format({sweeps[0].scheme.name: sweeps for sweeps in columns}, target_sqnr=target_sqnr))


def _choice_cells(choice: FormatChoice | None) -> tuple[Any, ...]:
    if choice is None:
        return (None,) * len(CHOICE_COLUMNS)
    return (
        choice.scheme.name,
        choice.bits_per_element,
        choice.worst_sqnr,
        "yes" if choice.meets_target else "no",
    )


def _notes(swept: Sequence[Swept]) -> Iterator[str]:
    """What is said of all records together, of each format apart; then of what they hold."""
    cells = [record.cells for record in swept]
    for index, first in enumerate(cells[0]):
        exponents = [exponent for one in cells if (exponent := one[index].recommended[0]) is not None]
        if len(exponents) > 1:
            median = statistics.median(exponents)
            what = "offsets" if first.mode.has_offsets else "exponents"
            start = f"{first.scheme.name}: " if len(cells[0]) > 1 else ""
            yield (
                f"{start}recommended {what} of {len(exponents)} tensors: median {median:.4g} "
                f"(scale {scale_of(median):.4g}), from {min(exponents):.4g} to {max(exponents):.4g}"
            )
    counts = [dict(zip(COUNTED, one[0].counts, strict=True)) for one in cells]
    num_special = sum(1 for one in counts if one["nan"] or one["inf"])
    if num_special:
        yield f"{num_special} of {len(swept)} tensors hold NaN or Inf, which are left out of the metrics"
    num_without = sum(1 for one in cells if one[0].recommended[0] is None)
    if num_without:
        yield f"{num_without} of {len(swept)} tensors hold no finite number other than zero: no scale"


def sweep(
    records: Records | Any,
    *,
    format: str | Sequence[str],  # noqa: A002 - the option's name
    by: Sequence[str] = (),
    view: View = View.COMPUTE,
    options: SweepOptions | None = None,
    with_levels: bool = False,
    target_sqnr: float = DEFAULT_TARGET_SQNR,
    engine: Engine | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """The recommended scale of every record and what is lost with it; with `by`, one row for each group.

    In the place of records an array of numpy, a tensor of torch or nested lists may be given: the table has its row.

    Several formats have a row each. Values of at most 16 bits are counted once, and the counts kept: a further format
    reads nothing; wider ones, and those for NVFP4 and channels, are read every time. `by` may name `sample`: then each
    sample of a record is swept for itself. Records of integers and bool are left out, and so are formats that kept
    histograms do not answer, which a note names, where others can be. A record without a finite number other than zero
    has a row without metrics. `with_levels` gives one row for each record and level instead. A format is good enough
    with an SQNR of `target_sqnr` dB. With `by` and one scale for each tensor, records are looked at twice: for the
    scales of their own, and for the common one. `on_record` is called each time.

    Raises:
        UsageError: the format or an option is not allowed; no record holds floating-point numbers, or has samples
            where these are asked for; `by` and `with_levels` exclude each other.
        UnknownFieldError: `by` names no field of a record.
    """
    asked = parse_jobs(format, options=options)
    check_shape(by=by, with_levels=with_levels, target_sqnr=target_sqnr)
    if not isinstance(records, Records):
        alone = [swept_array(records, asked, by=by)]
        return levels_table(alone) if with_levels else records_table(alone, target_sqnr=target_sqnr)
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record holds floating-point numbers, and for integers and bool no scale is sought")
    notes = []
    if SAMPLE in by:
        chosen, said = with_samples(chosen)
        notes.append(said)
    jobs, left_out = answerable(asked, keeps=set(chosen.column("keep").tolist()))
    notes.append(left_out)
    fields = with_stacks(by, chosen)
    found = []
    for swept in sweep_selection(chosen, jobs, view=view, by=fields, is_kept=not with_levels, engine=engine):
        if isinstance(swept, RanktapeError):
            raise swept
        found += swept
        on_record()
    table = table_of(
        found,
        view=view,
        by=fields,
        with_levels=with_levels,
        target_sqnr=target_sqnr,
        engine=engine,
        on_record=on_record,
    )
    return dataclasses.replace(table, notes=(*table.notes, *filter(None, notes)))


def check_shape(*, by: Sequence[str], with_levels: bool, target_sqnr: float) -> None:
    """Refuse what no table has.

    Raises:
        UsageError: `by` and `with_levels` exclude each other; the target is NaN.
    """
    if by and with_levels:
        raise UsageError("--levels and --by exclude each other: give one")
    if math.isnan(target_sqnr):
        raise UsageError("--target-sqnr nan is not allowed: give a number of dB")


def table_of(
    swept: Sequence[Swept],
    *,
    view: View,
    by: Sequence[str],
    with_levels: bool,
    target_sqnr: float,
    on_record: Callable[[], object],
    engine: Engine | None = None,
) -> Table:
    """The table of at least one record's sweeps: a row for each record, group or level, and format."""
    if by:
        groups = grouped(swept, view=view, engine=engine, on_record=on_record)
        return group_table(groups, by=by, target_sqnr=target_sqnr)
    return levels_table(swept) if with_levels else records_table(swept, target_sqnr=target_sqnr)
