"""Makes the record of a staged tensor, and the histogram or statistics that replace its values.

A histogram (`Keep.HISTOGRAM`) counts each bit pattern of 16-bit values, and each kind of element in blocks. It answers
all questions about single values and about the scales of blocks. Wider values are rounded to the compute dtype, as
analysis does. Statistics (`Keep.STATISTICS`) are sums and extremes of the values.

The trainer can compute the size of either without the values, and without importing the code that counts them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ranktape.analyze.numerics.histograms.block_counts import BLOCK_AXES, NUM_CODES, pack_histogram, padded
from ranktape.capture.staging.ring_file import Slot
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS, ElementTally, Keep, Overflow, RecordInfo
from ranktape.storage.format.statistics import STATISTICS, Statistics

BLOCK_SIZE = 32
"""Number of elements of a block, as in the OCP microscaling formats."""

_MAX_ROUNDED = 1 << 20
"""Number of wide values that are rounded at once, because a copy of a whole tensor could exceed the budget."""


_TYPICAL_CELLS = 28_000
"""Number of kinds of elements in blocks along one axis, for normally distributed values. Heavier tails have up to ten
times as many."""

_CELL_WORDS = 2
_WORD_NBYTES = 4
_HALVES = frozenset({"bfloat16", "float16"})
_WIDE = frozenset({"float32", "float64"})


def staged_record(slot: Slot, *, rank: int, attempt: int) -> tuple[np.ndarray[Any, Any], RecordInfo]:
    """The tensor in a slot, without a copy, and its record of values, without the checksum.

    If the trainer has staged statistics instead of the values, the statistics and their record.
    """
    if is_taken(slot):
        return _taken_record(slot, rank=rank, attempt=attempt)
    from ranktape.analyze.numerics.histograms.histogram import measure

    header = {**slot.header, "keep": Keep.VALUES.value}
    array = np.frombuffer(slot.payload, dtype=numpy_dtype(header["dtype"])).reshape(header["shape"])
    info = RecordInfo(
        **{**header, "shape": tuple(header["shape"])},
        rank=rank,
        attempt=attempt,
        nbytes=array.nbytes,
        overflow=measure(array, sample_dim=header["sample_dim"]),
        checksum="",
    )
    return array, info


def is_taken(slot: Slot) -> bool:
    """Whether the trainer has staged the statistics of a tensor instead of its values."""
    return "taken" in slot.header


def statistics_in(slot: Slot, array: np.ndarray[Any, Any]) -> Statistics:
    """The statistics of the finite values of a staged tensor."""
    if is_taken(slot):
        return Statistics.from_vector(array)
    from ranktape.analyze.numerics.histograms.moments import statistics_of

    return statistics_of(array)


def _taken_record(slot: Slot, *, rank: int, attempt: int) -> tuple[np.ndarray[Any, Any], RecordInfo]:
    """The statistics in a slot, and their record."""
    header = {name: value for name, value in slot.header.items() if name != "taken"}
    values = np.frombuffer(slot.payload, dtype="<f8")
    if slot.header["taken"] == "device":
        values = _words_of_device(slot.payload, num_elements=math.prod(header["shape"]))
    vector, overflow = taken_from(values, per_sample=header["sample_dim"] is not None)
    info = RecordInfo(
        **{**header, "shape": tuple(header["shape"]), "keep": Keep.STATISTICS.value},
        rank=rank,
        attempt=attempt,
        nbytes=vector.nbytes,
        overflow=overflow,
        checksum="",
    )
    return vector, info


def device_nbytes(num_samples: int) -> int:
    """Size of the result of `take_on_device`, in bytes."""
    return 40 * num_samples + 24


def _words_of_device(payload: memoryview, *, num_elements: int) -> np.ndarray[Any, Any]:
    """The result of `take_on_device` in the form that `taken_from` reads, with NaN for the third and fourth moments."""
    counts_SK = np.frombuffer(payload[:-24], dtype="<i8").reshape(-1, 5).astype(np.float64)
    low, high, mean, variance, magnitudes, absmax = (
        np.frombuffer(payload[-24:], dtype="<f4").astype(np.float64).tolist()
    )
    nan_S, upper_S, lower_S, zero_S, small_S = counts_SK.T
    num_finite = num_elements - float((nan_S + upper_S + lower_S).sum())
    moment_2 = num_elements * variance
    if num_finite < num_elements and num_finite:
        # Values that are not finite were replaced by zeros, which do not count.
        moment_2 = max(0.0, moment_2 + num_elements * mean**2 * (1 - num_elements / num_finite))
    if low >= high:
        moment_2 = 0.0
    ends = [low, high, absmax] if num_finite else [math.nan] * 3
    statistics = [num_elements, num_finite, num_elements * mean, moment_2, math.nan, math.nan, magnitudes, *ends]
    infinite = [end for end, is_there in ((-math.inf, lower_S.any()), (math.inf, upper_S.any())) if is_there]
    present = [*infinite, *(end for end in ends[:2] if not math.isnan(end))]
    extremes = [min(present), max(present), max(map(abs, present))] if present else ends
    counts = np.stack([upper_S, lower_S, small_S - zero_S, nan_S, upper_S + lower_S, zero_S], axis=1)
    return np.concatenate([statistics, extremes, counts.reshape(-1)])


def taken_from(values: np.ndarray[Any, Any], *, per_sample: bool) -> tuple[np.ndarray[Any, Any], Overflow]:
    """The vector of statistics that the trainer has staged, and the counts at the limits of the dtype."""
    vector, ends = values[: len(STATISTICS)], values[len(STATISTICS) : len(STATISTICS) + len(EXTREMES)].tolist()
    counts_SK = values[len(STATISTICS) + len(EXTREMES) :].astype(np.int64).reshape(-1, len(TALLY_KINDS))
    total = max(1, int(vector[0]))
    counts = zip(TALLY_KINDS, counts_SK.sum(0).tolist(), strict=True)
    tallies: dict[str, Any] = {kind: ElementTally(count=count, ratio=count / total) for kind, count in counts}
    extremes: dict[str, Any] = {n: None if math.isnan(end) else end for n, end in zip(EXTREMES, ends, strict=True)}
    overflow = Overflow(
        **tallies,
        **extremes,
        per_sample=dict(zip(TALLY_KINDS, counts_SK.T.tolist(), strict=True)) if per_sample else None,
    )
    return vector, overflow


def reduce_to(
    keep: str, array: np.ndarray[Any, Any], *, info: RecordInfo
) -> tuple[np.ndarray[Any, Any], RecordInfo] | None:
    """The histogram or statistics that replace the values of a tensor, and their record; None if the values are kept.

    The values are kept if `keep` says so. They are also kept if it requests a histogram of a tensor that can have none,
    such as one that was computed in 32 bits.
    """
    if keep == Keep.STATISTICS:
        from ranktape.analyze.numerics.histograms.moments import statistics_of

        reduced = statistics_of(array).to_vector()
    elif keep == Keep.HISTOGRAM and (dtype := counted_dtype(info.dtype, info.compute_dtype)) is not None:
        reduced = _histogram(array, dtype=dtype)
    else:
        return None
    return reduced, dataclasses.replace(info, keep=keep, nbytes=reduced.nbytes)


def counted_dtype(dtype: str, compute_dtype: str) -> str | None:
    """The dtype of the bit patterns that a tensor's histogram counts; None if it can have no histogram."""
    if dtype in _HALVES:
        return dtype
    return compute_dtype if dtype in _WIDE and compute_dtype in _HALVES else None


