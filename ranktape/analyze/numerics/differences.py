"""How far two arrays of one shape are apart, element by element.

Everything is computed in float64 (complex128 for complex elements), in blocks of 4,096 elements in the order of the
array, and added up once at the end: the same arrays give the same metrics to the last bit, however they were read.
Where squares would be beyond float64, or vanish, elements are divided by a power of two first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.difference_kernels import (
    SQUARES,
    SUMS,
    add_up,
    degrees,
    differing_elements,
    largest_ulp,
)
from ranktape.analyze.numerics.kernels import BLOCK

PIECE = 1 << 17
"""Elements that are widened to float64 at once: both pieces stay in a processor's cache."""

_SAFE_EXPONENT = 450
"""Up to this exponent of the largest magnitude, of either sign, squares that matter are float64 numbers."""

_SMALL_SQUARE = 2.0**-900
"""Sums of squares between this and its inverse are those of such magnitudes."""

_LOWEST = -4096
"""The exponent of nothing but zeros: lower than that of any number."""

_NEGLIGIBLE = 1e-12**2
"""Of the sum of squares: a variance below it is what rounding left of a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What sets b apart from a, element by element; a is the reference.

    Sums and extremes are over the positions where both are finite. Two NaN are equal, as are two infinities of one
    sign. A metric is None where nothing is compared, or where it is not defined.
    """

    num_elements: int
    """Elements of each array."""
    num_compared: int
    """Positions where both are finite."""
    num_differing: int
    """Positions whose bits differ: zeros of different sign do, two NaN do not. Of different dtypes, as float64."""
    nan_both: int
    """Positions where both are NaN."""
    nan_one: int
    """Positions where one of the two is NaN."""
    inf_equal: int
    """Positions where both are the same infinity."""
    inf_differing: int
    """Positions where one is infinite and the other is finite, or infinite with another sign."""
    num_zeros: int
    """Compared positions where a is 0: they have no relative difference."""
    max_abs: float | None
    """Largest |a - b|."""
    max_abs_at: tuple[int, ...] | None
    """Where in the array that is, the first of several; None where nothing differs."""
    mean_abs: float | None
    """Mean of |a - b|."""
    max_rel: float | None
    """Largest |a - b| / |a| where a is not 0."""
    mean_rel: float | None
    """Mean of |a - b| / |a| where a is not 0."""
    relative_norm: float | None
    """The norm of a - b over the norm of a; infinite where a is 0 everywhere and b is not."""
    cosine: float | None
    """Cosine of the angle between a and b; None where one of them is 0 everywhere."""
    sqnr: float | None
    """Mean of a^2 over the mean of (a - b)^2, in dB; infinite where they are equal."""
    correlation: float | None
    """Pearson's; None where a or b is constant. Of complex values its real part."""
    ulp_max: int | None
    """Most representable numbers from a to b, of one floating point dtype; None for others."""

    @property
    def num_apart(self) -> int:
        """Positions where one of the two is NaN, or infinite and the other not so: no difference is defined."""
        return self.nan_one + self.inf_differing


def compare_parts(
    parts: Iterable[tuple[NDArray[Any], NDArray[Any]]], *, shape: tuple[int, ...], first_dim: int | None = None
) -> Differences:
    """The differences of two arrays that come in flat parts, one after the other; at least one part.

    Args:
        parts: Parts of a and of b, as many elements of the one as of the other.
        shape: Of the whole arrays.
        first_dim: The dimension along which the parts were cut.
    """
    totals = _DifferenceTotals()
    for part_a, part_b in _in_blocks(parts):
        for start in range(0, max(1, part_a.size), PIECE):
            totals.add(part_a[start : start + PIECE], part_b[start : start + PIECE])
    return totals.differences(shape, first_dim=first_dim)


