"""Loops that quantise float32 numbers, fast enough for a training, where values alone are asked.

In place. Elements that round to even are scaled, rounded and scaled back in float32, which is exact: the scales of MX
are powers of two, and all others are defined so. Rounding adds a power of two and takes it away again. What rounds
otherwise does it in float64.
"""

# Shapes: O = everything before the axis of blocks or channels, L = elements along the axis, I = everything after;
# R = rows, C = columns of a matrix.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.kernels import BLOCK, compiled
from ranktape.analyze.numerics.quantization.fast_kernels import (
    INFINITY,
    MAGNITUDE,
    POWER,
    BlockScheme,
    block_factors,
    fill_factors,
    round_wide,
)
from ranktape.analyze.numerics.quantization.group_scales import STRETCH


@compiled
def _rounded(scaled: np.float32, after: np.float32, scheme: BlockScheme, zero: np.float32 | None) -> np.int32:
    """The pattern of a scaled float32, rounded to the nearest element, ties to even, and scaled back.

    `zero` is added to elements, 0.0 where they have no negative zero; of None nothing is compiled.
    """
    bits = np.float32(scaled).view(np.int32)
    magnitude = np.int32(min(np.int32(bits & MAGNITUDE), scheme.limit))
    field = max(scheme.lowest_field, np.int32(magnitude & INFINITY))
    # Added to the magnitude, it leaves no bits below the last one of the element.
    anchor = np.int32(field + scheme.anchor_step).view(np.float32)
    rounded = np.float32(np.float32(np.int32(magnitude).view(np.float32) + anchor) - anchor).view(np.int32)
    signed = np.int32(rounded | np.int32(bits & ~MAGNITUDE))
    result = signed.view(np.float32)
    if zero is not None:
        result = np.float32(result + zero)
    return np.float32(result * after).view(np.int32)


class Scratch(NamedTuple):
    """Memory for some columns of a matrix: what is done to a whole row at once becomes vector instructions."""

    largest: NDArray[np.int32]
    """Of each block, the pattern of its largest magnitude."""
    stretches: NDArray[np.float64]
    """Of each block, how many times its first scale it has."""
    errors: NDArray[np.float64]
    """Of each block, what the squared errors add up to with its first scale and with its second one."""
    before: NDArray[np.float32]
    """What the elements of each column are multiplied by, or divided by, before they are rounded."""
    after: NDArray[np.float32]
    """What they are multiplied by after it."""
    scaled: NDArray[np.float64]
    """Magnitudes of a row, scaled, where they are rounded in float64."""
    rounded: NDArray[np.float64]
    """What they are rounded to."""
    places: NDArray[np.int64]
    """Where they are in the tensor."""
    tried: NDArray[np.int32]
    """Patterns of the values of a row with scales that may not be chosen."""


@compiled
def _scratch(num_columns: int, num_blocks: int) -> Scratch:
    return Scratch(
        np.empty(num_blocks, dtype=np.int32),
        np.empty(num_blocks),
        np.empty((2, num_blocks)),
        np.empty(num_columns, dtype=np.float32),
        np.empty(num_columns, dtype=np.float32),
        np.empty(num_columns),
        np.empty(num_columns),
        np.empty(num_columns, dtype=np.int64),
        np.empty(num_columns, dtype=np.int32),
    )


@compiled
def _round_row(  # noqa: PLR0917 - as above
    row_C: NDArray[np.int32],
    scheme: BlockScheme,
    zero: np.float32 | None,
    first: int,
    step: int,
    scratch: Scratch,
) -> None:
    """Quantise a row with the factors of its columns; its places in the tensor are `first`, `first + step`, ..."""
    before_C, after_C = scratch.before[: row_C.size], scratch.after[: row_C.size]
    if scheme.is_wide:
        scaled_C, rounded_C = scratch.scaled[: row_C.size], scratch.rounded[: row_C.size]
        for column in range(row_C.size):
            magnitude = abs(np.int32(row_C[column]).view(np.float32))
            if scheme.scales == POWER:
                scaled_C[column] = np.float64(magnitude) * np.float64(before_C[column])
            elif scheme.is_divided:
                scaled_C[column] = np.float64(np.divide(magnitude, before_C[column]))
            else:
                scaled_C[column] = np.float64(magnitude * before_C[column])
        round_wide(scaled_C, rounded_C, scheme.wide, scheme.state, first, step, scratch.places)
        for column in range(row_C.size):
            result = np.copysign(np.float32(rounded_C[column]), np.int32(row_C[column]).view(np.float32))
            if zero is not None:
                result = np.float32(result + zero)
            row_C[column] = np.float32(result * after_C[column]).view(np.int32)
    # Two loops: in one, each element would be divided and multiplied.
    elif scheme.is_divided:
        for column in range(row_C.size):
            scaled = np.divide(np.int32(row_C[column]).view(np.float32), before_C[column])
            row_C[column] = _rounded(scaled, after_C[column], scheme, zero)
    else:
        for column in range(row_C.size):
            scaled = np.int32(row_C[column]).view(np.float32) * before_C[column]
            row_C[column] = _rounded(scaled, after_C[column], scheme, zero)


