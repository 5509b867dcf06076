"""Counts the elements of blocks by the kind of the largest magnitude of the block, in dense tables."""

# Shapes: O = everything before the axis of the blocks, N = the axis, I = everything after it, B = blocks along
# the axis, M = magnitudes, R = rows, T = tables.

from __future__ import annotations

import functools
from collections.abc import Iterable
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
def find_rows(
    patterns_ON: NDArray[np.int16],
    block_size: int,
    row_of_M: NDArray[np.uint16],
    rows_OB: NDArray[np.uint16],
    blocks_R: NDArray[np.int64],
) -> None:
    """Write the row of each block along the last axis, and add to `blocks_R` how many blocks each row has.

    Magnitudes of a floating type are in the order of their patterns: the largest pattern is that of the largest value.
    """
    for before in range(patterns_ON.shape[0]):
        line = patterns_ON[before]
        for block in range(rows_OB.shape[1]):
            patterns = line[block * block_size : (block + 1) * block_size]
            largest = np.int16(0)
            for position in range(patterns.size):
                largest = max(largest, np.int16(patterns[position] & _MAGNITUDE))
            row = row_of_M[largest]
            rows_OB[before, block] = row
            blocks_R[row] += 1


@compiled
def count_rows(
    patterns_ON: NDArray[np.int16],
    block_size: int,
    rows_OB: NDArray[np.uint16],
    table_of_R: NDArray[np.int64],
    counts: NDArray[np.uint32],
) -> None:
    """Count the magnitudes of the blocks whose row has a table, in that; the others have -1 in `table_of_R`.

    `counts` are the tables, one after the other.
    """
    for before in range(patterns_ON.shape[0]):
        line = patterns_ON[before]
        for block in range(rows_OB.shape[1]):
            table = table_of_R[rows_OB[before, block]]
            if table >= 0:
                # Unsigned, so that no index is looked at for being negative.
                first = np.uint64(table * NUM_MAGNITUDES)
                for pattern in line[block * block_size : (block + 1) * block_size]:
                    counts[first + np.uint64(pattern & _MAGNITUDE)] += np.uint32(1)


@compiled
def find_rows_inside(
    patterns_ONI: NDArray[np.int16],
    block_size: int,
    row_of_M: NDArray[np.uint16],
    rows_OBI: NDArray[np.uint16],
    blocks_R: NDArray[np.int64],
) -> None:
    """The same for blocks along the middle one of three axes; memory is read as it lies."""
    length, inner = patterns_ONI.shape[1], patterns_ONI.shape[2]
    largest_I = np.zeros(inner, dtype=np.int16)
    for before in range(patterns_ONI.shape[0]):
        for block in range(rows_OBI.shape[1]):
            largest_I[:] = 0
            for position in range(block * block_size, min((block + 1) * block_size, length)):
                line = patterns_ONI[before, position]
                for index in range(inner):
                    largest_I[index] = max(largest_I[index], np.int16(line[index] & _MAGNITUDE))
            for index in range(inner):
                row = row_of_M[largest_I[index]]
                rows_OBI[before, block, index] = row
                blocks_R[row] += 1


@compiled
def count_rows_inside(
    patterns_ONI: NDArray[np.int16],
    block_size: int,
    rows_OBI: NDArray[np.uint16],
    table_of_R: NDArray[np.int64],
    counts: NDArray[np.uint32],
) -> None:
    """The same for blocks along the middle one of three axes."""
    length, inner = patterns_ONI.shape[1], patterns_ONI.shape[2]
    first_I = np.zeros(inner, dtype=np.int64)
    for before in range(patterns_ONI.shape[0]):
        for block in range(rows_OBI.shape[1]):
            for index in range(inner):
                first_I[index] = table_of_R[rows_OBI[before, block, index]] * NUM_MAGNITUDES
            for position in range(block * block_size, min((block + 1) * block_size, length)):
                line = patterns_ONI[before, position]
                for index in range(inner):
                    if first_I[index] >= 0:
                        place = np.uint64(first_I[index]) + np.uint64(line[index] & _MAGNITUDE)
                        counts[place] += np.uint32(1)


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


NUM_TABLES = 128
"""Tables of all threads together, of 128 KiB each where all of it is used."""

