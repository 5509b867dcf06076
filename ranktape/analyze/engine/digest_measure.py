"""The digest of a record, measured with no more of it in memory than one chunk, and the form in which it rests.

What is measured does not depend on how the store holds the values: of types of at most 16 bits everything follows from
counts; of wider ones, sums are made of each sample, or of each run of elements, and added up in that order.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache_object import Payload
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, read_histogram, viewed_dtype, viewed_dtypes
from ranktape.analyze.numerics.digest import SAMPLE_METRICS, Digest, Summarizer, Summary, merge_summaries
from ranktape.analyze.numerics.digest_kernels import MAX_COUNT, NUM_TABLES, Nature, count_samples
from ranktape.analyze.numerics.histograms.histogram import KINDS, Tallies, own_limits, pattern_values, scan
from ranktape.analyze.numerics.histograms.moments import statistics_of, statistics_of_pairs
from ranktape.analyze.numerics.pieces import frozen
from ranktape.errors import DataError
from ranktape.storage import Record, Records
from ranktape.storage.format.dtypes import HALF_NBYTES, numpy_dtype
from ranktape.storage.format.record_info import Keep
from ranktape.storage.format.statistics import STATISTICS, Statistics, merge_statistics

ENDS = ("minimum", "maximum", "largest_finite", "smallest_nonzero")
"""The extremes in tallies."""

_FORMS = {
    "tallies": (np.dtype(np.int64), 1 + len(KINDS)),
    "ends": (np.dtype(np.float64), len(ENDS)),
    "flags": (np.dtype(np.bool_), 2),
}
"""Of the arrays in a payload: type and length."""

_NUM_AXES = 2
"""Of the metrics of samples: which metric, which sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMeasure:
    """Measures the digest of a record; `digest_of` reads the payload."""

    view: View = View.COMPUTE
    """Which numbers are judged."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return f"digest_{self.view}"

    def __call__(self, record: Record) -> Payload:
        """The digest of one record, as arrays.

        Raises:
            DataError: the record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: values were kept that are rounded already, and are to be looked at as they were seen.
        """
        dtype = numpy_dtype(viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=self.view))
        if record.keep == Keep.STATISTICS:
            return _of_statistics(record)
        if record.keep == Keep.HISTOGRAM:
            histogram = read_histogram(record, view=self.view)
            (patterns,) = np.nonzero(histogram.counts)
            return _of_patterns(patterns, histogram.counts[patterns], dtype=histogram.dtype)
        metrics, parts = _metrics_of(record), _parts(record, dtype)
        payload = (_narrow if dtype.itemsize <= HALF_NBYTES else _wide)(parts, dtype, metrics)
        has_samples = record.sample_dim is not None or len(metrics) > 0
        return payload | {"samples": np.ascontiguousarray(metrics.T)} if has_samples else payload

    def accepts(self, payload: Payload) -> bool:
        """Whether a payload has the form of those made here; anybody may have put one into a cache."""
        try:
            Statistics.from_vector(payload["statistics"])
            codes, counts = payload["codes"], payload["counts"]
            is_formed = all(
                (payload[name].dtype, payload[name].shape) == (dtype, (length,))
                for name, (dtype, length) in _FORMS.items()
            )
        except (DataError, KeyError):
            return False
        samples = payload.get("samples")
        return (
            is_formed
            and codes.shape == counts.shape == (codes.size,)
            and codes.dtype in (np.uint8, np.uint16, np.float32, np.float64)
            and counts.dtype in (np.uint32, np.int64)
            and (not codes.size or int(counts.min()) > 0)
            and (codes.dtype.kind == "u" or bool((codes[1:] > codes[:-1]).all() and not np.isnan(codes[:1]).any()))
            and (samples is None or (samples.ndim == _NUM_AXES and len(samples) == len(SAMPLE_METRICS)))
        )


def digest_of(payload: Payload, *, dtype: str) -> Digest:
    """The digest that `DigestMeasure` made a payload of; `dtype` is what the values were looked at as.

    Raises:
        DataError: it is of another type, or damaged.
    """
    known = (None if math.isnan(end) else end for end in payload["ends"].tolist())
    ends: dict[str, Any] = dict(zip(ENDS, known, strict=True))
    tallies = dict(zip(("num_elements", *KINDS), payload["tallies"].tolist(), strict=True))
    is_exact, has_values = payload["flags"].tolist()
    samples = payload.get("samples")
    return Digest(
        dtype=dtype,
        statistics=Statistics.from_vector(payload["statistics"]),
        tallies=Tallies(**tallies, **ends, per_sample=None),
        values=_values_of(payload["codes"], dtype=dtype),
        counts=payload["counts"].astype(np.int64),
        is_exact=bool(is_exact),
        has_values=bool(has_values),
        samples=None if samples is None else dict(zip(SAMPLE_METRICS, samples, strict=True)),
    )


def payload_of(digest: Digest) -> Payload:
    """The payload of a digest; of samples nothing is said."""
    tallies, narrow = digest.tallies, digest.values.astype(np.float32)
    return _payload(
        digest.statistics,
        counts=[tallies.num_elements, *(getattr(tallies, kind) for kind in KINDS)],
        ends=[getattr(tallies, name) for name in ENDS],
        codes=narrow if np.array_equal(narrow, digest.values) else digest.values,
        occurrences=digest.counts,
        is_exact=digest.is_exact,
        has_values=digest.has_values,
    )


def digests(records: Records, *, view: View = View.COMPUTE, engine: Engine | None = None) -> Iterator[Digest]:
    """The digest of each record, in their order: of those that were asked about before, nothing is read.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    measured = (engine or Engine()).measure(records, DigestMeasure(view=view))
    # The columns say the dtype; the payload holds numbers alone.
    for dtype, payload in zip(viewed_dtypes(records, view=view), measured, strict=True):
        yield digest_of(payload, dtype=dtype)


