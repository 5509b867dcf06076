"""How often does each magnitude occur in blocks of each kind, counted in little memory whatever the tensor's size?

A piece of the tensor is looked at twice: first for the kind of each block, its row, then to count every element in the
table of its block's row. There are few tables: when a piece has blocks of more rows, what was counted is put away, and
what has no table yet is counted by further looks at the piece.
"""

# Shapes: O = everything before the axis of the blocks, N = the axis, I = everything after it, B = blocks along
# the axis, M = magnitudes, R = rows.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the array

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.histograms.block_classes import Rows, rows_of
from ranktape.analyze.numerics.histograms.block_kernels import (
    NUM_MAGNITUDES,
    count_rows,
    count_rows_inside,
    find_rows,
    find_rows_inside,
    take_cells,
)
from ranktape.analyze.numerics.pieces import by_memory, in_three, pieces
from ranktape.analyze.numerics.threads import each, num_threads
from ranktape.errors import UsageError

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


def _both(some: Cells, others: Cells) -> Cells:
    dense = np.zeros(NUM_MAGNITUDES, dtype=np.int64)
    for magnitudes, counts in (some, others):
        dense[magnitudes] += counts
    found = np.flatnonzero(dense)
    return found.astype(np.uint16), dense[found]


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
        magnitudes, counts = np.empty(NUM_MAGNITUDES, dtype=np.uint16), np.empty(NUM_MAGNITUDES, dtype=np.int64)
        for row in np.flatnonzero(self._table_of_R >= 0).tolist():
            if self.is_over:
                break
            first = int(self._table_of_R[row]) * NUM_MAGNITUDES
            table = self._tables[first : first + int(self._rows.ends[row])]
            number = take_cells(table, *self.counted.cells.get(row, NO_CELLS), magnitudes, counts)
            self._keep(row, (magnitudes[:number].copy(), counts[:number].copy()))
        self._table_of_R[:] = -1
        self._num_counted = 0

    def merge(self, other: _Tables) -> None:
        """Add what another thread counted, and take it from there."""
        self.counted.blocks[:] += other.counted.blocks
        self._num_cells = max(self._num_cells, other._num_cells if other.is_over else 0)
        cells = other.counted.cells
        while cells and not self.is_over:
            row, found = cells.popitem()
            self._keep(row, _both(self.counted.cells.get(row, NO_CELLS), found))

    def _keep(self, row: int, cells: Cells) -> None:
        magnitudes, _ = self.counted.cells.get(row, NO_CELLS)
        self._num_cells += cells[0].size - magnitudes.size
        self.counted.cells[row] = cells

    def _give_tables(self, wanted: NDArray[np.int64]) -> None:
        new = wanted[self._table_of_R[wanted] < 0]
        num_used = np.count_nonzero(self._table_of_R >= 0)
        self._table_of_R[new] = np.arange(num_used, num_used + new.size)
