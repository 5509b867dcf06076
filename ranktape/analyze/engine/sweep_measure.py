"""Sweeps each record of a selection, from cached counts or from its values.

For types of at most 16 bits, a sweep with one scale for the tensor needs the count of each value, and a sweep with
power-of-two scales of blocks needs the count of each magnitude in each kind of block. Both are measured once and
cached, and answer all further formats. Wider types, NVFP4, scales of channels and the legacy mode need the values
themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Columns, Payload
from ranktape.analyze.engine.digests import DigestMeasure, digest_from_payload
from ranktape.analyze.engine.engine import Engine, Measure, each_record, raise_if_error
from ranktape.analyze.engine.values import (
    View,
    pick,
    read_block_histogram,
    read_numbers,
    read_values,
    viewed_dtype,
    viewed_dtypes,
)
from ranktape.analyze.numerics.digest import Digest
from ranktape.analyze.numerics.histograms.block_histogram import CELLS, CUTS, EXCLUDED, BlockHistogram, count_few_cells
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.quantization.schemes import Scheme
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sums import population_of_histogram
from ranktape.analyze.numerics.sweeps.sweep import MAX_CELLS, ScaleSweep, sweep_schemes
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage import Record, Records
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_row, numpy_dtype
from ranktape.storage.format.record_info import Keep

VERSION = 1
"""Version of the counts of blocks, and part of the name of their measure."""

Sweeps = tuple["ScaleSweep", ...]
"""One sweep for each job."""


class Job(NamedTuple):
    """A format to sweep a record for."""

    scheme: Scheme
    """The scheme to which values are rounded."""
    mode: SweepMode
    """The meaning of the levels."""
    options: SweepOptions
    """The levels to try."""

    @property
    def block_key(self) -> tuple[int, int] | None:
        """Axis and size of the blocks whose counts are sufficient; None if no counts of blocks are."""
        if self.mode is SweepMode.MX and not self.scheme.has_tensor_scale:
            return self.options.axis, self.scheme.block_size
        return None

    @property
    def is_counted(self) -> bool:
        """Whether the counts of a narrow type, of values or of blocks, are sufficient."""
        return self.mode is SweepMode.TENSOR or self.block_key is not None

    def measure(self, view: View) -> Measure:
        """The measure whose cached counts are sufficient for this job and all others with the same `block_key`."""
        if self.block_key is None:
            return DigestMeasure(view=view)
        return BlockMeasure(view=view, axis=self.block_key[0], block_size=self.block_key[1])

    def counted(self, payload: Payload, *, dtype: str) -> Counted:
        """The counts in a payload of `measure`; None if there were too many to count."""
        if self.block_key is None:
            return digest_histogram(digest_from_payload(payload, dtype=dtype))
        return payload_blocks(payload, axis=self.block_key[0], block_size=self.block_key[1], dtype=dtype)

    def from_counts(self, counted: Counted) -> ScaleSweep | None:
        """The sweep computed from counts; None if they are not sufficient."""
        if isinstance(counted, Histogram):
            return sweep_numbers(counted, [self])[0]
        if counted is None or not counted.blocks.supports(self.options.rule, self.scheme.element):
            return None
        sweep = sweep_schemes(counted.blocks, [(self.scheme, self.mode)], options=self.options)[0]
        return dataclasses.replace(sweep, minimum=counted.ends[0], maximum=counted.ends[1])


RecordJobs = Mapping[int | None, Sequence[Job]]
"""The jobs for one record: for some of its samples by index, and for the whole record by None."""

RecordSweeps = dict[int | None, Sweeps]
"""The sweeps of one record, by the same keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMeasure:
    """Counts the blocks of a record of at most 16 bits; `payload_blocks` reads the payload."""

    view: View
    """The view in which the values are counted."""
    axis: int
    """Axis along which blocks are taken."""
    block_size: int
    """Number of elements in a block."""

    @property
    def name(self) -> str:
        """The name in the cache."""
        return f"blocks_{self.axis}_{self.block_size}_{self.view}_v{VERSION}"

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """The counts of records. A record with too many different counts has no rows."""
        return Columns.of_payloads([self._payload(record) for record in records])

    def _payload(self, record: Record) -> Payload:
        array = read_values(record, view=self.view)
        num_dims = max(array.ndim, 1)
        if not -num_dims <= self.axis < num_dims:
            raise UsageError(f"--axis {self.axis} is not one of a tensor of shape {array.shape}")
        cells = count_few_cells(array, axis=self.axis, block_size=self.block_size, threads=1, max_cells=MAX_CELLS)
        if cells is None:
            return {}
        ends = population_of_histogram(count_values(array))
        numbers = [math.nan if end is None else end for end in (ends.minimum, ends.maximum)]
        return {
            **{name: getattr(cells, name) for name in CELLS[:-1]},
            # There are many cells and most counts are small.
            "counts": cells.counts.astype(np.min_scalar_type(int(cells.counts.max(initial=0)))),
            "apart": np.array([getattr(cells, name) for name in EXCLUDED], dtype=np.int64),
            "ends": np.array(numbers),
        }


