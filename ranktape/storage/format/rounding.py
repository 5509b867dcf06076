"""How are numbers that were computed in float64 brought into the type of a record, rounded once?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ranktape.storage.format.dtypes import DtypeRow


def round_once(values: np.ndarray[Any, Any], *, row: DtypeRow) -> np.ndarray[Any, Any]:
    """The nearest values of the type, ties to even; NaN stays NaN, and what is too large is what the type makes of it.

    ml_dtypes rounds float64 to float32 on the way to its own types, and then again: a number just above the middle of
    two becomes the middle, and then the even one. What is between two float32 becomes the one with an odd last bit
    here, which is in the middle of nothing that is shorter.
    """
    if not row.is_ml_dtype or values.dtype != np.float64:
        return values.astype(row.numpy_dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        widened = single.astype(np.float64)
        bits = np.atleast_1d(single).view(np.uint32)
        is_inexact = np.atleast_1d(np.isfinite(values) & (widened != values))
        is_beyond = np.atleast_1d(np.abs(widened) > np.abs(values))
        odd = np.where(is_inexact, (bits - (is_inexact & is_beyond)) | 1, bits).astype(np.uint32)
        return odd.view(np.float32).reshape(values.shape).astype(row.numpy_dtype)
