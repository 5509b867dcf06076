"""Gives every metric of many records as columns, and of their samples; what is kept of these is read at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.metrics.gather import Groups, group_columns_of
from ranktape.analyze.metrics.metric import METRICS, Metric, has_percentiles
from ranktape.analyze.metrics.target import parse_targets
from ranktape.analyze.numerics.digest import SAMPLE_METRICS, Digests
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Kind
from ranktape.storage import Records

NARROW_FORMAT = "fp8_e5m2"
"""The 8-bit format with the widest range: what it flushes even with a scale of its own, no other holds."""

_GRID_TOLERANCE = 2.0**-6
"""What rounding after a scale may take from the ratio of two numbers."""

_COARSE_BITS = 4
"""Significant bits of fp8_e4m3, the most that an 8-bit floating-point format has."""

_FINE_BITS = (1 << 53 - _COARSE_BITS) - 1
"""Bits of a float64 that are zero where its significand has no more than `_COARSE_BITS` bits."""

_MIN_NORMAL = 2.0**-1022

_MIN_COARSE = 8
"""Magnitudes of so few bits that differ: fewer may come from a loss, as the multiples of 1/16 of a mean."""

SATURATING = {"float8_e4m3fn": "fp8_e4m3"}
"""Types whose conversions end at the largest number, and the formats that say which that is."""


def _saturated(known: Digests) -> NDArray[np.float64]:
    names = [SATURATING.get(dtype) for dtype in known.dtypes]
    largest = np.array([math.inf if name is None else FORMATS[name].maximum for name in names])
    if not np.isfinite(largest).any():
        return np.zeros(len(known))
    counts = known.count_between(largest, largest) + known.count_between(-largest, -largest)
    return np.where(np.isfinite(largest), counts, 0).astype(np.float64)


def _floored(known: Digests) -> NDArray[np.float64]:
    zeros = np.zeros(len(known))
    if not known.values.size:
        return zeros
    below, above = known.search(zeros, side="left"), known.search(zeros, side="right")
    first, last = known.starts[:-1], known.starts[1:]

    def magnitudes(places: NDArray[np.int64]) -> NDArray[np.float64]:
        is_there = (places >= first) & (places < last)
        return np.where(is_there, np.abs(known.values[np.where(is_there, places, 0)]), math.inf)

    near = np.sort(np.stack([magnitudes(places) for places in (above, above + 1, below - 1, below - 2)]), axis=0)
    floor = near[0]
    second = np.min(np.where(near > floor, near, math.inf), axis=0)
    with np.errstate(invalid="ignore"):
        is_grid = np.isinf(second) | (np.abs(second - 2 * floor) <= _GRID_TOLERANCE * np.maximum(second, 2 * floor))
    counts = known.count_between(floor, floor) + known.count_between(-floor, -floor)
    return np.where(is_grid, counts, 0).astype(np.float64)


def _coarse(known: Digests) -> NDArray[np.float64]:
    # Of a float64 all bits behind the first few of its significand are zero; subnormal ones are brought up first.
    values = known.values * 2.0**100 if (np.abs(known.end("smallest_nonzero")) < _MIN_NORMAL).any() else known.values
    magnitudes = np.abs(values)
    is_coarse = (magnitudes.view(np.int64) & _FINE_BITS == 0) & (magnitudes > 0) & np.isfinite(known.values)
    owners = np.repeat(np.arange(len(known)), known.sizes)[is_coarse]
    counts = np.bincount(owners, weights=known.counts[is_coarse], minlength=len(known))
    pairs = np.stack([owners.astype(np.float64), magnitudes[is_coarse]])
    pairs = pairs[:, np.lexsort(pairs[::-1])]
    is_new = np.any(np.diff(pairs, axis=1, prepend=math.nan) != 0, axis=0)
    num_distinct = np.bincount(pairs[0, is_new].astype(np.int64), minlength=len(known))
    return np.where(num_distinct >= _MIN_COARSE, counts, 0.0)


def _flushed(known: Digests) -> NDArray[np.float64]:
    """The part of nonzero values that is zero in the format when the largest one is scaled to its largest number."""
    (target,) = parse_targets(NARROW_FORMAT, Scaling.TENSOR)
    nonzero = np.maximum(1, known.tally("num_elements") - known.tally("zero") - known.tally("nan"))
    flushed = known.count(*target.limits_of(known.end("largest_finite")))["flushed"]
    return np.where(known.has_values, flushed / nonzero, math.nan)


def _number(name: str, of_columns: Callable[[Digests], NDArray[np.float64]], *, needs_values: bool = True) -> Metric:
    return Metric(name=name, kind=Kind.FLOAT, head=name, of_columns=of_columns, needs_values=needs_values)


_BESIDE = (
    _number("saturated", _saturated),
    _number("floored", _floored),
    _number("coarse", _coarse),
    _number("flushed", _flushed),
    _number("is_exact", lambda known: known.is_exact.astype(np.float64), needs_values=False),
    _number("has_percentiles", lambda known: has_percentiles(known).astype(np.float64), needs_values=False),
    _number("has_values", lambda known: known.has_values.astype(np.float64), needs_values=False),
)

NUMBERS: dict[str, Metric] = METRICS | {one.name: one for one in _BESIDE}
"""What can be asked of digests: every metric that has a name, and what findings know of a digest beside these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordNumbers:
    """Numbers of many records, or of groups of them."""

    columns: dict[str, NDArray[np.float64]]
    """For each name one number for each, NaN where there is none."""
    sample_sizes: NDArray[np.int64]
    """How many samples each has; of groups none."""
    samples: NDArray[np.float64]
    """`SAMPLE_METRICS` of the samples of all; shape (samples, 14)."""

    def column(self, name: str) -> NDArray[np.float64]:
        """One number for each record, NaN where there is none."""
        return self.columns[name]

    def of_samples(self, name: str) -> NDArray[np.float64]:
        """One of `SAMPLE_METRICS` of the samples of all records."""
        found: NDArray[np.float64] = self.samples[:, SAMPLE_METRICS.index(name)]
        return found

    @property
    def owners(self) -> NDArray[np.int64]:
        """For each sample the place of its record."""
        return np.repeat(np.arange(self.sample_sizes.size), self.sample_sizes)

    @property
    def places(self) -> NDArray[np.int64]:
        """For each sample its place among those of its record."""
        starts = np.cumsum(self.sample_sizes) - self.sample_sizes
        return np.arange(len(self.samples)) - np.repeat(starts, self.sample_sizes)


