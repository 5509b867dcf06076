"""Gives what overflows and what underflows, where, and against which limits.

Against the limits of their own dtype, tensors were counted when they were written: the catalogue answers and
no value is read. Against another format, the digest of each record answers, which is made once and kept.

A value overflows in a format if rounding to nearest takes it beyond the largest value: from half a step above
it on. (The legacy tool counts everything above the largest value, also what rounds back to it: for
fp8_e4m3 that is from 448 to 464.) It underflows if it is not zero and below the smallest normal value, and is
flushed if it rounds to zero. With a scale it is divided by that first. `severity_columns` says what is how bad.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import count_names
from ranktape.analyze.engine.target import KINDS, Target, largest_value, parse_targets
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.identity import NUMBER_FIELDS, are_files, source_fields
from ranktape.analyze.numerics.quantization.encoded import HIGH_RATIO, MEDIUM_RATIO, LossSeverity, severity_of
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.questions.counts import Counts, Places, find_places, together
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
from ranktape.storage.format.record_info import EXTREMES

SEVERITY_COLUMNS = (
    Column(name="severity", kind=Kind.TEXT),
    Column(name="overflow.severity", kind=Kind.TEXT, is_detail=True),
    Column(name="overflow.underflow.severity", kind=Kind.TEXT, is_detail=True),
)
"""How bad the worse of overflow and underflow is, or any NaN, and how bad each of the two."""


NEXT_FORMAT = (
    "little or nothing is beyond the limits of the dtype: --format fp8_e4m3 says what an 8-bit format would lose with "
    "a scale for each tensor, and with --scaling none what a cast loses"
)
"""What is said where no format was named, and the dtype itself has room for everything."""


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
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """Count what is beyond the limits, NaN, Inf, zeros and subnormals.

    Without `format` against the limits of the dtype, as counted when the run was written: no value is read.
    With `format` every value is read once; what autocast rounded is rounded first (see `view`). The severity of a row
    is high with any NaN or Inf, and high or medium where much is lost (see `severity_columns`).

    NaN counts as NaN alone; infinities count as infinite, and as overflow too. The ratios of an empty tensor are 0.
    Of several formats each has a row.

    Args:
        format (NAME): Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, int8, hif8, nvfp4, bf16,
            fp16. And in blocks: mxfp8, mxfp4, ... Several with commas between. The captured dtype by default.
        scaling (KIND): Scales before values meet a format: none, tensor (a power of two for each, its largest value
            aligned) or block (those of the format); several with commas between. Unless given, the one that the format
            is used with: block for formats with blocks, tensor for others up to 8 bits, none for wider ones.
        first: Where it begins: iteration, layer in execution order, rank.
        per_sample: One row for each sample of each record; --by sample groups them.
        on_record: Called after each record that was read.

    Raises:
        UsageError: a format is not known, is one of scales, or does not go with the scaling; no record has samples;
            arguments exclude each other.
        UnknownFieldError: `by` names no field of a record.
    """
    if per_sample and by:
        raise UsageError("--per-sample and --by exclude each other: --by sample makes a row for each sample")
    targets = parse_targets(format, scaling)
    chosen = view or (View.COMPUTE if targets else View.SEEN)
    # What begins in one source begins in no other.
    fields = by or (source_fields(records) if first else ())
    places = find_places(
        records, targets, by=fields, per_sample=per_sample, view=chosen, engine=engine, on_record=on_record
    )
    return overflow_begins(places) if first else _table(places, targets, view=chosen)


def _table(places: Places, targets: Sequence[Target], *, view: View) -> Table:
    """A row for each place and format, and the verdict on all of them."""
    heads, members = places.rows()
    answers = []
    for target, counts in places.counted:
        numbers = counts
        if members is not None:
            order = np.concatenate([np.zeros(0, dtype=np.int64), *members])
            starts = np.cumsum([0, *map(len, members)])[:-1].astype(np.int64)
            numbers = together({name: column[order] for name, column in counts.items()}, starts)
        answers.append([*heads.columns, *_limits(places, members, target), *_count_cells(numbers, targets, target)])
    table = Table(
        title=_title(targets, view=view),
        columns=(*places.columns, *_limit_columns(targets), *_count_columns(targets)),
        rows=TableRows([alternate(cells) for cells in zip(*answers, strict=True)]),
        notes=places.notes,
        worst_first=worst_first,
    )
    is_clean = not targets and set(table.column("severity")) == {LossSeverity.NONE.value}
    hint = (NEXT_FORMAT,) if is_clean else ()
    return dataclasses.replace(table, notes=(*table.notes, *hint, *_verdict(table)))


def _verdict(table: Table) -> Iterator[str]:
    """How many rows are how bad, and which one is worst."""
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
    told = [
        f"{column.name} {row[column.name]}"
        for column in table.columns
        if column.is_key and not column.is_detail and len(set(map(str, table.column(column.name)))) > 1
    ]
    lost = [f"{100 * row[name]:.3g} % {what}" for name, what in _SAID.items() if row.get(name)]
    yield f"verdict: {counted}; worst: {' '.join([*told, ', '.join(lost)])}"


_SAID = {
    "overflow.nan.ratio": "NaN",
    "overflow.inf.ratio": "infinite",
    "overflow.ratio": "overflow",
    "overflow.underflow.ratio": "underflow",
    "overflow.flushed.ratio": "become zero",
}
"""What a verdict says of the worst row."""


def worst_first(table: Table) -> Table:
    """The rows of `overflow` by their severity; equally bad ones with the most NaN, infinities, then losses first."""
    return dataclasses.replace(table, rows=table.cells.take(_badness(table)))


def _badness(table: Table) -> NDArray[np.int64]:
    """The rows, the worst first."""
    rank = {severity.value: place for place, severity in enumerate(LossSeverity)}
    is_flushed = any(column.name == "overflow.flushed.ratio" for column in table.columns)
    names = ("overflow.nan.ratio", "overflow.ratio", f"overflow.{'flushed' if is_flushed else 'underflow'}.ratio")
    keys: list[list[float]] = [[-rank.get(severity, -1) for severity in table.column("severity")]]
    keys += [[-(ratio or 0.0) for ratio in table.column(name)] for name in names]
    return np.lexsort(np.array(keys[::-1], dtype=np.float64))


def _kinds(targets: Sequence[Target]) -> tuple[str, ...]:
    """What is counted, in the order of the columns; nothing is flushed or spoiled that is stored already."""
    left_out = set()
    if not targets:
        left_out.add("flushed")
    if all(target.scaling is not Scaling.BLOCK for target in targets):
        left_out.add("spoiled")
    return tuple(kind for kind in KINDS if kind not in left_out)


def _limit_columns(targets: Sequence[Target]) -> tuple[Column, ...]:
    """The columns that say whose limits count."""
    return (
        Column(name="limits_of", kind=Kind.TEXT, head="limits of", is_key=True),
        Column(name="largest_value", kind=Kind.FLOAT, head="largest value", is_detail=True),
        *((Column(name="scaling", kind=Kind.TEXT, is_key=True),) if targets else ()),
    )


def _limits(places: Places, members: Sequence[NDArray[np.int64]] | None, target: Target | None) -> list[Cells]:
    """The name of the limits of each row, the largest value if all have the same, and the scaling."""
    num_rows = len(places.owners) if members is None else len(members)
    if target is not None:
        nothing = np.zeros(num_rows, dtype=np.int64)
        return [Coded(nothing, [one]) for one in (target.name, target.element.maximum, target.scaling.value)]
    names = sorted(set(places.dtypes))
    codes = np.searchsorted(names, places.dtypes)[places.owners]
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
    """The columns of counts, extremes and severities of all rows."""
    elements = numbers["elements"]
    columns = [number_cells(elements, kind=Kind.INTEGER)]
    for kind in _kinds(targets):
        columns.append(number_cells(numbers[kind], kind=Kind.INTEGER))
        columns.append(numbers[kind] / np.maximum(1, elements))
    return [*columns, *(numbers[name] for name in EXTREMES), *severity_columns(numbers, target)]


def severity_columns(numbers: Counts, target: Target | None) -> list[Cells]:
    """How bad the counts are: all together, overflow, and underflow; None where it is not known.

    A single NaN or Inf is high, but for the -Inf of additive masks. Overflow is high above 1 % and medium above 0.1 %;
    with scales of blocks it is not judged, as their rules cut off less than a quarter of a value. Underflow is high
    above 25 %. It is medium where more than 1 % is subnormal in the dtype, or more than 10 % becomes zero in a format:
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
    # The rank -1 is the last of the words.
    return [Coded(ranks % len(words), words) for ranks in (worst, of_overflow, of_lost)]


