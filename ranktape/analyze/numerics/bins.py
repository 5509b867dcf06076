"""Counts values in the bins of an axis, linear or of binades, and says which binades a format holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.digest import Digest, finite
from ranktape.analyze.numerics.formats import Format
from ranktape.analyze.numerics.histograms.histogram import format_limits

_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """Finite values in bins of equal width, or of equal factors.

    A bin holds its lower edge and not its upper one, but the last one of equal width both.
    """

    edges: NDArray[np.float64]
    """One more than there are bins, ascending; empty where there is no bin.

    The last one is infinite where magnitudes of 2**1023 and more are counted in binades.
    """
    widths: NDArray[np.float64]
    """Length of each bin: a difference, or binades."""
    counts: NDArray[np.int64]
    """Values in each bin; of binades, magnitudes."""
    num_negative: NDArray[np.int64]
    """How many of them are negative."""

    @property
    def num_values(self) -> int:
        """Values in all bins together."""
        return int(self.counts.sum())

    def ratio(self) -> NDArray[np.float64]:
        """Part of the values in the bins that is in each of them; zeros where the bins hold nothing."""
        ratio: NDArray[np.float64] = self.counts / max(1, self.num_values)
        return ratio

    def density(self) -> NDArray[np.float64]:
        """`ratio` for each unit of the axis, so that the sum of density times `widths` is 1."""
        # Two subnormal edges are nearer than one over the largest number.
        with np.errstate(over="ignore"):
            density: NDArray[np.float64] = self.ratio() / self.widths
        return density

    def relative_density(self) -> NDArray[np.float64]:
        """The density as a part of the largest one: from 0 to 1; zeros where the bins hold nothing."""
        # The density itself may be beyond all numbers.
        relative = self.ratio() * (self.widths.max(initial=0.0) / self.widths)
        normalised: NDArray[np.float64] = relative / (relative.max(initial=0.0) or 1.0)
        return normalised


def linear_bins(digest: Digest, num_bins: int, *, low: float | None = None, high: float | None = None) -> Bins:
    """Bins of equal width from the smallest finite value to the largest, or between ends that are given.

    Without finite values there is no bin. Where all values are equal, bins reach half their magnitude to either side,
    or 0.5 from zero. Where float64 has not so many numbers between the ends, there are fewer bins.
    """
    numbers = finite(digest)
    first = numbers.minimum if low is None else low
    last = numbers.maximum if high is None else high
    if math.isnan(first) or math.isnan(last):
        return count_between(digest, np.zeros(0))
    if first == last:
        reach = abs(first) / 2 or 0.5
        first, last = max(first - reach, -_LARGEST), min(last + reach, _LARGEST)
    return count_between(digest, linear_edges(first, last, num_bins=num_bins))


def linear_edges(first: float, last: float, *, num_bins: int) -> NDArray[np.float64]:
    """The edges of so many bins of equal width; fewer where float64 has not so many numbers between the ends."""
    if math.isfinite(last - first):
        return np.unique(np.linspace(first, last, num_bins + 1))
    # The difference of two numbers of float64 may be beyond all of them, that of their halves is not.
    return np.unique(2 * np.linspace(first / 2, last / 2, num_bins + 1))


def count_between(digest: Digest, edges: NDArray[np.float64]) -> Bins:
    """The values between ascending edges: those of another digest, or any others."""
    numbers = finite(digest)
    places = np.searchsorted(edges, numbers.values, side="right") - 1
    if edges.size:
        places[numbers.values == edges[-1]] = edges.size - 2
    with np.errstate(over="ignore"):
        widths = np.diff(edges)
    return _count(digest, edges=edges, widths=widths, places=places)


def log2_bins(digest: Digest, per_binade: int = 1) -> Bins:
    """Magnitudes in whole binades [2**e, 2**(e+1)) from the smallest to the largest, each cut into equal factors.

    Zeros are in no bin. Without nonzero finite values there is no bin.
    """
    numbers = finite(digest)
    magnitudes = np.abs(numbers.values)
    _, exponents = np.frexp(magnitudes[magnitudes > 0])
    edges = np.zeros(0)
    if exponents.size:
        # frexp gives [0.5, 1) * 2**exponent.
        edges = binade_edges(int(exponents.min()) - 1, int(exponents.max()), per_binade=per_binade)
    places = np.searchsorted(edges, magnitudes, side="right") - 1
    widths = np.full(max(0, edges.size - 1), 1 / per_binade)
    return _count(digest, edges=edges, widths=widths, places=places)


def binade_edges(first: int, last: int, *, per_binade: int) -> NDArray[np.float64]:
    """The edges from 2**first to 2**last; exact at powers of two, and infinite where there is no such number."""
    steps = np.exp2(np.arange(per_binade) / per_binade)
    with np.errstate(over="ignore"):
        inner = np.ldexp(steps, np.arange(first, last)[:, np.newaxis]).reshape(-1)
        return np.append(inner, np.ldexp(1.0, last))


def _count(
    digest: Digest, *, edges: NDArray[np.float64], widths: NDArray[np.float64], places: NDArray[np.int64]
) -> Bins:
    """The bins, from the place of each distinct value among them; -1 or one too far are outside."""
    numbers = finite(digest)
    is_inside = (places >= 0) & (places < widths.size)

    def total(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        counts = np.zeros(widths.size, dtype=np.int64)
        np.add.at(counts, places[chosen], numbers.counts[chosen])
        return counts

    is_negative = is_inside & (numbers.values < 0)
    return Bins(edges=edges, widths=widths, counts=total(is_inside), num_negative=total(is_negative))


NARROW_FORMATS = (
    "fp8_e4m3",
    "fp8_e5m2",
    "fp6_e2m3",
    "fp6_e3m2",
    "fp4_e2m1",
    "int8",
    "hif8",
    "bf16",
    "fp16",
)
"""The formats that values are held against, unless others are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """What a format does to values that are divided by 2**`scale_exponent`: each value is in one of the counts."""

    format: str
    """Its name."""
    scale_exponent: int
    """The exponent of the scale."""
    highest_exponent: int
    """Exponent of the largest value that it holds, times the scale: as the values are."""
    lowest_normal_exponent: int
    """That of the smallest value with all significand bits; of integers, which have one step, of that step."""
    lowest_exponent: int
    """That of the smallest value."""
    above: int
    """Finite values that round to beyond the largest one."""
    normal: int
    """Finite values that have all significand bits, or as many as the format has there."""
    subnormal: int
    """Values below the smallest normal one that do not become zero: they lose significand bits."""
    flushed: int
    """Nonzero values that become zero."""
    zero: int
    """Zeros."""
    nan: int
    """NaN."""
    inf: int
    """Infinities."""

    @property
    def num_elements(self) -> int:
        """All values, of whatever kind."""
        return self.above + self.normal + self.subnormal + self.flushed + self.zero + self.nan + self.inf