_MAX_COUNTED = 1 << 32
"""Elements from which on the counts of a table could be too large for it."""

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

    None where there are more than `max_cells` of them, as soon as that is known.

    Raises:
        UsageError: a single block has too many elements for its counts, or `threads` is less than 1.
    """
    block_length = min(block_size, array.shape[axis])
    if block_length >= _MAX_COUNTED:
        raise UsageError(f"blocks of {block_length} elements cannot be counted: use less than {_MAX_COUNTED}")
    ordered, moved_axis = by_memory(array, axis=axis)
    parts = pieces(ordered, axis=moved_axis, block_size=block_length or 1)
    num_workers = max(1, min(num_threads(threads), len(parts)))
    shares = [parts[number::num_workers] for number in range(num_workers)]
    length = max(1, array.shape[axis])
    num_blocks = array.size // length * -(-length // max(1, block_length))
    num_tables = max(1, min(NUM_TABLES // num_workers, num_blocks))

    def count_share(share: Iterable[NDArray[Any]]) -> _Tables:
        tables = _Tables(rows_of(dtype), num_tables=num_tables, max_cells=max_cells)
        for part in share:
            if tables.is_over:
                break
            tables.add(in_three(_patterns(part, dtype=dtype), axis=moved_axis), block_size=block_length)
        tables.put_away()
        return tables

    first, *others = each(count_share, shares, threads=num_workers)
    for other in others:
        first.merge(other)
    return None if first.is_over else first.counted


def _patterns(part: NDArray[Any], *, dtype: np.dtype[Any]) -> NDArray[np.int16]:
    if part.dtype == dtype:
        return part.view(np.int16)
    with np.errstate(over="ignore", invalid="ignore"):
        if part.dtype.itemsize == 1:
            every = np.arange(1 << 8, dtype=np.uint8).view(part.dtype).astype(dtype).view(np.int16)
            return every[part.view(np.uint8)]
        return part.astype(dtype).view(np.int16)


class _Tables:
    """Counts as they grow."""

    def __init__(self, rows: Rows, *, num_tables: int, max_cells: int | None) -> None:
        self._rows, self._max_cells, self._num_cells = rows, max_cells, 0
        # Pages of it that nothing is counted in take no memory.
        self._tables = np.zeros(num_tables * NUM_MAGNITUDES, dtype=np.uint32)
        self._num_tables = num_tables
        self._table_of_R = np.full(rows.ends.size, -1, dtype=np.int64)
        self._num_counted = 0
        self.counted = Counted(blocks=np.zeros(rows.ends.size, dtype=np.int64), cells={})

    @property
    def is_over(self) -> bool:
        """Whether there are too many cells: what was counted is of no use then."""
        return self._max_cells is not None and self._num_cells > self._max_cells

    def add(self, patterns_ONI: NDArray[np.int16], *, block_size: int) -> None:
        """Count a piece."""
        outer, length, inner = patterns_ONI.shape
        is_last = inner == 1
        patterns = patterns_ONI[:, :, 0] if is_last else patterns_ONI
        num_blocks = -(-length // block_size)
        rows = np.empty((outer, num_blocks) if is_last else (outer, num_blocks, inner), dtype=np.uint16)
        blocks_R = np.zeros_like(self.counted.blocks)
        find = find_rows if is_last else find_rows_inside
        find(patterns, block_size, self._rows.of_magnitude, rows, blocks_R)
        self.counted.blocks[:] += blocks_R
        seen = 1 + np.flatnonzero(blocks_R[1:])
        num_used = np.count_nonzero(self._table_of_R >= 0)
        num_new = np.count_nonzero(self._table_of_R[seen] < 0)
        if num_used + num_new > self._num_tables or self._num_counted + patterns_ONI.size >= _MAX_COUNTED:
            self.put_away()
        for start in range(0, seen.size, self._num_tables):
            if start:
                self.put_away()
            self._give_tables(seen[start : start + self._num_tables])
            count_pass = count_rows if is_last else count_rows_inside
            count_pass(patterns, block_size, rows, self._table_of_R, self._tables)
        self._num_counted += patterns_ONI.size

    def put_away(self) -> None:
        """Move what the tables hold to the cells; they are free then."""
        for row in np.flatnonzero(self._table_of_R >= 0).tolist():
            if self.is_over:
                break
            first = int(self._table_of_R[row]) * NUM_MAGNITUDES
            table = self._tables[first : first + int(self._rows.ends[row])]
            found = np.flatnonzero(table)
            self._keep(row, (found.astype(np.uint16), table[found].astype(np.int64)))
            table[found] = 0
        self._table_of_R[:] = -1
        self._num_counted = 0

    def merge(self, other: _Tables) -> None:
        """Add what another thread counted, and take it from there."""
        self.counted.blocks[:] += other.counted.blocks
        self._num_cells = max(self._num_cells, other._num_cells if other.is_over else 0)
        cells = other.counted.cells
        while cells and not self.is_over:
            self._keep(*cells.popitem())

    def _keep(self, row: int, cells: Cells) -> None:
        """Add cells of a row to those that are held of it."""
        held = self.counted.cells.get(row, NO_CELLS)
        if held[0].size:
            dense = np.zeros(NUM_MAGNITUDES, dtype=np.int64)
            for magnitudes, counts in (held, cells):
                dense[magnitudes] += counts
            found = np.flatnonzero(dense)
            cells = found.astype(np.uint16), dense[found]
        self._num_cells += cells[0].size - held[0].size
        self.counted.cells[row] = cells

    def _give_tables(self, wanted: NDArray[np.int64]) -> None:
        new = wanted[self._table_of_R[wanted] < 0]
        num_used = np.count_nonzero(self._table_of_R >= 0)
        self._table_of_R[new] = np.arange(num_used, num_used + new.size)
