"""Determines the scale that each tensor of a selection needs in a format, and what is lost with it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ranktape.analyze.engine.digests import VERSION as DIGEST_VERSION
from ranktape.analyze.engine.engine import Engine, cached_record_values, raise_if_error
from ranktape.analyze.engine.sweep_measure import VERSION as BLOCKS_VERSION
from ranktape.analyze.engine.sweep_measure import Job, RecordJobs, sweep_numbers, sweep_records
from ranktape.analyze.engine.target import sweepable
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import (
    SOURCE_COLUMN,
    are_files,
    group_columns,
    group_row,
    identity_columns,
    identity_rows,
    sample_names,
    with_stacks,
)
from ranktape.analyze.numerics.pieces import as_array
from ranktape.analyze.numerics.quantization.schemes import MX_BLOCK_SIZE, Scheme
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.metrics import LOSSLESS, Level
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve_all, scale_of
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.analyze.questions.advice import (
    DEFAULT_TARGET_SQNR,
    FormatChoice,
    best_by,
    best_format,
    best_format_of,
    best_sqnr,
    common_grid,
    common_scale,
    direction_of,
    loses_everything,
)
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import RanktapeError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage.format.record_info import Keep
from ranktape.storage.query.columns import equal_rows
from ranktape.storage.records.records import Records

CACHE_VERSION = f"5-{DIGEST_VERSION}-{BLOCKS_VERSION}"
"""Versions of the cached sweeps, and of the counts that they are computed from."""

COUNTED = ("num_elements", "nan", "inf", "spoiled", "zero")
"""The counts of a tensor in a sweep."""

BEST_BY = ("mse", "cosine", "psnr")
"""Metrics whose best level is shown beside the recommended one."""

SCHEME_COLUMNS = (
    Column(name="format", kind=Kind.TEXT, is_key=True),
    Column(name="sweep_mode", head="mode", kind=Kind.TEXT, is_key=True),
)
"""The columns that identify the format and the kind of levels of a row."""

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
"""The columns of the fields of `Level`."""

_INHERITED = {field.name for field in dataclasses.fields(Level)}

LEGACY_COLUMNS = tuple(
    Column(name=field.name, kind=Kind.INTEGER if field.name.endswith("_count") else Kind.FLOAT, is_detail=True)
    for field in dataclasses.fields(LegacyLevel)
    if field.name not in _INHERITED
)
"""The columns of the fields that only `LegacyLevel` has, for legacy sweeps."""

TENSOR_COLUMNS = (
    *(Column(name=name.removeprefix("num_"), kind=Kind.INTEGER, is_detail=True) for name in COUNTED),
    *(Column(name=f"best_{name}_exponent", kind=Kind.FLOAT, is_detail=True) for name in BEST_BY),
)
"""The columns of a tensor besides those of its recommended level."""

CHOICE_COLUMNS = (
    Column(name="best_format", kind=Kind.TEXT),
    Column(name="best_format_bits", head="bits", kind=Kind.FLOAT, is_detail=True),
    Column(name="best_format_sqnr", head="best SQNR", kind=Kind.FLOAT, unit="dB"),
    Column(name="meets_target", head="meets target", kind=Kind.TEXT),
)
"""The columns of the narrowest format that reaches the target SQNR, or of the best one if none does."""

NOTE_COLUMN = Column(name="note", kind=Kind.TEXT)


class SweepCells(NamedTuple):
    """The values in a table for one record in one format."""

    scheme: Scheme
    mode: SweepMode
    counts: tuple[int, ...]
    """The values of `COUNTED`."""
    bests: tuple[float | None, ...]
    """The exponents of the best levels by `BEST_BY`; None without levels."""
    recommended: tuple[float | None, ...]
    """The fields of the recommended level; None without levels."""
    best_sqnr: float | None
    """The largest SQNR of a level, in dB; infinite for zeros. None for other tensors without levels."""
    note: str
    """Unusual properties of the tensor, and whether even the recommended level is useless."""


def sweep_cells(found: ScaleSweep) -> SweepCells:
    """The cells of one sweep."""
    chosen, bests = found.recommended, [best_by(found, name) for name in BEST_BY]
    fields = dataclasses.fields(Level if chosen is None else chosen)
    notes = [found.note] if found.note else []
    if chosen is not None and loses_everything(found.levels):
        direction = direction_of(found.levels, chosen, is_tapered=bool(found.target.taper))
        notes.append(f"all levels lose nearly everything: try {direction} scales")
    return SweepCells(
        scheme=found.scheme,
        mode=found.mode,
        counts=tuple(getattr(found, name) for name in COUNTED),
        bests=tuple(None if level is None else level.exponent for level in bests),
        recommended=tuple(None if chosen is None else getattr(chosen, field.name) for field in fields),
        best_sqnr=best_sqnr(found),
        note="; ".join(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptTensor:
    """One record or sample, with a sweep for each format, in order."""

    sweeps: tuple[ScaleSweep, ...] = ()
    cells: tuple[SweepCells, ...]
    """The values for a table. If these are from the cache, there are no `sweeps`."""
    source: str = ""
    """The run, folder or file of the tensor, as it was given."""
    identity: tuple[Any, ...] = ()
    """Its row of `identity_rows`."""
    key: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The values of the fields by which records are grouped."""
    records: Records | None = None
    """The selection with the record; None for an array."""
    index: int = 0
    """Its index in the selection."""
    sample: int | None = None
    """Index of the sample; None for the whole record."""


