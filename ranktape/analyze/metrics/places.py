"""Counts what is beyond limits in every record or sample of a selection, and groups them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digests import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sweep_measure import sweep_samples
from ranktape.analyze.engine.values import View, pick, viewed_dtype
from ranktape.analyze.identity import SAMPLE, SampleName, sample_names
from ranktape.analyze.metrics.counts import (
    EXTREMES,
    NAMES,
    Counts,
    LimitsMeasure,
    Row,
    block_job,
    block_row,
    count_records,
    refuse_statistics,
    unknown_row,
)
from ranktape.analyze.metrics.target import Target, sweepable
from ranktape.analyze.numerics.histograms.histogram import KINDS as SCANNED
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.format.record_info import TALLY_KINDS, Keep
from ranktape.storage.query.columns import equal_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Records, or the samples of records, and the counts of each."""

    records: Records
    """The records that were counted."""
    targets: tuple[Target, ...]
    """Whose limits count; none for those of the dtype."""
    owners: NDArray[np.int64]
    """Of each place where in `records` its record is."""
    dtypes: list[str]
    """Of each place what the values were looked at as."""
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

    def limits_of(self, places: Sequence[int], target: Target | None) -> list[str]:
        """The type or format whose limits count there; of several places each once."""
        if target is not None:
            return [target.name]
        return sorted({self.dtypes[place] for place in places})

    def groups(self, by: Sequence[str]) -> list[tuple[dict[str, Any], NDArray[np.int64]]]:
        """For each group of equal values of the fields, sorted by them, its places; one of all without fields.

        Raises:
            UnknownFieldError: records have no such field.
        """
        if not by:
            return [({}, np.arange(self.owners.size))]
        columns = [
            (self.samples or []) if field == SAMPLE else self.records.column(field)[self.owners].tolist()
            for field in by
        ]
        return [
            (dict(zip(by, key, strict=True)), np.array(rows, dtype=np.int64))
            for key, rows in equal_rows(zip(*columns, strict=True))
        ]

    def together(self, counts: Counts, places: NDArray[np.int64]) -> Row:
        """The counts of several places; a count is not known if that of one is not, extremes are of those known."""
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
    if per_sample or SAMPLE in by:
        owners, samples, counts = count_samples(chosen, targets, view=view, engine=engine)
        num_without = len(chosen) - np.unique(owners).size
        if num_without:
            notes.append(f"{num_without} of {len(chosen)} records have no samples, and are left out")
    else:
        owners, samples = np.arange(len(chosen)), None
        counts = count_records(chosen, targets, view=view, engine=engine, on_record=on_record)
    pairs = zip(chosen.column("dtype").tolist(), chosen.column("compute_dtype").tolist(), strict=True)
    dtypes = [viewed_dtype(dtype=one, compute_dtype=two, view=view) for one, two in pairs]
    return Places(
        records=chosen,
        targets=tuple(targets),
        owners=owners,
        dtypes=[dtypes[owner] for owner in owners.tolist()],
        samples=samples,
        counts=tuple(counts),
        notes=tuple(notes),
    )


def _countable(records: Records, targets: Sequence[Target]) -> tuple[Records, list[str]]:
    """The records that can be counted against all targets, and a sentence on the others."""
    if all(target.scaling is not Scaling.BLOCK for target in targets):
        return records, []
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record holds floating-point numbers, and of integers and bool no blocks are made")
    left_out = len(records) - len(chosen)
    return chosen, [f"{left_out} records of integers or bool left out: no blocks are made of them"] if left_out else []


