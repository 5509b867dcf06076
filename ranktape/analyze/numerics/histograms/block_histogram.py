"""Counts how often each magnitude occurs in blocks with each kind of largest magnitude.

With any of the scale rules, a power-of-two scale depends only on the exponent of the block's largest magnitude and on
which of a few cuts its significand reaches. Counts of (exponent, class of the significand, magnitude) are therefore
sufficient to compute exact errors of every format, rule and offset.
"""

# Shapes: O = all dimensions before the axis of the blocks, N = the axis, I = all after it, M = magnitudes, R = rows.

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
from ranktape.analyze.numerics.pieces import as_three_dims, map_in_threads, memory_order, num_threads, pieces
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, raise_of
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_name, dtype_row

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_MAGNITUDE = np.int16(NUM_MAGNITUDES - 1)


@compiled
def _count_last(  # noqa: PLR0917 - numba has no keyword-only arguments
    patterns_ON: NDArray[np.int16],
    block_size: int,
    row_of_M: NDArray[np.uint16],
    starts_R: NDArray[np.int64],
    blocks_R: NDArray[np.int64],
    counts: NDArray[np.uint32],
) -> None:
    """Count the blocks along the last axis by row, and their magnitudes in the tables of the rows.

    The patterns of a floating-point type are in the order of the magnitudes: the largest pattern is the largest value.
    """
    for before in range(patterns_ON.shape[0]):
        line = patterns_ON[before]
        for start in range(0, line.size, block_size):
            patterns, largest = line[start : start + block_size], np.int16(0)
            for position in range(patterns.size):
                largest = max(largest, np.int16(patterns[position] & _MAGNITUDE))
            row = row_of_M[largest]
            blocks_R[row] += 1
            # Unsigned, so that numba does not check for negative indices.
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
    """`_count_last` for blocks along the second of three axes; elements are read in memory order."""
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
"""All significands at which a rule raises the scale for the elements of some scheme, in units of 2**-11.

Significands of 16-bit types are even numbers of units, so an odd cut is just above one of them.
"""


def classes_of(significands: NDArray[np.float64], *, cuts: tuple[int, ...]) -> NDArray[np.int64]:
    """The class of each significand: the number of cuts that are less than or equal to it."""
    classes: NDArray[np.int64] = (significands[..., np.newaxis] * CUT_UNITS >= np.array(cuts)).sum(axis=-1)
    return classes