def merge_digests(parts: Sequence[Digest]) -> Digest:
    """The digest of all values together; of samples nothing is said. At least one part.

    The order of the parts matters to the last bit of sums, and to nothing else.
    """
    summary = merge_summaries([Summary(part.values, part.counts, part.is_exact) for part in parts])
    return Digest(
        dtype=" ".join(sorted({part.dtype for part in parts})),
        statistics=merge_statistics([part.statistics for part in parts]),
        tallies=merge_tallies([part.tallies for part in parts]),
        values=summary.values,
        counts=summary.counts,
        is_exact=summary.is_exact,
        has_values=all(part.has_values for part in parts),
    )


def _values_of(codes: NDArray[Any], *, dtype: str) -> NDArray[np.float64]:
    if codes.dtype.kind == "f":
        return codes.astype(np.float64)
    if not codes.size:
        return np.zeros(0)
    if codes.dtype.itemsize != numpy_dtype(dtype).itemsize:
        raise DataError(f"what was kept of a record in {dtype} is of another type: ask again with --no-cache")
    values: NDArray[np.float64] = pattern_values(numpy_dtype(dtype))[codes] + 0.0
    return values


def _of_statistics(record: Record) -> Payload:
    """What the catalogue and the statistics know of a record whose values were not kept."""
    statistics, overflow = record.statistics(), record.overflow
    counts = [0 if kind == "flushed" else getattr(overflow, kind).count for kind in KINDS]
    return _payload(
        statistics,
        counts=[statistics.num_elements, *counts],
        ends=(overflow.minimum, overflow.maximum, statistics.absmax, None),
        codes=np.zeros(0, dtype=np.uint16),
        occurrences=np.zeros(0, dtype=np.int64),
        has_values=False,
    )


