"""Compiled loops that add up how far the rows of a result are from those of a reference."""

# Shapes: R = rows, C = columns, P = reference and result.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ranktape.analyze.numerics.kernels import compiled, compiled_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]


@compiled
def _value(pattern: np.uint16) -> np.float64:
    """A number of bfloat16."""
    return np.float64(np.uint32(np.uint32(pattern) << 16).view(np.float32))


@compiled
def _number(values_RC: NDArray[Any], rest_RC: NDArray[np.uint16] | None, row: int, index: int) -> np.float64:
    """An element, with its rest where there is one."""
    if rest_RC is None:
        return np.float64(values_RC[row, index])
    return _value(values_RC[row, index]) + _value(rest_RC[row, index])


@compiled_sums
def _add_row(
    reference_RC: NDArray[Any], result_RC: NDArray[Any], rest_RC: NDArray[np.uint16] | None, row: int, errors_C: Floats
) -> tuple[float, float, float, float, float, float]:
    """Write the errors of a row, and give what its elements add up to.

    Sums of reference, result and error squared, of reference times result and of errors, and the largest error. The
    third is infinite or NaN where an element is.
    """
    wanted_squared = given_squared = squared = product = total = largest = 0.0
    for index in range(errors_C.size):
        x, y = np.float64(reference_RC[row, index]), _number(result_RC, rest_RC, row, index)
        error = y - x
        errors_C[index] = error
        wanted_squared += x * x
        given_squared += y * y
        squared += error * error
        product += x * y
        total += error
        largest = max(largest, abs(error))
    return wanted_squared, given_squared, squared, product, total, largest


@compiled
def _leave_out(
    reference_RC: NDArray[Any], result_RC: NDArray[Any], rest_RC: NDArray[np.uint16] | None, row: int, kept_PC: Floats
) -> tuple[int, int]:
    """Write a row of reference and result with zeros where one is not finite.

    Gives how many elements of the reference are finite, and how many of both.
    """
    finite = compared = 0
    for index in range(kept_PC.shape[1]):
        x, y = np.float64(reference_RC[row, index]), _number(result_RC, rest_RC, row, index)
        is_compared = abs(x) < np.inf and abs(y) < np.inf
        finite += int(abs(x) < np.inf)
        compared += int(is_compared)
        kept_PC[0, index], kept_PC[1, index] = (x, y) if is_compared else (0.0, 0.0)
    return finite, compared


@compiled
def add_errors(
    reference_RC: NDArray[np.float32],
    result_RC: NDArray[np.float32] | NDArray[np.uint16],
    rest_RC: NDArray[np.uint16] | None,
    columns_C: Floats,
    sums: Floats,
) -> None:
    """Write what rows of a matrix add up to in the order of the fields of `ErrorSums`, and add errors to columns.

    With a rest the elements of the result are sums of the two, both patterns of bfloat16. In the place of the deviation
    is what the rows add to the variance.
    """
    num_rows, num_columns = reference_RC.shape
    errors, kept = np.empty(num_columns), np.empty((2, num_columns))
    finite = compared = 0
    sums[:] = 0.0
    for row in range(num_rows):
        found = _add_row(reference_RC, result_RC, rest_RC, row, errors)
        if found[2] < np.inf:
            finite, compared = finite + num_columns, compared + num_columns
        else:
            # Few rows have such elements: all others are added up without looking at each.
            counts = _leave_out(reference_RC, result_RC, rest_RC, row, kept)
            finite, compared = finite + counts[0], compared + counts[1]
            found = _add_row(kept[:1], kept[1:], None, 0, errors)
        wanted_squared, given_squared, squared, product, total, largest = found
        sums[3], sums[4], sums[5] = sums[3] + wanted_squared, sums[4] + given_squared, sums[5] + product
        sums[6], sums[7], sums[8] = sums[6] + squared, sums[7] + total, sums[8] + total * total - squared
        sums[9] = max(sums[9], largest)
        for column in range(num_columns):
            columns_C[column] += errors[column]
    sums[0], sums[1], sums[2] = reference_RC.size, compared, finite - compared
