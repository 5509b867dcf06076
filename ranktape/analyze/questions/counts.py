"""Counts what is beyond limits in every record or sample of a selection, and groups the counts.

The catalogue answers for the limits of the dtype. For other limits it is what is counted once of a record and kept,
its digest or the cells of its blocks, as far as that tells; else the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.digests import digest_columns, digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.numbers import additive_masks
from ranktape.analyze.engine.sweep_measure import is_narrow
from ranktape.analyze.engine.target import NAMES, LimitsMeasure, Row, Target, row_of_sweep, sweepable, tells_apart
from ranktape.analyze.engine.values import View, pick, read_numbers, viewed_dtype, viewed_dtypes
from ranktape.analyze.identity import (
    SAMPLE_COLUMN,
    SampleName,
    group_columns,
    group_row,
    identity_cells,
    identity_columns,
    sample_names,
    with_stacks,
)
from ranktape.analyze.numerics.histograms.histogram import KINDS as SCANNED
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Cells, Column, TableRows
from ranktape.errors import UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS, Keep
from ranktape.storage.query.columns import equal_rows, rows_of

Counts = dict[str, "NDArray[np.float64]"]
"""The same of several records or samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Records, or the samples of records, and the counts of each."""

    records: Records
    """The records that were counted."""
    targets: tuple[Target, ...]
    """Whose limits count; none for those of the dtype."""
    by: tuple[str, ...]
    """The fields that are grouped by."""
    owners: NDArray[np.int64]
    """Of each place where in `records` its record is."""
    dtypes: list[str]
    """Of each record what its values were looked at as."""
    samples: list[SampleName] | None
    """Of each place what the sample is called; None where places are whole records."""
    counts: tuple[Counts, ...]
    """For each target, or for the dtype, the counts of all places."""
    notes: tuple[str, ...]
    """What was left out."""

    @property
    def counted(self) -> list[tuple[Target | None, Counts]]:
        """Each target, or None for the dtype, and its counts."""
        return list(zip(self.targets or (None,), self.counts, strict=True))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that say which group, record or sample a row is of."""
        if self.by:
            return group_columns(self.by)
        return (*identity_columns(self.records), *(() if self.samples is None else (SAMPLE_COLUMN,)))

    def rows(self) -> tuple[TableRows, list[NDArray[np.int64]] | None]:
        """What those columns hold, and the places of each row; None where each place has a row."""
        if self.by:
            groups = self.groups()
            heads = [self.head(key, members) for key, members in groups]
            return TableRows.of(heads, width=len(self.columns)), [members for _, members in groups]
        of_samples: list[Cells] = [] if self.samples is None else [list(map(str, self.samples))]
        return TableRows([*TableRows(identity_cells(self.records)).take(self.owners).columns, *of_samples]), None

    def head(self, key: dict[str, Any], members: NDArray[np.int64]) -> tuple[Any, ...]:
        """The cells that say which group it is, and of how many records."""
        return group_row(key, num_records=np.unique(self.owners[members]).size)

    def groups(self) -> list[tuple[dict[str, Any], NDArray[np.int64]]]:
        """For each group of equal values of the fields, sorted by them, its places; one of all without fields."""
        if not self.by:
            return [({}, np.arange(self.owners.size))]
        columns = [
            (self.samples or []) if field == SAMPLE else rows_of(self.records.stored(field), self.owners)
            for field in self.by
        ]
        return [(dict(zip(self.by, key, strict=True)), rows) for key, rows in equal_rows(columns)]

    def together(self, counts: Counts, places: Sequence[int] | NDArray[np.int64]) -> Row:
        """The counts of several places; a count is not known if that of one is not, extremes are of those known."""
        chosen = np.asarray(places)
        columns = together({name: column[chosen] for name, column in counts.items()}, np.zeros(1, dtype=np.int64))
        return {name: float(column[0]) for name, column in columns.items()}


def together(counts: Counts, starts: NDArray[np.int64]) -> Counts:
    """The counts of groups of places that follow one another; `starts` is the first of each."""
    found = {}
    for name, column in counts.items():
        if name not in EXTREMES:
            found[name] = np.add.reduceat(column, starts)
        else:
            found[name] = (np.fmin if name == "minimum" else np.fmax).reduceat(column, starts)
    return found


