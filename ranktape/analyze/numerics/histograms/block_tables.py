"""Counts the elements of blocks by the kind of the largest magnitude of the block, in dense tables."""

# Shapes: O = everything before the axis of the blocks, N = the axis, I = everything after it, B = blocks along
# the axis, M = magnitudes, R = rows, T = tables.

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.histograms.block_counts import CUT_UNITS, NUM_MAGNITUDES
from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.pieces import by_memory, each, in_three, num_threads, pieces
from ranktape.errors import UsageError

_MAGNITUDE = np.int16(NUM_MAGNITUDES - 1)


@compiled
def _count_last(  # noqa: PLR0917 - numba knows no keyword-only arguments
    patterns_ON: NDArray[np.int16],
    block_size: int,
    row_of_M: NDArray[np.uint16],
    starts_R: NDArray[np.int64],
    blocks_R: NDArray[np.int64],
    counts: NDArray[np.uint32],
) -> None:
    """Add the blocks along the last axis to those of their rows, and their magnitudes to the tables of these.

    Magnitudes of a floating type are in the order of their patterns: the largest pattern is that of the largest value.
    """
    for before in range(patterns_ON.shape[0]):
        line = patterns_ON[before]
        for start in range(0, line.size, block_size):
            patterns, largest = line[start : start + block_size], np.int16(0)
            for position in range(patterns.size):
                largest = max(largest, np.int16(patterns[position] & _MAGNITUDE))
            row = row_of_M[largest]
            blocks_R[row] += 1
            # Unsigned, so that no index is looked at for being negative.
            first = np.uint64(starts_R[row])
            for pattern in patterns:
                counts[first + np.uint64(pattern & _MAGNITUDE)] += np.uint32(1)


@compiled
def _count_inside(  # noqa: PLR0917 - as above
    patterns_ONI: NDArray[np.int16],
    block_size: int,
    row_of_M: NDArray[np.uint16],
    starts_R: NDArray[np.int64],
    blocks_R: NDArray[np.int64],
    counts: NDArray[np.uint32],
) -> None:
    """The same for blocks along the middle one of three axes; memory is read as it lies."""
    length, inner = patterns_ONI.shape[1], patterns_ONI.shape[2]
    largest_I, first_I = np.zeros(inner, dtype=np.int16), np.zeros(inner, dtype=np.uint64)
    for before in range(patterns_ONI.shape[0]):
        for start in range(0, length, block_size):
            largest_I[:] = 0
            for position in range(start, min(start + block_size, length)):
                line = patterns_ONI[before, position]
                for index in range(inner):
                    largest_I[index] = max(largest_I[index], np.int16(line[index] & _MAGNITUDE))
            for index in range(inner):
                row = row_of_M[largest_I[index]]
                blocks_R[row] += 1
                first_I[index] = starts_R[row]
            for position in range(start, min(start + block_size, length)):
                line = patterns_ONI[before, position]
                for index in range(inner):
                    counts[first_I[index] + np.uint64(line[index] & _MAGNITUDE)] += np.uint32(1)


CUTS = (2049, 3073, 3584, 3585, 3840, 3841, 3968, 4065, 4080)
"""Where any rule changes its mind for the elements of any scheme, in units of 2**-11.

Significands of 16-bit types are even numbers of units: an odd cut lies just above one.
"""


def classes_of(significands: NDArray[np.float64], *, cuts: tuple[int, ...]) -> NDArray[np.int64]:
    """How many of the cuts each significand has passed."""
    classes: NDArray[np.int64] = (significands[..., np.newaxis] * CUT_UNITS >= np.array(cuts)).sum(axis=-1)
    return classes


