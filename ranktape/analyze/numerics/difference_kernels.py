"""Compiled loops over two arrays that should be alike, and the distance of values in bits."""

# Shapes: B = blocks, M = sums.

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.kernels import BLOCK, compiled_sums
from ranktape.storage.format.dtypes import dtype_name, dtype_row


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


SUMS = (
    "finite",
    "absolute",
    "largest",
    "relative",
    "largest_relative",
    "zeros",
    "square_a",
    "square_b",
    "product",
    "square_difference",
    "real_a",
    "imaginary_a",
    "real_b",
    "imaginary_b",
    "moment_a",
    "moment_b",
    "moment_ab",
    "nan_both",
    "nan_one",
    "infinite_alike",
    "infinite_apart",
)
"""What `add_up` writes of each block, in its order: of elements that are finite in both arrays, but for the last four.

`largest` and `largest_relative` are maxima, the rest are sums. `relative` is over elements that are not 0 in the first
array, `zeros` counts the others. The moments are of differences from the means of the block.
"""

SQUARES = [SUMS.index(name) for name in ("square_a", "square_b")]


@functools.cache
def degrees() -> NDArray[np.int64]:
    """By which power of a factor each of `SUMS` grows, if all elements are multiplied by it."""
    linear = {"absolute", "largest", "real_a", "imaginary_a", "real_b", "imaginary_b"}
    quadratic = {name for name in SUMS if name.startswith(("square", "product", "moment"))}
    return np.array([1 if name in linear else 2 if name in quadratic else 0 for name in SUMS])


@compiled_sums
def add_up(a: NDArray[Any], b: NDArray[Any], sums_BM: NDArray[np.float64]) -> None:
    """Write what the elements of each block of `BLOCK` add up to; both arrays are float64 or both complex128."""
    for number in range(sums_BM.shape[0]):
        start, stop = number * BLOCK, min((number + 1) * BLOCK, a.size)
        finite = absolute = largest = relative = largest_relative = zeros = square_a = square_b = 0.0
        product = square_difference = 0.0
        real_a = imaginary_a = real_b = imaginary_b = 0.0
        nan_both = nan_one = infinite_alike = infinite_apart = 0.0
        for index in range(start, stop):
            x, y = a[index], b[index]
            magnitude, other = abs(x), abs(y)
            if magnitude < np.inf and other < np.inf:
                difference = abs(x - y)
                finite += 1.0
                absolute += difference
                largest = max(largest, difference)
                square_a += magnitude * magnitude
                square_b += other * other
                product += x.real * y.real + x.imag * y.imag
                square_difference += difference * difference
                real_a, imaginary_a = real_a + x.real, imaginary_a + x.imag
                real_b, imaginary_b = real_b + y.real, imaginary_b + y.imag
                if magnitude > 0:
                    ratio = difference / magnitude
                    relative += ratio
                    largest_relative = max(largest_relative, ratio)
                else:
                    zeros += 1.0
            elif np.isnan(x) or np.isnan(y):
                nan_both += 1.0 if np.isnan(x) and np.isnan(y) else 0.0
                nan_one += 0.0 if np.isnan(x) and np.isnan(y) else 1.0
            else:
                infinite_alike += 1.0 if x == y else 0.0
                infinite_apart += 0.0 if x == y else 1.0
        count = max(finite, 1.0)
        mean_real_a, mean_imaginary_a = real_a / count, imaginary_a / count
        mean_real_b, mean_imaginary_b = real_b / count, imaginary_b / count
        moment_a = moment_b = moment_ab = 0.0
        for index in range(start, stop):
            x, y = a[index], b[index]
            if abs(x) < np.inf and abs(y) < np.inf:
                u, v = x.real - mean_real_a, x.imag - mean_imaginary_a
                w, z = y.real - mean_real_b, y.imag - mean_imaginary_b
                moment_a += u * u + v * v
                moment_b += w * w + z * z
                moment_ab += u * w + v * z
        sums = sums_BM[number]
        sums[0], sums[1], sums[2] = finite, absolute, largest
        sums[3], sums[4], sums[5] = relative, largest_relative, zeros
        sums[6], sums[7], sums[8], sums[9] = square_a, square_b, product, square_difference
        sums[10], sums[11], sums[12], sums[13] = real_a, imaginary_a, real_b, imaginary_b
        sums[14], sums[15], sums[16] = moment_a, moment_b, moment_ab
        sums[17], sums[18], sums[19], sums[20] = nan_both, nan_one, infinite_alike, infinite_apart
