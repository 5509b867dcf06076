"""Measures digests of records, and returns them as columns, one by one, or merged by group.

A digest does not depend on how the store holds the values. For types of at most 16 bits, everything is computed from
counts. For wider types, sums are computed for each sample, or for each run of elements, and added in that order.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Columns, Payload
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import CACHED_METRICS, NUMBERS
from ranktape.analyze.engine.values import View, read_histogram, viewed_dtype, viewed_dtypes
from ranktape.analyze.numerics.digest import (
    CODE_KINDS,
    SAMPLE_METRICS,
    Digest,
    Digests,
    Summarizer,
    Summary,
    merge_statistic_columns,
    merge_summaries,
    merge_tally_columns,
    numbers_of_patterns,
    push,
)
from ranktape.analyze.numerics.digest_kernels import (
    ENDS,
    NUM_TABLES,
    Nature,
    count_samples,
    digest_records,
    finish_record,
)
from ranktape.analyze.numerics.histograms.histogram import KINDS, Tallies, dtype_limits, pattern_values, scan
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.analyze.numerics.pieces import frozen
from ranktape.errors import DataError
from ranktape.storage import Record, Records
from ranktape.storage.format.dtypes import HALF_NBYTES, numpy_dtype
from ranktape.storage.format.record_info import Keep, is_one_sample
from ranktape.storage.format.statistics import STATISTICS, Statistics, merge_statistics
from ranktape.storage.query.columns import equal_rows
from ranktape.storage.records.run import RunReader

VERSION = 2
"""Version of the columns of a digest, and part of the name of the measure."""

_READ_NBYTES = 4 << 20
"""Maximum size of the records of one array that are counted together, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMeasure:
    """Measures the digests of records; `digests_from_columns` interprets the columns."""

    view: View = View.COMPUTE
    """The view in which the values are counted."""

    @property
    def name(self) -> str:
        """The name in the cache."""
        return f"digest_{self.view}_v{VERSION}"

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """The columns of the digests of records."""
        parts: list[Columns] = []
        indices: list[int] = []
        dtypes: list[str] = []
        stacks, single = _stack_batches(records) if isinstance(records, Records) else ([], None)
        single_records = records if single is None else cast("Records", records).take(single)
        for record in single_records:
            dtypes.append(self._dtype(record))
            parts.append(self._single(record))
        indices += range(len(parts)) if single is None else single
        for members in stacks:
            batch = cast("Records", records).take(members)
            parts.append(self._stacked(batch))
            dtypes += [self._dtype(batch[0])] * len(batch)
            indices += members
        order = np.argsort(np.array(indices, dtype=np.int64))
        columns = Columns.join(parts).take(order)
        digested = digests_from_columns(columns, [dtypes[index] for index in order.tolist()])
        metrics = [NUMBERS[name].compute(digested) for name in CACHED_METRICS]
        return columns.with_columns({"kept": np.stack(metrics, axis=1)})

    def _dtype(self, record: Record) -> str:
        return viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=self.view)

    def _single(self, record: Record) -> Columns:
        dtype = numpy_dtype(self._dtype(record))
        if record.keep == Keep.STATISTICS:
            return _statistics_columns(record)
        if record.keep == Keep.HISTOGRAM:
            histogram = read_histogram(record, view=self.view)
            return _counts_columns(histogram.counts, dtype=histogram.dtype)
        metrics, parts = _empty_metrics(record), _parts(record, dtype)
        return (_digest_narrow if dtype.itemsize <= HALF_NBYTES else _digest_wide)(
            parts, dtype, metrics, has_samples=_has_samples(record)
        )

    def _stacked(self, records: Records) -> Columns:
        """The digests of records of one stored array, which have the same shape and dtype."""
        first = records[0]
        dtype = numpy_dtype(self._dtype(first))
        assert isinstance(first.reader, RunReader)
        indices, checksums = (records.column(name).tolist() for name in ("index", "checksum"))
        array = first.reader.read_stack(first, indices, checksums)
        if array is None:
            array = np.stack([record.read() for record in records])
        with np.errstate(over="ignore", invalid="ignore"):
            viewed = array if array.dtype == dtype else array.astype(dtype)
        if first.sample_dim is None:
            samples = viewed.reshape(len(records), 1, -1)
        else:
            moved = np.moveaxis(viewed, 1 + first.sample_dim, 1)
            samples = np.ascontiguousarray(moved).reshape(len(records), moved.shape[1], -1)
        if dtype.itemsize > HALF_NBYTES:
            pending = [([values] if values.size else [], _empty_metrics(first)) for values in samples]
            return Columns.join(
                [_digest_wide(parts, dtype, rows, has_samples=_has_samples(first)) for parts, rows in pending]
            )
        num_samples = first.info.num_samples
        return _digest_rows(samples, dtype, num_samples=num_samples, has_samples=_has_samples(first))


