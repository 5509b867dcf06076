"""Sweeps each record of a selection, from counts that were kept or from its values.

Of types of at most 16 bits, one scale for the tensor needs how often each value occurs, and blocks with power-of-two
scales how often each magnitude occurs in blocks of each kind: both are measured once, kept, and answer every further
format. Wider types, NVFP4, channels and the legacy mode look at the values themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ranktape.analyze.engine.digest_measure import DigestMeasure, digest_of
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, pick, read_block_histogram, read_numbers, read_values, viewed_dtype
from ranktape.analyze.numerics.histograms.block_histogram import APART, CELLS, BlockHistogram, count_few_cells
from ranktape.analyze.numerics.histograms.block_tables import CUTS
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.population import population_of_histogram
from ranktape.analyze.numerics.sweeps.sweep import MAX_CELLS, sweep_schemes
from ranktape.errors import RanktapeError, UsageError, WorkersError
from ranktape.storage.format.block_counts import NUM_MAGNITUDES
from ranktape.storage.format.dtypes import dtype_row, numpy_dtype
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.cache_object import Measure, Payload
    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.analyze.numerics.quantization.schemes import Scheme
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
    from ranktape.storage import Record, Records

VERSION = 1
"""Of the payload; one more whenever what is in it changes."""

Sweeps = tuple["ScaleSweep", ...]
"""One for each job."""

Asked = TypeVar("Asked")
"""What is asked of one record."""


class Job(NamedTuple):
    """One format that a record is to be swept for."""

    scheme: Scheme
    """What values are rounded to."""
    mode: SweepMode
    """What levels are."""
    options: SweepOptions
    """Which levels are tried."""

    @property
    def block_key(self) -> tuple[int, int] | None:
        """Axis and size of the blocks whose counts answer it; None where no counts of blocks do."""
        if self.mode is SweepMode.MX and not self.scheme.has_tensor_scale:
            return self.options.axis, self.scheme.block_size
        return None

    @property
    def is_counted(self) -> bool:
        """Whether counts of a narrow type answer it, of values or of blocks."""
        return self.mode is SweepMode.TENSOR or self.block_key is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMeasure:
    """Counts the blocks of a record of at most 16 bits; `blocks_of` reads the payload."""

    view: View
    """Which numbers are judged."""
    axis: int
    """Along which axis blocks lie."""
    block_size: int
    """Elements of a block."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return f"blocks_v{VERSION}_{self.axis}_{self.block_size}_{self.view}"

    def __call__(self, record: Record) -> Payload:
        """The counts of one record, as arrays; none where there are too many of them."""
        array = read_values(record, view=self.view)
        num_dims = max(array.ndim, 1)
        if not -num_dims <= self.axis < num_dims:
            raise UsageError(f"--axis {self.axis} is not one of a tensor of shape {array.shape}")
        found = count_few_cells(array, axis=self.axis, block_size=self.block_size, threads=1, max_cells=MAX_CELLS)
        if found is None:
            return {}
        ends = population_of_histogram(count_values(array))
        numbers = [math.nan if end is None else end for end in (ends.minimum, ends.maximum)]
        return {
            **{name: getattr(found, name) for name in CELLS[:-1]},
            # Most cells are small, and there are many.
            "counts": found.counts.astype(np.min_scalar_type(int(found.counts.max(initial=0)))),
            "apart": np.array([getattr(found, name) for name in APART], dtype=np.int64),
            "ends": np.array(numbers),
        }

    def accepts(self, payload: Payload) -> bool:
        """Whether a payload is one that is made here; what lies in a cache may have been put there by anybody."""
        if not payload:
            return True
        if set(payload) != {*CELLS, "apart", "ends"}:
            return False
        cells = [payload[name] for name in CELLS]
        return (
            [cell.dtype.str for cell in cells[:-1]] == ["<i2", "|u1", "<u2"]
            and cells[-1].dtype.kind == "u"
            and all(cell.shape == (cells[0].size,) for cell in cells)
            and _is_like(payload["apart"], "<i8", len(APART))
            and _is_like(payload["ends"], "<f8", 2)
            and bool((payload["classes"] <= len(CUTS)).all() and (payload["magnitudes"] < NUM_MAGNITUDES).all())
            and bool((payload["counts"] > 0).all() and (payload["apart"] >= 0).all())
        )