@functools.cache
def significands_of(dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """All significands of a floating type, in [1, 2)."""
    num_bits = ml_dtypes.finfo(dtype).nmant  # type: ignore[no-untyped-call]
    return 1 + np.arange(1 << num_bits) / (1 << num_bits)


class Rows(NamedTuple):
    """The kinds of blocks of a 16-bit type: row 0 is that of zeros, the last one that of NaN and infinities."""

    of_magnitude: NDArray[np.uint16]
    """The row of a block whose largest magnitude has that pattern; rows are in the order of magnitudes."""
    exponents: NDArray[np.int16]
    """Of each row; of no meaning for the first and the last."""
    classes: NDArray[np.uint8]
    """Of each row, as `exponents`."""
    ends: NDArray[np.int64]
    """Of each row the first pattern that no element of its blocks can have."""
    infinity: int
    """The pattern of infinity."""


@functools.cache
def rows_of(dtype: np.dtype[Any]) -> Rows:
    """The rows of a 16-bit floating type, by `CUTS`."""
    magnitudes = pattern_values(dtype)[:NUM_MAGNITUDES]
    infinity = int(np.flatnonzero(np.isinf(magnitudes))[0])
    halves, upper = np.frexp(magnitudes[1:infinity])
    kinds = np.stack([upper - 1, classes_of(2 * halves, cuts=CUTS)])
    is_first = np.any(np.diff(kinds, axis=1, prepend=kinds[:, :1] - 1), axis=0)
    of_magnitude = np.zeros(NUM_MAGNITUDES, dtype=np.uint16)
    of_magnitude[1:infinity] = np.cumsum(is_first)
    of_magnitude[infinity:] = is_first.sum() + 1
    exponents, classes = np.pad(kinds[:, is_first], ((0, 0), (1, 1)))
    return Rows(
        of_magnitude=of_magnitude,
        exponents=exponents.astype(np.int16),
        classes=classes.astype(np.uint8),
        ends=np.searchsorted(of_magnitude, np.arange(exponents.size), side="right"),
        infinity=infinity,
    )


_MAX_COUNTED = 1 << 31
"""Elements that are counted in one table, whose counts have 32 bits."""

Cells = tuple[NDArray[np.uint16], NDArray[np.int64]]
"""Magnitudes, ascending, and how often each occurs."""

NO_CELLS: Cells = np.zeros(0, dtype=np.uint16), np.zeros(0, dtype=np.int64)


class Counted(NamedTuple):
    """What was counted in each row."""

    blocks: NDArray[np.int64]
    """Blocks of each row."""
    cells: dict[int, Cells]
    """Of each row but that of zeros."""


def count_in_tables(
    array: NDArray[Any],
    *,
    axis: int,
    block_size: int,
    dtype: np.dtype[Any],
    threads: int | None,
    max_cells: int | None = None,
) -> Counted | None:
    """The counts of an array with at least one dimension, whose values are counted as patterns of `dtype`.

    None where there are more than `max_cells` of them.

    Raises:
        UsageError: a single block has too many elements for its counts, or `threads` is less than 1.
    """
    block_length = max(1, min(block_size, array.shape[axis]))
    if block_length >= _MAX_COUNTED:
        raise UsageError(f"blocks of {block_length} elements cannot be counted: use less than {_MAX_COUNTED}")
    ordered, moved_axis = by_memory(array, axis=axis)
    parts = pieces(ordered, axis=moved_axis, block_size=block_length)
    num_workers = max(1, min(num_threads(threads), len(parts)))
    num_shares = min(max(num_workers, -(-2 * array.size // _MAX_COUNTED)), max(1, len(parts)))
    rows = rows_of(dtype)
    starts_R = np.cumsum(rows.ends) - rows.ends

    def count_share(number: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        # Each row has a table; pages of them that nothing is counted in take no memory.
        blocks_R, counts = np.zeros_like(starts_R), np.zeros(int(rows.ends.sum()), dtype=np.uint32)
        for part in parts[number::num_shares]:
            patterns_ONI = in_three(_patterns(part, dtype=dtype), axis=moved_axis)
            own = block_length, rows.of_magnitude, starts_R, blocks_R, counts
            if patterns_ONI.shape[2] == 1:
                _count_last(patterns_ONI[:, :, 0], *own)
            else:
                _count_inside(patterns_ONI, *own)
        return blocks_R, counts

    shares = each(count_share, range(num_shares), threads=num_workers)
    blocks = np.sum([blocks_R for blocks_R, _ in shares], axis=0)
    cells, num_cells = {}, 0
    for row in (1 + np.flatnonzero(blocks[1:])).tolist():
        table = slice(int(starts_R[row]), int(starts_R[row] + rows.ends[row]))
        first, *others = (counts[table] for _, counts in shares)
        total = sum(others, start=first.astype(np.int64)) if others else first
        found = np.flatnonzero(total)
        cells[row] = found.astype(np.uint16), total[found].astype(np.int64)
        num_cells += found.size
        if max_cells is not None and num_cells > max_cells:
            return None
    return Counted(blocks=blocks, cells=cells)


def _patterns(part: NDArray[Any], *, dtype: np.dtype[Any]) -> NDArray[np.int16]:
    if part.dtype == dtype:
        return part.view(np.int16)
    with np.errstate(over="ignore", invalid="ignore"):
        if part.dtype.itemsize == 1:
            every = np.arange(1 << 8, dtype=np.uint8).view(part.dtype).astype(dtype).view(np.int16)
            return every[part.view(np.uint8)]
        return part.astype(dtype).view(np.int16)