def _ranks(ratios: NDArray[np.float64], *, medium: float, high: float) -> NDArray[np.int64]:
    """The place of the severity of each ratio in `LossSeverity`; -1 where it is not known."""
    names = list(LossSeverity)
    known, codes = np.unique(ratios, return_inverse=True)
    ranks = [
        -1 if math.isnan(ratio) else names.index(severity_of(ratio, medium=medium, high=high))
        for ratio in known.tolist()
    ]
    return np.array(ranks, dtype=np.int64)[codes.reshape(-1)]


def _title(targets: Sequence[Target], *, view: View) -> str:
    medium, lost = (limit.FLUSHED_RATIO, "flushed") if targets else (limit.LOST_RATIO, "underflow")
    severity = (
        f"high: NaN, Inf, overflow > {HIGH_RATIO:.0%}, {lost} > {limit.LOST_RATIO_SERIOUS:.0%}; "
        f"medium: > {MEDIUM_RATIO:.1%}, > {medium:.0%}"
    )
    if not targets:
        whose = "the dtype that was captured" if view is View.SEEN else "the dtype that was computed with"
        return f"overflow and underflow against the limits of {whose}; {severity}"
    if len(targets) > 1:
        return f"overflow and underflow in {', '.join(target.title for target in targets)}; {severity}"
    (target,) = targets
    element = target.element
    return (
        f"overflow and underflow in {target.title}: largest value {element.maximum:.6g}, "
        f"smallest normal {element.min_normal:.6g}, smallest subnormal {element.min_subnormal:.6g}; {severity}"
    )


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