def _is_like(array: NDArray[Any], dtype: str, length: int) -> bool:
    return array.dtype.str == dtype and array.shape == (length,)


class _BlocksCounted(NamedTuple):
    """The counts of a record's blocks, and its smallest and largest finite value."""

    blocks: BlockHistogram
    ends: tuple[float | None, ...]


def sweep_records(
    records: Records, jobs: Sequence[Sequence[Job]], *, view: View, engine: Engine | None = None
) -> Iterator[Sweeps | RanktapeError]:
    """The sweeps of each record for its own jobs, in their order; in the place of one that fails the reason why.

    The records are of floating-point or complex numbers. What is found is the same to the last bit as by `sweep_one`.

    Raises:
        UsageError: of the engine itself; of records none are.
        WorkersError: the processes or the cluster cannot be had, or were lost.
    """
    used = engine or Engine()
    mask, narrow = pick(records, lambda dtype, compute, keep: _is_narrow(dtype, compute, keep, view=view))
    wanted = [
        [job for job in asked if not (is_narrow and job.is_counted)]
        for is_narrow, asked in zip(mask, jobs, strict=True)
    ]
    tasks, sizes = _tasks(records, wanted, view=view)
    mapped = used.map(_try, tasks, sizes=sizes)
    measures: dict[Any, Measure] = {}
    for job in dict.fromkeys(job for asked in jobs for job in asked if job.is_counted):
        key = job.block_key
        measures[key] = (
            DigestMeasure(view=view) if key is None else BlockMeasure(view=view, axis=key[0], block_size=key[1])
        )
    counts = {key: _measured(narrow, measure, used) for key, measure in measures.items()}
    dtypes = zip(records.column("dtype").tolist(), records.column("compute_dtype").tolist(), strict=True)
    for position, (is_narrow, asked, pair) in enumerate(zip(mask, wanted, dtypes, strict=True)):
        from_values = next(mapped) if asked else ()
        payloads = {key: next(iterator) for key, iterator in counts.items()} if is_narrow else {}
        needed = {job.block_key for job in jobs[position] if job.is_counted}
        failures = [one for one in (from_values, *map(payloads.get, needed)) if isinstance(one, RanktapeError)]
        if failures or isinstance(from_values, RanktapeError):
            yield failures[0]
        elif not is_narrow:
            yield from_values
        else:
            dtype = viewed_dtype(dtype=pair[0], compute_dtype=pair[1], view=view)
            numbers = {key: _numbers(payloads[key], key, dtype=dtype) for key in needed}
            yield _put_together(records, position, jobs[position], numbers, from_values, view=view)


def sweep_samples(
    records: Records, jobs: Sequence[Mapping[int, Sequence[Job]]], *, view: View, engine: Engine | None = None
) -> Iterator[Mapping[int, Sweeps] | RanktapeError]:
    """The sweeps of samples of each record, by the index of the sample; in the place of a record that fails the reason.

    Each record has samples, and its values were kept; it is read once. A sample keeps their dimension, where there is
    one, so that axes are numbered as those of the record.
    """
    tasks, sizes = _tasks(records, jobs, view=view)
    found = (engine or Engine()).map(_try_samples, tasks, sizes=sizes)
    for asked in jobs:
        yield next(found) if asked else {}


def sweep_one(record: Record, jobs: Sequence[Job], *, view: View) -> Sweeps:
    """The sweeps of one record, from one reading of it.

    Raises:
        DataError: the record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of the record does not answer the question, or it holds no real numbers.
    """
    if record.keep == Keep.HISTOGRAM:
        return _sweep_kept(record, jobs, view=view)
    return sweep_numbers(read_numbers(record, view=view), jobs)