def kept_as(keep: str, *, dtype: str, compute_dtype: str) -> str:
    """What is kept of a tensor if `keep` is requested: the values if it can have no histogram."""
    is_countable = counted_dtype(dtype, compute_dtype) is not None
    return Keep.VALUES.value if keep == Keep.HISTOGRAM and not is_countable else keep


def kept_nbytes(keep: str, *, nbytes: int, dtype: str, compute_dtype: str) -> int:
    """Size of what is kept of a tensor with `nbytes` of values, in bytes, before compression.

    For a histogram, the size for normally distributed values. It is always compressed, to about a tenth of that.
    """
    match kept_as(keep, dtype=dtype, compute_dtype=compute_dtype):
        case Keep.STATISTICS:
            return 8 * len(STATISTICS)
        case Keep.HISTOGRAM:
            num_cells = min(nbytes // numpy_dtype(dtype).itemsize, _TYPICAL_CELLS)
            return _WORD_NBYTES * padded(NUM_CODES + 1 + len(BLOCK_AXES) * _CELL_WORDS * num_cells)
    return nbytes


def _histogram(array: np.ndarray[Any, Any], *, dtype: str) -> np.ndarray[Any, Any]:
    """The counts of the 65,536 bit patterns of the dtype, and of each kind of element in blocks.

    Blocks are taken along both axes of the tensor as a matrix [all dimensions but the last, last]. A one-dimensional
    array is a single row, and a scalar a single element.
    """
    from ranktape.analyze.numerics.histograms.block_histogram import count_blocks
    from ranktape.analyze.numerics.histograms.histogram import count_values

    flat, target = array.reshape(-1), numpy_dtype(dtype)
    step = flat.size if flat.dtype == target else _MAX_ROUNDED
    counts = np.zeros(NUM_CODES, dtype=np.int64)
    for start in range(0, flat.size, max(1, step)):
        with np.errstate(over="ignore", invalid="ignore"):
            counts += count_values(flat[start : start + step].astype(target, copy=False), threads=1).counts
    shape = array.shape or (1,)
    matrix = array.reshape(math.prod(shape[:-1]), shape[-1])
    blocks = [
        dataclasses.replace(
            count_blocks(matrix, axis=axis, block_size=BLOCK_SIZE, threads=1, rounded_to=target), axis=name
        )
        for name, axis in zip(BLOCK_AXES, (1, 0), strict=True)
    ]
    return pack_histogram(counts, blocks)