def parse_jobs(formats: str | Sequence[str], *, options: SweepOptions | None = None) -> tuple[Job, ...]:
    """The jobs for format names as users write them: one, several, or several separated by commas.

    Formats that are the same with these options have one job.

    Raises:
        UsageError: a format is unknown or does not support the options, an option applies to no format, or no format is
            given.
    """
    texts = [formats] if isinstance(formats, str) else formats
    names = [name.strip() for text in texts for name in text.split(",")]
    chosen = options or SweepOptions()
    found: dict[str, Job] = {}
    for scheme, mode in resolve_all(names, options=chosen):
        if mode.has_offsets:
            chosen.offsets()  # raises an error if the ends leave no room for all levels
        found.setdefault(scheme.name, Job(scheme, mode, chosen))
    if not found:
        raise UsageError("no format is given: give --format NAME, such as fp8_e4m3")
    return tuple(found.values())


def records_with_samples(records: Records) -> tuple[Records, str]:
    """The records whose samples can be distinguished, and a note about the others.

    Raises:
        UsageError: there are no such records.
    """
    with_values = records.where(f"keep == '{Keep.VALUES}' and numel > 0")
    chosen = with_values.take([place for place, names in enumerate(sample_names(with_values)) if names])
    left_out = len(records) - len(chosen)
    if not len(chosen):
        raise UsageError(
            f"none of {len(records)} records has stored values and samples that can be distinguished: "
            "leave sample out of --by"
        )
    return chosen, f"{left_out} of {len(records)} records have no samples and are left out" if left_out else ""


def answerable_jobs(jobs: Sequence[Job], *, keeps: Collection[str]) -> tuple[Sequence[Job], str]:
    """The jobs that stored histograms can answer, and a note about the formats that were left out.

    `keeps` are the kinds of stored data of the records. If no record is stored as a histogram, or if no job can be
    answered, all jobs are returned, and each record reports the reason.
    """
    left_out = [
        job.scheme.name
        for job in jobs
        if job.mode is SweepMode.CHANNEL
        or (job.mode is SweepMode.MX and (job.scheme.has_tensor_scale or job.scheme.block_size != MX_BLOCK_SIZE))
    ]
    if Keep.HISTOGRAM not in keeps or not left_out or len(left_out) == len(jobs):
        return jobs, ""
    return [job for job in jobs if job.scheme.name not in left_out], (
        f"{', '.join(left_out)} left out: they need values, and some records store only histograms, which support "
        f"mx formats with blocks of {MX_BLOCK_SIZE}, tensor and legacy mode; --where \"keep == 'values'\" leaves "
        "out such records instead"
    )


def is_cacheable(jobs: Sequence[Job], *, by: Sequence[str], with_levels: bool) -> bool:
    """Whether the table needs only `SweepCells`. Levels of the legacy mode have more fields."""
    return not by and not with_levels and all(job.mode is not SweepMode.LEGACY for job in jobs)


