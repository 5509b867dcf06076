"""The compiled loop over a result and the one that it should be."""

# Shapes: B = blocks, M = sums.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.kernels import BLOCK, compiled, compiled_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray


@compiled
def _value(pattern: np.uint16) -> np.float64:
    """A number of bfloat16."""
    return np.float64(np.uint32(np.uint32(pattern) << 16).view(np.float32))


@compiled_sums
def add_errors(
    reference: NDArray[np.float32],
    result: NDArray[np.float32] | NDArray[np.uint16],
    rest: NDArray[np.uint16] | None,
    sums_BM: NDArray[np.float64],
) -> None:
    """Write what each block of `BLOCK` elements adds up to, in the order of the fields of `ErrorSums`.

    With a rest the elements of the result are sums of the two, both patterns of bfloat16.
    """
    for number in range(sums_BM.shape[0]):
        wanted = reference[number * BLOCK : (number + 1) * BLOCK]
        given = result[number * BLOCK : (number + 1) * BLOCK]
        finite = compared = wanted_squared = given_squared = product = squared = total = largest = 0.0
        for index in range(wanted.size):
            x = np.float64(wanted[index])
            if rest is None:
                y = np.float64(given[index])
            else:
                y = _value(given[index]) + _value(rest[number * BLOCK + index])
            is_finite = abs(x) < np.inf
            is_compared = is_finite & (abs(y) < np.inf)
            x = x if is_compared else np.float64(0.0)
            y = y if is_compared else np.float64(0.0)
            error = y - x
            finite += 1.0 if is_finite else 0.0
            compared += 1.0 if is_compared else 0.0
            wanted_squared += x * x
            given_squared += y * y
            product += x * y
            squared += error * error
            total += error
            largest = max(largest, abs(error))
        sums = sums_BM[number]
        sums[0], sums[1], sums[2] = wanted.size, compared, finite - compared
        sums[3], sums[4], sums[5] = wanted_squared, given_squared, product
        sums[6], sums[7], sums[8] = squared, total, largest