def numbers_of(
    records: Records, names: Iterable[str] = NUMBERS, *, view: View, engine: Engine | None = None
) -> RecordNumbers:
    """What is known of each record; values are read of those alone that were never asked about.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    groups = Groups(keys=({},) * len(records), sizes=(1,) * len(records), numbers=tuple(range(len(records))))
    return numbers_of_groups(records, groups, [NUMBERS[name] for name in names], view=view, engine=engine)


def numbers_of_groups(
    records: Records, groups: Groups, metrics: Sequence[Metric], *, view: View, engine: Engine | None = None
) -> RecordNumbers:
    """What is known of each group of records as if it were one; of samples nothing is said. Raises as `numbers_of`."""
    columns = {one.name: np.full(len(groups.keys), math.nan) for one in metrics}
    sizes = np.zeros(len(groups.keys), dtype=np.int64)
    samples = []
    known = group_columns_of(
        records, groups, view=view, engine=engine, with_values=any(one.needs_values for one in metrics)
    )
    for places, digests in known:
        for one in metrics:
            columns[one.name][places] = one.of_columns(digests)
        sizes[places] = np.maximum(0, digests.sample_sizes)
        samples.append(digests.samples)
    return RecordNumbers(
        columns=columns,
        sample_sizes=sizes,
        samples=np.concatenate([np.zeros((0, len(SAMPLE_METRICS))), *samples]),
    )