def sweep_selection(
    records: Records,
    jobs: Sequence[Job],
    *,
    view: View,
    engine: Engine,
    source: str = "",
    by: Sequence[str] = (),
    is_kept: bool = False,
) -> Iterator[list[SweptTensor] | RanktapeError]:
    """The sweeps of each record in order, or the error of each record that fails.

    With `is_kept`, only the cells are returned, which are cached. If `by` contains `sample`, each sample of a record is
    swept separately; records without samples give an empty list.
    """
    identities = identity_rows(records)
    if is_kept:
        kept = _cached_cells(records, jobs, view=view, engine=engine)
        for row, (identity, one) in enumerate(zip(identities, kept, strict=True)):
            if isinstance(one, RanktapeError):
                yield one
            else:
                yield [SweptTensor(cells=one, source=source, identity=identity, records=records, index=row)]
        return
    names = sample_names(records) if SAMPLE in by else []
    columns = {field: records.column(field).tolist() for field in by if field != SAMPLE}
    asked: list[RecordJobs] = [dict.fromkeys(range(len(found)), jobs) for found in names] or [{None: jobs}] * len(
        records
    )
    all_found = sweep_records(records, asked, view=view, engine=engine)
    for row, (identity, found) in enumerate(zip(identities, all_found, strict=True)):
        if isinstance(found, RanktapeError):
            yield found
            continue
        yield [
            SweptTensor(
                sweeps=sweeps,
                cells=tuple(map(sweep_cells, sweeps)),
                source=source,
                identity=identity,
                key={field: names[row][sample or 0] if field == SAMPLE else columns[field][row] for field in by},
                records=records,
                index=row,
                sample=sample,
            )
            for sample, sweeps in found.items()
        ]


def _cached_cells(
    records: Records, jobs: Sequence[Job], *, view: View, engine: Engine
) -> Iterator[tuple[SweepCells, ...] | RanktapeError]:
    """The cells of each record, one for each job, from the cache if possible."""
    # The cached rows do not depend on the order in which formats are given.
    ordered = sorted(set(jobs), key=repr)
    asked = hashlib.blake2b(repr(ordered).encode(), digest_size=8).hexdigest()

    def compute(some: Records) -> Iterator[Any]:
        for found in sweep_records(some, [{None: ordered}] * len(some), view=view, engine=engine):
            yield found if isinstance(found, RanktapeError) else [sweep_cells(one)[2:] for one in found[None]]

    for value in cached_record_values(records, compute, name=f"sweep_{asked}_{view}_v{CACHE_VERSION}", engine=engine):
        if isinstance(value, RanktapeError):
            yield value
            continue
        of_jobs = ((job, value[ordered.index(job)]) for job in jobs)
        yield tuple(
            SweepCells(job.scheme, job.mode, tuple(counts), tuple(bests), tuple(recommended), best, note)
            for job, (counts, bests, recommended, best, note) in of_jobs
        )


def records_table(swept: Sequence[SweptTensor], *, target_sqnr: float) -> Table:
    """The table with one row for each record and format: its recommended level, and the best of several formats."""
    start_columns, start = _row_keys(swept)
    level_columns, has_formats = _level_columns(swept), len(swept[0].cells) > 1
    rows = []
    for record in swept:
        choice: tuple[Any, ...] = ()
        if has_formats:
            best = [(one.scheme, one.best_sqnr) for one in record.cells if one.best_sqnr is not None]
            choice = _choice_cells(best_format_of(best, target_sqnr=target_sqnr))
        for one in record.cells:
            level = one.recommended
            if one.bests[0] is None:
                lost = LOSSLESS if one.best_sqnr is not None else {}
                level = tuple(lost.get(column.name) for column in level_columns)
            rows.append((*start(record, one), *one.counts, *one.bests, *level, *choice, one.note))
    choice_columns = CHOICE_COLUMNS if has_formats else ()
    return Table(
        title=f"recommended scale of each tensor in {_formats(swept)}: the level with the best score",
        columns=(*start_columns, *TENSOR_COLUMNS, *level_columns, *choice_columns, NOTE_COLUMN),
        rows=tuple(rows),
        notes=tuple(_notes(swept)),
    )


def levels_table(swept: Sequence[SweptTensor]) -> Table:
    """The table with one row for each record, format and level."""
    start_columns, start = _row_keys(swept)
    level_columns = _level_columns(swept)
    rows = []
    for record in swept:
        for found, cells in zip(record.sweeps, record.cells, strict=True):
            own, chosen = start(record, cells), found.recommended
            rows += [
                (
                    *own,
                    *(getattr(level, column.name) for column in level_columns),
                    "recommended" if level is chosen else "",
                )
                for level in found.levels
            ]
            if not found.levels:
                rows.append((*own, *(None,) * len(level_columns), found.note))
    return Table(
        title=f"all levels in {_formats(swept)}",
        columns=(*start_columns, *level_columns, NOTE_COLUMN),
        rows=tuple(rows),
        notes=tuple(_notes(swept)),
    )


def _formats(swept: Sequence[SweptTensor]) -> str:
    return ", ".join(one.scheme.name for one in swept[0].cells)


def _level_columns(swept: Sequence[SweptTensor]) -> tuple[Column, ...]:
    return (*LEVEL_COLUMNS, *(LEGACY_COLUMNS if swept[0].cells[0].mode is SweepMode.LEGACY else ()))


