"""Counts what overflows and underflows, where, and with which limits.

For the limits of their own dtype, tensors were counted when they were written, so that the catalogue has the answer and
no value is read. For another format, the answer is computed from the digest of each record, which is cached.

A value overflows in a format if rounding to nearest takes it beyond the largest value, which starts half a step above
that value. (The legacy tool counts all values above the largest value, including those that round to it: for fp8_e4m3,
from 448 to 464.) It underflows if it is not zero and smaller than the smallest normal value, and is flushed if it
rounds to zero. With a scale, it is divided by the scale first. `severity_columns` defines the severities.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.digests import digest_columns, digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import count_names
from ranktape.analyze.engine.numbers import additive_masks
from ranktape.analyze.engine.sweep_measure import is_narrow
from ranktape.analyze.engine.target import (
    KINDS,
    NAMES,
    LimitsMeasure,
    Target,
    largest_value,
    parse_targets,
    preserves_limits,
    sweep_row,
    sweepable,
)
from ranktape.analyze.engine.values import View, pick, read_numbers, viewed_dtype, viewed_dtypes
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.identity import (
    NUMBER_FIELDS,
    SAMPLE_COLUMN,
    SampleName,
    are_files,
    group_columns,
    group_row,
    identity_cells,
    identity_columns,
    sample_names,
    source_fields,
    with_stacks,
)
from ranktape.analyze.numerics.histograms.histogram import KINDS as SCANNED
from ranktape.analyze.numerics.quantization.encoded import HIGH_RATIO, MEDIUM_RATIO, LossSeverity
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import (
    Cells,
    Coded,
    Column,
    Kind,
    Table,
    TableRows,
    alternate,
    json_value,
    number_cells,
)
from ranktape.errors import UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS, Keep
from ranktape.storage.query.columns import equal_rows, rows_of
from ranktape.storage.query.filters import expect_list

SEVERITY_COLUMNS = (
    Column(name="severity", kind=Kind.TEXT),
    Column(name="overflow.severity", kind=Kind.TEXT, is_detail=True),
    Column(name="overflow.underflow.severity", kind=Kind.TEXT, is_detail=True),
)
"""The severity of a row: the worse of overflow and underflow, or high for NaN; and the severity of each of the two."""


NEXT_FORMAT = (
    "few or no values are beyond the limits of the dtype: --format fp8_e4m3 shows what an 8-bit format would lose with "
    "a scale for each tensor, and with --scaling none what a cast would lose"
)
"""The note if no format was named and nothing severe happens in the dtype itself."""


def overflow(
    records: Records,
    *,
    format: str | Sequence[str] | None = None,  # noqa: A002 - the option's name
    scaling: str | Sequence[str] | None = None,
    first: bool = False,
    per_sample: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Count NaN, Inf, zeros, subnormals and values beyond the limits of a format.

    Without `format`, the limits are those of the captured dtype, counted while the run was recorded: no values are
    read. With `format`, values are read once, rounded to the dtype that the operation computed in (see `view`), and
    each format has its own row.

    The severity is high for any NaN or Inf, and otherwise depends on the ratio of values that are lost. NaN counts only
    as NaN; an infinity counts as infinite and as overflow. Ratios of an empty tensor are 0.

    Args:
        format (NAME): Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, int8, hif8, nvfp4, bf16,
            fp16, or with block scales: mxfp8, mxfp4, ...; several are separated by commas. Default: the captured dtype.
        scaling (KIND): Scale that values are divided by: none, tensor (a power of two that aligns the largest value) or
            block (those of the format); several are separated by commas. Default: block for formats with block scales,
            tensor for others of up to 8 bits, none for wider formats.
        first: Show where each kind of loss first occurs.
        per_sample: Show one row for each sample of each record.

    Raises:
        UsageError: a format is not known, is one of scales, or does not go with the scaling; no record has samples;
            arguments exclude each other.
        UnknownFieldError: `by` names no field of a record.
    """
    if per_sample and by:
        raise UsageError("--per-sample and --by exclude each other: --by sample makes a row for each sample")
    targets = parse_targets(format, scaling)
    chosen = view or (View.COMPUTE if targets else View.SEEN)
    # The first occurrence is determined for each source separately.
    fields = by or (source_fields(records) if first else ())
    record_counts = count_records(records, targets, by=fields, per_sample=per_sample, view=chosen, engine=engine)
    return first_occurrences(record_counts) if first else _table(record_counts, targets, view=chosen)


