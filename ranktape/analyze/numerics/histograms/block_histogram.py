"""Counts, of blocks that share a scale, how often each value occurs beside each kind of block maximum.

All that a power-of-two scale can depend on, by any of the scale rules, is the exponent of the block's largest
magnitude and on which side of a few cuts its significand lies. Counts of (exponent, class of the significand,
magnitude) therefore answer every format, rule and offset at once, exactly.
"""

# Shapes: O = everything before the axis of the blocks, N = the axis, I = everything after it, M = magnitudes, R = rows.

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Format
from ranktape.analyze.numerics.formats.kernels import ONE_FIELD
from ranktape.analyze.numerics.histograms.block_counts import CUT_UNITS, NUM_MAGNITUDES, NUMBERS, BlockCounts
from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.pieces import by_memory, each, in_three, num_threads, pieces
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, raise_of
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_name, dtype_row

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockHistogram(BlockCounts):
    """How often each magnitude occurs in blocks of each kind: one cell for each (exponent, class, magnitude) seen.

    Cells are sorted by these three. They hold the elements of blocks that are neither all zero nor hold a NaN or an
    infinity: those have no scale that a rule could give, and are counted apart. The axis is a number, counted from the
    end, or one of `BLOCK_AXES`.
    """

    dtype: np.dtype[Any]
    """The 16-bit type whose patterns `magnitudes` are; bfloat16 for types of 8 bits, of which it holds every value."""

    @property
    def num_cells(self) -> int:
        """Cells that hold an element."""
        return self.counts.size

    @property
    def values(self) -> NDArray[np.float64]:
        """Of each cell the magnitude as a number."""
        return pattern_values(self.dtype)[self.magnitudes]

    def answers(self, rule: ScaleRule, element: Format) -> bool:
        """Whether the scales of that rule for elements of that format follow from the classes."""
        significands = significands_of(self.dtype)
        is_doubled = _is_doubled(significands, rule, element)
        classes = classes_of(significands, cuts=self.cuts)
        return not set(classes[is_doubled]) & set(classes[~is_doubled])

    def scale_exponents(self, rule: ScaleRule, element: Format) -> NDArray[np.int64]:
        """Of each cell the exponent of the block's scale, before an offset is added and the sum is clamped.

        Raises:
            UsageError: the classes do not tell.
        """
        if not self.answers(rule, element):
            raise UsageError(
                f"blocks counted in classes do not tell the scales of rule {rule} for elements of {element.name}: "
                f"use another rule, or the values themselves"
            )
        significands = significands_of(self.dtype)
        step_of_class = np.zeros(len(self.cuts) + 1, dtype=np.int64)
        step_of_class[classes_of(significands, cuts=self.cuts)] = _is_doubled(significands, rule, element)
        return self.exponents + step_of_class[self.classes] - element.emax


def _is_doubled(significands: NDArray[np.float64], rule: ScaleRule, element: Format) -> NDArray[np.bool_]:
    """Of which largest magnitudes the scale is twice as large."""
    doubled: NDArray[np.bool_] = significands.view(np.int64) + raise_of(rule, element=element) >= TWO_BITS
    return doubled


TWO_BITS = (ONE_FIELD + 1) << 52
"""The bits of the float64 2.0."""

APART = NUMBERS[1:]
"""What a histogram of blocks counts beside its cells."""

CELLS = ("exponents", "classes", "magnitudes", "counts")
"""What it holds of each cell."""


def count_blocks(
    array: NDArray[Any],
    *,
    axis: int = -1,
    block_size: int = 32,
    threads: int | None = None,
    rounded_to: np.dtype[Any] | None = None,
) -> BlockHistogram:
    """The joint counts of an array of a floating type of at most 16 bits, in blocks along one axis.

    Of a wider one, too, where `rounded_to` is a type of at most 16 bits: its values are rounded to that first, to
    nearest, ties to even.

    A block with a NaN or an infinity is counted apart as a whole, and so is one of nothing but zeros; signs are not
    told apart. Empty input counts nothing; an array without dimensions is one block of one element.

    Any shape and layout, without a copy of the whole; at the end of the axis a block has what is left. The counts are
    the same whatever `threads` is; None is one thread on each core.

    Raises:
        UsageError: the elements are wider or of no floating type, there is no such axis, or a block has no element.
    """
    found = count_few_cells(array, axis=axis, block_size=block_size, threads=threads, rounded_to=rounded_to)
    assert found is not None, "no number of cells is too large"
    return found


