"""How is the digest of each record of a selection found, and that of several together?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digest import SAMPLE_FIGURES, Digest
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.histograms.histogram import (
    KINDS,
    Histogram,
    Tallies,
    count_values,
    own_limits,
    scan,
    scan_histogram,
)
from ranktape.analyze.histograms.moments import statistics_of, statistics_of_histogram
from ranktape.analyze.values import View, read_numbers, viewed_dtype
from ranktape.storage.dtypes import numpy_dtype
from ranktape.storage.record import Keep
from ranktape.storage.statistics import STATISTICS, Statistics, merge_statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.measure import Payload
    from ranktape.storage import Record, Records

VERSION = 1
"""Of the payload; one more whenever what is in it changes."""

_ENDS = ("minimum", "maximum", "largest_finite", "smallest_nonzero")
_HALF_NBYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMeasure:
    """Measures the digest of a record; `digest_of` reads the payload."""

    view: View = View.COMPUTE
    """Which numbers are judged."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return f"digest_v{VERSION}_{self.view}"

    def __call__(self, record: Record) -> Payload:
        """The digest of one record, as arrays."""
        return _payload(_digest(record, view=self.view))


def digests(records: Records, *, view: View = View.COMPUTE, engine: Engine | None = None) -> Iterator[Digest]:
    """The digest of each record, in their order: of those that were asked about before, nothing is read.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    measured = (engine or Engine()).measure(records, DigestMeasure(view=view))
    # The columns say the dtype; the payload holds numbers alone.
    pairs = zip(records.column("dtype").tolist(), records.column("compute_dtype").tolist(), strict=True)
    for (dtype, compute), payload in zip(pairs, measured, strict=True):
        yield digest_of(payload, dtype=viewed_dtype(dtype=dtype, compute_dtype=compute, view=view))


def merge_digests(parts: Sequence[Digest]) -> Digest:
    """The digest of all values together; of samples nothing is said. At least one part.

    The order of the parts matters to the last bit of sums, and to nothing else.
    """
    tallies = [part.tallies for part in parts]
    values, places = np.unique(np.concatenate([part.values for part in parts]), return_inverse=True)
    counts = np.zeros(values.size, dtype=np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    ends: dict[str, Any] = {
        name: choose((end for one in tallies if (end := getattr(one, name)) is not None), default=None)
        for name, choose in zip(_ENDS, (min, max, max, min), strict=True)
    }
    return Digest(
        dtype=" ".join(sorted({part.dtype for part in parts})),
        statistics=merge_statistics([part.statistics for part in parts]),
        tallies=Tallies(
            num_elements=sum(one.num_elements for one in tallies),
            **{kind: sum(getattr(one, kind) for one in tallies) for kind in KINDS},
            **ends,
            per_sample=None,
        ),
        values=values,
        counts=counts,
        is_exact=all(part.is_exact for part in parts),
        has_values=all(part.has_values for part in parts),
    )


def digest_of(payload: Payload, *, dtype: str) -> Digest:
    """The digest that `DigestMeasure` made a payload of."""
    ends: dict[str, Any] = dict(zip(_ENDS, (_end(value) for value in payload["ends"].tolist()), strict=True))
    counts = dict(zip(("num_elements", *KINDS), payload["tallies"].tolist(), strict=True))
    is_exact, has_values = payload["flags"].tolist()
    samples = payload.get("samples")
    return Digest(
        dtype=dtype,
        statistics=Statistics.from_vector(payload["statistics"]),
        tallies=Tallies(**counts, **ends, per_sample=None),
        values=payload["values"],
        counts=payload["counts"],
        is_exact=bool(is_exact),
        has_values=bool(has_values),
        samples=None if samples is None else dict(zip(SAMPLE_FIGURES, samples, strict=True)),
    )


def _payload(digest: Digest) -> Payload:
    tallies = digest.tallies
    ends = [math.nan if (end := getattr(tallies, name)) is None else end for name in _ENDS]
    payload: Payload = {
        "statistics": digest.statistics.to_vector(),
        "tallies": np.array([tallies.num_elements, *(getattr(tallies, kind) for kind in KINDS)], dtype=np.int64),
        "ends": np.array(ends),
        "flags": np.array([digest.is_exact, digest.has_values]),
        "values": digest.values,
        "counts": digest.counts,
    }
    if digest.samples is not None:
        payload["samples"] = np.array([digest.samples[name] for name in SAMPLE_FIGURES], dtype=np.float64)
    return payload


def _digest(record: Record, *, view: View) -> Digest:
    dtype = viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=view)
    limits = own_limits(numpy_dtype(dtype))
    if record.keep == Keep.STATISTICS:
        return _digest_of_statistics(record, dtype=dtype)
    numbers = read_numbers(record, view=view)
    if isinstance(numbers, Histogram):
        tallies, statistics = scan_histogram(numbers, limits=limits), statistics_of_histogram(numbers)
        values, counts = _ascending(numbers)
        return Digest(dtype=dtype, statistics=statistics, tallies=tallies, values=values, counts=counts, is_exact=True)
    tallies = dataclasses.replace(scan(numbers, limits=limits), per_sample=None)
    is_exact = numbers.dtype.itemsize <= _HALF_NBYTES
    values, counts = _ascending(count_values(numbers)) if is_exact else _rounded_to_odd(numbers)
    return Digest(
        dtype=dtype,
        statistics=statistics_of(numbers),
        tallies=tallies,
        values=values,
        counts=counts,
        is_exact=is_exact,
        samples=None if record.sample_dim is None else _samples(numbers, dim=record.sample_dim, limits=limits),
    )


def _digest_of_statistics(record: Record, *, dtype: str) -> Digest:
    """What the catalogue and the statistics know of a record whose values were not kept."""
    statistics, overflow = record.statistics(), record.overflow
    counts = {kind: 0 if kind == "flushed" else getattr(overflow, kind).count for kind in KINDS}
    return Digest(
        dtype=dtype,
        statistics=statistics,
        tallies=Tallies(
            num_elements=statistics.num_elements,
            **counts,
            minimum=overflow.minimum,
            maximum=overflow.maximum,
            largest_finite=statistics.absmax,
            smallest_nonzero=None,
            per_sample=None,
        ),
        values=np.zeros(0),
        counts=np.zeros(0, dtype=np.int64),
        is_exact=True,
        has_values=False,
    )


def _ascending(histogram: Histogram) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    values, counts = histogram.pairs()
    return _added_up(values, counts)


def _rounded_to_odd(array: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The values of a wide type with eight bits of significand, and half a step more where they had more bits."""
    if array.dtype.kind == "c":
        real, imaginary = array.real, array.imag
        larger = np.where(np.abs(real) >= np.abs(imaginary), real, imaginary)
        array = np.where(np.isnan(real) | np.isnan(imaginary), np.nan, larger)
    wide = array.astype(np.float64).reshape(-1)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    narrow = np.where(np.abs(narrow) > np.abs(wide), np.nextafter(narrow, np.float32(0)), narrow)
    bits = narrow.view(np.uint32)
    is_odd = ((bits & 0xFFFF) != 0) | (narrow != wide)
    keys = (bits >> 16 << 1) | (is_odd & ~np.isnan(wide))
    patterns, counts = np.unique(keys, return_counts=True)
    return _added_up((patterns.astype(np.uint32) << 15).view(np.float32).astype(np.float64), counts)


def _added_up(values: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The numbers in ascending order, each once, and how often they occur."""
    is_number = ~np.isnan(values)
    numbers, places = np.unique(values[is_number] + 0.0, return_inverse=True)
    total = np.zeros(numbers.size, dtype=np.int64)
    np.add.at(total, places, counts[is_number])
    return numbers, total


def _samples(array: NDArray[Any], *, dim: int, limits: Any) -> dict[str, NDArray[Any]]:
    per_sample = scan(array, limits=limits, sample_dim=dim).per_sample
    assert per_sample is not None
    found = [statistics_of(sample) for sample in np.moveaxis(array, dim, 0)]
    names = {"num_elements", *STATISTICS, "mean", "std", "norm"} & set(SAMPLE_FIGURES)
    known = {name: _column([getattr(one, name) for one in found]) for name in names}
    return {name: known[name] if name in known else _column(per_sample[name]) for name in SAMPLE_FIGURES}


def _column(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _end(value: float) -> float | None:
    return None if math.isnan(value) else value