def _table(record_counts: RecordCounts, targets: Sequence[Target], *, view: View) -> Table:
    """The table with a row for each place and format, and the verdict on all rows."""
    heads, members = record_counts.rows()
    answers = []
    for target, counts in record_counts.counted:
        numbers = counts
        if members is not None:
            order = np.concatenate([np.zeros(0, dtype=np.int64), *members])
            starts = np.cumsum([0, *map(len, members)])[:-1].astype(np.int64)
            numbers = sum_groups({name: column[order] for name, column in counts.items()}, starts)
        answers.append(
            [*heads.columns, *_limits(record_counts, members, target), *_count_cells(numbers, targets, target)]
        )
    table = Table(
        title=_title(targets, view=view),
        columns=(*record_counts.columns, *_limit_columns(targets), *_count_columns(targets)),
        rows=TableRows([alternate(cells) for cells in zip(*answers, strict=True)]),
        notes=record_counts.notes,
        worst_first=worst_first,
    )
    is_clean = not targets and set(table.column("severity")) == {LossSeverity.NONE.value}
    hint = (NEXT_FORMAT,) if is_clean else ()
    return dataclasses.replace(table, notes=(*table.notes, *hint, *_verdict(table)))


def _verdict(table: Table) -> Iterator[str]:
    """The number of rows of each severity, and the worst row."""
    severities = table.column("severity")
    counts = [(one.value, severities.count(one.value)) for one in reversed(LossSeverity)]
    unknown = severities.count(None)
    counted = ", ".join(
        [*(f"{count} {name}" for name, count in counts if count), *([f"{unknown} unknown"] * (unknown > 0))]
    )
    if not any(name in severities for name in (LossSeverity.HIGH.value, LossSeverity.MEDIUM.value)):
        yield f"verdict: {counted or 'no row'}"
        return
    row = dict(zip((column.name for column in table.columns), table.rows[int(_badness(table)[0])], strict=True))
    location = [
        f"{column.name} {row[column.name]}"
        for column in table.columns
        if column.is_key and not column.is_detail and len(set(map(str, table.column(column.name)))) > 1
    ]
    losses = [f"{100 * row[name]:.3g} % {what}" for name, what in _LOSS_NAMES.items() if row.get(name)]
    yield f"verdict: {counted}; worst: {' '.join([*location, ', '.join(losses)])}"


_LOSS_NAMES = {
    "overflow.nan.ratio": "NaN",
    "overflow.inf.ratio": "infinite",
    "overflow.ratio": "overflow",
    "overflow.underflow.ratio": "underflow",
    "overflow.flushed.ratio": "flushed",
}
"""The losses that a verdict names for the worst row."""


def worst_first(table: Table) -> Table:
    """The rows of `overflow` by severity, then by the ratios of NaN, of overflow, and of other losses."""
    return dataclasses.replace(table, rows=table.cells.take(_badness(table)))


def _badness(table: Table) -> NDArray[np.int64]:
    """The indices of rows, the worst first."""
    rank = {severity.value: place for place, severity in enumerate(LossSeverity)}
    is_flushed = any(column.name == "overflow.flushed.ratio" for column in table.columns)
    names = ("overflow.nan.ratio", "overflow.ratio", f"overflow.{'flushed' if is_flushed else 'underflow'}.ratio")
    keys: list[list[float]] = [[-rank.get(severity, -1) for severity in table.column("severity")]]
    keys += [[-(ratio or 0.0) for ratio in table.column(name)] for name in names]
    return np.lexsort(np.array(keys[::-1], dtype=np.float64))


def _kinds(targets: Sequence[Target]) -> tuple[str, ...]:
    """The counts in the order of the columns. Stored values cannot be flushed or spoiled."""
    left_out = set()
    if not targets:
        left_out.add("flushed")
    if all(target.scaling is not Scaling.BLOCK for target in targets):
        left_out.add("spoiled")
    return tuple(kind for kind in KINDS if kind not in left_out)