def _stack_batches(records: Records) -> tuple[list[list[int]], list[int] | None]:
    """Batches of similar records that are adjacent in one stored array, and the records that are read alone.

    Records are given by index. If all are read alone, there are no batches, and the second result is None.
    """
    is_stacked = records.column("stack").astype(bool) & (records.column("keep") == Keep.VALUES)
    if records.is_costly or not is_stacked.any():
        return [], None
    groups = np.zeros(len(records), dtype=np.int64)
    for number, (_, part) in enumerate(records.groups()):
        groups[part] = number
    is_sample = np.zeros(len(records), dtype=np.int64)
    fields = ("sample_dim", "sample_ids", "tensor_name")
    for (dim, ids, name), rows in equal_rows([records.stored(field) for field in fields]):
        is_sample[rows] = dim is None and is_one_sample(json.loads(ids), tensor_name=name)
    columns = (records.stored(name) for name in ("stack", "dtype", "compute_dtype", "sample_dim", "nbytes"))
    batches = []
    for (*_, nbytes, _, _, has_stack), rows in equal_rows([*columns, groups, is_sample, is_stacked.astype(np.int64)]):
        if has_stack:
            step = max(1, _READ_NBYTES // max(1, int(nbytes)))
            batches += [rows[start : start + step].tolist() for start in range(0, len(rows), step)]
    return batches, np.flatnonzero(~is_stacked).tolist()


def _has_samples(record: Record) -> bool:
    return record.sample_dim is not None or record.info.num_samples > 0


def digests_from_columns(columns: Columns, dtypes: Sequence[str]) -> Digests:
    """The digests in columns of `DigestMeasure`, given the dtype in which each record was viewed.

    Raises:
        DataError: the number of dtypes differs from the number of records.
    """
    if len(dtypes) != columns.num_records:
        raise DataError(
            f"the cache has {columns.num_records} digests for {len(dtypes)} records: run again with --no-cache"
        )
    sample_sizes = np.where(columns["has_samples"], columns.sizes("samples"), -1)
    return Digests(
        dtypes=dtypes,
        statistics=columns["statistics"],
        tallies=columns["tallies"],
        ends=columns["ends"],
        flags=columns["flags"],
        kinds=columns["kinds"],
        sizes=columns.sizes("counts"),
        codes=lambda: columns["codes"],
        counts=lambda: columns["counts"],
        sample_sizes=sample_sizes,
        samples=lambda: columns["samples"],
        cached_metrics=(lambda: columns["kept"]) if "kept" in columns.names else None,
    )


def digest_from_payload(payload: Payload, *, dtype: str) -> Digest:
    """The digest in a payload of `DigestMeasure`."""
    return digests_from_columns(Columns.of_payloads([payload]), [dtype]).digest(0)


def digest_columns(
    records: Records,
    *,
    view: View = View.COMPUTE,
    engine: Engine | None = None,
    is_mask: NDArray[np.bool_] | None = None,
) -> Iterator[Digests]:
    """The digests of the records in order, a few hundred at a time. Cached digests are not measured again.

    In records that are masks, -Inf counts as infinite but not as overflow.
    """
    dtypes, start = viewed_dtypes(records, view=view), 0
    for columns in (engine or Engine()).columns(records, DigestMeasure(view=view)):
        part = slice(start, start + columns.num_records)
        measured = digests_from_columns(columns, dtypes[part])
        yield measured if is_mask is None else measured.without_masks(is_mask[part])
        start = part.stop


def digests(records: Records, *, view: View = View.COMPUTE, engine: Engine | None = None) -> Iterator[Digest]:
    """The digest of each record, in order. Raises the errors of `digest_columns`."""
    for columns in digest_columns(records, view=view, engine=engine):
        yield from map(columns.digest, range(len(columns)))


def merge_digests(parts: Sequence[Digest]) -> Digest:
    """The digest of all values of at least one part, without samples.

    The order of the parts affects only the last bit of sums.
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


def grouped_digests(
    records: Records,
    numbers: Sequence[int] | NDArray[np.int64],
    *,
    is_mask: NDArray[np.bool_],
    view: View,
    engine: Engine | None,
    with_values: bool = True,
) -> Iterator[tuple[NDArray[np.int64], Digests]]:
    """The digests of groups of records, each as if the group were one record, without samples.

    Groups are returned with their numbers, a few hundred at a time, soon after the last record of each was read. Only
    the distinct numbers of unfinished groups are in memory; without `with_values`, none are.

    Args:
        records: The records.
        numbers: The number of each record's group, starting at 0.
        is_mask: Whether -Inf is intended in each record.
        view: The view in which the values are counted.
        engine: The engine that reads the records.
        with_values: Whether the distinct numbers and their counts are needed.
    """
    group_indices = np.asarray(numbers, dtype=np.int64)
    sizes = np.bincount(group_indices)
    groups = _Groups(viewed_dtypes(records, view=view), group_indices, with_values=with_values)
    start, remaining, finished = 0, sizes.copy(), list[int]()
    for columns in digest_columns(records, view=view, engine=engine, is_mask=is_mask):
        stop = start + len(columns)
        groups.add(start, columns)
        remaining -= np.bincount(group_indices[start:stop], minlength=remaining.size)
        ended = np.unique(group_indices[start:stop])
        finished += ended[remaining[ended] == 0].tolist()
        start = stop
        while len(finished) >= _MAX_GROUPS or (finished and groups.num_ready(finished) >= _MAX_WAITING):
            yield groups.take(finished[:_MAX_GROUPS])
            del finished[:_MAX_GROUPS]
    if finished:
        yield groups.take(finished)


_MAX_WAITING = 1 << 20
"""Number of values of a group that are merged at once, and of finished groups that are returned at once."""

_MAX_GROUPS = 1 << 12
"""Maximum number of groups that are returned at once."""


class _Groups:
    """The digests of groups whose records have been read in part."""

    def __init__(self, dtypes: Sequence[str], group_indices: NDArray[np.int64], *, with_values: bool) -> None:
        num_records = len(dtypes)
        self._dtypes, self._group_indices, self._with_values = dtypes, group_indices, with_values
        self._statistics = np.zeros((num_records, len(STATISTICS)))
        self._tallies = np.zeros((num_records, 1 + len(KINDS)), dtype=np.int64)
        self._ends = np.zeros((num_records, len(ENDS)))
        self._flags = np.ones((num_records, 2), dtype=np.bool_)
        # Sorted by group; the records of a group stay in order.
        self._order = np.argsort(group_indices, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(group_indices))])
        self._waiting: dict[int, list[tuple[str, NDArray[Any], NDArray[Any]]]] = defaultdict(list)
        self._num_waiting = Counter[int]()
        self._tables: dict[int, dict[str, NDArray[np.int64]]] = defaultdict(dict)
        self._wide: dict[int, list[Summary]] = defaultdict(list)
        self._num_wide = Counter[int]()

    def add(self, start: int, columns: Digests) -> None:
        """Add the digests of the records from `start` on."""
        part = slice(start, start + len(columns))
        self._statistics[part], self._tallies[part], self._ends[part] = (
            columns.statistics,
            columns.tallies,
            columns.ends,
        )
        self._flags[part] = np.stack([columns.is_exact, columns.has_values], axis=1)
        if not self._with_values:
            return
        sizes = columns.sizes.tolist()
        for index, group in enumerate(self._group_indices[part].tolist()):
            if sizes[index]:
                self._waiting[group].append((columns.dtypes[index], *columns.stored_pairs(index)))
                self._num_waiting[group] += sizes[index]
                if self._num_waiting[group] >= _MAX_WAITING:
                    self._merge_waiting(group)

    def num_ready(self, groups: Sequence[int]) -> int:
        """Number of values in these groups that are not merged yet."""
        return sum(self._num_waiting[group] for group in groups)

    def take(self, groups: Sequence[int]) -> tuple[NDArray[np.int64], Digests]:
        """The numbers and the digests of finished groups."""
        chosen = np.array(groups, dtype=np.int64)
        counts = self._starts[chosen + 1] - self._starts[chosen]
        firsts = np.cumsum(counts) - counts
        rows = self._order[np.repeat(self._starts[chosen] - firsts, counts) + np.arange(int(counts.sum()))]
        tallies, ends = merge_tally_columns(self._tallies[rows], self._ends[rows], firsts)
        summaries = [self._summary(group) for group in groups]
        flags = np.logical_and.reduceat(self._flags[rows], firsts)
        flags[:, 0] &= [summary.is_exact for summary in summaries]
        names = [sorted({self._dtypes[row] for row in part.tolist()}) for part in np.split(rows, firsts[1:])]
        merged = Digests(
            dtypes=[" ".join(part) for part in names],
            statistics=merge_statistic_columns(self._statistics[rows], firsts),
            tallies=tallies,
            ends=ends,
            flags=flags,
            kinds=np.full(len(groups), CODE_KINDS.index(np.dtype("f8")), dtype=np.uint8),
            sizes=np.array([summary.values.size for summary in summaries], dtype=np.int64),
            codes=lambda: np.concatenate([summary.values for summary in summaries]).view(np.uint8),
            counts=lambda: np.concatenate([summary.counts for summary in summaries]),
            sample_sizes=np.full(len(groups), -1),
            samples=lambda: np.zeros((0, len(SAMPLE_METRICS))),
        )
        return chosen, merged

    def _merge_waiting(self, group: int) -> None:
        """Count values of narrow types in tables, and merge summaries of wide types, like carries of a counter."""
        waiting = self._waiting.pop(group, [])
        self._num_waiting[group] = 0
        narrow: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = defaultdict(list)
        for dtype, codes, counts in waiting:
            if codes.dtype.kind == "u":
                narrow[dtype].append((codes, counts))
                continue
            self._num_wide[group] += 1
            summary = Summary(codes.astype(np.float64), counts.astype(np.int64), is_exact=True)
            push(self._wide[group], summary, number=self._num_wide[group], merge=merge_summaries)
        for dtype, pairs in narrow.items():
            codes, counts = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
            table = np.bincount(codes, weights=counts).astype(np.int64)
            previous = self._tables[group].get(dtype)
            if previous is not None:
                size = max(previous.size, table.size)
                table = np.pad(table, (0, size - table.size)) + np.pad(previous, (0, size - previous.size))
            self._tables[group][dtype] = table

    def _summary(self, group: int) -> Summary:
        """The summary of a group, which is then removed."""
        self._merge_waiting(group)
        parts = self._wide.pop(group, [])
        for dtype, table in self._tables.pop(group, {}).items():
            (codes,) = np.nonzero(table)
            values = numbers_of_patterns(numpy_dtype(dtype))[codes]
            order = np.argsort(values)
            parts.append(Summary(values[order], table[codes][order], is_exact=True))
        if not parts:
            return Summary(np.zeros(0), np.zeros(0, dtype=np.int64), is_exact=True)
        return merge_summaries(parts) if len(parts) > 1 else parts[0]


def _statistics_columns(record: Record) -> Columns:
    """The digest of a record without stored values, from the catalogue and the statistics."""
    statistics, overflow = record.statistics(), record.overflow
    counts = [0 if kind == "flushed" else getattr(overflow, kind).count for kind in KINDS]
    return _record_columns(
        statistics,
        counts=[statistics.num_elements, *counts],
        ends=(overflow.minimum, overflow.maximum, statistics.absmax, None),
        summary=Summary(np.zeros(0), np.zeros(0, dtype=np.int64), is_exact=True),
        has_values=False,
    )


def _record_columns(
    statistics: Statistics,
    *,
    counts: Sequence[int],
    ends: Sequence[float | None],
    summary: Summary,
    kind: str = "f8",
    has_values: bool = True,
    samples: NDArray[np.float64] | None = None,
) -> Columns:
    """The columns of one record."""
    return _columns(
        statistics=statistics.to_vector().reshape(1, -1),
        tallies=np.array([counts], dtype=np.int64),
        ends=np.array([[math.nan if end is None else end for end in ends]], dtype=np.float64),
        flags=np.array([[summary.is_exact, has_values]]),
        codes=summary.values.astype(kind),
        counts=summary.counts,
        sizes=np.array([summary.values.size]),
        samples=None if samples is None else samples[np.newaxis],
    )


def _columns(
    *,
    statistics: NDArray[np.float64],
    tallies: NDArray[np.int64],
    ends: NDArray[np.float64],
    flags: NDArray[np.bool_],
    codes: NDArray[Any],
    counts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    samples: NDArray[np.float64] | None,
) -> Columns:
    """The columns of records whose codes have one dtype and that have the same number of samples."""
    num_records = len(sizes)
    num_samples = 0 if samples is None else samples.shape[1]
    return Columns(
        {
            "statistics": statistics,
            "tallies": tallies,
            "ends": ends,
            "flags": flags,
            "kinds": np.full(num_records, CODE_KINDS.index(codes.dtype), dtype=np.uint8),
            "codes": np.ascontiguousarray(codes).view(np.uint8),
            # There are many counts and most are small.
            "counts": counts.astype(np.min_scalar_type(int(counts.max(initial=0)))),
            "has_samples": np.full(num_records, samples is not None),
            "samples": np.zeros((0, len(SAMPLE_METRICS)))
            if samples is None
            else samples.reshape(-1, len(SAMPLE_METRICS)),
        },
        sizes={
            "codes": sizes * codes.dtype.itemsize,
            "counts": sizes,
            "samples": np.full(num_records, num_samples, dtype=np.int64),
        },
        num_records=num_records,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """The meaning of each bit pattern of a type of at most 16 bits."""

    natures: NDArray[np.uint8]
    """The `Nature` of each pattern."""
    ranks: NDArray[np.uint16]
    """The rank of each pattern's value among all distinct values. Both zeros have the same rank; NaN has the last."""
    codes: NDArray[Any]
    """A pattern of the value of each rank."""

    @staticmethod
    @functools.cache
    def of(dtype: np.dtype[Any]) -> _Table:
        """The table of a type."""
        values, limits = pattern_values(dtype), dtype_limits(dtype)
        natures = np.zeros(values.size, dtype=np.uint8)
        natures[(values != 0) & (np.abs(values) < limits.min_normal)] = Nature.UNDERFLOW
        natures[values == 0] = Nature.ZERO
        natures[values == np.inf] = Nature.UPPER
        natures[values == -np.inf] = Nature.LOWER
        natures[np.isnan(values)] = Nature.NAN
        with np.errstate(invalid="ignore"):  # signaling NaN
            _, firsts, inverse = np.unique(values + 0.0, return_index=True, return_inverse=True)
        ranks = np.zeros(values.size, dtype=np.uint16)
        ranks[:] = inverse
        codes = firsts.astype(np.uint16)
        codes = np.pad(codes, (0, values.size - codes.size))
        for array in (natures, ranks, codes):
            array.flags.writeable = False
        return _Table(natures=natures, ranks=ranks, codes=codes)


class _Counters(threading.local):
    """Counters of a thread. They are zero between records."""

    def __init__(self) -> None:
        self.by_size: dict[int, _Counted] = {}

    def of(self, num_patterns: int) -> _Counted:
        """The counters for a number of patterns."""
        if num_patterns not in self.by_size:
            self.by_size[num_patterns] = _Counted(
                np.zeros((NUM_TABLES, num_patterns), dtype=np.uint32),
                np.zeros(num_patterns, dtype=np.int64),
                np.zeros(num_patterns + 1, dtype=np.uint16),
                np.zeros(num_patterns, dtype=np.int64),
            )
        return self.by_size[num_patterns]


class _Counted(NamedTuple):
    """Counters by pattern."""

    tables: NDArray[np.uint32]
    """The counts of the current sample."""
    totals: NDArray[np.int64]
    """The counts of the current record."""
    listed: NDArray[np.uint16]
    """Space for the list of patterns that occurred."""
    rank_totals: NDArray[np.int64]
    """The counts of the current record by rank of the value."""


_counters = _Counters()


class _Buffers(NamedTuple):
    """Arrays into which the digests of records are written."""

    statistics: NDArray[np.float64]
    tallies: NDArray[np.int64]
    ends: NDArray[np.float64]
    sizes: NDArray[np.int64]
    codes: NDArray[np.uint16]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, num_records: int, num_pairs: int) -> _Buffers:
        """Arrays for a number of records, with `num_pairs` distinct values in all of them."""
        return cls(
            np.zeros((num_records, len(STATISTICS))),
            np.zeros((num_records, 1 + len(KINDS)), dtype=np.int64),
            np.zeros((num_records, len(ENDS))),
            np.zeros(num_records, dtype=np.int64),
            np.zeros(num_pairs, dtype=np.uint16),
            np.zeros(num_pairs, dtype=np.int64),
        )

    def columns(self, num_pairs: int, dtype: np.dtype[Any], samples: NDArray[np.float64] | None) -> Columns:
        """The columns, after `num_pairs` distinct values were written."""
        return _columns(
            statistics=self.statistics,
            tallies=self.tallies,
            ends=self.ends,
            flags=np.ones((len(self.sizes), 2), dtype=np.bool_),
            codes=self.codes[:num_pairs].astype(f"u{dtype.itemsize}"),
            counts=self.counts[:num_pairs],
            sizes=self.sizes,
            samples=samples,
        )