def sweep_numbers(numbers: NDArray[Any] | Histogram, jobs: Sequence[Job]) -> Sweeps:
    """The sweeps of an array, or of a histogram, with as few passes as they need.

    Raises:
        UsageError: the numbers do not answer the question.
    """
    found: dict[int, ScaleSweep] = {}
    for options in dict.fromkeys(job.options for job in jobs):
        places = [place for place, job in enumerate(jobs) if job.options == options]
        wanted = [(jobs[place].scheme, jobs[place].mode) for place in places]
        found |= dict(zip(places, sweep_schemes(numbers, wanted, options=options), strict=True))
    return tuple(found[place] for place in range(len(jobs)))


def _is_narrow(dtype: str, compute_dtype: str, keep: str, *, view: View) -> bool:
    row = dtype_row(viewed_dtype(dtype=dtype, compute_dtype=compute_dtype, view=view))
    return keep == Keep.VALUES and row.is_floating and row.itemsize <= 2  # noqa: PLR2004 - bytes that are counted


def _measured(records: Records, measure: Measure, engine: Engine) -> Iterator[Payload | RanktapeError]:
    """What is measured of each record; a failure takes its place, and does not end the rest."""
    done = 0
    while done < len(records):
        try:
            for payload in engine.measure(records[done:], measure):
                done += 1
                yield payload
        except WorkersError:
            raise  # no record's fault
        except RanktapeError:
            # Where several work, another record may be the one that failed.
            try:
                found: Payload | RanktapeError = next(iter(engine.measure(records[done : done + 1], measure)))
            except RanktapeError as error:
                found = error
            done += 1
            yield found


def _tasks(
    records: Records, jobs: Sequence[Asked], *, view: View
) -> tuple[list[tuple[Record | RanktapeError, Asked, View]], list[int]]:
    """What is to be done of each record with a job, and the bytes that each reads."""
    if not any(jobs):
        return [], []
    found: list[Record | RanktapeError] = []
    try:
        found += records
    except RanktapeError:
        found = [_record(records, position) for position in range(len(records))]
    tasks = [(record, asked, view) for record, asked in zip(found, jobs, strict=True) if asked]
    return tasks, [0 if isinstance(record, RanktapeError) else record.nbytes for record, _, _ in tasks]


def _record(records: Records, position: int) -> Record | RanktapeError:
    try:
        return records[position]
    except RanktapeError as error:
        return error


def _try(task: tuple[Record | RanktapeError, Sequence[Job], View]) -> Sweeps | RanktapeError:
    record, jobs, view = task
    if isinstance(record, RanktapeError):
        return record
    try:
        return sweep_one(record, jobs, view=view)
    except RanktapeError as error:
        return error


def _try_samples(
    task: tuple[Record | RanktapeError, Mapping[int, Sequence[Job]], View],
) -> Mapping[int, Sweeps] | RanktapeError:
    record, jobs, view = task
    if isinstance(record, RanktapeError):
        return record
    try:
        values = read_values(record, view=view)
        if record.sample_dim is None:
            return {sample: sweep_numbers(values, asked) for sample, asked in jobs.items()}
        samples = np.moveaxis(values, record.sample_dim, 0)
        return {
            sample: sweep_numbers(np.moveaxis(samples[sample : sample + 1], 0, record.sample_dim), asked)
            for sample, asked in jobs.items()
        }
    except RanktapeError as error:
        return error


def _numbers(
    payload: Payload | RanktapeError, key: tuple[int, int] | None, *, dtype: str
) -> Histogram | _BlocksCounted | None:
    assert not isinstance(payload, RanktapeError)
    if key is None:
        return histogram_of(digest_of(payload, dtype=dtype))
    return blocks_of(payload, axis=key[0], block_size=key[1], dtype=dtype) if payload else None