def binades(bins: Bins) -> NDArray[np.int64]:
    """The exponent e of each bin [2**e, 2**(e+1)) of whole binades."""
    exponents: NDArray[np.int64] = np.frexp(bins.edges[:-1])[1].astype(np.int64) - 1
    return exponents


def aligned_exponent(digest: Digest, row: Format) -> int | None:
    """The smallest exponent of a scale with which no finite value is beyond the format's largest; None without any.

    Nor is there one of nothing but zeros, or where statistics alone were kept.
    """
    largest = digest.tallies.largest_finite if digest.has_values else None
    return row.largest_alignment(largest) if largest else None


def held_by(digest: Digest, row: Format, scale_exponent: int = 0) -> HeldRange:
    """What a format does to each value x after division by 2**`scale_exponent`, with its own rounding.

    Exactly, unless the values are wider than 16 bits and the format has more than six mantissa bits. Where statistics
    alone were kept, zeros, NaN and infinities are known.
    """
    found = digest.count(format_limits(row, exponent=scale_exponent))
    above = found.upper + found.lower - found.inf if digest.has_values else 0
    num_ordinary = found.num_finite - found.zero if digest.has_values else 0
    return HeldRange(
        format=row.name,
        scale_exponent=scale_exponent,
        highest_exponent=row.emax + scale_exponent,
        lowest_normal_exponent=math.frexp(row.min_normal)[1] - 1 + scale_exponent,
        lowest_exponent=math.frexp(row.min_subnormal)[1] - 1 + scale_exponent,
        above=above,
        normal=num_ordinary - above - found.underflow,
        subnormal=max(0, found.underflow - found.flushed),
        flushed=found.flushed,
        zero=found.zero,
        nan=found.nan,
        inf=found.inf,
    )