def _limit_columns(targets: Sequence[Target]) -> tuple[Column, ...]:
    """The columns that identify the limits."""
    return (
        Column(name="limits_of", kind=Kind.TEXT, head="limits of", is_key=True),
        Column(name="largest_value", kind=Kind.FLOAT, head="largest value", is_detail=True),
        *((Column(name="scaling", kind=Kind.TEXT, is_key=True),) if targets else ()),
    )


def _limits(
    record_counts: RecordCounts, members: Sequence[NDArray[np.int64]] | None, target: Target | None
) -> list[Cells]:
    """The name of the limits of each row, the largest value if it is the same for all records, and the scaling."""
    num_rows = len(record_counts.owners) if members is None else len(members)
    if target is not None:
        nothing = np.zeros(num_rows, dtype=np.int64)
        return [Coded(nothing, [one]) for one in (target.name, target.element.maximum, target.scaling.value)]
    names = sorted(set(record_counts.dtypes))
    codes = np.searchsorted(names, record_counts.dtypes)[record_counts.owners]
    largest = list(map(largest_value, names))
    if members is None:
        return [Coded(codes, names), Coded(codes, largest)]
    several = [np.unique(codes[one]).tolist() for one in members]
    limits = [{largest[code] for code in one} for one in several]
    return [
        [" ".join(names[code] for code in one) for one in several],
        [one.pop() if len(one) == 1 else None for one in limits],
    ]


def _count_columns(targets: Sequence[Target]) -> tuple[Column, ...]:
    def pair(kind: str) -> tuple[Column, Column]:
        count, ratio = count_names(kind)
        head = "overflow" if kind == "total" else kind
        return (
            Column(name=count, kind=Kind.INTEGER, head=f"{head} count", is_detail=True),
            Column(name=ratio, kind=Kind.RATIO, head=head),
        )

    return (
        Column(name="elements", kind=Kind.INTEGER),
        *(column for kind in _kinds(targets) for column in pair(kind)),
        *(Column(name=f"overflow.{name}", kind=Kind.FLOAT, head=name, is_detail=name != "absmax") for name in EXTREMES),
        *SEVERITY_COLUMNS,
    )


def _count_cells(numbers: Counts, targets: Sequence[Target], target: Target | None) -> list[Cells]:
    """The cells of counts, extremes and severities of all rows."""
    elements = numbers["elements"]
    columns = [number_cells(elements, kind=Kind.INTEGER)]
    for kind in _kinds(targets):
        columns.append(number_cells(numbers[kind], kind=Kind.INTEGER))
        columns.append(numbers[kind] / np.maximum(1, elements))
    return [*columns, *(numbers[name] for name in EXTREMES), *severity_columns(numbers, target)]


def severity_columns(numbers: Counts, target: Target | None) -> list[Cells]:
    """The severities of the counts: of all together, of overflow, and of underflow; None if unknown.

    Any NaN or Inf is high, except -Inf in additive masks. Overflow is high above 1 % and medium above 0.1 %; with
    scales of blocks it is not judged, because their rules cut off less than a quarter of a value. Underflow is high
    above 25 %. It is medium if more than 1 % is subnormal in the dtype, or if more than 10 % becomes zero in a format,
    as in `findings`.
    """
    elements = np.maximum(1, numbers["elements"])
    overflow, lost = (numbers[kind] / elements for kind in ("total", "underflow" if target is None else "flushed"))
    if target is not None and target.scaling is Scaling.BLOCK:
        overflow = np.where(np.isnan(overflow), overflow, 0.0)
    overflow = np.where(numbers["inf"] > numbers["masked"], math.inf, overflow)
    medium = limit.LOST_RATIO if target is None else limit.FLUSHED_RATIO
    names = [severity.value for severity in LossSeverity]
    of_overflow = _ranks(overflow, medium=MEDIUM_RATIO, high=HIGH_RATIO)
    of_lost = _ranks(lost, medium=medium, high=limit.LOST_RATIO_SERIOUS)
    highest = names.index(LossSeverity.HIGH.value)
    worst = np.where(numbers["nan"] > 0, highest, np.maximum(of_overflow, of_lost))
    worst = np.where((of_overflow < 0) | (of_lost < 0), -1, worst)
    words = [*names, None]
    # The rank -1 selects the last element, None.
    return [Coded(ranks % len(words), words) for ranks in (worst, of_overflow, of_lost)]


