"""The loop that quantises on a CPU where values alone are asked, in a fraction of the time of operations of torch.

Values are float32 or bfloat16 numbers, and so are results. Narrow elements that round to even are scaled, rounded and
scaled back in float32, which is exact: the scales of MX are powers of two, and all others are defined so. Rounding adds
a power of two and takes it away again. What rounds otherwise does it in float64.
"""

# Shapes: R = rows, C = columns, G = groups of rows, K = groups of columns.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.formats.kernels import RANDOM, RoundingConstants, constants_of, draw, round_block
from ranktape.analyze.numerics.formats.values import NARROW_BITS, state_of
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.scales import is_divided

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

INFINITY = np.int32(0x7F800000)
"""The bits of an infinite float32."""

FRACTION_BITS, ONE_FIELD = 23, 127
"""Of a float32: the bits below its exponent field, and the exponent field of 1.0."""


class Narrow(NamedTuple):
    """How float32 numbers are rounded to narrow elements; a named tuple, because numba takes it apart by name."""

    lowest_field: np.int32
    """Exponent field, in its place, of the smallest normal element."""
    anchor_step: np.int32
    """From the exponent field, in its place, of a number to that of the power of two that rounding adds."""
    limit: np.int32
    """The bits of the largest element."""
    zero: np.float32
    """What is added to elements: 0.0 where they have no negative zero, -0.0 where they have."""


class Wide(NamedTuple):
    """How float64 numbers are rounded to elements of any kind."""

    element: RoundingConstants
    """To what."""
    state: int
    """Where the random numbers of stochastic rounding begin."""
    is_float32: bool
    """Whether scaled numbers are rounded to float32 first."""
    zero: np.float32
    """As of `Narrow`."""


def rounding_of(plan: QuantizePlan) -> tuple[Narrow | None, Wide | None, int | None]:
    """What `quantize_rows` takes of a plan: one of the two ways to round, and a number where elements are divided.

    For what is None no code is compiled.
    """
    element = plan.scheme.element
    zero = np.float32(-0.0 if element.has_negative_zero else 0.0)
    divides = 1 if is_divided(plan) else None
    if plan.rounding is not Rounding.EVEN or element.taper or element.num_bits > NARROW_BITS:
        wide = Wide(constants_of(element, plan.rounding), state_of(plan.seed), plan.scale_rule is None, zero)
        return None, wide, divides
    narrow = Narrow(
        lowest_field=np.int32((element.emin + ONE_FIELD) << FRACTION_BITS),
        anchor_step=np.int32((FRACTION_BITS - element.mantissa_bits) << FRACTION_BITS),
        limit=np.float32(element.maximum).view(np.int32),
        zero=zero,
    )
    return narrow, None, divides


@compiled
def _narrow(number: np.int32, before: np.float32, after: np.float32, how: Narrow, divides: int | None) -> np.int32:
    value = np.int32(number).view(np.float32)
    scaled = value * before if divides is None else np.divide(value, before)
    bits = np.float32(scaled).view(np.int32)
    magnitude = np.int32(bits & MAGNITUDE)
    bounded = np.int32(min(magnitude, how.limit))
    # Added to the magnitude, it leaves no bits below the last one of the element.
    anchor = np.int32(max(how.lowest_field, np.int32(bounded & INFINITY)) + how.anchor_step).view(np.float32)
    rounded = np.float32(np.float32(np.int32(bounded).view(np.float32) + anchor) - anchor).view(np.int32)
    signed = np.int32(rounded | np.int32(bits & ~MAGNITUDE)).view(np.float32)
    result = np.float32(np.float32(signed + how.zero) * after).view(np.int32)
    return result if magnitude <= INFINITY else bits


@compiled
def _wide_row(  # noqa: PLR0917 - numba knows no keyword-only arguments
    numbers: NDArray[Any],
    results: NDArray[Any],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    scratch_2C: NDArray[np.float64],
    place: int,
    how: Wide,
    divides: int | None,
) -> None:
    """What `quantize_rows` does with a row, by what rounds in float64; each step is a loop of vector instructions."""
    from_bits, to_bits = 8 * (4 - numbers.itemsize), 8 * (4 - results.itemsize)
    kind = results.dtype.type
    scaled, rounded = scratch_2C[0, : numbers.size], scratch_2C[1, : numbers.size]
    for index in range(numbers.size):
        magnitude = abs(np.int32(np.int32(numbers[index]) << from_bits).view(np.float32))
        value, factor = np.float64(magnitude), np.float64(before[index])
        quotient = value * factor if divides is None else np.divide(value, factor)
        scaled[index] = np.float64(np.float32(quotient)) if how.is_float32 else quotient
    if how.element.kind == RANDOM:
        draw(scaled, how.element, how.state, place, rounded)
    else:
        round_block(scaled, how.element, rounded)
    for index in range(numbers.size):
        number = np.int32(np.int32(numbers[index]) << from_bits).view(np.float32)
        signed = np.float32(np.copysign(np.float32(rounded[index]), number) + how.zero)
        result = np.float32(signed * after[index])
        is_number = number == number  # noqa: PLR0124 - NaN is not itself
        results[index] = kind(np.float32(result if is_number else np.nan).view(np.int32) >> to_bits)