def _digest_rows(samples_RSI: NDArray[Any], dtype: np.dtype[Any], *, num_samples: int, has_samples: bool) -> Columns:
    """The digests of records of one shape and a type of at most 16 bits; `num_samples` of each have metrics."""
    table, numbers = _Table.of(dtype), pattern_values(dtype)
    counted = _counters.of(numbers.size)
    num_records = len(samples_RSI)
    metrics = np.zeros((num_records, num_samples, len(SAMPLE_METRICS)))
    buffers = _Buffers.of(num_records, num_records * min(numbers.size, math.prod(samples_RSI.shape[1:])))
    patterns = frozen(samples_RSI.view(f"u{dtype.itemsize}"), shape=samples_RSI.shape)
    try:
        num_pairs = digest_records(
            patterns,
            *counted[:3],
            numbers,
            table.natures,
            table.ranks,
            table.codes,
            counted.rank_totals,
            metrics,
            buffers.statistics,
            buffers.tallies,
            buffers.ends,
            buffers.sizes,
            buffers.codes,
            buffers.counts,
        )
    except BaseException:
        # The counters contain a part of a record.
        _counters.by_size.clear()
        raise
    return buffers.columns(num_pairs, dtype, metrics if has_samples else None)


def _digest_narrow(
    parts: Iterable[NDArray[Any]], dtype: np.dtype[Any], metrics: NDArray[np.float64], *, has_samples: bool
) -> Columns:
    """The digest of values of a type of at most 16 bits. Fills the rows of `metrics`, one for each sample, if any."""
    values, natures = pattern_values(dtype), _Table.of(dtype).natures
    counted = _counters.of(values.size)
    try:
        num_listed, num_samples = 0, 0
        for part in parts:
            patterns = frozen(part.view(f"u{dtype.itemsize}"), shape=(part.shape[0], part[0].size))
            rows = metrics[num_samples : num_samples + len(patterns)]
            num_listed = count_samples(patterns, *counted[:3], num_listed, values, natures, rows)
            num_samples += len(patterns)
        return _finished(counted, num_listed, dtype, metrics[np.newaxis] if has_samples else None)
    except BaseException:
        # The counters contain a part of a record.
        _counters.by_size.clear()
        raise