def _of_patterns(patterns: NDArray[Any], occurrences: NDArray[np.int64], *, dtype: np.dtype[Any]) -> Payload:
    """The payload of values of which each pattern is given once, in any order, and how often it occurs."""
    table = _Table.of(dtype)
    natures = table.natures[patterns]
    totals = np.bincount(natures, weights=occurrences, minlength=len(Nature)).astype(np.int64).tolist()
    ranks = table.ranks[patterns[natures != Nature.NAN]]
    order = np.argsort(ranks, kind="stable")
    numbers, numbers_occurrences = ranks[order], occurrences[natures != Nature.NAN][order]
    is_first = np.ones(numbers.size, dtype=np.bool_)
    # Both zeros have one rank.
    np.not_equal(numbers[1:], numbers[:-1], out=is_first[1:])
    (firsts,) = np.nonzero(is_first)
    codes = table.codes[numbers[firsts]]
    counts = np.add.reduceat(numbers_occurrences, firsts) if firsts.size else numbers_occurrences
    values = pattern_values(dtype)[codes] + 0.0
    statistics = statistics_of_pairs(values, counts, num_elements=int(occurrences.sum()))
    upper, lower, nan = (totals[nature] for nature in (Nature.UPPER, Nature.LOWER, Nature.NAN))
    magnitudes = np.abs(values[np.isfinite(values)])
    return _payload(
        statistics,
        counts=[
            statistics.num_elements,
            *(upper, lower, totals[Nature.UNDERFLOW], 0, nan, upper + lower, totals[Nature.ZERO]),
        ],
        ends=(
            float(values[0]) if values.size else None,
            float(values[-1]) if values.size else None,
            statistics.absmax,
            float(magnitudes[magnitudes > 0].min()) if magnitudes.any() else None,
        ),
        codes=codes,
        occurrences=counts,
    )