@compiled
def round_channels(  # noqa: PLR0917 - as above
    patterns_OLI: NDArray[np.int32],
    befores_L: NDArray[np.float32],
    afters_L: NDArray[np.float32],
    scheme: BlockScheme,
    zero: np.float32 | None,
    first: int,
) -> None:
    """Quantise with the factors of each index along the second of three dimensions; NaN stays NaN.

    The array is contiguous. Places in the tensor are `first` and those after it.
    """
    num_outer, length, width = patterns_OLI.shape
    rows = patterns_OLI.reshape(num_outer, length * width)
    scratch = _scratch(min(rows.shape[1], BLOCK), 0)
    for start in range(0, rows.shape[1], BLOCK):
        stop = min(start + BLOCK, rows.shape[1])
        for channel in range(start // width, (stop - 1) // width + 1):
            for column in range(max(channel * width, start), min((channel + 1) * width, stop)):
                scratch.before[column - start] = befores_L[channel]
                scratch.after[column - start] = afters_L[channel]
        given = scratch.tried[: stop - start]
        for outer in range(num_outer):
            row = rows[outer, start:stop]
            given[:] = row
            _round_row(row, scheme, zero, first + outer * rows.shape[1] + start, 1, scratch)
            for column in range(row.size):
                pattern = given[column]
                row[column] = pattern if np.int32(pattern & MAGNITUDE) > INFINITY else row[column]


@compiled
def _spread_factors(
    num_columns: int,
    width: int,
    scheme: BlockScheme,
    is_apart: bool,  # noqa: FBT001 - as above
    scratch: Scratch,
) -> None:
    """Write the factors of each column from the largest magnitudes and the stretches of blocks of such a width."""
    for block in range(_num_blocks(num_columns, width)):
        before, after = block_factors(scratch.largest[block], scheme, scratch.stretches[block], is_apart)
        for column in range(block * width, min((block + 1) * width, num_columns)):
            scratch.before[column] = before
            scratch.after[column] = after


@compiled
def _choose_scales(  # noqa: PLR0917 - as above
    band_RC: NDArray[np.int32],
    width: int,
    scheme: BlockScheme,
    zero: np.float32 | None,
    places_R2: NDArray[np.int64],
    scratch: Scratch,
) -> None:
    """Write for each block the stretch with which the squared errors of its values add up to less."""
    num_rows, num_columns = band_RC.shape
    count, tried_C = _num_blocks(num_columns, width), scratch.tried[:num_columns]
    scratch.errors[:] = 0.0
    for attempt in range(2):
        scratch.stretches[:count] = STRETCH if attempt else 1.0
        # Apart or not, the errors are those of the values as a whole.
        _spread_factors(num_columns, width, scheme, False, scratch)  # noqa: FBT003
        for row in range(num_rows):
            row_C = band_RC[row]
            tried_C[:] = row_C
            _round_row(tried_C, scheme, zero, places_R2[row, 0], places_R2[row, 1], scratch)
            for block in range(count):
                total = 0.0
                for column in range(block * width, min((block + 1) * width, num_columns)):
                    value = np.float64(np.int32(tried_C[column]).view(np.float32))
                    difference = value - np.float64(np.int32(row_C[column]).view(np.float32))
                    total += difference * difference
                scratch.errors[attempt, block] += total
    for block in range(count):
        scratch.stretches[block] = STRETCH if scratch.errors[1, block] < scratch.errors[0, block] else 1.0


@compiled
def _num_blocks(length: int, size: int) -> int:
    """Blocks of that size in a row of that length; the last one may be shorter."""
    return (length + size - 1) // size


@compiled
def round_tiles(  # noqa: PLR0917 - as above
    patterns_RC: NDArray[np.int32],
    tile: tuple[int, int],
    scheme: BlockScheme,
    zero: np.float32 | None,
    first_row: int,
    width: int,
) -> None:
    """Quantise a matrix in tiles of so many rows and columns, smaller ones at its edges; `zero` as in `_rounded`.

    Its first row is the row `first_row` of a matrix of which `width` rows lie beside each other in the tensor: their
    elements take turns in it.
    """
    num_rows, num_columns = patterns_RC.shape
    # As many columns at a time as stay in a cache.
    reach = min(max(1, BLOCK // tile[1]) * tile[1], num_columns)
    scratch = _scratch(reach, _num_blocks(reach, tile[1]))
    places_R2 = np.empty((min(tile[0], num_rows), 2), dtype=np.int64)
    for top in range(0, num_rows, tile[0]):
        for start in range(0, num_columns, reach):
            band_RC = patterns_RC[top : min(top + tile[0], num_rows), start : min(start + reach, num_columns)]
            for block in range(_num_blocks(band_RC.shape[1], tile[1])):
                largest = np.int32(0)
                for row in range(band_RC.shape[0]):
                    for column in range(block * tile[1], min((block + 1) * tile[1], band_RC.shape[1])):
                        largest = max(largest, np.int32(band_RC[row, column] & MAGNITUDE))
                scratch.largest[block] = largest
            for row in range(band_RC.shape[0]):
                place = _place(first_row + top + row, start, num_columns, width)
                places_R2[row, 0], places_R2[row, 1] = place, width
            scratch.stretches[:] = 1.0
            if scheme.four_over_six:
                _choose_scales(band_RC, tile[1], scheme, zero, places_R2, scratch)
            _spread_factors(band_RC.shape[1], tile[1], scheme, scheme.is_apart, scratch)
            for row in range(band_RC.shape[0]):
                _round_row(band_RC[row], scheme, zero, places_R2[row, 0], width, scratch)


@compiled
def _place(row: int, column: int, num_columns: int, width: int) -> int:
    """Where an element of a matrix is in the tensor in which `width` of its rows lie beside each other."""
    return (row // width * num_columns + column) * width + row % width


@compiled
def round_rows(patterns_RL: NDArray[np.int32], scheme: BlockScheme, block_size: int, zero: np.float32 | None) -> None:
    """Quantise rows in blocks of neighbours; neither what is wide nor what chooses between two scales.

    `round_tiles` gives the same in three times the time: it writes down the factors of every element.
    """
    num_rows, length = patterns_RL.shape
    for row in range(num_rows):
        for start in range(0, length, block_size):
            block = patterns_RL[row, start : min(start + block_size, length)]
            largest = np.int32(0)
            for index in range(block.size):
                largest = max(largest, np.int32(block[index] & MAGNITUDE))
            before, after = block_factors(largest, scheme, 1.0, scheme.is_apart)
            # Two loops, as in `_round_row`.
            if scheme.is_divided:
                for index in range(block.size):
                    scaled = np.divide(np.int32(block[index]).view(np.float32), before)
                    block[index] = _rounded(scaled, after, scheme, zero)
            else:
                for index in range(block.size):
                    block[index] = _rounded(np.int32(block[index]).view(np.float32) * before, after, scheme, zero)


@compiled
def round_columns(
    patterns_OLI: NDArray[np.int32], scheme: BlockScheme, block_size: int, zero: np.float32 | None
) -> None:
    """Quantise in blocks along the second of three dimensions, row after row as memory has them; not what is wide."""
    length, width = patterns_OLI.shape[1:]
    largest = np.empty(width, dtype=np.int32)
    before, after = np.empty((2, width), dtype=np.float32)
    for outer in range(patterns_OLI.shape[0]):
        for start in range(0, length, block_size):
            block = patterns_OLI[outer, start : min(start + block_size, length)]
            largest[:] = 0
            for row in range(block.shape[0]):
                for column in range(width):
                    magnitude = np.int32(block[row, column] & MAGNITUDE)
                    largest[column] = max(largest[column], magnitude)
            fill_factors(largest, scheme, before, after)
            for row in range(block.shape[0]):
                line = block[row]
                if scheme.is_divided:
                    for column in range(width):
                        scaled = np.divide(np.int32(line[column]).view(np.float32), before[column])
                        line[column] = _rounded(scaled, after[column], scheme, zero)
                else:
                    for column in range(width):
                        scaled = np.int32(line[column]).view(np.float32) * before[column]
                        line[column] = _rounded(scaled, after[column], scheme, zero)
