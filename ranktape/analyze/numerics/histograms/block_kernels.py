"""What does the compiled code do with each block of a tensor whose blocks share a scale?

First the row of each block is found, which says all that a scale can depend on; then every element is counted in
the table of its block's row.
"""

# Shapes: O = everything before the axis of the blocks, N = the axis, I = everything after it, B = blocks along
# the axis, M = magnitudes, R = rows, T = tables.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.kernels import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_MAGNITUDES = 1 << 15
"""Patterns of a 16-bit floating type without its sign."""

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


@compiled
def take_cells(
    table: NDArray[np.uint32],
    held_magnitudes: NDArray[np.uint16],
    held_counts: NDArray[np.int64],
    magnitudes: NDArray[np.uint16],
    counts: NDArray[np.int64],
) -> int:
    """Write the cells of a table and those held of it before, in the order of magnitudes; return how many they are.

    The table is empty then; pages of it that nothing was counted in are not written to.
    """
    number, held = 0, 0
    for magnitude in range(table.size):
        found = np.int64(table[magnitude])
        is_held = held < held_magnitudes.size and held_magnitudes[held] == magnitude
        if found:
            table[magnitude] = 0
        if is_held:
            found += held_counts[held]
            held += 1
        if found:
            magnitudes[number] = magnitude
            counts[number] = found
            number += 1
    return number