def count_few_cells(
    array: NDArray[Any],
    *,
    axis: int,
    block_size: int,
    threads: int | None,
    rounded_to: np.dtype[Any] | None = None,
    max_cells: int | None = None,
) -> BlockHistogram | None:
    """What `count_blocks` counts, or None where that has more than `max_cells` cells: patterns drawn by lot have.

    Raises:
        UsageError: as `count_blocks`.
    """
    dtype = _counted_dtype(array.dtype, rounded_to)
    shaped = array.reshape(1) if array.ndim == 0 else array
    if not -shaped.ndim <= axis < shaped.ndim:
        raise UsageError(f"axis={axis} is not an axis of an array of shape {array.shape}")
    if block_size < 1:
        raise UsageError(f"block_size={block_size} is not a number of elements: give 1 or more")
    from_front = axis % shaped.ndim
    counted = count_in_tables(
        shaped, axis=from_front, block_size=block_size, dtype=dtype, threads=threads, max_cells=max_cells
    )
    if counted is None:
        return None
    axis_from_end = str(from_front - shaped.ndim)
    return histogram_of(counted, dtype=dtype, axis=axis_from_end, block_size=block_size, num_elements=array.size)


@functools.cache
def _counted_dtype(given: np.dtype[Any], rounded_to: np.dtype[Any] | None) -> np.dtype[Any]:
    dtype = given if rounded_to is None else rounded_to
    row = dtype_row(dtype_name(dtype))
    if not row.is_floating or not dtype_row(dtype_name(given)).is_floating or row.itemsize > HALF_NBYTES:
        raise UsageError(
            f"{given} cannot be counted in blocks: use a floating type of at most 16 bits; "
            f"sweep_array takes wider values as they are"
        )
    return dtype if row.itemsize == HALF_NBYTES else _BFLOAT16


def histogram_of(
    counted: Counted, *, dtype: np.dtype[Any], axis: str, block_size: int, num_elements: int
) -> BlockHistogram:
    """The histogram of what was counted in rows; the cells are taken out of it."""
    rows = rows_of(dtype)
    last = rows.ends.size - 1
    spoiled_magnitudes, spoiled_counts = counted.cells.pop(last, NO_CELLS)
    found = sorted(counted.cells)
    sizes = [counted.cells[row][0].size for row in found]
    magnitudes, counts = np.empty(sum(sizes), dtype=np.uint16), np.empty(sum(sizes), dtype=np.int64)
    end = 0
    for row, size in zip(found, sizes, strict=True):
        # Taken out one after the other: twice all cells could be more memory than all tables.
        magnitudes[end : end + size], counts[end : end + size] = counted.cells.pop(row)
        end += size
    return BlockHistogram(
        dtype=dtype,
        axis=axis,
        block_size=block_size,
        cuts=CUTS,
        exponents=np.repeat(rows.exponents[found], sizes),
        classes=np.repeat(rows.classes[found], sizes),
        magnitudes=magnitudes,
        counts=counts,
        num_blocks=int(counted.blocks.sum()),
        zero_blocks=int(counted.blocks[0]),
        zero_elements=num_elements - int(counts.sum()) - int(spoiled_counts.sum()),
        spoiled_blocks=int(counted.blocks[last]),
        spoiled=int(spoiled_counts[spoiled_magnitudes < rows.infinity].sum()),
        nan=int(spoiled_counts[spoiled_magnitudes > rows.infinity].sum()),
        inf=int(spoiled_counts[spoiled_magnitudes == rows.infinity].sum()),
    )
