"""Compares two arrays of the same shape element by element.

Everything is computed in float64 (complex128 for complex elements), in blocks of 4,096 elements in the order of the
array, and summed once at the end: the same arrays give bitwise the same metrics, however they were read. If squares
would overflow or underflow in float64, the elements are divided by a power of two first.
"""

# Shapes: R = rows, C = columns, B = blocks or rows with sums of their own, M = sums.

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.kernels import BLOCK, compiled, compiled_sums
from ranktape.storage.format.dtypes import dtype_name, dtype_row

Floats: TypeAlias = NDArray[np.float64]

PIECE = 1 << 17
"""Number of elements that are widened to float64 at once: the pieces of both arrays fit into a CPU cache."""

_SAFE_EXPONENT = 450
"""Limit of the exponent of the largest magnitude, of either sign, up to which squares that matter fit into float64."""

_SMALL_SQUARE = 2.0**-900
"""Sums of squares between this and its inverse need no scaling."""

_LOWEST = -4096
"""The exponent of a piece with only zeros, lower than the exponent of any number."""

_NEGLIGIBLE = 1e-12**2
"""A variance below this fraction of the sum of squares is the rounding error of a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The differences between an array b and a reference a, element by element.

    Means, norms and extremes are over the positions where both are finite. Two NaN are equal, as are two infinities of
    the same sign. A metric is None if no position is compared or if it is undefined.
    """

    num_elements: int
    """Number of elements of each array."""
    num_compared: int
    """Number of positions where both are finite."""
    num_differing: int
    """Number of positions whose bits differ, after conversion to float64 or complex128 if the dtypes differ.

    Zeros of different sign differ, two NaN do not.
    """
    nan_both: int
    """Number of positions where both are NaN."""
    nan_one: int
    """Number of positions where exactly one of the two is NaN."""
    inf_equal: int
    """Number of positions where both are the same infinity."""
    inf_differing: int
    """Number of positions where one is infinite and the other is finite or an infinity of another sign."""
    num_zeros: int
    """Number of compared positions where a is 0. They have no relative difference."""
    max_abs: float | None
    """Largest |a - b|."""
    max_abs_at: tuple[int, ...] | None
    """Index of the first element with that difference; None if no finite elements differ."""
    mean_abs: float | None
    """Mean of |a - b|."""
    max_rel: float | None
    """Largest |a - b| / |a| over the positions where a is not 0."""
    mean_rel: float | None
    """Mean of |a - b| / |a| over the positions where a is not 0."""
    relative_norm: float | None
    """Norm of a - b over the norm of a; infinite if a is 0 everywhere and b is not."""
    cosine: float | None
    """Cosine of the angle between a and b; None if one of them is 0 everywhere."""
    sqnr: float | None
    """Mean of a^2 over the mean of (a - b)^2, in dB; infinite if a and b are equal."""
    correlation: float | None
    """Pearson's correlation (of complex values its real part); None if a or b is constant."""
    ulp_max: int | None
    """Largest difference between elements in representable numbers (ULP).

    It is 0 if no bits differ. Otherwise, it is None unless both arrays have the same floating-point or complex dtype.
    It is also None for empty arrays.
    """

    @property
    def num_apart(self) -> int:
        """Number of positions without a defined difference: one is NaN, or infinite and the other not the same."""
        return self.nan_one + self.inf_differing


def compare_parts(
    parts: Iterable[tuple[NDArray[Any], NDArray[Any]]], *, shape: tuple[int, ...], first_dim: int | None = None
) -> Differences:
    """The differences between two arrays that are given as consecutive flat parts.

    Args:
        parts: Pairs of a part of a and a part of b of the same size; at least one pair.
        shape: The shape of the whole arrays.
        first_dim: The dimension along which the arrays were split; None for the first.
    """
    totals = _DifferenceTotals()
    for part_a, part_b in _in_blocks(parts):
        for start in range(0, max(1, part_a.size), PIECE):
            totals.add(part_a[start : start + PIECE], part_b[start : start + PIECE])
    return totals.differences(shape, first_dim=first_dim)


