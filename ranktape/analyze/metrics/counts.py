"""Counts what is beyond limits in every record or sample of a selection, and groups the counts.

The catalogue answers for the limits of the dtype. For other limits it is what is counted once of a record and kept,
its digest or the cells of its blocks, as far as that tells; else the values.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache_object import Payload
from ranktape.analyze.engine.digest_measure import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sheet import SheetForm, SheetRow, sheet_of
from ranktape.analyze.engine.values import View, pick, read_numbers, viewed_dtype, viewed_dtypes
from ranktape.analyze.identity import (
    SAMPLE,
    SAMPLE_COLUMN,
    SampleName,
    group_columns,
    group_row,
    identity_columns,
    identity_rows,
    sample_names,
    with_stacks,
)
from ranktape.analyze.metrics.masks import additive_masks
from ranktape.analyze.metrics.target import (
    NAMES,
    LimitsMeasure,
    Row,
    Target,
    row_of,
    sweepable,
    unknown_row,
    with_total,
)
from ranktape.analyze.numerics.digest import Digest
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Column
from ranktape.errors import UsageError
from ranktape.storage import Records
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS, Keep
from ranktape.storage.query.columns import equal_rows

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

    def rows(self) -> Iterator[tuple[tuple[Any, ...], Sequence[int]]]:
        """What those columns hold, and the places of each row."""
        if self.by:
            for key, members in self.groups():
                yield self.head(key, members), members.tolist()
            return
        identities = identity_rows(self.records)
        for place, owner in enumerate(self.owners.tolist()):
            yield (*identities[owner], *(() if self.samples is None else (str(self.samples[place]),))), [place]

    def head(self, key: dict[str, Any], members: NDArray[np.int64]) -> tuple[Any, ...]:
        """The cells that say which group it is, and of how many records."""
        return group_row(key, num_records=np.unique(self.owners[members]).size)

    def dtypes_of(self, places: Sequence[int]) -> list[str]:
        """What the values of several places were looked at as, each once."""
        return sorted({self.dtypes[self.owners[place]] for place in places})

    def groups(self) -> list[tuple[dict[str, Any], NDArray[np.int64]]]:
        """For each group of equal values of the fields, sorted by them, its places; one of all without fields."""
        if not self.by:
            return [({}, np.arange(self.owners.size))]
        columns = [
            (self.samples or []) if field == SAMPLE else self.records.column(field)[self.owners].tolist()
            for field in self.by
        ]
        return [
            (dict(zip(self.by, key, strict=True)), np.array(rows, dtype=np.int64))
            for key, rows in equal_rows(zip(*columns, strict=True))
        ]

    def together(self, counts: Counts, places: Sequence[int] | NDArray[np.int64]) -> Row:
        """The counts of several places; a count is not known if that of one is not, extremes are of those known."""
        if len(places) == 1:
            return {name: float(column[places[0]]) for name, column in counts.items()}
        found = {name: float(column[places].sum()) for name, column in counts.items() if name not in EXTREMES}
        for name in EXTREMES:
            known = counts[name][places]
            known = known[~np.isnan(known)]
            ends = known.min if name == "minimum" else known.max
            found[name] = float(ends()) if known.size else math.nan
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
    counted = _CountedRecords(chosen, sizes, view=view, engine=engine or Engine(), on_record=on_record)
    is_mask = additive_masks(chosen)[owners]
    counts = [_without_masks(one, is_mask) for one in (counted.counts(targets) if targets else [counted.own_counts()])]
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


class _CountedRecords:
    """Counts records, or the samples of those that have some."""

    def __init__(
        self,
        records: Records,
        sizes: Sequence[int] | None,
        *,
        view: View,
        engine: Engine,
        on_record: Callable[[], object],
    ) -> None:
        self._sizes = None if sizes is None else [size for size in sizes if size]
        self._records = records if sizes is None else records.take([place for place, size in enumerate(sizes) if size])
        self._view, self._engine, self._on_record = view, engine, on_record

    def counts(self, targets: Sequence[Target]) -> list[Counts]:
        """For each target the counts of all records or samples; each digest is looked at once."""
        self._refuse(self._records)
        is_per_sample = self._sizes is not None
        # In whatever order targets are given, the rows that are kept are the same.
        ordered = sorted(set(targets), key=lambda one: (one.name, one.scaling))
        measures = [LimitsMeasure(target=one, view=self._view, per_sample=is_per_sample) for one in ordered]
        named = hashlib.blake2b("\0".join(one.name for one in measures).encode(), digest_size=8).hexdigest()
        form = SheetForm(name=f"counts_{named}", width=0, part_width=len(NAMES) * len(measures))
        left = iter(range(len(self._records)))
        sheet = sheet_of(self._records, form, functools.partial(self._each, measures, left), engine=self._engine)
        for _ in left:  # those that are known
            self._on_record()
        columns = np.split(sheet.parts, len(measures), axis=1)
        counts = [{name: table[:, place] for place, name in enumerate(NAMES)} for table in columns]
        return [counts[ordered.index(target)] | self._extremes(target) for target in targets]

    def _each(self, measures: Sequence[LimitsMeasure], left: Iterator[int], records: Records) -> Iterator[SheetRow]:
        """Of each record the rows of all measures, side by side."""
        sizes = None
        if self._sizes is not None:
            sizes = [len(names) for names in sample_names(records)]
        part = _CountedRecords(records, sizes, view=self._view, engine=self._engine, on_record=self._on_record)
        for rows in zip(*part._measured(measures), strict=True):
            yield SheetRow([], np.concatenate(rows, axis=1))
            next(left)
            self._on_record()

    def _measured(self, measures: Sequence[LimitsMeasure]) -> list[Iterator[NDArray[np.float64]]]:
        """For each measure the rows of each record."""
        plain = [one for one in measures if one.target.scaling is not Scaling.BLOCK and self._sizes is None]
        known = digests(self._records, view=self._view, engine=self._engine)
        copies: dict[LimitsMeasure, Iterator[Digest] | Iterator[Payload]]
        copies = dict(zip(plain, itertools.tee(known, len(plain)), strict=True))
        for alike in self._counted_alike(measures):
            counted = self._engine.measure(self._without_values(alike[0]), alike[0].job.measure(self._view))
            copies |= zip(alike, itertools.tee(counted, len(alike)), strict=True)
        return [self._rows(one, copies.get(one)) for one in measures]

    @staticmethod
    def _counted_alike(measures: Sequence[LimitsMeasure]) -> Iterable[list[LimitsMeasure]]:
        """The measures of blocks, together those that blocks of one size along one axis answer."""
        alike: dict[Any, list[LimitsMeasure]] = {}
        for one in measures:
            if one.target.scaling is Scaling.BLOCK and not one.per_sample and one.job.is_counted:
                alike.setdefault(one.job.block_key, []).append(one)
        return alike.values()

    def _without_values(self, measure: LimitsMeasure) -> Records:
        """The records of which something is kept that answers."""
        return self._records.take(np.flatnonzero(~pick(self._records, measure.needs_values)[0]).tolist())

    def _rows(
        self, measure: LimitsMeasure, known: Iterator[Digest] | Iterator[Payload] | None
    ) -> Iterator[NDArray[np.float64]]:
        """The rows of each record: of what is kept, or of its values."""
        records, engine = self._records, self._engine
        mask, by_value = pick(records, measure.needs_values)
        kept: Iterator[Digest | Payload | None] = iter(known or ())
        if known is None or measure.target.scaling is Scaling.BLOCK:
            counted = kept
            kept = (None if is_read else next(counted) for is_read in mask.tolist())
        values = engine.measure(by_value, measure)
        for place, (is_read, one, dtype) in enumerate(
            zip(mask.tolist(), kept, viewed_dtypes(records, view=self._view), strict=True)
        ):
            row = None if is_read or one is None else measure.count(one, dtype=dtype)
            if row is not None:
                yield np.array([[row[name] for name in NAMES]])
            else:
                found = next(values if is_read else engine.measure(records[place : place + 1], measure))["rows"]
                is_its_own = len(found) == (1 if self._sizes is None else self._sizes[place])
                yield found if is_its_own else measure(records[place])["rows"]

    def _extremes(self, target: Target) -> Counts:
        """Those of records that were counted in blocks: what the catalogue has, rounded as the values are."""
        if target.scaling is not Scaling.BLOCK or self._sizes is not None:
            return {}
        dtypes = np.array(viewed_dtypes(self._records, view=self._view), dtype=object)
        found: Counts = {}
        for name in EXTREMES:
            column = self._records.column(f"overflow.{name}").astype(np.float64)
            for dtype in set(dtypes.tolist()):
                with np.errstate(over="ignore"):
                    column[dtypes == dtype] = column[dtypes == dtype].astype(numpy_dtype(dtype)).astype(np.float64)
            found[name] = column
        return found

    def own_counts(self) -> Counts:
        """Against the limits of the dtype: from the catalogue, where values are looked at as they were counted."""
        records, view = self._records, self._view
        mask, others = pick(
            records, lambda dtype, compute, _: viewed_dtype(dtype=dtype, compute_dtype=compute, view=view) != dtype
        )
        self._refuse(others)
        again = zip(np.flatnonzero(mask).tolist(), digests(others, view=view, engine=self._engine), strict=True)
        if self._sizes is not None:
            return self._own_samples(mask, again)
        names = {"elements": "numel", "total": "overflow.total"}
        names |= {kind: f"overflow.{kind}.count" for kind in TALLY_KINDS}
        names |= {name: f"overflow.{name}" for name in EXTREMES}
        found = {name: records.column(column).astype(np.float64) for name, column in names.items()}
        found |= {name: np.zeros(len(records)) for name in ("flushed", "spoiled")}
        for position, digest in again:
            for name, value in row_of(digest.tallies).items():
                found[name][position] = value
            self._on_record()
        return found

    def _own_samples(self, mask: NDArray[np.bool_], again: Iterator[tuple[int, Digest]]) -> Counts:
        records, sizes = self._records, self._sizes or []
        known = records.column("overflow.per_sample").tolist()
        whole = {kind: records.column(f"overflow.{kind}.count").tolist() for kind in TALLY_KINDS}
        rows: list[Row] = []
        for place, (size, numel) in enumerate(zip(sizes, records.column("numel").tolist(), strict=True)):
            counts: dict[str, Any]
            if mask[place]:
                counts = next(again)[1].samples or {}
            elif size == 1:
                counts = {kind: [column[place]] for kind, column in whole.items()}
            else:
                counts = json.loads(known[place]) or {kind: [math.nan] * size for kind in TALLY_KINDS}
            for sample in range(size):
                row = with_total((kind, counts[kind][sample]) for kind in TALLY_KINDS)
                rows.append(unknown_row(int(numel / size)) | row)
        return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in NAMES}

    def _refuse(self, records: Records) -> None:
        """Refuse records of which no value is known; of whose samples, also those whose histogram was kept."""
        (kept,) = np.nonzero(records.column("keep") == Keep.STATISTICS)
        if kept.size:
            read_numbers(records[int(kept[0])], view=View.SEEN)
        (kept,) = np.nonzero(records.column("keep") == Keep.HISTOGRAM)
        if kept.size and self._sizes is not None:
            raise UsageError(
                f"of {records[int(kept[0])]!r} the histogram was kept, which does not know its samples: "
                f"leave such records out with --where \"keep == 'values'\""
            )