@compiled
def quantize_rows(  # noqa: PLR0917 - as above
    numbers_RC: NDArray[Any],
    results_RC: NDArray[Any],
    group_R: NDArray[np.int64],
    before_GK: NDArray[np.float32],
    after_GK: NDArray[np.float32],
    run: int,
    first_place: int,
    narrow: Narrow | None,
    wide: Wide | None,
    divides: int | None,
) -> None:
    """Write what numbers become: each divided by, or times, the first factor of its group, rounded, times the second.

    Numbers and results are patterns: of float32 as int32, of bfloat16 as uint16. Groups are those of the row, and
    within it of `run` neighbours each. `first_place` is the index of the first number in C order of the tensor. NaN
    stays NaN, and so does a group whose second factor is.
    """
    num_columns, kind = numbers_RC.shape[1], results_RC.dtype.type
    from_bits, to_bits = 8 * (4 - numbers_RC.itemsize), 8 * (4 - results_RC.itemsize)
    spread_2C = np.empty((2, num_columns), dtype=np.float32)
    scratch_2C = np.empty((2, num_columns))
    for row in range(numbers_RC.shape[0]):
        numbers_C, results_C = numbers_RC[row], results_RC[row]
        before_K, after_K = before_GK[group_R[row]], after_GK[group_R[row]]
        if wide is not None:
            if run == 1:
                spread_2C[0, :], spread_2C[1, :] = before_K, after_K
            else:
                for start in range(0, num_columns, run):
                    spread_2C[0, start : start + run] = before_K[start // run]
                    spread_2C[1, start : start + run] = after_K[start // run]
            place = first_place + row * num_columns
            _wide_row(numbers_C, results_C, spread_2C[0], spread_2C[1], scratch_2C, place, wide, divides)
        if narrow is not None:
            if run == 1:
                for index in range(num_columns):
                    number = np.int32(np.int32(numbers_C[index]) << from_bits)
                    found = _narrow(number, before_K[index], after_K[index], narrow, divides)
                    results_C[index] = kind(found >> to_bits)
            else:
                for start in range(0, num_columns, run):
                    numbers, results = numbers_C[start : start + run], results_C[start : start + run]
                    before, after = before_K[start // run], after_K[start // run]
                    for index in range(numbers.size):
                        number = np.int32(np.int32(numbers[index]) << from_bits)
                        results[index] = kind(_narrow(number, before, after, narrow, divides) >> to_bits)


@compiled
def find_largest(
    numbers_RC: NDArray[Any],
    group_R: NDArray[np.int64],
    run: int,
    end: np.int32,
    largest_GK: NDArray[np.int32],
) -> None:
    """Raise the patterns of the largest magnitudes of groups to those of their numbers whose patterns are below `end`.

    Patterns of magnitudes are in the order of the magnitudes: an infinity ends what is finite, and NaN is beyond it.
    """
    from_bits = 8 * (4 - numbers_RC.itemsize)
    for row in range(numbers_RC.shape[0]):
        numbers_C, largest_K = numbers_RC[row], largest_GK[group_R[row]]
        if run == 1:
            for index in range(numbers_C.size):
                magnitude = np.int32(np.int32(np.int32(numbers_C[index]) << from_bits) & MAGNITUDE)
                largest_K[index] = max(largest_K[index], magnitude if magnitude < end else np.int32(0))
        else:
            for start in range(0, numbers_C.size, run):
                numbers, largest = numbers_C[start : start + run], np.int32(0)
                for index in range(numbers.size):
                    magnitude = np.int32(np.int32(np.int32(numbers[index]) << from_bits) & MAGNITUDE)
                    largest = max(largest, magnitude if magnitude < end else np.int32(0))
                largest_K[start // run] = max(largest_K[start // run], largest)


@compiled
def add_squared_errors(
    numbers_RC: NDArray[Any],
    results_RC: NDArray[np.int32],
    group_R: NDArray[np.int64],
    run: int,
    errors_GK: NDArray[np.float64],
) -> None:
    """Add the squared errors of results to those of their groups, of each row one after the other."""
    from_bits = 8 * (4 - numbers_RC.itemsize)
    for row in range(numbers_RC.shape[0]):
        errors_K = errors_GK[group_R[row]]
        for start in range(0, numbers_RC.shape[1], run):
            total = 0.0
            for index in range(start, min(start + run, numbers_RC.shape[1])):
                number = np.int32(np.int32(numbers_RC[row, index]) << from_bits).view(np.float32)
                error = np.float64(np.int32(results_RC[row, index]).view(np.float32)) - np.float64(number)
                total += error * error
            errors_K[start // run] += total