def _ranks(ratios: NDArray[np.float64], *, medium: float, high: float) -> NDArray[np.int64]:
    """The index of the severity of each ratio in `LossSeverity`; -1 if unknown."""
    order = [list(LossSeverity).index(one) for one in (LossSeverity.NONE, LossSeverity.MEDIUM, LossSeverity.HIGH)]
    ranks = np.select([np.isnan(ratios), ratios > high, ratios > medium], [-1, order[2], order[1]], default=order[0])
    return ranks.astype(np.int64)


def _title(targets: Sequence[Target], *, view: View) -> str:
    medium, lost = (limit.FLUSHED_RATIO, "flushed") if targets else (limit.LOST_RATIO, "underflow")
    severity = (
        f"high: NaN, Inf, overflow > {HIGH_RATIO:.0%}, {lost} > {limit.LOST_RATIO_SERIOUS:.0%}; "
        f"medium: > {MEDIUM_RATIO:.1%}, > {medium:.0%}"
    )
    if not targets:
        whose = "the captured dtype" if view is View.SEEN else "the compute dtype"
        return f"overflow and underflow against the limits of {whose}; {severity}"
    if len(targets) > 1:
        return f"overflow and underflow in {', '.join(target.title for target in targets)}; {severity}"
    (target,) = targets
    element = target.element
    return (
        f"overflow and underflow in {target.title}: largest value {element.maximum:.6g}, "
        f"smallest normal {element.min_normal:.6g}, smallest subnormal {element.min_subnormal:.6g}; {severity}"
    )