def find_places(
    records: Records,
    targets: Sequence[Target],
    *,
    by: Sequence[str] = (),
    per_sample: bool = False,
    view: View,
    engine: Engine | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> Places:
    """The counts of every record, or of every sample, where these are asked for or grouped by.

    NaN counts as NaN alone; infinities count as infinite, and overflow everywhere. Of signs nothing is known with
    scales of blocks, of extremes nothing where samples are counted.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: no record has samples, or blocks; what was kept of one does not answer the question.
        UnknownFieldError: `by` names no field of a record.
    """
    for field in by:
        if field != SAMPLE:
            records.column(field)  # refuses what is no field before anything is read
    chosen, notes = _countable(records, targets)
    sizes: list[int] | None = None
    owners, samples = np.arange(len(chosen)), None
    if per_sample or SAMPLE in by:
        names = sample_names(chosen)
        sizes = [len(found) for found in names]
        if not any(sizes):
            raise UsageError(
                f"none of {len(chosen)} records has samples that can be told apart: "
                f"leave out --per-sample and --by sample"
            )
        owners, samples = np.repeat(owners, sizes), [name for found in names for name in found]
        if num_without := sizes.count(0):
            notes.append(f"{num_without} of {len(chosen)} records have no samples, and are left out")
    counted = chosen.take([place for place, size in enumerate(sizes) if size]) if sizes is not None else chosen
    sizes = None if sizes is None else [size for size in sizes if size]
    used = engine or Engine()
    if targets:
        every = _counts(counted, targets, sizes, view=view, engine=used)
    else:
        every = [_own_counts(counted, sizes, view=view, engine=used)]
    for _ in range(len(chosen)):
        on_record()
    is_mask = additive_masks(chosen)[owners]
    counts = [_without_masks(one, is_mask) for one in every]
    if num_masks := np.unique(owners[counts[0]["masked"] > 0]).size:
        notes.append(f"in {num_masks} records -Inf is that of an additive mask: it is no overflow")
    return Places(
        records=chosen,
        targets=tuple(targets),
        by=with_stacks(by, records),
        owners=owners,
        dtypes=viewed_dtypes(chosen, view=view),
        samples=samples,
        counts=tuple(counts),
        notes=tuple(notes),
    )


def _without_masks(counts: Counts, is_mask: NDArray[np.bool_]) -> Counts:
    """The counts in which the infinities of masks are `masked`, and not beyond the limits."""
    masked = np.where(is_mask, counts["inf"], 0.0)
    return {**counts, "masked": masked, **{name: counts[name] - masked for name in ("total", "lower")}}


def _countable(records: Records, targets: Sequence[Target]) -> tuple[Records, list[str]]:
    """The records that can be counted against all targets, and a sentence on the others."""
    if all(target.scaling is not Scaling.BLOCK for target in targets):
        return records, []
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record holds floating-point numbers, and of integers and bool no blocks are made")
    left_out = len(records) - len(chosen)
    return chosen, [f"{left_out} records of integers or bool left out: no blocks are made of them"] if left_out else []


def _counts(
    records: Records,
    targets: Sequence[Target],
    sizes: Sequence[int] | None,
    *,
    view: View,
    engine: Engine,
) -> list[Counts]:
    """For each target the counts of all records, or of the samples of all of them where `sizes` says how many."""
    _refuse(records, are_samples=sizes is not None)
    if sizes is not None:
        return [_measured(records, target, sizes, view=view, engine=engine) for target in targets]
    plain = [target for target in targets if target.scaling is not Scaling.BLOCK]
    found = dict(zip(plain, _of_digests(records, plain, view=view, engine=engine), strict=True)) if plain else {}
    alike: dict[Any, list[Target]] = {}
    for target in targets:
        if target.scaling is Scaling.BLOCK:
            alike.setdefault(target.job.block_key, []).append(target)
    for together in alike.values():
        found |= zip(together, _of_blocks(records, together, view=view, engine=engine), strict=True)
    return [found[target] for target in targets]


def _empty(num: int) -> Counts:
    return {name: np.full(num, math.nan if name in EXTREMES else 0.0) for name in NAMES}


def _of_digests(records: Records, targets: Sequence[Target], *, view: View, engine: Engine) -> Iterator[Counts]:
    """The counts that follow from digests; of wide values whose digests do not tell, from the values."""
    found = {target: _empty(len(records)) for target in targets}
    is_unknown = {target: np.zeros(len(records), dtype=np.bool_) for target in targets}
    start = 0
    for known in digest_columns(records, view=view, engine=engine):
        part = slice(start, start + len(known))
        start += len(known)
        for target, counts in found.items():
            of_kinds = known.count(*target.limits_of(known.end("largest_finite")))
            counts["elements"][part] = known.tally("num_elements")
            for kind in SCANNED:
                counts[kind][part] = of_kinds[kind] if kind in of_kinds else known.tally(kind)
            counts["minimum"][part], counts["maximum"][part] = known.end("minimum"), known.end("maximum")
            if not tells_apart(target.limits()):
                is_unknown[target][part] = ~known.is_exact
    for target, counts in found.items():
        counts["total"] = counts["upper"] + counts["lower"]
        counts["absmax"] = np.maximum(np.abs(counts["minimum"]), np.abs(counts["maximum"]))
        _count_values(records, target, is_unknown[target], counts, view=view, engine=engine)
        yield counts


def _of_blocks(records: Records, targets: Sequence[Target], *, view: View, engine: Engine) -> Iterator[Counts]:
    """The counts that follow from counts of blocks; else from the values."""
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
            sweep = target.job.answer(blocks)
            if sweep is None:
                is_unknown[place] = True
            else:
                for name, value in row_of_sweep(sweep).items():
                    counts[name][place] = value
    for target, counts, is_unknown in zip(targets, found, unknown, strict=True):
        _count_values(records, target, is_unknown, counts, view=view, engine=engine)
        yield counts | _catalogued_extremes(records, view=view)


def _count_values(
    records: Records, target: Target, chosen: NDArray[np.bool_], counts: Counts, *, view: View, engine: Engine
) -> None:
    """Count the values of some of the records."""
    (places,) = np.nonzero(chosen)
    if places.size:
        found = _measured(records.take(places.tolist()), target, None, view=view, engine=engine)
        for name, column in found.items():
            counts[name][places] = column


def _measured(records: Records, target: Target, sizes: Sequence[int] | None, *, view: View, engine: Engine) -> Counts:
    """The counts of values that are read, of each record or of each sample."""
    measure = LimitsMeasure(target=target, view=view, per_sample=sizes is not None)
    rows = np.concatenate([np.zeros((0, len(NAMES))), *(one["rows"] for one in engine.columns(records, measure))])
    assert len(rows) == (len(records) if sizes is None else sum(sizes)), "a row for each record or sample"
    return {name: rows[:, place].copy() for place, name in enumerate(NAMES)}


def _catalogued_extremes(records: Records, *, view: View) -> Counts:
    """The extremes in the catalogue, rounded as the values are."""
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


def _own_counts(records: Records, sizes: Sequence[int] | None, *, view: View, engine: Engine) -> Counts:
    """Against the limits of the dtype: from the catalogue, where values are looked at as they were counted."""
    mask, others = pick(
        records, lambda dtype, compute, _: viewed_dtype(dtype=dtype, compute_dtype=compute, view=view) != dtype
    )
    _refuse(others, are_samples=sizes is not None)
    if sizes is not None:
        return _own_samples(records, sizes, mask, others, view=view, engine=engine)
    names = {"elements": "numel", "total": "overflow.total"}
    names |= {kind: f"overflow.{kind}.count" for kind in TALLY_KINDS}
    names |= {name: f"overflow.{name}" for name in EXTREMES}
    found = {name: records.column(column).astype(np.float64) for name, column in names.items()}
    found |= {name: np.zeros(len(records)) for name in ("flushed", "spoiled")}
    places, start = np.flatnonzero(mask), 0
    for known in digest_columns(others, view=view, engine=engine):
        part = places[start : start + len(known)]
        start += len(known)
        found["elements"][part] = known.tally("num_elements")
        for kind in TALLY_KINDS:
            found[kind][part] = known.tally(kind)
        found["total"][part] = found["upper"][part] + found["lower"][part]
        found["minimum"][part], found["maximum"][part] = known.end("minimum"), known.end("maximum")
        found["absmax"][part] = np.maximum(np.abs(known.end("minimum")), np.abs(known.end("maximum")))
    return found


def _own_samples(
    records: Records, sizes: Sequence[int], mask: NDArray[np.bool_], others: Records, *, view: View, engine: Engine
) -> Counts:
    counts = {kind: np.zeros(sum(sizes)) for kind in TALLY_KINDS}
    starts = np.cumsum([0, *sizes])
    again = digests(others, view=view, engine=engine)
    known = records.column("overflow.per_sample").tolist()
    whole = {kind: records.column(f"overflow.{kind}.count").tolist() for kind in TALLY_KINDS}
    for place, size in enumerate(sizes):
        part = slice(int(starts[place]), int(starts[place + 1]))
        own: Any
        if mask[place]:
            own = next(again).samples or {}
        elif size == 1:
            own = {kind: [column[place]] for kind, column in whole.items()}
        else:
            own = json.loads(known[place]) or dict.fromkeys(TALLY_KINDS, math.nan)
        for kind, column in counts.items():
            column[part] = own[kind]
    num_samples = np.array(sizes)
    elements = np.repeat(records.column("numel") // np.maximum(num_samples, 1), num_samples).astype(np.float64)
    zeros = np.zeros(elements.size)
    found = {"elements": elements, **counts, "total": counts["upper"] + counts["lower"]}
    return {**found, "flushed": zeros, "spoiled": zeros, **dict.fromkeys(EXTREMES, np.full(elements.size, math.nan))}


def _refuse(records: Records, *, are_samples: bool) -> None:
    """Refuse records of which no value is known; of whose samples, also those whose histogram was kept."""
    (kept,) = np.nonzero(records.column("keep") == Keep.STATISTICS)
    if kept.size:
        read_numbers(records[int(kept[0])], view=View.SEEN)
    (kept,) = np.nonzero(records.column("keep") == Keep.HISTOGRAM)
    if kept.size and are_samples:
        raise UsageError(
            f"of {records[int(kept[0])]!r} the histogram was kept, which does not know its samples: "
            f"leave such records out with --where \"keep == 'values'\""
        )