_ORDER = ("iteration", "attempt", "counter", "rank")
"""By which records come one after the other: ranks count for themselves what they record."""


EVENTS = {
    "nan": ("nan", 0.0),
    "overflow": ("total", 0.0),
    "underflow": ("underflow", MEDIUM_RATIO),
    "flushed": ("flushed", MEDIUM_RATIO),
}
"""What may begin: what is counted of it, and the part of all elements that has to be exceeded; of underflow as much as
the legacy tool warns of."""


def overflow_begins(places: Places) -> Table:
    """Where NaN, overflow and underflow begin: a row for each of them, for each target, and with `by` each group.

    That is the first iteration, in it the record with the lowest `counter`, which is the first in execution order,
    and of several ranks the lowest; `first.ranks` are all at which the same thing is seen at the same place and in the
    same iteration. NaN and overflow begin with the first value; underflow with more than 0.1 % of a record's elements.
    What never begins has a row that says so.
    """
    fields = {name: places.records.column(name)[places.owners] for name in {*PLACE_FIELDS, *_ORDER, "site"}}
    turns = np.argsort(np.lexsort([fields[name] for name in reversed(_ORDER)]))
    rows = []
    groups = places.groups()
    limits_of = [TableRows(_limits(places, [members for _, members in groups], target)) for target, _ in places.counted]
    for number, (key, members) in enumerate(groups):
        ordered = members[np.argsort(turns[members])]
        start = places.head(key, members) if places.by else ()
        for (target, counts), limits in zip(places.counted, limits_of, strict=True):
            for name, (kind, above) in EVENTS.items():
                # Nothing is flushed that is stored already.
                if target is None and name == "flushed":
                    continue
                ratios = counts[kind] / np.maximum(counts["elements"], 1)
                found = ordered[ratios[ordered] > above]
                rows.append((*start, name, *limits[number], *_cells(places, fields, ratios, found)))
    return Table(
        title="where it begins: the first iteration, in it the first record in execution order, the lowest rank",
        columns=(
            *(places.columns if places.by else ()),
            Column(name="kind", kind=Kind.TEXT),
            *_limit_columns(places.targets),
            *_place_columns(places),
        ),
        rows=tuple(rows),
        notes=(*places.notes, f"underflow and flushed begin above {MEDIUM_RATIO:.1%} of a record's elements"),
    )


def _place_columns(places: Places) -> tuple[Column, ...]:
    details = {"counter", "microbatch", "layer_stack", "phase", "file"}
    file = ("file",) if are_files(places.records) else ()
    sample = () if places.samples is None else (SAMPLE,)
    return (
        Column(name="affected", kind=Kind.INTEGER),
        *(
            Column(
                name=f"first.{field}",
                kind=Kind.INTEGER if field in NUMBER_FIELDS else Kind.TEXT,
                head=field,
                is_detail=field in details,
            )
            for field in (*PLACE_FIELDS, *file, *sample)
        ),
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
        *(json_value(fields[name][first]) for name in names),
        *(() if places.samples is None else (str(places.samples[first]),)),
        float(ratios[first]),
        len(ranks),
        ranks,
    )