def histogram_of(digest: Digest) -> Histogram:
    """The histogram that an exact digest of a type of at most 16 bits was made of; zeros and NaN have one pattern."""
    dtype = numpy_dtype(digest.dtype)
    counts = np.zeros(1 << 8 * dtype.itemsize, dtype=np.int64)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    counts[digest.values.astype(dtype).view(unsigned)] = digest.counts
    if digest.tallies.nan:
        with np.errstate(invalid="ignore"):
            counts[np.array([np.nan]).astype(dtype).view(unsigned)] = digest.tallies.nan
    return Histogram(dtype=dtype, counts=counts)


def blocks_of(payload: Payload, *, axis: int, block_size: int, dtype: str) -> _BlocksCounted:
    """The histogram of blocks that `BlockMeasure` made a payload of."""
    row = dtype_row(dtype)
    cells: dict[str, Any] = {name: payload[name] for name in CELLS} | {"counts": payload["counts"].astype(np.int64)}
    apart: dict[str, Any] = dict(zip(APART, payload["apart"].tolist(), strict=True))
    patterns = row.numpy_dtype if row.itemsize == 2 else numpy_dtype("bfloat16")  # noqa: PLR2004 - bytes
    blocks = BlockHistogram(dtype=patterns, axis=str(axis), block_size=block_size, cuts=CUTS, **cells, **apart)
    return _BlocksCounted(blocks, tuple(None if math.isnan(end) else end for end in payload["ends"].tolist()))


def _put_together(
    records: Records,
    position: int,
    jobs: Sequence[Job],
    numbers: Mapping[Any, Histogram | _BlocksCounted | None],
    from_values: Iterable[ScaleSweep],
    *,
    view: View,
) -> Sweeps | RanktapeError:
    """The sweeps of a record of a narrow type, from its counts as far as these answer."""
    others = iter(from_values)
    found: dict[int, ScaleSweep] = {}
    unanswered: list[int] = []
    try:
        for place, job in enumerate(jobs):
            counted = numbers[job.block_key] if job.is_counted else None
            if not job.is_counted:
                found[place] = next(others)
            elif isinstance(counted, Histogram):
                found[place] = sweep_numbers(counted, [job])[0]
            elif counted is not None and counted.blocks.answers(job.options.rule, job.scheme.element):
                sweep = sweep_schemes(counted.blocks, [(job.scheme, job.mode)], options=job.options)[0]
                found[place] = dataclasses.replace(sweep, minimum=counted.ends[0], maximum=counted.ends[1])
            else:
                unanswered.append(place)
        if unanswered:
            sweeps = sweep_one(records[position], [jobs[place] for place in unanswered], view=view)
            found |= dict(zip(unanswered, sweeps, strict=True))
    except RanktapeError as error:
        return error
    return tuple(found[place] for place in range(len(jobs)))


def _sweep_kept(record: Record, jobs: Sequence[Job], *, view: View) -> Sweeps:
    """The sweeps of a record of which the histogram was kept, each count read once."""
    read: dict[str, Histogram | BlockHistogram | NDArray[Any]] = {}
    found: list[ScaleSweep] = []
    for job in jobs:
        axis = _kept_axis(record, job)
        if axis not in read:
            read[axis] = read_block_histogram(record, axis=axis, view=view) if axis else read_numbers(record, view=view)
        found += sweep_schemes(read[axis], [(job.scheme, job.mode)], options=job.options)
    return tuple(found)


def _kept_axis(record: Record, job: Job) -> str:
    """Along which axis the counts of blocks answer a sweep; empty where counts of values do.

    Raises:
        UsageError: blocks along that dimension are not among the counts that were kept.
    """
    if job.block_key is None:
        return ""
    asked = job.options.axis
    num_dims = max(1, len(record.shape))
    dim = asked % num_dims if -num_dims <= asked < num_dims else None
    if dim == num_dims - 1:
        return "features"
    if dim == 0 and num_dims == 2:  # noqa: PLR2004 - the rows are the tokens
        return "tokens"
    raise UsageError(
        f"of {record!r} the histogram was kept, with blocks along its last dimension and along all others as one: "
        f"give --axis -1 and not {asked}, or leave such records out with --where \"keep == 'values'\""
    )
