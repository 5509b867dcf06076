"""Packs the counts of a tensor and of its blocks into one array of integers, and refuses damaged ones.

First how often each 16-bit pattern occurs; then, for blocks along each of two axes, how often each magnitude occurs
in blocks of each kind. docs/format.md has the layout, word by word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.errors import DataError

NUM_CODES = 1 << 16
"""Bit patterns of a 16-bit value."""

NUM_MAGNITUDES = 1 << 15
"""The same without the sign."""

BLOCK_AXES = ("features", "tokens")
"""Axes of the matrix [all dimensions but the last, last] that a tensor is: the last, and the first."""

NUMBERS = ("block_size", "num_blocks", "zero_blocks", "zero_elements", "spoiled_blocks", "spoiled", "nan", "inf")
"""What is counted beside the cells, in the order in which it is stored."""

CUT_UNITS = 1 << 11
"""Cuts are stored in units of one in so many; significands of 16-bit types are even numbers of them."""

PADDING = 1 << 14
"""An array has a multiple of so many words, so that those of like tensors are of one length and lie in one stack."""

EXPONENT_BIAS = 1 << 10
"""Added to exponents, which are stored without a sign."""

WIDE_FROM = 1 << 32
"""Elements from which on words have 64 bits instead of 32."""

_MAX_CUTS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCounts:
    """How often each magnitude occurs in blocks of each kind, as it is stored; `BlockHistogram` answers questions."""

    axis: str
    """Along which axis the blocks lie: one of `BLOCK_AXES`."""
    block_size: int
    """Elements of a block; at the end of the axis it may have fewer."""
    num_blocks: int
    """Blocks of every kind."""
    zero_blocks: int
    """Blocks of nothing but zeros."""
    zero_elements: int
    """Elements of such blocks."""
    spoiled_blocks: int
    """Blocks that hold a NaN or an infinity."""
    spoiled: int
    """Finite elements of such blocks."""
    nan: int
    """Elements that are NaN."""
    inf: int
    """Elements that are infinite."""
    cuts: tuple[int, ...]
    """From which significands on a block's largest magnitude is of the next class, in units of 2**-11."""
    exponents: NDArray[np.int16]
    """Of each cell the exponent of the largest magnitude of its blocks."""
    classes: NDArray[np.uint8]
    """Of each cell the number of `cuts` that this has passed."""
    magnitudes: NDArray[np.uint16]
    """Of each cell the pattern of its elements, without the sign."""
    counts: NDArray[np.int64]
    """Elements of each cell."""

    @property
    def num_elements(self) -> int:
        """Elements of every kind."""
        return int(self.counts.sum()) + self.zero_elements + self.spoiled + self.nan + self.inf


def pack_histogram(counts: NDArray[np.int64], blocks: Sequence[BlockCounts]) -> NDArray[Any]:
    """What is kept of a tensor: the counts of its patterns, and those of its blocks along some axes."""
    sections = [word for one in blocks for word in _section(one)]
    words = np.concatenate([counts, [len(blocks)], *sections])
    dtype = "<u8" if counts.sum() >= WIDE_FROM else "<u4"
    packed = np.zeros(padded(words.size), dtype=dtype)
    packed[: words.size] = words
    return packed


def padded(num_words: int) -> int:
    """The length of an array that holds so many words."""
    return -(-num_words // PADDING) * PADDING


def unpack_blocks(words: NDArray[Any]) -> list[BlockCounts]:
    """The counts of blocks in what is kept of a tensor; none where patterns alone were counted.

    Raises:
        DataError: they are damaged.
    """
    if words.size == NUM_CODES:
        return []
    if words.size < NUM_CODES:
        raise _damaged("they are cut off")
    left = words[NUM_CODES:].astype(np.uint64, copy=False)

    def take(number: int) -> NDArray[np.uint64]:
        nonlocal left
        if number > left.size:
            raise _damaged("they are cut off")
        taken, left = left[:number], left[number:]
        return taken

    (number,) = take(1).tolist()
    if number > len(BLOCK_AXES):
        raise _damaged(f"they are along {number} axes")
    found = [_blocks(take) for _ in range(number)]
    if left.any():
        raise _damaged("something lies behind them")
    return found


def _damaged(why: str) -> DataError:
    return DataError(f"the counts of blocks are damaged: {why}")


def _section(one: BlockCounts) -> list[NDArray[np.int64]]:
    rows = one.exponents.astype(np.int64) + EXPONENT_BIAS << 8 | one.classes
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    sizes = np.diff(starts, append=rows.size)
    magnitudes = one.magnitudes.astype(np.int64)
    steps = np.diff(magnitudes, prepend=0)
    steps[starts] = magnitudes[starts]
    header = [BLOCK_AXES.index(one.axis), *(getattr(one, name) for name in NUMBERS)]
    header += [len(one.cuts), starts.size, rows.size, *one.cuts]
    of_rows = [rows[starts] >> 8, rows[starts] & 255, sizes]
    return [np.array(header, dtype=np.int64), np.stack(of_rows, axis=1).reshape(-1), steps, one.counts]


def _blocks(take: Callable[[int], NDArray[np.uint64]]) -> BlockCounts:
    axis, *numbers = take(1 + len(NUMBERS)).tolist()
    num_cuts, num_rows, num_cells = take(3).tolist()
    if axis >= len(BLOCK_AXES) or not numbers[0] or num_cuts > _MAX_CUTS or max(numbers) >= 1 << 62:
        raise _damaged("their header says what cannot be")
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
        raise _damaged("their cells cannot be")
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
    """The magnitudes of cells from their distances within each row."""
    sums = np.cumsum(steps)
    starts = np.cumsum(sizes) - sizes
    magnitudes = sums - np.repeat(sums[starts] - steps[starts], sizes)
    is_first = np.zeros(steps.size, dtype=np.bool_)
    is_first[starts] = True
    if ((steps == 0) & ~is_first).any() or (magnitudes >= NUM_MAGNITUDES).any():
        raise _damaged("their cells cannot be")
    return np.asarray(magnitudes, dtype=np.uint16)