def _in_blocks(
    parts: Iterable[tuple[NDArray[Any], NDArray[Any]]],
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The same elements in parts that are whole numbers of blocks, but for the last."""
    rest: tuple[NDArray[Any], NDArray[Any]] | None = None
    for part in parts:
        a, b = part if rest is None else (np.concatenate(pair) for pair in zip(rest, part, strict=True))
        stop = a.size // BLOCK * BLOCK
        if stop:
            yield a[:stop], b[:stop]
        rest = a[stop:], b[stop:]
    assert rest is not None
    yield rest


class _DifferenceTotals:
    """What is added up of the pieces so far."""

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
        sums_BM, exponent = _sums_of(wide_a, wide_b)
        with np.errstate(over="ignore"):
            largest = np.ldexp(sums_BM[:, SUMS.index("largest")], exponent)
        if largest.size and largest.max() > self._largest:
            block = int(largest.argmax())
            piece = slice(block * BLOCK, (block + 1) * BLOCK)
            self._largest = float(largest[block])
            self._largest_at = self._num_elements + block * BLOCK + _place(wide_a[piece], wide_b[piece])
        is_differing = differing_elements(a, b, wide_a=wide_a, wide_b=wide_b)
        num_differing = int(np.count_nonzero(is_differing))
        is_finite = None if sums_BM[:, 0].sum() == a.size else np.isfinite(wide_a) & np.isfinite(wide_b)
        ulp = largest_ulp(a, b, is_finite=is_finite) if num_differing else 0
        self._ulp = ulp if self._ulp is None or ulp is None else max(self._ulp, ulp)
        self._num_differing += num_differing
        self._num_elements += a.size
        self._sums.append(sums_BM)
        self._exponents.append(np.full(len(sums_BM), exponent))

    def differences(self, shape: tuple[int, ...], *, first_dim: int | None) -> Differences:
        """The metrics of everything that was added."""
        exponents = np.concatenate(self._exponents)
        top = int(exponents.max(initial=_LOWEST))
        own_BM = np.concatenate(self._sums)
        sums_BM = np.ldexp(own_BM, (exponents - top)[:, np.newaxis] * degrees())
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
            cosine=cosine_of(total["product"], total["square_a"], total["square_b"], is_equal=not largest_scaled),
            sqnr=decibels(relative_norm),
            correlation=None if is_constant else cosine_of(*moments, is_equal=not largest_scaled),
            ulp_max=self._ulp if self._num_elements else None,
        )


def _sums_of(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[np.float64], int]:
    """What the elements of each block add up to, and the exponent of the power of two that they were divided by."""
    sums_BM = np.zeros((-(-a.size // BLOCK), len(SUMS)))
    add_up(a, b, sums_BM)
    squares = sums_BM[:, SQUARES]
    if ((squares > _SMALL_SQUARE) & (squares < 1 / _SMALL_SQUARE)).all():
        return sums_BM, 0
    parts = np.concatenate([one.view(np.float64).reshape(-1) for one in (a, b)])
    magnitude = float(np.abs(parts[np.isfinite(parts)]).max(initial=0.0))
    if not magnitude:
        return sums_BM, _LOWEST
    exponent = math.frexp(magnitude)[1]
    if abs(exponent) <= _SAFE_EXPONENT:
        return sums_BM, 0
    half = -exponent // 2
    scaled_BM = np.zeros(sums_BM.shape)
    with np.errstate(all="ignore"):
        scaled_a, scaled_b = (one * math.ldexp(1.0, half) * math.ldexp(1.0, -exponent - half) for one in (a, b))
    add_up(scaled_a, scaled_b, scaled_BM)
    # Scaling may make NaN of complex infinities, and zeros of what is far below the largest.
    is_count = degrees() == 0
    scaled_BM[:, is_count] = sums_BM[:, is_count]
    return scaled_BM, exponent


def _unscaled(value: float, exponent: int) -> float:
    with np.errstate(over="ignore"):
        return float(np.ldexp(value, exponent))


def _place(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Where in a block the largest finite difference is."""
    is_finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore"):
        return int(np.where(is_finite, np.abs(a - b), -1.0).argmax())


def _unravel(place: int, shape: tuple[int, ...], first_dim: int | None) -> tuple[int, ...]:
    """The index of an element whose place in the order of the parts is known."""
    dim = first_dim or 0
    if not shape:
        return ()
    first, *rest = np.unravel_index(place, (shape[dim], *shape[:dim], *shape[dim + 1 :]))
    rest.insert(dim, first)
    return tuple(map(int, rest))


def _moments(columns: dict[str, NDArray[np.float64]], total: dict[str, float]) -> tuple[float, float, float]:
    """The sums of products and of squares of differences from the means of the whole arrays."""
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
    # The squares of what is below 1e-162 are 0.
    difference, reference = math.sqrt(total["square_difference"]) or largest, math.sqrt(total["square_a"])
    if not difference:
        return 0.0
    return _known(difference / reference) if reference else math.inf


def decibels(relative_norm: float | None) -> float | None:
    """A reference's mean square over that of what is off it, from the ratio of their norms the other way round.

    Infinite of 0, minus infinity of infinity, None of None.
    """
    if not relative_norm:
        return None if relative_norm is None else math.inf
    return -20 * math.log10(relative_norm)


def cosine_of(product: float, square_a: float, square_b: float, *, is_equal: bool) -> float | None:
    """The cosine of two vectors from their product and squares; None where one of the two has no length."""
    norms = math.sqrt(square_a) * math.sqrt(square_b)
    if not norms:
        return None
    return 1.0 if is_equal else _known(min(1.0, max(-1.0, product / norms)))


def _known(value: float) -> float | None:
    """A metric; None where sums of the largest float64 left nothing of it."""
    return None if math.isnan(value) else value
