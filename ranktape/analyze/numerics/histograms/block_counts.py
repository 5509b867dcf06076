"""Packs the counts of a tensor and of its blocks into one array of integers, and detects damaged ones.

The counts of each 16-bit pattern are first. They are followed by the counts of each magnitude in blocks of each kind,
for blocks along each of up to two axes. docs/format.md describes the layout word by word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.errors import DataError

NUM_CODES = 1 << 16
"""Number of bit patterns of a 16-bit value."""

NUM_MAGNITUDES = 1 << 15
"""Number of bit patterns without the sign."""

BLOCK_AXES = ("features", "tokens")
"""The last and the first axis of a tensor as a matrix [all dimensions but the last, last]."""

NUMBERS = ("block_size", "num_blocks", "zero_blocks", "zero_elements", "spoiled_blocks", "spoiled", "nan", "inf")
"""The fields of `BlockCounts` that are single numbers, in the order in which they are stored."""

CUT_UNITS = 1 << 11
"""Number of units of cuts per 1. Significands of 16-bit types are even numbers of units."""

PADDING = 1 << 14
"""The length of an array is a multiple of it, so that similar tensors have arrays of one length, to be stacked."""

EXPONENT_BIAS = 1 << 10
"""Number added to exponents, which are stored unsigned."""

WIDE_FROM = 1 << 32
"""Number of elements from which words have 64 bits instead of 32."""

_MAX_CUTS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCounts:
    """How often each magnitude occurs in blocks of each kind, as stored.

    A cell is a magnitude in the blocks of a kind. `BlockHistogram` adds methods to these fields.
    """

    axis: str
    """The axis of the blocks, one of `BLOCK_AXES`."""
    block_size: int
    """Number of elements of a block. The last block along the axis may have fewer."""
    num_blocks: int
    """Number of all blocks."""
    zero_blocks: int
    """Number of blocks with only zeros."""
    zero_elements: int
    """Number of elements of blocks with only zeros."""
    spoiled_blocks: int
    """Number of blocks that contain NaN or an infinity."""
    spoiled: int
    """Number of finite elements of blocks that contain NaN or an infinity."""
    nan: int
    """Number of NaN."""
    inf: int
    """Number of infinities."""
    cuts: tuple[int, ...]
    """The significands at which the next class of largest magnitudes starts, in units of 2**-11."""
    exponents: NDArray[np.int16]
    """For each cell, the exponent of the largest magnitude of its blocks."""
    classes: NDArray[np.uint8]
    """For each cell, the number of `cuts` at or below the significand of the largest magnitude of its blocks."""
    magnitudes: NDArray[np.uint16]
    """For each cell, the bit pattern of its elements without the sign."""
    counts: NDArray[np.int64]
    """Number of elements of each cell."""

    @property
    def num_elements(self) -> int:
        """Number of all elements."""
        return int(self.counts.sum()) + self.zero_elements + self.spoiled + self.nan + self.inf


def pack_histogram(counts: NDArray[np.int64], blocks: Sequence[BlockCounts]) -> NDArray[Any]:
    """Pack the counts of a tensor's bit patterns and of its blocks into one array, which is stored."""
    sections = [word for counts_of_axis in blocks for word in _section(counts_of_axis)]
    words = np.concatenate([counts, [len(blocks)], *sections])
    dtype = "<u8" if counts.sum() >= WIDE_FROM else "<u4"
    packed = np.zeros(padded(words.size), dtype=dtype)
    packed[: words.size] = words
    return packed


