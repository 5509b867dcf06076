"""What takes that which is kept of a tensor in the place of its values?

Known without the values, and without what counts them, so that the trainer can say it.
"""

from __future__ import annotations

from ranktape.storage.record import Keep
from ranktape.storage.statistics import STATISTICS

HISTOGRAM_NBYTES = 4 << 16
"""Of the counts of all 16-bit patterns, in 32 bits each; of a billion values and more it may be twice that."""

STATISTICS_NBYTES = 8 * len(STATISTICS)

_HALVES = frozenset({"bfloat16", "float16"})
_WIDE = frozenset({"float32", "float64"})


def counted_dtype(dtype: str, *, compute_dtype: str) -> str | None:
    """The dtype whose patterns are counted for a tensor; None for one that only its values can stand for."""
    if dtype in _HALVES:
        return dtype
    return compute_dtype if dtype in _WIDE and compute_dtype in _HALVES else None


def kept_nbytes(keep: str, *, nbytes: int, dtype: str, compute_dtype: str) -> int:
    """Bytes of what is kept of a tensor whose values take `nbytes`."""
    if keep == Keep.STATISTICS:
        return STATISTICS_NBYTES
    if keep == Keep.HISTOGRAM and counted_dtype(dtype, compute_dtype=compute_dtype) is not None:
        return HISTOGRAM_NBYTES
    return nbytes