def _counts_columns(counts: NDArray[np.int64], *, dtype: np.dtype[Any]) -> Columns:
    """The digest of values, given the count of each pattern."""
    counted = _counters.of(counts.size)
    (patterns,) = np.nonzero(counts)
    counted.totals[patterns] = counts[patterns]
    counted.listed[: patterns.size] = patterns
    return _finished(counted, patterns.size, dtype, None)


def _finished(counted: _Counted, num_listed: int, dtype: np.dtype[Any], samples: NDArray[np.float64] | None) -> Columns:
    table, buffers = _Table.of(dtype), _Buffers.of(1, num_listed)
    buffers.sizes[0] = finish_record(
        counted.listed[:num_listed],
        counted.totals,
        pattern_values(dtype),
        table.natures,
        table.ranks,
        table.codes,
        counted.rank_totals,
        buffers.statistics[0],
        buffers.tallies[0],
        buffers.ends[0],
        buffers.codes,
        buffers.counts,
    )
    return buffers.columns(int(buffers.sizes[0]), dtype, samples)


def load_kernels() -> None:
    """Load compiled code and tables of the common types, so that processes forked from this one have them."""
    for name in ("bfloat16", "float16"):
        dtype = numpy_dtype(name)
        _digest_rows(np.ones((1, 1, 1), dtype), dtype, num_samples=1, has_samples=True)
        _digest_narrow([np.ones((1, 1), dtype)], dtype, np.zeros((1, len(SAMPLE_METRICS))), has_samples=True)