def padded(num_words: int) -> int:
    """The length of an array with padding for that many words."""
    return -(-num_words // PADDING) * PADDING


def unpack_blocks(words: NDArray[Any]) -> list[BlockCounts]:
    """The counts of blocks in the stored array of a tensor; empty if only bit patterns were counted.

    Raises:
        DataError: the counts are damaged.
    """
    if words.size == NUM_CODES:
        return []
    if words.size < NUM_CODES:
        raise _damage_error("they are cut off")
    remaining = words[NUM_CODES:].astype(np.uint64, copy=False)

    def take(number: int) -> NDArray[np.uint64]:
        nonlocal remaining
        if number > remaining.size:
            raise _damage_error("they are cut off")
        taken, remaining = remaining[:number], remaining[number:]
        return taken

    (number,) = take(1).tolist()
    if number > len(BLOCK_AXES):
        raise _damage_error(f"they are along {number} axes")
    blocks = [_blocks(take) for _ in range(number)]
    if remaining.any():
        raise _damage_error("there is data after them")
    return blocks


def _damage_error(why: str) -> DataError:
    return DataError(f"the counts of blocks are damaged: {why}")


def _section(blocks: BlockCounts) -> list[NDArray[np.int64]]:
    rows = blocks.exponents.astype(np.int64) + EXPONENT_BIAS << 8 | blocks.classes
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    sizes = np.diff(starts, append=rows.size)
    magnitudes = blocks.magnitudes.astype(np.int64)
    steps = np.diff(magnitudes, prepend=0)
    steps[starts] = magnitudes[starts]
    header = [BLOCK_AXES.index(blocks.axis), *(getattr(blocks, name) for name in NUMBERS)]
    header += [len(blocks.cuts), starts.size, rows.size, *blocks.cuts]
    row_header = [rows[starts] >> 8, rows[starts] & 255, sizes]
    return [np.array(header, dtype=np.int64), np.stack(row_header, axis=1).reshape(-1), steps, blocks.counts]


def _blocks(take: Callable[[int], NDArray[np.uint64]]) -> BlockCounts:
    axis, *numbers = take(1 + len(NUMBERS)).tolist()
    num_cuts, num_rows, num_cells = take(3).tolist()
    if axis >= len(BLOCK_AXES) or not numbers[0] or num_cuts > _MAX_CUTS or max(numbers) >= 1 << 62:
        raise _damage_error("their header has impossible values")
    cuts = tuple(take(num_cuts).tolist())
    rows = take(3 * num_rows).reshape(num_rows, 3)
    steps, counts = take(num_cells), take(num_cells)
    exponents, classes, sizes = rows.T
    ends = np.cumsum(sizes, dtype=np.uint64)
    is_sound = (
        (exponents < 2 * EXPONENT_BIAS).all()
        and (classes <= num_cuts).all()
        and (sizes > 0).all()
        and (sizes <= NUM_MAGNITUDES).all()
        and int(ends[-1] if num_rows else 0) == num_cells
        and (np.diff((exponents << np.uint64(8) | classes).astype(np.int64)) > 0).all()
        and (steps < NUM_MAGNITUDES).all()
        and (counts > 0).all()
        and (counts < 1 << 62).all()
        and sorted(set(cuts)) == list(cuts)
    )
    if not is_sound:
        raise _damage_error("their cells have impossible values")
    wide = sizes.astype(np.int64)
    return BlockCounts(
        axis=BLOCK_AXES[axis],
        **dict(zip(NUMBERS, numbers, strict=True)),
        cuts=cuts,
        exponents=np.repeat(exponents.astype(np.int16) - EXPONENT_BIAS, wide).astype(np.int16),
        classes=np.repeat(classes.astype(np.uint8), wide),
        magnitudes=_summed(steps.astype(np.int64), wide),
        counts=counts.astype(np.int64),
    )


def _summed(steps: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The magnitudes of cells, given their differences within each row."""
    sums = np.cumsum(steps)
    starts = np.cumsum(sizes) - sizes
    magnitudes = sums - np.repeat(sums[starts] - steps[starts], sizes)
    is_first = np.zeros(steps.size, dtype=np.bool_)
    is_first[starts] = True
    if ((steps == 0) & ~is_first).any() or (magnitudes >= NUM_MAGNITUDES).any():
        raise _damage_error("their cells have impossible values")
    return np.asarray(magnitudes, dtype=np.uint16)