def count_samples(
    records: Records, targets: Sequence[Target], *, view: View, engine: Engine | None = None
) -> tuple[NDArray[np.int64], list[SampleName], list[Counts]]:
    """What `count_records` says of records, for each sample of those whose samples can be told apart.

    Where in the selection the record of each sample is, what it is called, and for each target the counts of all.
    Of extremes nothing is said. Against the limits of the dtype the catalogue answers, where it can.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: no record has samples; what was kept of one does not answer the question.
    """
    used = engine or Engine()
    names = sample_names(records)
    sizes = [len(found) for found in names]
    if not any(sizes):
        raise UsageError(
            f"none of {len(records)} records has samples that can be told apart: leave out --per-sample and --by sample"
        )
    with_samples = records.take([place for place, size in enumerate(sizes) if size])
    counts = [size for size in sizes if size]
    if targets:
        refuse_statistics(with_samples)
        refuse_histograms(with_samples)
        rows = [list(_rows(with_samples, counts, target, view=view, engine=used)) for target in targets]
    else:
        rows = [list(_own_rows(with_samples, counts, view=view, engine=used))]
    owners = np.repeat(np.arange(len(records)), sizes)
    assert all(len(found) == owners.size for found in rows)
    counted: list[Counts] = [
        {name: np.array([row[name] for row in found], dtype=np.float64) for name in NAMES} for found in rows
    ]
    return owners, [name for found in names for name in found], counted


def refuse_histograms(records: Records) -> None:
    """Refuse records of whose samples nothing is known beside what was counted when they were written.

    Raises:
        UsageError: there is one.
    """
    (kept,) = np.nonzero(records.column("keep") == Keep.HISTOGRAM)
    if kept.size:
        raise UsageError(
            f"of {records[int(kept[0])]!r} the histogram was kept, which does not know its samples: "
            f"leave such records out with --where \"keep == 'values'\""
        )


def _sample_sizes(records: Records, counts: Sequence[int]) -> list[tuple[int, float]]:
    """For each record how many samples it has, and how many elements each has."""
    return [(count, numel / count) for count, numel in zip(counts, records.column("numel").tolist(), strict=True)]


def _row(counts: dict[str, float], *, num_elements: float) -> Row:
    return (
        unknown_row(int(num_elements))
        | dict.fromkeys(("flushed", "spoiled"), 0.0)
        | counts
        | {"total": counts["upper"] + counts["lower"]}
    )


def _own_rows(records: Records, sizes: Sequence[int], *, view: View, engine: Engine) -> Iterator[Row]:
    def is_other(dtype: str, compute: str, _: str) -> bool:
        return viewed_dtype(dtype=dtype, compute_dtype=compute, view=view) != dtype

    mask, others = pick(records, is_other)
    refuse_statistics(others)
    refuse_histograms(others)
    found = digests(others, view=view, engine=engine)
    known = records.column("overflow.per_sample").tolist()
    whole = {kind: records.column(f"overflow.{kind}.count").tolist() for kind in TALLY_KINDS}
    for place, (num_samples, num_elements) in enumerate(_sample_sizes(records, sizes)):
        if mask[place]:
            samples = next(found).samples
            assert samples is not None
            counts = {kind: samples[kind].tolist() for kind in TALLY_KINDS}
        elif num_samples == 1:
            counts = {kind: [column[place]] for kind, column in whole.items()}
        else:
            counts = json.loads(known[place]) or {kind: [math.nan] * num_samples for kind in TALLY_KINDS}
        for sample in range(num_samples):
            yield _row({kind: float(counts[kind][sample]) for kind in TALLY_KINDS}, num_elements=num_elements)


def _rows(records: Records, counts: Sequence[int], target: Target, *, view: View, engine: Engine) -> Iterator[Row]:
    sizes = _sample_sizes(records, counts)
    if target.scaling is not Scaling.BLOCK:
        for payload, (_, num_elements) in zip(
            engine.measure(records, LimitsMeasure(target=target, view=view, per_sample=True)), sizes, strict=True
        ):
            for row in payload["counts"].tolist():
                yield _row(dict(zip(SCANNED, map(float, row), strict=True)), num_elements=num_elements)
        return
    jobs = [block_job(target)]
    asked = [dict.fromkeys(range(count), jobs) for count, _ in sizes]
    for sweeps, (count, _) in zip(sweep_samples(records, asked, view=view, engine=engine), sizes, strict=True):
        if isinstance(sweeps, RanktapeError):
            raise sweeps
        for sample in range(count):
            yield block_row(sweeps[sample][0])