def _parts(record: Record, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The parts of a record in the viewed dtype. The first dimension is that of samples, of size 1 without samples.

    Rounding is as in `values.read_values`. A record that is one sample is returned in one part, like a sample of
    another record.
    """
    is_sample = record.sample_dim is None and record.info.num_samples
    for part in [record.read().reshape(-1)] if is_sample and math.prod(record.shape) else record.parts():
        with np.errstate(over="ignore", invalid="ignore"):
            viewed = part if part.dtype == dtype else part.astype(dtype)
        yield viewed[np.newaxis] if record.sample_dim is None else viewed


def _empty_metrics(record: Record) -> NDArray[np.float64]:
    """A row of metrics for each sample, with the values for an empty sample. There are no rows without samples."""
    empty = [0.0 if name in _COUNTED or name == "norm" else math.nan for name in SAMPLE_METRICS]
    return np.tile(np.array(empty), (record.info.num_samples, 1))


_COUNTED = {"num_elements", "num_finite", *KINDS}
_STATISTICAL = {"num_elements", *STATISTICS, "mean", "std", "norm"} & set(SAMPLE_METRICS)


def _digest_wide(
    parts: Iterable[NDArray[Any]], dtype: np.dtype[Any], metrics: NDArray[np.float64], *, has_samples: bool
) -> Columns:
    """The digest of values of a type of more than 16 bits. Fills the rows of `metrics`, one for each sample."""
    limits = dtype_limits(dtype)
    statistics: list[Statistics] = []
    tallies: list[Tallies] = []
    summarizer = Summarizer()
    for part in parts:
        for sample in part:
            statistics.append(statistics_of(sample))
            tallies.append(scan(sample, limits=limits))
            summarizer.add(sample)
    total = merge_tallies(tallies)
    for row, statistic, tally in zip(metrics, statistics, tallies, strict=False):
        metric_values = [getattr(statistic if name in _STATISTICAL else tally, name) for name in SAMPLE_METRICS]
        row[:] = [math.nan if value is None else value for value in metric_values]
    return _record_columns(
        merge_statistics(statistics),
        counts=[total.num_elements, *(getattr(total, kind) for kind in KINDS)],
        ends=[getattr(total, name) for name in ENDS],
        summary=summarizer.summary(),
        kind="f4" if dtype in (np.float32, np.complex64) else "f8",
        samples=metrics if has_samples else None,
    )


def merge_tallies(parts: Sequence[Tallies]) -> Tallies:
    """The tallies of all parts together, without samples; zero counts and no extremes if there are no parts."""
    ends: dict[str, Any] = {
        name: choose((end for part in parts if (end := getattr(part, name)) is not None), default=None)
        for name, choose in zip(ENDS, (min, max, max, min), strict=True)
    }
    return Tallies(
        num_elements=sum(part.num_elements for part in parts),
        **{kind: sum(getattr(part, kind) for part in parts) for kind in KINDS},
        **ends,
        per_sample=None,
    )
