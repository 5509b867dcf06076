"""The compiled loop over a result and the one that it should be."""

# Shapes: R = rows, C = columns.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.kernels import compiled, compiled_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray


@compiled
def _value(pattern: np.uint16) -> np.float64:
    """A number of bfloat16."""
    return np.float64(np.uint32(np.uint32(pattern) << 16).view(np.float32))


@compiled_sums
def add_errors(
    reference_RC: NDArray[np.float32],
    result_RC: NDArray[np.float32] | NDArray[np.uint16],
    rest_RC: NDArray[np.uint16] | None,
    columns_C: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    """Write what rows of a matrix add up to in the order of the fields of `ErrorSums`, and add errors to columns.

    With a rest the elements of the result are sums of the two, both patterns of bfloat16. Of the variance only the part
    of the rows is written.
    """
    finite = compared = wanted_squared = given_squared = product = squared = total = rows = largest = 0.0
    for row in range(reference_RC.shape[0]):
        wanted, given = reference_RC[row], result_RC[row]
        of_row = 0.0
        for index in range(wanted.size):
            x = np.float64(wanted[index])
            y = np.float64(given[index]) if rest_RC is None else _value(given[index]) + _value(rest_RC[row, index])
            is_finite = abs(x) < np.inf
            is_compared = is_finite & (abs(y) < np.inf)
            x = x if is_compared else np.float64(0.0)
            y = y if is_compared else np.float64(0.0)
            error = y - x
            columns_C[index] += error
            finite += 1.0 if is_finite else 0.0
            compared += 1.0 if is_compared else 0.0
            wanted_squared += x * x
            given_squared += y * y
            product += x * y
            squared += error * error
            of_row += error
            largest = max(largest, abs(error))
        total += of_row
        rows += of_row * of_row
    sums[0], sums[1], sums[2] = reference_RC.size, compared, finite - compared
    sums[3], sums[4], sums[5] = wanted_squared, given_squared, product
    sums[6], sums[7], sums[8], sums[9] = squared, total, rows - squared, largest
