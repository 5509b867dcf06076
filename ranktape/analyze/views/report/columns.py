"""How do columns of numbers travel in a page: in as few characters as they need, to be read without parsing each?

Every column is base64 of little-endian numbers, of the narrowest type that holds them: whole numbers exactly, others
with the 24 bits of a float32, which is seven digits. A column of one value is that value.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Packed = dict[str, Any]
"""What JSON holds of a column: `type`, and `data` or `value`."""

_INTEGERS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("i1"), np.dtype("<i2"), np.dtype("<i4"))
_SMALLEST, _LARGEST = 1e-38, 3e38
"""Magnitudes that a float32 holds with all of its digits."""


def packed(values: Sequence[float | None] | NDArray[Any]) -> Packed:
    """A column as JSON holds it; NaN for None, infinities as they are."""
    column = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    if column.size and np.all((column == column[0]) | (np.isnan(column) & np.isnan(column[0]))):
        return {"type": "same", "value": None if np.isnan(column[0]) else _text_if_infinite(float(column[0]))}
    dtype = _narrowest(column)
    return {"type": dtype.str.lstrip("<|"), "data": base64.b64encode(column.astype(dtype).tobytes()).decode("ascii")}


def unpacked(column: Packed, *, count: int) -> NDArray[np.float64]:
    """What `packed` was given, with the digits that it kept: what the page's script reads."""
    if column["type"] == "same":
        return np.full(count, math.nan if column["value"] is None else float(column["value"]))
    return np.frombuffer(base64.b64decode(column["data"]), dtype=np.dtype(column["type"])).astype(np.float64)


def _narrowest(column: NDArray[np.float64]) -> np.dtype[Any]:
    magnitudes = np.abs(column[np.isfinite(column) & (column != 0)])
    if np.isfinite(column).all() and np.array_equal(column, np.rint(column)):
        for dtype in _INTEGERS:
            limits = np.iinfo(dtype)
            if limits.min <= column.min(initial=0) and column.max(initial=0) <= limits.max:
                return dtype
    is_held = magnitudes.min(initial=_LARGEST) >= _SMALLEST and magnitudes.max(initial=0) <= _LARGEST
    return np.dtype("<f4") if is_held else np.dtype("<f8")


def _text_if_infinite(value: float) -> float | str:
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
