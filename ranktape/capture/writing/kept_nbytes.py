"""Tells what that takes which is kept of a tensor in the place of its values.

Known without the values, and without what counts them, so that the trainer can say it.
"""

from __future__ import annotations

from ranktape.storage.format.block_counts import BLOCK_AXES, NUM_CODES, padded
from ranktape.storage.format.record_info import Keep
from ranktape.storage.format.statistics import STATISTICS

STATISTICS_NBYTES = 8 * len(STATISTICS)

_TYPICAL_CELLS = 28_000
"""Kinds of elements in blocks along one axis, where values are normally distributed; heavier tails have up to ten times
as many."""

_CELL_WORDS = 2
_WORD_NBYTES = 4

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_HALVES = frozenset({"bfloat16", "float16"})
_WIDE = frozenset({"float32", "float64"})


def counted_dtype(dtype: str, *, compute_dtype: str) -> str | None:
    """The dtype whose patterns are counted for a tensor; None for one that only its values can stand for."""
    if dtype in _HALVES:
        return dtype
    return compute_dtype if dtype in _WIDE and compute_dtype in _HALVES else None


def kept_nbytes(keep: str, *, nbytes: int, dtype: str, compute_dtype: str) -> int:
    """Bytes of what is kept of a tensor whose values take `nbytes`, before it is packed.

    Of a histogram what it takes where the values are normally distributed: packed, as it always is, about a tenth
    of that.
    """
    if keep == Keep.STATISTICS:
        return STATISTICS_NBYTES
    if keep == Keep.HISTOGRAM and counted_dtype(dtype, compute_dtype=compute_dtype) is not None:
        num_cells = min(nbytes // _ITEMSIZES[dtype], _TYPICAL_CELLS)
        return _WORD_NBYTES * padded(NUM_CODES + 1 + len(BLOCK_AXES) * _CELL_WORDS * num_cells)
    return nbytes