class BlocksCounted(NamedTuple):
    """The counts of a record's blocks, and its smallest and largest finite value."""

    blocks: BlockHistogram
    ends: tuple[float | None, ...]


Counted = Histogram | BlocksCounted | None
"""The counts of a record of a narrow type; None if there are too many."""


def sweep_records(
    records: Records, record_jobs: Sequence[RecordJobs], *, view: View, engine: Engine | None = None
) -> Iterator[RecordSweeps | RanktapeError]:
    """The sweeps of each record and of its samples, in order, with the error in place of each record that fails.

    The records contain floating-point or complex numbers. Records for whose samples there are jobs have samples and
    values. The results are bit-identical to those of `sweep_record`. A sample keeps its dimension, if there is one, so
    that its axes have the same numbers as those of the record.
    """
    used = engine or Engine()
    mask, narrow = pick(
        records, lambda dtype, compute, keep: is_narrow(dtype, compute_dtype=compute, keep=keep, view=view)
    )
    narrow_mask = mask.tolist()
    value_jobs: list[RecordJobs] = []
    for by_part, is_counted in zip(record_jobs, narrow_mask, strict=True):
        remaining = {
            part: [job for job in jobs if part is not None or not (is_counted and job.is_counted)]
            for part, jobs in by_part.items()
        }
        value_jobs.append({part: jobs for part, jobs in remaining.items() if jobs})
    tasks = _tasks(records, value_jobs, view=view)
    sizes = [0 if isinstance(record, RanktapeError) else record.nbytes for record, _, _ in tasks]
    mapped = used.map(_sweep_values, tasks, sizes=sizes)
    firsts = {job.block_key: job for by_part in record_jobs for job in by_part.get(None, ()) if job.is_counted}
    measured = {key: used.measure_each(narrow, job.measure(view)) for key, job in firsts.items()}
    for position, dtype in enumerate(viewed_dtypes(records, view=view)):
        from_values = next(mapped) if value_jobs[position] else {}
        payloads = {key: next(iterator) for key, iterator in measured.items()} if narrow_mask[position] else {}
        jobs = record_jobs[position].get(None, ())
        try:
            sweeps = dict(raise_if_error(from_values))
            if narrow_mask[position] and jobs:
                keys = {job.block_key for job in jobs if job.is_counted}
                counted = {key: firsts[key].counted(raise_if_error(payloads[key]), dtype=dtype) for key in keys}
                record = functools.partial(records.__getitem__, position)
                sweeps[None] = _combine(record, jobs, counted, sweeps.get(None, ()), view=view)
            yield sweeps
        except RanktapeError as error:
            yield error


def _combine(
    record: Callable[[], Record],
    jobs: Sequence[Job],
    counted: Mapping[Any, Counted],
    from_values: Sweeps,
    *,
    view: View,
) -> Sweeps:
    """The sweeps of a record of a narrow type: from counts if these are sufficient, otherwise from the values."""
    values = iter(from_values)
    sweeps = [job.from_counts(counted[job.block_key]) if job.is_counted else next(values) for job in jobs]
    missing = [job for job, sweep in zip(jobs, sweeps, strict=True) if sweep is None]
    recomputed = iter(sweep_record(record(), missing, view=view) if missing else ())
    return tuple(next(recomputed) if sweep is None else sweep for sweep in sweeps)


def sweep_record(record: Record, jobs: Sequence[Job], *, view: View) -> Sweeps:
    """The sweeps of one record, which is read once."""
    if record.keep == Keep.HISTOGRAM:
        return _sweep_histogram(record, jobs, view=view)
    return sweep_numbers(read_numbers(record, view=view), jobs)


def sweep_numbers(numbers: NDArray[Any] | Histogram, jobs: Sequence[Job]) -> Sweeps:
    """The sweeps of an array or a histogram, with as few passes as possible."""
    sweeps: dict[int, ScaleSweep] = {}
    for options in dict.fromkeys(job.options for job in jobs):
        indices = [index for index, job in enumerate(jobs) if job.options == options]
        schemes = [(jobs[index].scheme, jobs[index].mode) for index in indices]
        sweeps |= dict(zip(indices, sweep_schemes(numbers, schemes, options=options), strict=True))
    return tuple(sweeps[index] for index in range(len(jobs)))