def _payload(
    statistics: Statistics,
    *,
    counts: Sequence[int],
    ends: Sequence[float | None],
    codes: NDArray[Any],
    occurrences: NDArray[np.int64],
    is_exact: bool = True,
    has_values: bool = True,
) -> Payload:
    is_narrow = not occurrences.size or int(occurrences.max()) <= MAX_COUNT
    return {
        "statistics": statistics.to_vector(),
        "tallies": np.array(counts, dtype=np.int64),
        "ends": np.array([math.nan if end is None else end for end in ends]),
        "flags": np.array([is_exact, has_values]),
        "codes": codes,
        "counts": occurrences.astype(np.uint32 if is_narrow else np.int64),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """What each pattern of a type of at most 16 bits stands for."""

    natures: NDArray[np.uint8]
    """By pattern: its `Nature`."""
    ranks: NDArray[np.uint16]
    """By pattern: the place of its value among all values; of zeros of both signs the same, of NaN the last."""
    codes: NDArray[Any]
    """By rank: a pattern of the value."""

    @staticmethod
    @functools.cache
    def of(dtype: np.dtype[Any]) -> _Table:
        """The table of a type."""
        values, limits = pattern_values(dtype), own_limits(dtype)
        natures = np.zeros(values.size, dtype=np.uint8)
        natures[(values != 0) & (np.abs(values) < limits.min_normal)] = Nature.UNDERFLOW
        natures[values == 0] = Nature.ZERO
        natures[values == np.inf] = Nature.UPPER
        natures[values == -np.inf] = Nature.LOWER
        natures[np.isnan(values)] = Nature.NAN
        with np.errstate(invalid="ignore"):  # NaN that signal
            _, firsts, ranks = np.unique(values + 0.0, return_index=True, return_inverse=True)
        codes = firsts.astype(f"u{dtype.itemsize}")
        for array in (natures, ranks, codes):
            array.flags.writeable = False
        return _Table(natures=natures, ranks=ranks.astype(np.uint16), codes=codes)


class _Counters(threading.local):
    """Counters of a thread, zero between records."""

    def __init__(self) -> None:
        self.tables: dict[int, tuple[NDArray[Any], ...]] = {}

    def of(self, num_patterns: int) -> tuple[NDArray[Any], ...]:
        """Tables of counters, totals, and room for the list of what was met."""
        if num_patterns not in self.tables:
            self.tables[num_patterns] = (
                np.zeros((NUM_TABLES, num_patterns), dtype=np.uint32),
                np.zeros(num_patterns, dtype=np.int64),
                np.zeros(num_patterns + 1, dtype=np.uint16),
            )
        return self.tables[num_patterns]


_counters = _Counters()


def _narrow(parts: Iterable[NDArray[Any]], dtype: np.dtype[Any], metrics: NDArray[np.float64]) -> Payload:
    """The digest of values of a type of at most 16 bits; the metrics of samples are filled in, if there are rows."""
    values, natures = pattern_values(dtype), _Table.of(dtype).natures
    try:
        num_met, num_samples = 0, 0
        tables, totals, met = _counters.of(values.size)
        for part in parts:
            patterns = frozen(part.view(f"u{dtype.itemsize}"), shape=(part.shape[0], part[0].size))
            rows = metrics[num_samples : num_samples + len(patterns)]
            num_met = count_samples(patterns, tables, totals, met, num_met, values, natures, rows)
            num_samples += len(patterns)
        patterns_met = met[:num_met].copy()
        occurrences = totals[patterns_met]
        totals[patterns_met] = 0
    except BaseException:
        # A record that was not counted to its end leaves numbers behind.
        _counters.tables.clear()
        raise
    return _of_patterns(patterns_met, occurrences, dtype=dtype)


def load_kernels() -> None:
    """Have compiled code and tables of the common types loaded, so that processes forked from this one have them."""
    for name in ("bfloat16", "float16"):
        dtype = numpy_dtype(name)
        _narrow([np.ones((1, 1), dtype)], dtype, np.zeros((1, len(SAMPLE_METRICS))))


def _parts(record: Record, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The parts of a record in the type that is judged; the first dimension counts samples, one where there are none.

    Rounding is as in `values.read_values`. A record that is one sample comes in one part, as a sample of others does.
    """
    is_sample = record.sample_dim is None and record.info.num_samples
    for part in [record.read().reshape(-1)] if is_sample and math.prod(record.shape) else record.parts():
        with np.errstate(over="ignore", invalid="ignore"):
            viewed = part if part.dtype == dtype else part.astype(dtype)
        yield viewed[np.newaxis] if record.sample_dim is None else viewed


def _metrics_of(record: Record) -> NDArray[np.float64]:
    """A row of metrics for each sample, as of one without an element; no row where there are no samples."""
    empty = [0.0 if name in _COUNTED or name == "norm" else math.nan for name in SAMPLE_METRICS]
    return np.tile(np.array(empty), (record.info.num_samples, 1))


_COUNTED = {"num_elements", "num_finite", *KINDS}
_STATISTICAL = {"num_elements", *STATISTICS, "mean", "std", "norm"} & set(SAMPLE_METRICS)


def _wide(parts: Iterable[NDArray[Any]], dtype: np.dtype[Any], metrics: NDArray[np.float64]) -> Payload:
    """The digest of values of a type of more than 16 bits; the metrics of samples are filled in."""
    limits = own_limits(dtype)
    statistics: list[Statistics] = []
    tallies: list[Tallies] = []
    summarizer = Summarizer()
    for part in parts:
        for sample in part:
            statistics.append(statistics_of(sample))
            tallies.append(scan(sample, limits=limits))
            summarizer.add(sample)
    together = merge_tallies(tallies)
    summary = summarizer.summary()
    for row, known, counted in zip(metrics, statistics, tallies, strict=False):
        found = [getattr(known if name in _STATISTICAL else counted, name) for name in SAMPLE_METRICS]
        row[:] = [math.nan if value is None else value for value in found]
    return _payload(
        merge_statistics(statistics),
        counts=[together.num_elements, *(getattr(together, kind) for kind in KINDS)],
        ends=[getattr(together, name) for name in ENDS],
        codes=summary.values.astype(np.float32 if dtype in (np.float32, np.complex64) else np.float64),
        occurrences=summary.counts,
        is_exact=summary.is_exact,
    )


def merge_tallies(parts: Sequence[Tallies]) -> Tallies:
    """The tallies of all parts together, none where there is no part; of samples nothing is said."""
    ends: dict[str, Any] = {
        name: choose((end for one in parts if (end := getattr(one, name)) is not None), default=None)
        for name, choose in zip(ENDS, (min, max, max, min), strict=True)
    }
    return Tallies(
        num_elements=sum(one.num_elements for one in parts),
        **{kind: sum(getattr(one, kind) for one in parts) for kind in KINDS},
        **ends,
        per_sample=None,
    )
