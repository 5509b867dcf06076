"""What is kept of a tensor where there is no room for its values, or where they are not asked for?

How often each bit pattern of a 16-bit value occurs in it: every question about single values can be answered from
that (`Keep.HISTOGRAM`). Wider values are rounded to what the operation computed in, as analysis would do. Or what its
values add up to (`Keep.STATISTICS`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.histogram import count_values
from ranktape.analyze.moments import statistics_of
from ranktape.capture.writing.kept_nbytes import counted_dtype
from ranktape.storage.dtypes import numpy_dtype
from ranktape.storage.record import Keep

if TYPE_CHECKING:
    from ranktape.storage.record import RecordInfo

_MAX_ROUNDED = 1 << 20
"""Wide values that are rounded at once: a copy of a whole tensor could be larger than the budget."""


def reduce_to(
    keep: str, array: np.ndarray[Any, Any], *, info: RecordInfo
) -> tuple[np.ndarray[Any, Any], RecordInfo] | None:
    """What is kept of a tensor in the place of its values, with its identity; None where the values are kept.

    That is so where they are asked for, and where a histogram is and cannot be: only the values can stand for what
    was computed in 32 bits.
    """
    if keep == Keep.STATISTICS:
        kept = statistics_of(array).to_vector()
    elif keep == Keep.HISTOGRAM and (dtype := counted_dtype(info.dtype, compute_dtype=info.compute_dtype)) is not None:
        kept = count_codes(array, dtype=dtype)
    else:
        return None
    return kept, dataclasses.replace(info, keep=keep, nbytes=kept.nbytes)


def is_countable(info: RecordInfo) -> bool:
    """Whether a histogram can stand for the values of a tensor."""
    return counted_dtype(info.dtype, compute_dtype=info.compute_dtype) is not None


def count_codes(array: np.ndarray[Any, Any], *, dtype: str) -> np.ndarray[Any, Any]:
    """How often each pattern of the dtype occurs: 65,536 counts, of 32 bits where that is enough, else of 64."""
    flat = array.reshape(-1)
    target = numpy_dtype(dtype)
    if flat.dtype == target:
        counts = count_values(flat).counts
    else:
        counts = np.zeros(1 << 16, dtype=np.int64)
        for start in range(0, flat.size, _MAX_ROUNDED):
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = flat[start : start + _MAX_ROUNDED].astype(target)
            counts += count_values(rounded).counts
    return counts.astype("<u4" if counts.max() < 1 << 32 else "<u8")