LOCATION_FIELDS = (
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
"""The fields that locate the first occurrence."""

_ORDER = ("iteration", "attempt", "counter", "rank")
"""The order of records. Each rank has its own counter."""


EVENTS = {
    "nan": ("nan", 0.0),
    "overflow": ("total", 0.0),
    "underflow": ("underflow", MEDIUM_RATIO),
    "flushed": ("flushed", MEDIUM_RATIO),
}
"""What is located: the count of each, and the fraction of elements that it has to exceed. That of underflow is the
threshold of the legacy tool's warning."""


def first_occurrences(record_counts: RecordCounts) -> Table:
    """Where NaN, overflow and underflow start: a row for each of them and each target, and with `by`, each group.

    This is the first iteration, and in it the record with the lowest `counter`, which is the first in execution order,
    on the lowest rank. `first.ranks` are all ranks with the same event at the same site in the same iteration. NaN and
    overflow start with the first value, and underflow with more than 0.1 % of a record's elements. An event that never
    occurs has a row without a location.
    """
    fields = {
        name: record_counts.records.column(name)[record_counts.owners] for name in {*LOCATION_FIELDS, *_ORDER, "site"}
    }
    execution_order = np.argsort(np.lexsort([fields[name] for name in reversed(_ORDER)]))
    rows = []
    groups = record_counts.groups()
    limits_of = [
        TableRows(_limits(record_counts, [members for _, members in groups], target))
        for target, _ in record_counts.counted
    ]
    for number, (key, members) in enumerate(groups):
        ordered = members[np.argsort(execution_order[members])]
        group_cells = record_counts.head(key, members) if record_counts.by else ()
        for (target, counts), limits in zip(record_counts.counted, limits_of, strict=True):
            for name, (kind, above) in EVENTS.items():
                # Stored values cannot be flushed.
                if target is None and name == "flushed":
                    continue
                ratios = counts[kind] / np.maximum(counts["elements"], 1)
                occurrences = ordered[ratios[ordered] > above]
                rows.append((*group_cells, name, *limits[number], *_cells(record_counts, fields, ratios, occurrences)))
    return Table(
        title="first occurrence: by iteration, then execution order, then rank",
        columns=(
            *(record_counts.columns if record_counts.by else ()),
            Column(name="kind", kind=Kind.TEXT),
            *_limit_columns(record_counts.targets),
            *_location_columns(record_counts),
        ),
        rows=tuple(rows),
        notes=(*record_counts.notes, f"underflow and flushed occur above {MEDIUM_RATIO:.1%} of a record's elements"),
    )


def _location_columns(record_counts: RecordCounts) -> tuple[Column, ...]:
    details = {"counter", "microbatch", "layer_stack", "phase", "file"}
    file = ("file",) if are_files(record_counts.records) else ()
    sample = () if record_counts.samples is None else (SAMPLE,)
    return (
        Column(name="affected", kind=Kind.INTEGER),
        *(
            Column(
                name=f"first.{field}",
                kind=Kind.INTEGER if field in NUMBER_FIELDS else Kind.TEXT,
                head=field,
                is_detail=field in details,
            )
            for field in (*LOCATION_FIELDS, *file, *sample)
        ),
        Column(name="first.ratio", kind=Kind.RATIO, head="ratio"),
        Column(name="first.num_ranks", kind=Kind.INTEGER, head="ranks"),
        Column(name="first.ranks", kind=Kind.LIST, head="rank list", is_detail=True),
    )


def _cells(
    record_counts: RecordCounts,
    fields: Mapping[str, NDArray[Any]],
    ratios: NDArray[np.float64],
    occurrences: NDArray[np.int64],
) -> tuple[Any, ...]:
    """The number of affected records and the location of the first of `occurrences`, which are in execution order."""
    names = (*LOCATION_FIELDS, *(("site",) if are_files(record_counts.records) else ()))
    if not occurrences.size:
        return (0, *(None,) * (len(names) + int(record_counts.samples is not None) + 3))
    first = int(occurrences[0])
    same = ["iteration", "attempt", "site"]
    is_same_site = np.all([fields[name][occurrences] == fields[name][first] for name in same], axis=0)
    ranks = np.unique(fields["rank"][occurrences[is_same_site]]).tolist()
    return (
        np.unique(record_counts.owners[occurrences]).size,
        *(json_value(fields[name][first]) for name in names),
        *(() if record_counts.samples is None else (str(record_counts.samples[first]),)),
        float(ratios[first]),
        len(ranks),
        ranks,
    )


Counts = dict[str, "NDArray[np.float64]"]
"""Counts by name, each for several records or samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordCounts:
    """Records or their samples, with the counts of each."""

    records: Records
    """The records that were counted."""
    targets: tuple[Target, ...]
    """The formats whose limits apply; none for the limits of the dtype."""
    by: tuple[str, ...]
    """The fields by which records are grouped."""
    owners: NDArray[np.int64]
    """For each place, the index of its record in `records`."""
    dtypes: list[str]
    """For each record, the dtype in which its values were judged."""
    samples: list[SampleName] | None
    """For each place, the name of the sample; None if places are whole records."""
    counts: tuple[Counts, ...]
    """For each target, or for the dtype, the counts of all places."""
    notes: tuple[str, ...]
    """Notes about records that were left out, and about masks."""

    @property
    def counted(self) -> list[tuple[Target | None, Counts]]:
        """Each target, or None for the dtype, with its counts."""
        return list(zip(self.targets or (None,), self.counts, strict=True))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that identify the group, record or sample of a row."""
        if self.by:
            return group_columns(self.by)
        return (*identity_columns(self.records), *(() if self.samples is None else (SAMPLE_COLUMN,)))

    def rows(self) -> tuple[TableRows, list[NDArray[np.int64]] | None]:
        """The values of these columns, and the places of each row, or None if each place has its own row."""
        if self.by:
            groups = self.groups()
            heads = [self.head(key, members) for key, members in groups]
            return TableRows.of(heads, width=len(self.columns)), [members for _, members in groups]
        of_samples: list[Cells] = [] if self.samples is None else [list(map(str, self.samples))]
        return TableRows([*TableRows(identity_cells(self.records)).take(self.owners).columns, *of_samples]), None

    def head(self, key: dict[str, Any], members: NDArray[np.int64]) -> tuple[Any, ...]:
        """The cells of a group: the values of its fields and its number of records."""
        return group_row(key, num_records=np.unique(self.owners[members]).size)

    def groups(self) -> list[tuple[dict[str, Any], NDArray[np.int64]]]:
        """The groups by the values of fields, sorted, with the places of each; a single group without fields."""
        if not self.by:
            return [({}, np.arange(self.owners.size))]
        columns = [
            (self.samples or []) if field == SAMPLE else rows_of(self.records.stored(field), self.owners)
            for field in self.by
        ]
        return [(dict(zip(self.by, key, strict=True)), rows) for key, rows in equal_rows(columns)]


def sum_groups(counts: Counts, starts: NDArray[np.int64]) -> Counts:
    """The counts of groups of consecutive places; `starts` has the first place of each group."""
    summed = {}
    for name, column in counts.items():
        if name not in EXTREMES:
            summed[name] = np.add.reduceat(column, starts)
        else:
            summed[name] = (np.fmin if name == "minimum" else np.fmax).reduceat(column, starts)
    return summed


def count_records(
    records: Records,
    targets: Sequence[Target],
    *,
    by: Sequence[str] = (),
    per_sample: bool = False,
    view: View,
    engine: Engine | None = None,
) -> RecordCounts:
    """The counts of each record, or of each sample if `per_sample` is set or `by` contains `sample`.

    NaN counts only as NaN. Infinities count as infinite and as overflow. With scales of blocks, there are no counts by
    sign; for samples, there are no extremes.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: no record has samples or blocks, or the stored data of a record is not sufficient.
        UnknownFieldError: `by` names an unknown field of a record.
    """
    expect_list(by)
    for field in by:
        if field != SAMPLE:
            records.column(field)  # raises an error for an unknown field before anything is read
    countable, notes = _countable(records, targets)
    sizes: list[int] | None = None
    owners, samples = np.arange(len(countable)), None
    if per_sample or SAMPLE in by:
        names = sample_names(countable)
        sizes = [len(sample_ids) for sample_ids in names]
        if not any(sizes):
            raise UsageError(
                f"none of {len(countable)} records has samples that can be distinguished: "
                f"leave out --per-sample and --by sample"
            )
        owners, samples = np.repeat(owners, sizes), [name for sample_ids in names for name in sample_ids]
        if num_without := sizes.count(0):
            notes.append(f"{num_without} of {len(countable)} records have no samples and are left out")
    counted = countable.take([place for place, size in enumerate(sizes) if size]) if sizes is not None else countable
    sizes = None if sizes is None else [size for size in sizes if size]
    if targets:
        by_target = _counts(counted, targets, sizes, view=view, engine=engine or Engine())
    else:
        by_target = [_dtype_counts(counted, sizes, view=view, engine=engine)]
    is_mask = additive_masks(countable)[owners]
    counts = [_without_masks(one, is_mask) for one in by_target]
    if num_masks := np.unique(owners[counts[0]["masked"] > 0]).size:
        notes.append(f"in {num_masks} records, -Inf belongs to an additive mask and does not count as overflow")
    return RecordCounts(
        records=countable,
        targets=tuple(targets),
        by=with_stacks(by, records),
        owners=owners,
        dtypes=viewed_dtypes(countable, view=view),
        samples=samples,
        counts=tuple(counts),
        notes=tuple(notes),
    )


def _without_masks(counts: Counts, is_mask: NDArray[np.bool_]) -> Counts:
    """The counts with the infinities of masks as `masked` instead of overflow."""
    masked = np.where(is_mask, counts["inf"], 0.0)
    return {**counts, "masked": masked, **{name: counts[name] - masked for name in ("total", "lower")}}


def _countable(records: Records, targets: Sequence[Target]) -> tuple[Records, list[str]]:
    """The records that can be counted for all targets, and notes about the others."""
    if all(target.scaling is not Scaling.BLOCK for target in targets):
        return records, []
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record has floating-point numbers: integers and bool are not divided into blocks")
    left_out = len(records) - len(chosen)
    return chosen, [
        f"{left_out} records of integers or bool are left out: they are not divided into blocks"
    ] if left_out else []


def _counts(
    records: Records,
    targets: Sequence[Target],
    sizes: Sequence[int] | None,
    *,
    view: View,
    engine: Engine,
) -> list[Counts]:
    """For each target, the counts of all records, or of their samples if `sizes` is given."""
    _check_stored(records, are_samples=sizes is not None)
    if sizes is not None:
        return [_counts_of_values(records, target, sizes, view=view, engine=engine) for target in targets]
    plain = [target for target in targets if target.scaling is not Scaling.BLOCK]
    by_target = (
        dict(zip(plain, _counts_of_digests(records, plain, view=view, engine=engine), strict=True)) if plain else {}
    )
    by_blocks: dict[Any, list[Target]] = {}
    for target in targets:
        if target.scaling is Scaling.BLOCK:
            by_blocks.setdefault(target.job.block_key, []).append(target)
    for same_blocks in by_blocks.values():
        by_target |= zip(same_blocks, _counts_of_blocks(records, same_blocks, view=view, engine=engine), strict=True)
    return [by_target[target] for target in targets]


def _empty(num: int) -> Counts:
    return {name: np.full(num, math.nan if name in EXTREMES else 0.0) for name in NAMES}


def _counts_of_digests(records: Records, targets: Sequence[Target], *, view: View, engine: Engine) -> Iterator[Counts]:
    """The counts from digests. Values are read if a digest is not exact enough for the limits."""
    by_target = {target: _empty(len(records)) for target in targets}
    is_unknown = {target: np.zeros(len(records), dtype=np.bool_) for target in targets}
    start = 0
    for digests_part in digest_columns(records, view=view, engine=engine):
        part = slice(start, start + len(digests_part))
        start += len(digests_part)
        for target, counts in by_target.items():
            of_kinds = digests_part.count(*target.limits_of(digests_part.end("largest_finite")))
            counts["elements"][part] = digests_part.tally("num_elements")
            for kind in SCANNED:
                counts[kind][part] = of_kinds[kind] if kind in of_kinds else digests_part.tally(kind)
            counts["minimum"][part], counts["maximum"][part] = digests_part.end("minimum"), digests_part.end("maximum")
            if not preserves_limits(target.limits()):
                is_unknown[target][part] = ~digests_part.is_exact
    for target, counts in by_target.items():
        counts["total"] = counts["upper"] + counts["lower"]
        counts["absmax"] = np.maximum(np.abs(counts["minimum"]), np.abs(counts["maximum"]))
        _count_values(records, target, is_unknown[target], counts, view=view, engine=engine)
        yield counts


def _counts_of_blocks(records: Records, targets: Sequence[Target], *, view: View, engine: Engine) -> Iterator[Counts]:
    """The counts from counts of blocks, or from the values if these are not sufficient."""
    job = targets[0].job
    mask, counted = np.zeros(len(records), dtype=np.bool_), records[:0]
    if job.is_counted:
        mask, counted = pick(
            records, lambda dtype, compute, keep: is_narrow(dtype, compute_dtype=compute, keep=keep, view=view)
        )
    found = [_empty(len(records)) for _ in targets]
    unknown = [~mask for _ in targets]
    dtypes = viewed_dtypes(counted, view=view)
    payloads = engine.measure(counted, job.measure(view))
    for place, dtype, payload in zip(np.flatnonzero(mask).tolist(), dtypes, payloads, strict=True):
        blocks = job.counted(payload, dtype=dtype)
        for target, counts, is_unknown in zip(targets, found, unknown, strict=True):
            sweep = target.job.from_counts(blocks)
            if sweep is None:
                is_unknown[place] = True
            else:
                for name, value in sweep_row(sweep).items():
                    counts[name][place] = value
    for target, counts, is_unknown in zip(targets, found, unknown, strict=True):
        _count_values(records, target, is_unknown, counts, view=view, engine=engine)
        yield counts | _catalogued_extremes(records, view=view)


def _count_values(
    records: Records, target: Target, is_chosen: NDArray[np.bool_], counts: Counts, *, view: View, engine: Engine
) -> None:
    """Count the values of the chosen records and add the results to `counts`."""
    (rows,) = np.nonzero(is_chosen)
    if rows.size:
        counted = _counts_of_values(records.take(rows.tolist()), target, None, view=view, engine=engine)
        for name, column in counted.items():
            counts[name][rows] = column


def _counts_of_values(
    records: Records, target: Target, sizes: Sequence[int] | None, *, view: View, engine: Engine
) -> Counts:
    """The counts of each record or sample from a measure that reads the values."""
    measure = LimitsMeasure(target=target, view=view, per_sample=sizes is not None)
    rows = np.concatenate([np.zeros((0, len(NAMES))), *(one["rows"] for one in engine.columns(records, measure))])
    assert len(rows) == (len(records) if sizes is None else sum(sizes)), "a row for each record or sample"
    return {name: rows[:, place].copy() for place, name in enumerate(NAMES)}


def _catalogued_extremes(records: Records, *, view: View) -> Counts:
    """The extremes in the catalogue, rounded to the viewed dtype."""
    dtypes = np.array(viewed_dtypes(records, view=view), dtype=object)
    found: Counts = {}
    for name in EXTREMES:
        column = records.column(f"overflow.{name}").astype(np.float64)
        for dtype in set(dtypes.tolist()):
            with np.errstate(over="ignore"):
                rounded = column[dtypes == dtype].astype(np.empty(0, numpy_dtype(dtype)).real.dtype)
                column[dtypes == dtype] = rounded.astype(np.float64)
        found[name] = column
    return found


def _dtype_counts(records: Records, sizes: Sequence[int] | None, *, view: View, engine: Engine | None) -> Counts:
    """The counts for the limits of the dtype, from the catalogue unless the view rounds the values."""
    is_viewed, viewed = pick(
        records, lambda dtype, compute, _: viewed_dtype(dtype=dtype, compute_dtype=compute, view=view) != dtype
    )
    _check_stored(viewed, are_samples=sizes is not None)
    if sizes is not None:
        return _dtype_sample_counts(records, sizes, is_viewed, viewed, view=view, engine=engine)
    names = {"elements": "numel", "total": "overflow.total"}
    names |= {kind: f"overflow.{kind}.count" for kind in TALLY_KINDS}
    names |= {name: f"overflow.{name}" for name in EXTREMES}
    counts = {name: records.column(column).astype(np.float64) for name, column in names.items()}
    counts |= {name: np.zeros(len(records)) for name in ("flushed", "spoiled")}
    places, start = np.flatnonzero(is_viewed), 0
    for digests_part in digest_columns(viewed, view=view, engine=engine) if len(viewed) else ():
        part = places[start : start + len(digests_part)]
        start += len(digests_part)
        counts["elements"][part] = digests_part.tally("num_elements")
        for kind in TALLY_KINDS:
            counts[kind][part] = digests_part.tally(kind)
        counts["total"][part] = counts["upper"][part] + counts["lower"][part]
        counts["minimum"][part], counts["maximum"][part] = digests_part.end("minimum"), digests_part.end("maximum")
        counts["absmax"][part] = np.maximum(np.abs(digests_part.end("minimum")), np.abs(digests_part.end("maximum")))
    return counts


def _dtype_sample_counts(
    records: Records,
    sizes: Sequence[int],
    mask: NDArray[np.bool_],
    others: Records,
    *,
    view: View,
    engine: Engine | None,
) -> Counts:
    known = {text: json.loads(text) for text in set(records.column("overflow.per_sample").tolist())}
    nothing = dict.fromkeys(TALLY_KINDS, math.nan)
    parts = [known[text] or nothing for text in records.column("overflow.per_sample").tolist()]
    again = digests(others, view=view, engine=engine)
    for place in np.flatnonzero(mask).tolist():
        parts[place] = next(again).samples or {}
    counts = {}
    for kind in TALLY_KINDS:
        whole = np.where(mask, math.nan, records.column(f"overflow.{kind}.count"))
        own = [
            np.broadcast_to(whole[place] if size == 1 and not mask[place] else parts[place][kind], size)
            for place, size in enumerate(sizes)
        ]
        counts[kind] = np.concatenate([np.zeros(0), *own])
    num_samples = np.array(sizes)
    elements = np.repeat(records.column("numel") // np.maximum(num_samples, 1), num_samples).astype(np.float64)
    zeros = np.zeros(elements.size)
    found = {"elements": elements, **counts, "total": counts["upper"] + counts["lower"]}
    return {**found, "flushed": zeros, "spoiled": zeros, **dict.fromkeys(EXTREMES, np.full(elements.size, math.nan))}


def _check_stored(records: Records, *, are_samples: bool) -> None:
    """Raise an error if a record has no stored values, or only a histogram if samples are counted."""
    (kept,) = np.nonzero(records.column("keep") == Keep.STATISTICS)
    if kept.size:
        read_numbers(records[int(kept[0])], view=View.SEEN)
    (kept,) = np.nonzero(records.column("keep") == Keep.HISTOGRAM)
    if kept.size and are_samples:
        raise UsageError(
            f"{records[int(kept[0])]!r} stores only a histogram, which does not distinguish samples: "
            f"leave such records out with --where \"keep == 'values'\""
        )
