"""Counts what is beyond limits in each record: from the catalogue, a digest, or the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digests import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sweep_measure import Job, sweep_records
from ranktape.analyze.engine.values import View, pick, read_numbers, read_values, viewed_dtype
from ranktape.analyze.metrics.target import Target, tells_apart
from ranktape.analyze.numerics.histograms.histogram import KINDS as SCANNED
from ranktape.analyze.numerics.histograms.histogram import Histogram, Limits, Tallies, scan, scan_histogram
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve
from ranktape.errors import RanktapeError
from ranktape.storage.format.dtypes import dtype_row, numpy_dtype
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.cache_object import Payload
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
    from ranktape.storage import Record, Records

VERSION = 1
"""Of the payload; one more whenever what is in it changes."""

KINDS = ("upper", "lower", "total", "underflow", "flushed", "nan", "inf", "zero", "spoiled")
"""What is counted: `total` is what overflows on either side; `spoiled` are finite values of blocks with NaN or Inf."""

EXTREMES = ("minimum", "maximum", "absmax")
"""The extreme values, NaN left out."""

NAMES = ("elements", *KINDS, *EXTREMES)
"""What is known of each record."""

Counts = Mapping[str, "NDArray[np.float64]"]
"""For each of `NAMES` one number for each record; NaN where it is not known, or there is none."""

Row = dict[str, float]
"""The same of one record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsMeasure:
    """Counts the values of a record against the limits of a format."""

    target: Target
    """The format, and the scale, which is that of the whole tensor."""
    view: View
    """Which numbers are judged."""
    per_sample: bool = False
    """Whether each sample is counted for itself: a row of `SCANNED` for each, in place of one of `NAMES`."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        start = "sample_limits" if self.per_sample else "limits"
        return f"{start}_v{VERSION}_{self.target.name}_{self.target.scaling}_{self.view}"

    def __call__(self, record: Record) -> Payload:
        """The counts of one record, as an array."""
        numbers = read_values(record, view=self.view) if self.per_sample else read_numbers(record, view=self.view)
        limits = self.target.limits()
        if self.target.scaling is Scaling.TENSOR:
            limits = self.target.limits(largest=_scanned(numbers, limits).largest_finite)
        if not self.per_sample:
            row = row_of(_scanned(numbers, limits))
            return {"row": np.array([row[name] for name in NAMES], dtype=np.float64)}
        assert not isinstance(numbers, Histogram), "values were read"
        dim = record.sample_dim
        found = scan(numbers if dim is not None else numbers[np.newaxis], limits=limits, sample_dim=dim or 0).per_sample
        assert found is not None
        return {"counts": np.array([found[kind] for kind in SCANNED], dtype=np.int64).T}

    def accepts(self, payload: Payload) -> bool:
        """Whether a payload is one that is made here; what lies in a cache may have been put there by anybody."""
        if self.per_sample:
            table = payload.get("counts")
            return table is not None and table.shape[1:] == (len(SCANNED),) and table.dtype == np.int64
        row = payload.get("row")
        return row is not None and row.shape == (len(NAMES),) and row.dtype == np.float64


def _scanned(numbers: NDArray[Any] | Histogram, limits: Limits) -> Tallies:
    return scan_histogram(numbers, limits=limits) if isinstance(numbers, Histogram) else scan(numbers, limits=limits)


def count_records(
    records: Records,
    targets: Sequence[Target],
    *,
    view: View,
    engine: Engine | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> list[Counts]:
    """For each target the counts of all records; without targets, once, against the limits of their own dtype.

    NaN counts as NaN alone; infinities count as infinite, and overflow everywhere. With scales of blocks nothing is
    known of signs, and so `upper` and `lower` are not; no record may be of integers or bool.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record does not answer the question.
    """
    used = engine or Engine()
    if not targets:
        return [_own_counts(records, view=view, engine=used, on_record=on_record)]
    refuse_statistics(records)
    plain = [target for target in targets if target.scaling is not Scaling.BLOCK]
    blocks = [target for target in targets if target.scaling is Scaling.BLOCK]
    found: dict[Target, Counts] = {}
    if plain:
        found |= _plain_counts(records, plain, view=view, engine=used, on_record=on_record)
    if blocks:
        reported = (lambda: None) if plain else on_record
        found |= _block_counts(records, blocks, view=view, engine=used, on_record=reported)
    return [found[target] for target in targets]


def refuse_statistics(records: Records) -> None:
    """Refuse records of which no value is known.

    Raises:
        UsageError: there is one; as `values.read_numbers` says it.
    """
    (kept,) = np.nonzero(records.column("keep") == Keep.STATISTICS)
    if kept.size:
        read_numbers(records[int(kept[0])], view=View.SEEN)


def row_of(tallies: Tallies) -> Row:
    """What is known of a record of which that was counted."""
    extremes = {name: getattr(tallies, name) for name in EXTREMES}
    return {
        "elements": float(tallies.num_elements),
        **{kind: float(getattr(tallies, kind)) for kind in SCANNED},
        "total": float(tallies.upper + tallies.lower),
        "spoiled": 0.0,
        **{name: math.nan if value is None else value for name, value in extremes.items()},
    }


def _own_counts(records: Records, *, view: View, engine: Engine, on_record: Callable[[], object]) -> Counts:
    """From the catalogue, which counted when the run was written, where values are looked at as they were then."""
    names = {"elements": "numel", "total": "overflow.total"}
    names |= {kind: f"overflow.{kind}.count" for kind in KINDS if kind not in {"total", "flushed", "spoiled"}}
    names |= {name: f"overflow.{name}" for name in EXTREMES}
    found = {name: records.column(column).astype(np.float64) for name, column in names.items()}
    found |= {name: np.zeros(len(records)) for name in ("flushed", "spoiled")}

    def is_other(dtype: str, compute: str, _: str) -> bool:
        return viewed_dtype(dtype=dtype, compute_dtype=compute, view=view) != dtype

    mask, others = pick(records, is_other)
    refuse_statistics(others)
    for position, digest in zip(np.flatnonzero(mask), digests(others, view=view, engine=engine), strict=True):
        for name, value in row_of(digest.tallies).items():
            found[name][position] = value
        on_record()
    return found


def _plain_counts(
    records: Records,
    targets: Sequence[Target],
    *,
    view: View,
    engine: Engine,
    on_record: Callable[[], object],
) -> dict[Target, Counts]:
    rows: dict[Target, list[Row]] = {target: [] for target in targets}
    from_values = {target: _ValueCounts(records, target, view=view, engine=engine) for target in targets}
    for position, digest in enumerate(digests(records, view=view, engine=engine)):
        for target in targets:
            limits = target.limits(largest=digest.tallies.largest_finite)
            known = digest.is_exact or tells_apart(limits)
            measured = from_values[target].row(position, is_needed=not known)
            rows[target].append(measured or row_of(digest.count(limits)))
        on_record()
    return {target: _columns(found) for target, found in rows.items()}


class _ValueCounts:
    """The counts of records whose digests do not tell on which side of a limit a value lies."""

    def __init__(self, records: Records, target: Target, *, view: View, engine: Engine) -> None:
        self._records, self._engine = records, engine
        self._measure = LimitsMeasure(target=target, view=view)

        def is_wide(dtype: str, compute: str, keep: str) -> bool:
            row = dtype_row(viewed_dtype(dtype=dtype, compute_dtype=compute, view=view))
            return keep == Keep.VALUES and row.itemsize > 2  # noqa: PLR2004 - bytes of which a digest is exact

        # Limits that every wide record needs its values for are counted together.
        is_hard = not tells_apart(target.limits())
        self._mask: NDArray[np.bool_] = np.zeros(len(records), dtype=np.bool_)
        wide = records[:0]
        if is_hard:
            self._mask, wide = pick(records, is_wide)
        self._ahead: Iterator[Payload] = engine.measure(wide, self._measure)

    def row(self, position: int, *, is_needed: bool) -> Row | None:
        """The counts of the next record; None where its digest has them."""
        if self._mask[position]:
            return row_of_payload(next(self._ahead))
        if not is_needed:
            return None
        return row_of_payload(next(iter(self._engine.measure(self._records[position : position + 1], self._measure))))


def row_of_payload(payload: Payload) -> Row:
    """What `LimitsMeasure` made a payload of."""
    return dict(zip(NAMES, payload["row"].tolist(), strict=True))


def _block_counts(
    records: Records,
    targets: Sequence[Target],
    *,
    view: View,
    engine: Engine,
    on_record: Callable[[], object],
) -> dict[Target, Counts]:
    rows: dict[Target, list[Row]] = {target: [] for target in targets}
    jobs = [block_job(target) for target in targets]
    pairs = zip(records.column("dtype").tolist(), records.column("compute_dtype").tolist(), strict=True)
    dtypes = [numpy_dtype(viewed_dtype(dtype=dtype, compute_dtype=compute, view=view)) for dtype, compute in pairs]
    ends = {name: records.column(f"overflow.{name}") for name in EXTREMES}
    for position, sweeps in enumerate(sweep_records(records, [jobs] * len(records), view=view, engine=engine)):
        if isinstance(sweeps, RanktapeError):
            raise sweeps
        with np.errstate(over="ignore"):
            # Rounding keeps the order of values, so that the extremes are those that were counted, rounded.
            known = {name: float(ends[name][position].astype(dtypes[position])) for name in EXTREMES}
        for place, target in enumerate(targets):
            rows[target].append(block_row(sweeps[place]) | known)
        on_record()
    return {target: _columns(found) for target, found in rows.items()}


def block_job(target: Target) -> Job:
    """The sweep whose one level is that of the format's own scales."""
    options = SweepOptions(mode=SweepMode.MX, num_levels=1, max_scale_exp=0, min_scale_exp=0)
    return Job(*resolve(target.name, options=options), options)


def block_row(sweep: ScaleSweep) -> Row:
    """What is known of a record, or a sample, from its sweep at one level; its extremes are not."""
    level = sweep.levels[0] if sweep.levels else None
    counts = {"total": "overflow_count", "underflow": "underflow_count", "flushed": "flushed_count"}
    return unknown_row(sweep.num_elements) | {
        **{kind: 0.0 if level is None else float(getattr(level, name)) for kind, name in counts.items()},
        "total": float(sweep.inf + (0 if level is None else level.overflow_count)),
        **{kind: float(getattr(sweep, kind)) for kind in ("nan", "inf", "zero", "spoiled")},
    }


def unknown_row(num_elements: int) -> Row:
    """What is known where nothing could be counted."""
    return {"elements": float(num_elements)} | dict.fromkeys(NAMES[1:], math.nan)


def _columns(rows: Sequence[Row]) -> Counts:
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in NAMES}
