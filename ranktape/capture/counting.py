"""What is left of a tensor when there is no room for its values?

How often each bit pattern of a 16-bit value occurs in it: every question about single values can be answered from
that (`Keep.HISTOGRAM`). Wider values are rounded to what the operation computed in, as analysis would do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranktape.analyze.histogram import count_values
from ranktape.storage.dtypes import numpy_dtype

_HALVES = frozenset({"bfloat16", "float16"})
_WIDE = frozenset({"float32", "float64"})

_MAX_ROUNDED = 1 << 20
"""Wide values that are rounded at once: a copy of a whole tensor could be larger than the budget."""


def counted_dtype(dtype: str, *, compute_dtype: str) -> str | None:
    """The dtype whose patterns are counted for a tensor; None for one that only its values can stand for."""
    if dtype in _HALVES:
        return dtype
    return compute_dtype if dtype in _WIDE and compute_dtype in _HALVES else None


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
