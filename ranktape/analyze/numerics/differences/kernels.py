"""The sums over two arrays, element by element, in compiled code."""

# Shapes: B = blocks, M = sums.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.kernels import BLOCK, compiled_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
