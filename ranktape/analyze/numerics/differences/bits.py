"""Which elements of two arrays have different bits, and how many representable numbers lie between them?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.storage.format.dtypes import dtype_name, dtype_row

if TYPE_CHECKING:
    from numpy.typing import NDArray


def differing_elements(
    a: NDArray[Any], b: NDArray[Any], *, wide_a: NDArray[Any], wide_b: NDArray[Any]
) -> NDArray[np.bool_]:
    """Which elements of two flat arrays have other bits; two NaN have not, whatever their payload.

    Arrays of different dtypes are looked at as they are in float64 or complex128: `wide_a` and `wide_b`.
    """
    one, other = (a, b) if a.dtype == b.dtype else (wide_a, wide_b)
    # Complex elements have 8 or 16 bytes: two words of one float each.
    is_complex = one.dtype.kind == "c"
    raw, others = (array.view(f"u{array.dtype.itemsize // (1 + is_complex)}") for array in (one, other))
    is_differing: NDArray[np.bool_] = np.asarray(raw != others)
    if is_complex:
        is_differing = is_differing[::2] | is_differing[1::2]
    if is_differing.any():
        is_differing &= ~(np.isnan(wide_a) & np.isnan(wide_b))
    return is_differing


def largest_ulp(a: NDArray[Any], b: NDArray[Any], *, is_finite: NDArray[np.bool_] | None) -> int | None:
    """The most steps from one representable number to the next that lie between elements of two flat arrays.

    Zeros of both signs are one number. Of complex elements both parts count. None where the arrays are not of one
    floating point dtype.

    Args:
        a: The one.
        b: The other.
        is_finite: Which elements are looked at: those that are finite in both; None for all.
    """
    row = dtype_row(dtype_name(a.dtype))
    if a.dtype != b.dtype or not (row.is_floating or row.is_complex):
        return None
    one, other = (a, b) if is_finite is None else (a[is_finite], b[is_finite])
    if not one.size:
        return 0
    if row.is_complex:
        part = f"f{row.itemsize // 2}"
        one, other = one.view(part), other.view(part)
    if row.numpy_dtype == ml_dtypes.float8_e8m0fnu:
        return int(np.abs(one.view(np.uint8).astype(np.int32) - other.view(np.uint8)).max())
    keys = [_keys(array) for array in (one, other)]
    if keys[0].dtype == np.int64:
        # The difference of two 64-bit keys may need 65 bits; as unsigned ones it fits.
        return int((np.maximum(*keys).view(np.uint64) - np.minimum(*keys).view(np.uint64)).max())
    return int(np.abs(keys[0] - keys[1]).max())


def _keys(array: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers in the order of the values, one apart where no other number lies between them."""
    num_bits = int(ml_dtypes.finfo(array.dtype).bits)  # type: ignore[no-untyped-call]
    patterns = array.view(f"i{array.dtype.itemsize}")
    # The 4- and 6-bit types fill a byte each: their sign is not its first bit.
    padding = 8 * array.dtype.itemsize - num_bits
    signed = (patterns << padding >> padding if padding else patterns).astype(_WIDER[array.dtype.itemsize])
    magnitudes = signed & ((1 << num_bits - 1) - 1)
    # All ones where the sign is set: a number minus itself, without a branch.
    signs = signed >> 8 * signed.dtype.itemsize - 1
    keys: NDArray[Any] = (magnitudes ^ signs) - signs
    return keys


_WIDER = {1: np.int32, 2: np.int32, 4: np.int64, 8: np.int64}
"""The type in which keys of so many bytes can be subtracted."""