def _in_blocks(
    parts: Iterable[tuple[NDArray[Any], NDArray[Any]]],
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The same elements in parts that consist of whole blocks, except for the last part."""
    remainder: tuple[NDArray[Any], NDArray[Any]] | None = None
    for part in parts:
        a, b = part if remainder is None else (np.concatenate(pair) for pair in zip(remainder, part, strict=True))
        stop = a.size // BLOCK * BLOCK
        if stop:
            yield a[:stop], b[:stop]
        remainder = a[stop:], b[stop:]
    assert remainder is not None
    yield remainder


class _DifferenceTotals:
    """The running totals of the pieces so far."""

    def __init__(self) -> None:
        self._sums: list[NDArray[np.float64]] = []
        self._exponents: list[NDArray[np.int64]] = []
        self._largest = 0.0
        self._largest_at: int | None = None
        self._num_elements = 0
        self._num_differing = 0
        self._ulp: int | None = None

    def add(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        """Add the next elements of both arrays."""
        wide = np.complex128 if "c" in {a.dtype.kind, b.dtype.kind} else np.float64
        with np.errstate(invalid="ignore"):
            wide_a, wide_b = a.astype(wide), b.astype(wide)
        sums_BM, exponent = _scaled_sums(wide_a, wide_b)
        with np.errstate(over="ignore"):
            largest = np.ldexp(sums_BM[:, SUMS.index("largest")], exponent)
        if largest.size and largest.max() > self._largest:
            block = int(largest.argmax())
            piece = slice(block * BLOCK, (block + 1) * BLOCK)
            self._largest = float(largest[block])
            self._largest_at = self._num_elements + block * BLOCK + _argmax_difference(wide_a[piece], wide_b[piece])
        is_differing = _differing_elements(a, b, wide_a=wide_a, wide_b=wide_b)
        num_differing = int(np.count_nonzero(is_differing))
        is_finite = None if sums_BM[:, 0].sum() == a.size else np.isfinite(wide_a) & np.isfinite(wide_b)
        ulp = _largest_ulp(a, b, is_finite=is_finite) if num_differing else 0
        self._ulp = ulp if self._ulp is None or ulp is None else max(self._ulp, ulp)
        self._num_differing += num_differing
        self._num_elements += a.size
        self._sums.append(sums_BM)
        self._exponents.append(np.full(len(sums_BM), exponent))

    def differences(self, shape: tuple[int, ...], *, first_dim: int | None) -> Differences:
        """The metrics of all elements that were added."""
        exponents = np.concatenate(self._exponents)
        top = int(exponents.max(initial=_LOWEST))
        unscaled_BM = np.concatenate(self._sums)
        sums_BM = np.ldexp(unscaled_BM, (exponents - top)[:, np.newaxis] * _degrees())
        with np.errstate(over="ignore", invalid="ignore"):
            total = dict(zip(SUMS, sums_BM.sum(axis=0).tolist(), strict=True))
            moments = _moments(dict(zip(SUMS, sums_BM.T, strict=True)), total)
        largest_scaled = float(sums_BM[:, SUMS.index("largest")].max(initial=0.0))
        largest_relative = float(sums_BM[:, SUMS.index("largest_relative")].max(initial=0.0))
        count, num_relative = total["finite"], total["finite"] - total["zeros"]
        relative_norm = _relative_norm(total, largest_scaled) if count else None
        _, moment_a, moment_b = moments
        is_constant = not (moment_a > _NEGLIGIBLE * total["square_a"] and moment_b > _NEGLIGIBLE * total["square_b"])
        return Differences(
            num_elements=self._num_elements,
            num_compared=int(count),
            num_differing=self._num_differing,
            nan_both=int(total["nan_both"]),
            nan_one=int(total["nan_one"]),
            inf_equal=int(total["infinite_alike"]),
            inf_differing=int(total["infinite_apart"]),
            num_zeros=int(total["zeros"]),
            max_abs=self._largest if count else None,
            max_abs_at=None if self._largest_at is None else _unravel(self._largest_at, shape, first_dim),
            mean_abs=_unscaled(total["absolute"] / count, top) if count else None,
            max_rel=largest_relative if num_relative else None,
            mean_rel=total["relative"] / num_relative if num_relative else None,
            relative_norm=relative_norm,
            cosine=cosine(total["product"], total["square_a"], total["square_b"], is_equal=not largest_scaled),
            sqnr=decibels(relative_norm),
            correlation=None if is_constant else cosine(*moments, is_equal=not largest_scaled),
            ulp_max=self._ulp if self._num_elements else None,
        )


def _scaled_sums(a: NDArray[Any], b: NDArray[Any]) -> tuple[Floats, int]:
    """The sums of each block, and the exponent of the power of two by which the elements were divided."""
    sums_BM = _block_sums(a, b)
    squares = sums_BM[:, SQUARES]
    if ((squares > _SMALL_SQUARE) & (squares < 1 / _SMALL_SQUARE)).all():
        return sums_BM, 0
    parts = np.concatenate([array.view(np.float64).reshape(-1) for array in (a, b)])
    magnitude = float(np.abs(parts[np.isfinite(parts)]).max(initial=0.0))
    if not magnitude:
        return sums_BM, _LOWEST
    exponent = math.frexp(magnitude)[1]
    if abs(exponent) <= _SAFE_EXPONENT:
        return sums_BM, 0
    half = -exponent // 2
    factors = math.ldexp(1.0, half), math.ldexp(1.0, -exponent - half)
    with np.errstate(all="ignore"):
        scaled_BM = _block_sums(*(array * factors[0] * factors[1] for array in (a, b)))
    # The counts are those before the scaling, which may turn complex infinities into NaN and small elements into 0.
    is_count = _degrees() == 0
    scaled_BM[:, is_count] = sums_BM[:, is_count]
    return scaled_BM, exponent


def _block_sums(a: NDArray[Any], b: NDArray[Any]) -> Floats:
    num_whole = a.size // BLOCK
    sums_BM, buffer_2C = np.zeros((-(-a.size // BLOCK), len(SUMS))), np.zeros((2, BLOCK), dtype=a.dtype)
    for blocks, length, block_BM in (
        (slice(num_whole * BLOCK), BLOCK, sums_BM[:num_whole]),
        (slice(num_whole * BLOCK, None), a.size % BLOCK, sums_BM[num_whole:]),
    ):
        if len(block_BM):
            a_RC, b_RC = (array[blocks].reshape(-1, length) for array in (a, b))
            add_differences(a_RC, b_RC, None, None, buffer_2C, block_BM)
    return sums_BM


def _unscaled(value: float, exponent: int) -> float:
    with np.errstate(over="ignore"):
        return float(np.ldexp(value, exponent))


def _argmax_difference(a: NDArray[Any], b: NDArray[Any]) -> int:
    """The index of the largest finite difference in a block."""
    is_finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore"):
        return int(np.where(is_finite, np.abs(a - b), -1.0).argmax())


def _unravel(index: int, shape: tuple[int, ...], first_dim: int | None) -> tuple[int, ...]:
    """The index in the array of an element, given its position in the order of the parts."""
    dim = first_dim or 0
    if not shape:
        return ()
    first, *others = np.unravel_index(index, (shape[dim], *shape[:dim], *shape[dim + 1 :]))
    others.insert(dim, first)
    return tuple(map(int, others))


def _moments(columns: dict[str, NDArray[np.float64]], total: dict[str, float]) -> tuple[float, float, float]:
    """The moments about the means of the whole arrays: of a with b, of a, and of b."""
    counts = columns["finite"]

    def shift(name: str) -> NDArray[np.float64]:
        return np.where(counts > 0, columns[name] / np.maximum(counts, 1) - total[name] / max(1, total["finite"]), 0.0)

    shifts_a, shifts_b = ([shift(f"{part}_{side}") for part in ("real", "imaginary")] for side in "ab")

    def moment(name: str, xs: list[NDArray[np.float64]], ys: list[NDArray[np.float64]]) -> float:
        return float((columns[name] + counts * sum(x * y for x, y in zip(xs, ys, strict=True))).sum())

    return (
        moment("moment_ab", shifts_a, shifts_b),
        moment("moment_a", shifts_a, shifts_a),
        moment("moment_b", shifts_b, shifts_b),
    )


def _relative_norm(total: dict[str, float], largest: float) -> float | None:
    # Squares of numbers below 1e-162 underflow to 0.
    difference, reference = math.sqrt(total["square_difference"]) or largest, math.sqrt(total["square_a"])
    if not difference:
        return 0.0
    return _none_if_nan(difference / reference) if reference else math.inf


def decibels(relative_norm: float | None) -> float | None:
    """The signal-to-noise ratio in dB for a ratio of the norm of the error to the norm of the reference.

    0 gives infinity, infinity gives minus infinity, None gives None.
    """
    if not relative_norm:
        return None if relative_norm is None else math.inf
    return -20 * math.log10(relative_norm)


def cosine(product: float, square_a: float, square_b: float, *, is_equal: bool) -> float | None:
    """The cosine between two vectors from their dot product and squared norms; None if one norm is 0."""
    norms = math.sqrt(square_a) * math.sqrt(square_b)
    if not norms:
        return None
    return 1.0 if is_equal else _none_if_nan(min(1.0, max(-1.0, product / norms)))


def _none_if_nan(value: float) -> float | None:
    """The value, or None if it is NaN because sums overflowed float64."""
    return None if math.isnan(value) else value


def _differing_elements(
    a: NDArray[Any], b: NDArray[Any], *, wide_a: NDArray[Any], wide_b: NDArray[Any]
) -> NDArray[np.bool_]:
    """Which elements of two flat arrays have different bits; two NaN count as equal, whatever their payload.

    Arrays of different dtypes are compared as float64 or complex128: `wide_a` and `wide_b`.
    """
    left, right = (a, b) if a.dtype == b.dtype else (wide_a, wide_b)
    # Complex elements have 8 or 16 bytes: two floats, which are compared as integers.
    is_complex = left.dtype.kind == "c"
    left_bits, right_bits = (array.view(f"u{array.dtype.itemsize // (1 + is_complex)}") for array in (left, right))
    is_differing: NDArray[np.bool_] = np.asarray(left_bits != right_bits)
    if is_complex:
        is_differing = is_differing[::2] | is_differing[1::2]
    if is_differing.any():
        is_differing &= ~(np.isnan(wide_a) & np.isnan(wide_b))
    return is_differing


def _largest_ulp(a: NDArray[Any], b: NDArray[Any], *, is_finite: NDArray[np.bool_] | None) -> int | None:
    """The largest difference between elements of two flat arrays, in representable numbers (ULP).

    Zeros of both signs are the same number. Real and imaginary parts are compared separately. None if the arrays do
    not have the same floating-point or complex dtype.

    Args:
        a: The first array.
        b: The second array.
        is_finite: Which elements are finite in both arrays, and therefore compared; None for all.
    """
    row = dtype_row(dtype_name(a.dtype))
    if a.dtype != b.dtype or not (row.is_floating or row.is_complex):
        return None
    left, right = (a, b) if is_finite is None else (a[is_finite], b[is_finite])
    if not left.size:
        return 0
    if row.is_complex:
        part = f"f{row.itemsize // 2}"
        left, right = left.view(part), right.view(part)
    if row.numpy_dtype == ml_dtypes.float8_e8m0fnu:
        return int(np.abs(left.view(np.uint8).astype(np.int32) - right.view(np.uint8)).max())
    keys = [_keys(array) for array in (left, right)]
    if keys[0].dtype == np.int64:
        # The difference of two signed 64-bit keys may overflow; that of unsigned ones fits.
        return int((np.maximum(*keys).view(np.uint64) - np.minimum(*keys).view(np.uint64)).max())
    return int(np.abs(keys[0] - keys[1]).max())


def _keys(array: NDArray[Any]) -> NDArray[Any]:
    """Integers in the order of the values, such that adjacent representable numbers differ by 1."""
    num_bits = int(ml_dtypes.finfo(array.dtype).bits)  # type: ignore[no-untyped-call]
    patterns = array.view(f"i{array.dtype.itemsize}")
    # Types of 4 and 6 bits are padded to a byte: their sign is not the first bit of it.
    padding = 8 * array.dtype.itemsize - num_bits
    signed = (patterns << padding >> padding if padding else patterns).astype(_WIDER[array.dtype.itemsize])
    magnitudes = signed & ((1 << num_bits - 1) - 1)
    # All ones for negative values, whose magnitude is negated without a branch.
    signs = signed >> 8 * signed.dtype.itemsize - 1
    keys: NDArray[Any] = (magnitudes ^ signs) - signs
    return keys


_WIDER = {1: np.int32, 2: np.int32, 4: np.int64, 8: np.int64}
"""The integer type in which keys of a type of that many bytes can be subtracted."""


SUMS = (
    "finite",
    "finite_a",
    "largest",
    "square_a",
    "square_b",
    "product",
    "square_difference",
    "difference",
    "absolute",
    "real_a",
    "imaginary_a",
    "real_b",
    "imaginary_b",
    "row_variance",
    "relative",
    "largest_relative",
    "zeros",
    "moment_a",
    "moment_b",
    "moment_ab",
    "nan_both",
    "nan_one",
    "infinite_alike",
    "infinite_apart",
)
"""The sums that `add_up` computes, in its order.

All but `finite_a` and the last four are over elements that are finite in both arrays. `largest` and `largest_relative`
are maxima. `difference` is b - a, and `row_variance` is the square of its sum over a row minus the sum of its squares.
`relative` is over elements that are not 0 in the first array, and `zeros` counts the others. The moments are about the
means of the row.
"""

SQUARES = [SUMS.index(name) for name in ("square_a", "square_b")]


@functools.cache
def _degrees() -> NDArray[np.int64]:
    """The power of a factor by which each of `SUMS` grows if all elements are multiplied by the factor."""
    linear = {"absolute", "largest", "difference", "real_a", "imaginary_a", "real_b", "imaginary_b"}
    quadratic = {name for name in SUMS if name.startswith(("square", "product", "moment", "row"))}
    return np.array([1 if name in linear else 2 if name in quadratic else 0 for name in SUMS])


@compiled
def _second(b_RC: NDArray[Any], residual_RC: NDArray[np.uint16] | None, row: int, index: int) -> Any:
    """An element of the second array, plus its rest if there is one; both are then bit patterns of bfloat16."""
    if residual_RC is None:
        return b_RC[row, index] + 0.0
    high = np.uint32(np.uint32(b_RC[row, index]) << 16).view(np.float32)
    return np.float64(high) + np.float64(np.uint32(np.uint32(residual_RC[row, index]) << 16).view(np.float32))


@compiled_sums
def _add_row(
    a_RC: NDArray[Any], b_RC: NDArray[Any], residual_RC: NDArray[np.uint16] | None, row: int, columns_2C: Floats | None
) -> tuple[float, ...]:
    """The sums of a row from `largest` to `imaginary_b`; those after `difference` are 0 if `columns_2C` is given.

    The fifth, `square_difference`, is infinite or NaN if an element is. With `columns_2C`, the errors are written to
    its second row.
    """
    largest = square_a = square_b = product = square_difference = difference = 0.0
    absolute = real_a = imaginary_a = real_b = imaginary_b = 0.0
    for index in range(a_RC.shape[1]):
        x, y = a_RC[row, index] + 0.0, _second(b_RC, residual_RC, row, index)
        error = y - x
        size = abs(error)
        largest = max(largest, size)
        square_a += x.real * x.real + x.imag * x.imag
        square_b += y.real * y.real + y.imag * y.imag
        product += x.real * y.real + x.imag * y.imag
        square_difference += size * size
        if columns_2C is not None:
            columns_2C[1, index] = error
            difference += error
        else:
            absolute += size
            real_a, imaginary_a = real_a + x.real, imaginary_a + x.imag
            real_b, imaginary_b = real_b + y.real, imaginary_b + y.imag
    first = largest, square_a, square_b, product, square_difference, difference
    return (*first, absolute, real_a, imaginary_a, real_b, imaginary_b)


@compiled_sums
def _add_relations(a_RC: NDArray[Any], b_RC: NDArray[Any], row: int, sums: Floats) -> None:
    """Write the sums from `relative` to `moment_ab` of a row of finite elements, after all other sums."""
    relative = largest_relative = zeros = moment_a = moment_b = moment_ab = 0.0
    count = max(1.0, sums[0])
    mean_a, mean_ia, mean_b, mean_ib = sums[9] / count, sums[10] / count, sums[11] / count, sums[12] / count
    for index in range(a_RC.shape[1]):
        x, y = a_RC[row, index], b_RC[row, index]
        magnitude = abs(x)
        is_zero = magnitude == 0
        ratio = 0.0 if is_zero else np.divide(abs(x - y), magnitude)
        relative += ratio
        largest_relative = max(largest_relative, ratio)
        zeros += 1.0 if is_zero else 0.0
    # In a loop without the maximum, which would keep the compiler from vectorising the sums, and add rounding errors.
    for index in range(a_RC.shape[1]):
        x, y = a_RC[row, index], b_RC[row, index]
        u, v, w, z = x.real - mean_a, x.imag - mean_ia, y.real - mean_b, y.imag - mean_ib
        moment_a += u * u + v * v
        moment_b += w * w + z * z
        moment_ab += u * w + v * z
    sums[14], sums[15], sums[16] = relative, largest_relative, zeros
    sums[17], sums[18], sums[19] = moment_a, moment_b, moment_ab


@compiled
def _copy_finite(  # noqa: PLR0917 - numba has no keyword-only arguments
    a_RC: NDArray[Any],
    b_RC: NDArray[Any],
    residual_RC: NDArray[np.uint16] | None,
    row: int,
    columns_2C: Floats | None,
    buffer_2C: NDArray[Any],
    sums: Floats,
) -> int:
    """Write the elements of a row that are finite in both arrays to `kept_2C`, and count the others by their kind.

    With `columns_2C`, elements keep their positions and zeros replace the others; without, they are written without
    gaps. Returns the number of elements written, zeros included.
    """
    compared = 0
    for index in range(a_RC.shape[1]):
        x, y = a_RC[row, index] + 0.0, _second(b_RC, residual_RC, row, index)
        is_compared = abs(x) < np.inf and abs(y) < np.inf
        is_nan_a, is_nan_b = np.isnan(x), np.isnan(y)
        position = index if columns_2C is not None else compared
        buffer_2C[0, position], buffer_2C[1, position] = (
            (x, y) if is_compared else (0.0 * buffer_2C[0, 0], 0.0 * buffer_2C[0, 0])
        )
        compared += int(is_compared)
        sums[1] += 1.0 if abs(x) < np.inf else 0.0
        if is_nan_a or is_nan_b:
            sums[20 if is_nan_a and is_nan_b else 21] += 1.0
        elif not is_compared:
            sums[22 if x == y else 23] += 1.0
    sums[0] += compared
    return a_RC.shape[1] if columns_2C is not None else compared


@compiled
def add_differences(  # noqa: PLR0917 - as above
    a_RC: NDArray[Any],
    b_RC: NDArray[Any],
    residual_RC: NDArray[np.uint16] | None,
    columns_2C: Floats | None,
    buffer_2C: NDArray[Any],
    sums_BM: Floats,
) -> None:
    """Add the differences between two matrices to `SUMS`, for each row or for all rows together.

    The matrices are float64 or complex128. With `columns_2C` they are float32, the errors of each column are added to
    its first row, and the sums from `absolute` to `imaginary_b`, the relative ones and the moments are left out. Its
    second row and `kept_2C` are buffers for a row. All outputs and buffers are zero at the start.
    """
    for row in range(a_RC.shape[0]):
        sums = sums_BM[row if sums_BM.shape[0] == a_RC.shape[0] else 0]
        row_sums = _add_row(a_RC, b_RC, residual_RC, row, columns_2C)
        is_finite, size = row_sums[4] < np.inf, a_RC.shape[1]
        if is_finite:
            sums[0] += a_RC.shape[1]
            sums[1] += a_RC.shape[1]
        else:
            # Few rows have non-finite elements, and only these check each element.
            size = _copy_finite(a_RC, b_RC, residual_RC, row, columns_2C, buffer_2C, sums)
            row_sums = _add_row(buffer_2C[:1, :size], buffer_2C[1:, :size], None, 0, columns_2C)
        sums[2] = max(sums[2], row_sums[0])
        for index in range(1, len(row_sums)):
            sums[2 + index] += row_sums[index]
        if columns_2C is not None:
            sums[13] += row_sums[5] * row_sums[5] - row_sums[4]
            for column in range(columns_2C.shape[1]):
                columns_2C[0, column] += columns_2C[1, column]
        elif is_finite:
            _add_relations(a_RC, b_RC, row, sums)
        else:
            _add_relations(buffer_2C[:1, :size], buffer_2C[1:, :size], 0, sums)