def _row_keys(
    swept: Sequence[SweptTensor],
) -> tuple[tuple[Column, ...], Callable[[SweptTensor, SweepCells], tuple[Any, ...]]]:
    """The columns that identify the record and format of a row, and a function for their cells."""
    sources = (SOURCE_COLUMN,) if len({record.source for record in swept}) > 1 else ()
    selections = [record.records for record in swept if record.records is not None]
    of_files = next(filter(are_files, selections), None) or next(iter(selections), None)
    identity = () if of_files is None else identity_columns(of_files)

    def start(record: SweptTensor, one: SweepCells) -> tuple[Any, ...]:
        source = (record.source,) if sources else ()
        # A run beside files has no file names.
        nothing = (None,) * (len(identity) - len(record.identity))
        return (*source, *record.identity, *nothing, one.scheme.name, one.mode.value)

    return (*sources, *identity, *SCHEME_COLUMNS), start


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
"""The columns of a group, each with a metric of the recommended level of a tensor and the function that combines
them."""

COMMON_COLUMNS = (
    _column("common_exponent", head="common exponent"),
    _column("common_scale", is_detail=True),
    _column("common_score", is_detail=True),
    _column("median_common_price", head="median loss", unit="dB"),
    _column("worst_common_price", head="worst loss", unit="dB"),
)
"""The columns of the best common scale or offset of a group, and the loss of SQNR due to sharing it."""


def group_table(
    swept: Sequence[SweptTensor], *, by: Sequence[str], view: View, target_sqnr: float, engine: Engine
) -> Table:
    """The table with one row for each group and format: recommended levels, best common level, and best format."""
    columns = list(zip(*(one.key.values() for one in swept), strict=True))
    groups = [[swept[row] for row in rows.tolist()] for _, rows in equal_rows(columns)]
    again = _at_common_scales(groups, view=view, engine=engine)
    rows = []
    for members in groups:
        of_formats = list(zip(*(record.sweeps for record in members), strict=True))
        choice = best_format({sweeps[0].scheme.name: sweeps for sweeps in of_formats}, target_sqnr=target_sqnr)
        *key, num_records = group_row(members[0].key, num_records=len(members))
        for index, sweeps in enumerate(of_formats):
            levels = [level for found in sweeps if (level := found.recommended) is not None]
            metrics = (
                combine([metric(level) for level in levels]) if levels else None for _, metric, combine in GROUP_COLUMNS
            )
            common = common_scale([again.get((id(member), index), member.sweeps[index]) for member in members])
            shared: tuple[float | None, ...] = (None,) * len(COMMON_COLUMNS)
            if common is not None:
                prices = common.median_price, common.worst_price
                shared = common.exponent, scale_of(common.exponent), common.score, *prices
            scheme = sweeps[0].scheme.name, sweeps[0].mode.value
            rows.append((*key, *scheme, num_records, *metrics, *shared, *_choice_cells(choice)))
    *keys, count = group_columns(by)
    metric_columns = (column for column, _, _ in GROUP_COLUMNS)
    return Table(
        title=f"recommended scales in {_formats(swept)}, each tensor with its own scale, and the best common scale",
        columns=(*keys, *SCHEME_COLUMNS, count, *metric_columns, *COMMON_COLUMNS, *CHOICE_COLUMNS),
        rows=tuple(rows),
        notes=(
            *_notes(swept),
            f"meets target: an SQNR of at least {target_sqnr:g} dB at the best level of every tensor",
        ),
    )


def _at_common_scales(
    groups: Sequence[Sequence[SweptTensor]], *, view: View, engine: Engine
) -> dict[tuple[int, int], ScaleSweep]:
    """The sweeps at the common scales of each group, by the `id` of a member and the index of a format.

    Members that were swept at these scales already are left out.
    """
    batches: dict[int, list[tuple[SweptTensor, dict[int, Job]]]] = {}
    for members in groups:
        jobs = {}
        for index, sweeps in enumerate(zip(*(member.sweeps for member in members), strict=True)):
            grid, first = common_grid(sweeps), sweeps[0]
            if grid is not None and grid != first.options:
                jobs[index] = Job(first.scheme, first.mode, grid)
        for member in members if jobs else ():
            batches.setdefault(id(member.records), []).append((member, jobs))
    again: dict[tuple[int, int], ScaleSweep] = {}
    for batch in batches.values():
        records = batch[0][0].records
        assert records is not None, "an array is in no group"
        asked: list[dict[int | None, list[Job]]] = [{} for _ in range(len(records))]
        for member, jobs in batch:
            asked[member.index][member.sample] = list(jobs.values())
        found = list(map(raise_if_error, sweep_records(records, asked, view=view, engine=engine)))
        for member, jobs in batch:
            sweeps = found[member.index][member.sample]
            again |= {(id(member), index): one for index, one in zip(jobs, sweeps, strict=True)}
    return again


