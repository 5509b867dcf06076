"""Counts, of blocks that share a scale, how often each value occurs beside each kind of block maximum.

All that a power-of-two scale can depend on, by any of the scale rules, is the exponent of the block's largest
magnitude and on which side of a few cuts its significand lies. Counts of (exponent, class of the significand,
magnitude) therefore answer every format, rule and offset at once, exactly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Format
from ranktape.analyze.numerics.formats.kernels import ONE_FIELD
from ranktape.analyze.numerics.histograms.block_counts import NUMBERS, BlockCounts
from ranktape.analyze.numerics.histograms.block_tables import (
    CUTS,
    NO_CELLS,
    Counted,
    classes_of,
    count_in_tables,
    rows_of,
    significands_of,
)
from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, raise_of
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_name, dtype_row

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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