@functools.cache
def significands_of(dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """All significands of a floating-point type, in [1, 2)."""
    num_bits = ml_dtypes.finfo(dtype).nmant  # type: ignore[no-untyped-call]
    return 1 + np.arange(1 << num_bits) / (1 << num_bits)


class Rows(NamedTuple):
    """The kinds of blocks of a 16-bit type: row 0 has only zeros, and the last row contains NaN or infinities."""

    of_magnitude: NDArray[np.uint16]
    """The row of a block for each pattern of its largest magnitude. Rows are in the order of magnitudes."""
    exponents: NDArray[np.int16]
    """Exponent of the largest magnitudes of each row; meaningless for the first and the last row."""
    classes: NDArray[np.uint8]
    """Class of the largest magnitudes of each row; meaningless for the first and the last row."""
    ends: NDArray[np.int64]
    """For each row, the first pattern beyond those that elements of its blocks can have."""
    infinity: int
    """The pattern of infinity."""


@functools.cache
def rows_of(dtype: np.dtype[Any]) -> Rows:
    """The rows of a 16-bit floating-point type with `CUTS`."""
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
"""Upper limit of the elements that are counted in one table, whose counts have 32 bits."""

Cells = tuple[NDArray[np.uint16], NDArray[np.int64]]
"""Ascending patterns of magnitudes and their counts."""

NO_CELLS: Cells = np.zeros(0, dtype=np.uint16), np.zeros(0, dtype=np.int64)


def count_in_tables(
    array: NDArray[Any],
    *,
    axis: int,
    block_size: int,
    dtype: np.dtype[Any],
    threads: int | None,
    max_cells: int | None = None,
) -> tuple[NDArray[np.int64], dict[int, Cells]] | None:
    """The number of blocks of each row, and the cells of each row that has blocks, except row 0; None if too many.

    The array has at least one dimension. Its values are converted to `dtype`. At most `max_cells` are counted.

    Raises:
        UsageError: a block has too many elements for its counts, or `threads` is less than 1.
    """
    block_length = max(1, min(block_size, array.shape[axis]))
    if block_length >= _MAX_COUNTED:
        raise UsageError(f"blocks of {block_length} elements cannot be counted: use less than {_MAX_COUNTED}")
    ordered, moved_axis = memory_order(array, axis=axis)
    parts = pieces(ordered, axis=moved_axis, block_size=block_length)
    num_workers = max(1, min(num_threads(threads), len(parts)))
    num_parts = min(max(num_workers, -(-2 * array.size // _MAX_COUNTED)), max(1, len(parts)))
    rows = rows_of(dtype)
    starts_R = np.cumsum(rows.ends) - rows.ends

    def count_part(part_number: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        # Each row has a table. Pages of a table without counts take no memory.
        blocks_R, counts = np.zeros_like(starts_R), np.zeros(int(rows.ends.sum()), dtype=np.uint32)
        for part in parts[part_number::num_parts]:
            patterns_ONI = as_three_dims(_patterns(part, dtype=dtype), axis=moved_axis)
            arguments = block_length, rows.of_magnitude, starts_R, blocks_R, counts
            if patterns_ONI.shape[2] == 1:
                _count_last(patterns_ONI[:, :, 0], *arguments)
            else:
                _count_inside(patterns_ONI, *arguments)
        return blocks_R, counts

    part_counts = map_in_threads(count_part, range(num_parts), threads=num_workers)
    blocks = np.sum([blocks_R for blocks_R, _ in part_counts], axis=0)
    cells, num_cells = {}, 0
    for row in (1 + np.flatnonzero(blocks[1:])).tolist():
        table = slice(int(starts_R[row]), int(starts_R[row] + rows.ends[row]))
        first, *others = (counts[table] for _, counts in part_counts)
        total = sum(others, start=first.astype(np.int64)) if others else first
        occurring = np.flatnonzero(total)
        cells[row] = occurring.astype(np.uint16), total[occurring].astype(np.int64)
        num_cells += occurring.size
        if max_cells is not None and num_cells > max_cells:
            return None
    return blocks, cells


def _patterns(part: NDArray[Any], *, dtype: np.dtype[Any]) -> NDArray[np.int16]:
    if part.dtype == dtype:
        return part.view(np.int16)
    with np.errstate(over="ignore", invalid="ignore"):
        if part.dtype.itemsize == 1:
            all_patterns = np.arange(1 << 8, dtype=np.uint8).view(part.dtype).astype(dtype).view(np.int16)
            return all_patterns[part.view(np.uint8)]
        return part.astype(dtype).view(np.int16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockHistogram(BlockCounts):
    """How often each magnitude occurs in blocks of each kind: a cell for each (exponent, class, magnitude) that occurs.

    Cells are sorted by these three. Blocks with only zeros and blocks with NaN or infinities have no scale by a rule;
    their elements are in no cell and are counted separately. The axis is one of `BLOCK_AXES`, or a number as a string,
    counted from the end.
    """

    dtype: np.dtype[Any]
    """The 16-bit dtype of the patterns `magnitudes`; bfloat16 for 8-bit dtypes, all of whose values it represents."""

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return self.counts.size

    @property
    def values(self) -> NDArray[np.float64]:
        """The magnitude of each cell as a number."""
        return pattern_values(self.dtype)[self.magnitudes]

    def supports(self, rule: ScaleRule, element: Format) -> bool:
        """Whether the classes determine the scales of the rule for elements of the format."""
        significands = significands_of(self.dtype)
        is_doubled = _is_doubled(significands, rule, element)
        classes = classes_of(significands, cuts=self.cuts)
        return not set(classes[is_doubled]) & set(classes[~is_doubled])

    def scale_exponents(self, rule: ScaleRule, element: Format) -> NDArray[np.int64]:
        """The exponent of the scale of each cell's blocks, before an offset is added and the sum is clamped.

        Raises:
            UsageError: the classes do not determine the scales.
        """
        if not self.supports(rule, element):
            raise UsageError(
                f"blocks counted in classes do not tell the scales of rule {rule} for elements of {element.name}: "
                f"use another rule, or the values themselves"
            )
        significands = significands_of(self.dtype)
        step_of_class = np.zeros(len(self.cuts) + 1, dtype=np.int64)
        step_of_class[classes_of(significands, cuts=self.cuts)] = _is_doubled(significands, rule, element)
        return self.exponents + step_of_class[self.classes] - element.emax


def _is_doubled(significands: NDArray[np.float64], rule: ScaleRule, element: Format) -> NDArray[np.bool_]:
    """For which significands of the largest magnitude the rule doubles the scale."""
    doubled: NDArray[np.bool_] = significands.view(np.int64) + raise_of(rule, element=element) >= TWO_BITS
    return doubled


TWO_BITS = (ONE_FIELD + 1) << 52
"""The bits of the float64 2.0."""

EXCLUDED = NUMBERS[1:]
"""The fields of a histogram of blocks that are counts of blocks and of elements outside of cells."""

CELLS = ("exponents", "classes", "magnitudes", "counts")
"""The fields of a histogram of blocks with a number for each cell."""


def count_blocks(
    array: NDArray[Any],
    *,
    axis: int = -1,
    block_size: int = 32,
    threads: int | None = None,
    rounded_to: np.dtype[Any] | None = None,
) -> BlockHistogram:
    """The joint counts of a floating-point array with a dtype of at most 16 bits, in blocks along one axis.

    With `rounded_to`, a dtype of at most 16 bits, the array may be wider: values are first rounded to nearest, ties to
    even.

    Blocks with NaN or infinities and blocks with only zeros are counted separately. Signs are ignored. All counts of an
    empty array are 0. An array without dimensions is one block of one element. The last block along the axis may be
    shorter.

    Arrays of any shape and layout are counted without a copy of the whole. `threads` does not change the counts. If it
    is None, there is one thread per core.

    Raises:
        UsageError: the dtype is wider or not a floating-point one, there is no such axis, or `block_size` or `threads`
            is less than 1.
    """
    histogram = count_few_cells(array, axis=axis, block_size=block_size, threads=threads, rounded_to=rounded_to)
    assert histogram is not None, "no number of cells is too large"
    return histogram


def count_few_cells(
    array: NDArray[Any],
    *,
    axis: int,
    block_size: int,
    threads: int | None,
    rounded_to: np.dtype[Any] | None = None,
    max_cells: int | None = None,
) -> BlockHistogram | None:
    """`count_blocks`, or None if there are more than `max_cells` cells, as for random bit patterns.

    Raises:
        UsageError: as for `count_blocks`.
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
    return _build_histogram(*counted, dtype=dtype, axis=axis_from_end, block_size=block_size, num_elements=array.size)


@functools.cache
def _counted_dtype(stored: np.dtype[Any], rounded_to: np.dtype[Any] | None) -> np.dtype[Any]:
    dtype = stored if rounded_to is None else rounded_to
    row = dtype_row(dtype_name(dtype))
    if not row.is_floating or not dtype_row(dtype_name(stored)).is_floating or row.itemsize > HALF_NBYTES:
        raise UsageError(
            f"{stored} cannot be counted in blocks: use a floating type of at most 16 bits; "
            f"sweep_array takes wider values as they are"
        )
    return dtype if row.itemsize == HALF_NBYTES else _BFLOAT16


def _build_histogram(
    blocks: NDArray[np.int64],
    cells: dict[int, Cells],
    *,
    dtype: np.dtype[Any],
    axis: str,
    block_size: int,
    num_elements: int,
) -> BlockHistogram:
    """The histogram of the counts of rows. Removes the cells from `cells`."""
    rows = rows_of(dtype)
    last = rows.ends.size - 1
    spoiled_magnitudes, spoiled_counts = cells.pop(last, NO_CELLS)
    row_ids = sorted(cells)
    sizes = [cells[row][0].size for row in row_ids]
    magnitudes, counts = np.empty(sum(sizes), dtype=np.uint16), np.empty(sum(sizes), dtype=np.int64)
    end = 0
    for row, size in zip(row_ids, sizes, strict=True):
        # Rows are removed one by one, because two copies of all cells could take more memory than the tables.
        magnitudes[end : end + size], counts[end : end + size] = cells.pop(row)
        end += size
    return BlockHistogram(
        dtype=dtype,
        axis=axis,
        block_size=block_size,
        cuts=CUTS,
        exponents=np.repeat(rows.exponents[row_ids], sizes),
        classes=np.repeat(rows.classes[row_ids], sizes),
        magnitudes=magnitudes,
        counts=counts,
        num_blocks=int(blocks.sum()),
        zero_blocks=int(blocks[0]),
        zero_elements=num_elements - int(counts.sum()) - int(spoiled_counts.sum()),
        spoiled_blocks=int(blocks[last]),
        spoiled=int(spoiled_counts[spoiled_magnitudes < rows.infinity].sum()),
        nan=int(spoiled_counts[spoiled_magnitudes > rows.infinity].sum()),
        inf=int(spoiled_counts[spoiled_magnitudes == rows.infinity].sum()),
    )