def _choice_cells(choice: FormatChoice | None) -> tuple[Any, ...]:
    if choice is None:
        return (None,) * len(CHOICE_COLUMNS)
    return (
        choice.scheme.name,
        choice.bits_per_element,
        choice.worst_sqnr,
        "yes" if choice.meets_target else "no",
    )


def _notes(swept: Sequence[SweptTensor]) -> Iterator[str]:
    """Notes about the scales in each format, and about tensors with special values."""
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
        yield f"{num_special} of {len(swept)} tensors contain NaN or Inf, which are left out of the metrics"
    num_without = sum(1 for one in cells if one[0].recommended[0] is None)
    if num_without:
        yield f"{num_without} of {len(swept)} tensors have no finite nonzero value, and no scale"


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
) -> Table:
    """The recommended scale of each record and the loss with it, or with `by`, one row for each group.

    Instead of records, an array of numpy, a tensor of torch or nested lists may be given, which gets one row.

    Each format has its own row. Values of at most 16 bits are counted once and the counts are cached, so that further
    formats read nothing. Wider values, NVFP4 and channels read the values each time. If `by` contains `sample`, each
    sample is swept separately. Records of integers and bool are left out. If some records are stored as histograms,
    formats that these cannot answer are left out, too, unless none remains; a note names them. A record without a
    finite nonzero number has a row without metrics. `with_levels` gives one row for each record and level instead. A
    format is sufficient if its SQNR is at least `target_sqnr`, in dB. With `by` and one scale per tensor, records are
    swept twice: for their own scales and for the common one.

    Raises:
        UsageError: the format or an option is invalid, no record has floating-point numbers, samples are requested but
            no record has any, or `by` and `with_levels` are both given.
        UnknownFieldError: `by` names an unknown field of a record.
    """
    asked: Sequence[Job] = parse_jobs(format, options=options)
    check_shape(by=by, with_levels=with_levels, target_sqnr=target_sqnr)
    if not isinstance(records, Records):
        if by:
            raise UsageError(f"by={list(by)} is only for records, not for an array: leave it out")
        sweeps = sweep_numbers(as_array(records), asked)
        alone = [SweptTensor(sweeps=sweeps, cells=tuple(map(sweep_cells, sweeps)))]
        return levels_table(alone) if with_levels else records_table(alone, target_sqnr=target_sqnr)
    chosen, notes = sweepable(records), [""]
    if not len(chosen):
        raise UsageError("no record has floating-point numbers: integers and bool are not swept")
    if SAMPLE in by:
        chosen, notes[0] = records_with_samples(chosen)
    jobs, left_out = answerable_jobs(asked, keeps=set(chosen.column("keep").tolist()))
    fields, used = with_stacks(by, chosen), engine or Engine()
    is_kept = is_cacheable(jobs, by=by, with_levels=with_levels)
    found: list[SweptTensor] = []
    for swept in sweep_selection(chosen, jobs, view=view, by=fields, is_kept=is_kept, engine=used):
        found += raise_if_error(swept)
    table = sweep_table(found, view=view, by=fields, with_levels=with_levels, target_sqnr=target_sqnr, engine=used)
    return dataclasses.replace(table, notes=(*table.notes, *filter(None, (*notes, left_out))))


def check_shape(*, by: Sequence[str], with_levels: bool, target_sqnr: float) -> None:
    """Check the options that determine the rows of the table.

    Raises:
        UsageError: `by` and `with_levels` are both given, or the target is NaN.
    """
    if by and with_levels:
        raise UsageError("--levels and --by exclude each other: give one")
    if math.isnan(target_sqnr):
        raise UsageError("--target-sqnr nan is not allowed: give a number of dB")


def sweep_table(
    swept: Sequence[SweptTensor],
    *,
    view: View,
    by: Sequence[str],
    with_levels: bool,
    target_sqnr: float,
    engine: Engine,
) -> Table:
    """The table of the sweeps of at least one record, with a row for each record, group or level, and format."""
    if by:
        return group_table(swept, by=by, view=view, target_sqnr=target_sqnr, engine=engine)
    return levels_table(swept) if with_levels else records_table(swept, target_sqnr=target_sqnr)