def is_narrow(dtype: str, *, compute_dtype: str, keep: str, view: View) -> bool:
    """Whether the values of a record were stored and have a type that is counted."""
    row = dtype_row(viewed_dtype(dtype=dtype, compute_dtype=compute_dtype, view=view))
    return keep == Keep.VALUES and row.is_floating and row.itemsize <= HALF_NBYTES


def _tasks(
    records: Records, jobs_by_record: Sequence[RecordJobs], *, view: View
) -> list[tuple[Record | RanktapeError, RecordJobs, View]]:
    """The records that have jobs, each with its jobs and the view."""
    if not any(jobs_by_record):
        return []
    return [(record, jobs, view) for record, jobs in zip(each_record(records), jobs_by_record, strict=True) if jobs]


def _sweep_values(task: tuple[Record | RanktapeError, RecordJobs, View]) -> RecordSweeps | RanktapeError:
    record, record_jobs, view = task
    try:
        checked = raise_if_error(record)
        samples = {part: jobs for part, jobs in record_jobs.items() if part is not None}
        values = sample_arrays(checked, view=view) if samples else []
        sweeps: RecordSweeps = {part: sweep_numbers(values[part], jobs) for part, jobs in samples.items()}
        if None in record_jobs:
            sweeps[None] = sweep_record(checked, record_jobs[None], view=view)
    except RanktapeError as error:
        return error
    return sweeps


def sample_arrays(record: Record, *, view: View) -> list[NDArray[Any]]:
    """The values of each sample, with its dimension of size 1. A record that is one sample is returned whole."""
    values, dim = read_values(record, view=view), record.sample_dim
    if dim is None:
        return [values]
    ahead = (slice(None),) * dim
    return [values[*ahead, sample : sample + 1] for sample in range(values.shape[dim])]


def digest_histogram(digest: Digest) -> Histogram:
    """The histogram of an exact digest of a type of at most 16 bits. Zeros have one pattern, and so have NaNs."""
    dtype = numpy_dtype(digest.dtype)
    counts = np.zeros(1 << 8 * dtype.itemsize, dtype=np.int64)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    counts[digest.values.astype(dtype).view(unsigned)] = digest.counts
    if digest.tallies.nan:
        with np.errstate(invalid="ignore"):
            counts[np.array([np.nan]).astype(dtype).view(unsigned)] = digest.tallies.nan
    return Histogram(dtype=dtype, counts=counts)


def payload_blocks(payload: Payload, *, axis: int, block_size: int, dtype: str) -> BlocksCounted | None:
    """The histogram of blocks in a payload of `BlockMeasure`; None if there were too many counts."""
    if not payload or not payload["apart"].size:
        return None
    row = dtype_row(dtype)
    cells: dict[str, Any] = {name: payload[name] for name in CELLS} | {"counts": payload["counts"].astype(np.int64)}
    outside_cells: dict[str, Any] = dict(zip(EXCLUDED, payload["apart"].tolist(), strict=True))
    patterns = row.numpy_dtype if row.itemsize == HALF_NBYTES else numpy_dtype("bfloat16")
    blocks = BlockHistogram(dtype=patterns, axis=str(axis), block_size=block_size, cuts=CUTS, **cells, **outside_cells)
    return BlocksCounted(blocks, tuple(None if math.isnan(end) else end for end in payload["ends"].tolist()))


def _sweep_histogram(record: Record, jobs: Sequence[Job], *, view: View) -> Sweeps:
    """The sweeps of a record that was stored as a histogram. Each count is read once."""
    read: dict[str, Histogram | BlockHistogram | NDArray[Any]] = {}
    sweeps: list[ScaleSweep] = []
    for job in jobs:
        axis = _stored_axis(record, job)
        if axis not in read:
            read[axis] = read_block_histogram(record, axis=axis, view=view) if axis else read_numbers(record, view=view)
        sweeps += sweep_schemes(read[axis], [(job.scheme, job.mode)], options=job.options)
    return tuple(sweeps)


def _stored_axis(record: Record, job: Job) -> str:
    """The stored axis of blocks that a job needs; empty if it needs the counts of values."""
    if job.block_key is None:
        return ""
    axis = job.options.axis
    num_dims = max(1, len(record.shape))
    dim = axis % num_dims if -num_dims <= axis < num_dims else None
    if dim == num_dims - 1:
        return "features"
    if dim == 0 and num_dims == 2:  # noqa: PLR2004 - the rows are the tokens
        return "tokens"
    raise UsageError(
        f"of {record!r} the histogram was kept, with blocks along its last dimension and along all others as one: "
        f"give --axis -1 and not {axis}, or leave such records out with --where \"keep == 'values'\""
    )
