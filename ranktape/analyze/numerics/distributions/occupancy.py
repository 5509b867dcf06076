"""Gives how many values are in each power of two, and which of them a format holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.digest import finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest
    from ranktape.analyze.numerics.formats import Format

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """How many values are in each binade [2**e, 2**(e+1)), of either sign; of complex values, of their larger parts."""

    exponents: NDArray[np.int64]
    """e, from that of the smallest nonzero magnitude to that of the largest without a gap; empty without any."""
    counts: NDArray[np.int64]
    """Values in each binade."""
    zero: int
    """Zeros of either sign."""
    nan: int
    """NaN."""
    inf: int
    """Infinities of either sign."""
    magnitudes: NDArray[np.float64]
    """The nonzero finite magnitudes that occur, ascending."""
    magnitude_counts: NDArray[np.int64]
    """How often each of them occurs."""
    largest: float | None
    """The largest finite magnitude, exactly; None without any."""
    is_exact: bool
    """Whether `magnitudes` are those that were recorded; the binade of each is right in any case."""

    @property
    def num_elements(self) -> int:
        """All values, of whatever kind."""
        return int(self.counts.sum()) + self.zero + self.nan + self.inf


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


def occupancy(digest: Digest) -> Occupancy:
    """The binades of the values of a digest: none where it has no nonzero finite value, or statistics alone."""
    numbers = finite(digest)
    magnitudes, places = np.unique(np.abs(numbers.values), return_inverse=True)
    counts = np.zeros(magnitudes.size, dtype=np.int64)
    np.add.at(counts, places, numbers.counts)
    is_nonzero = magnitudes > 0
    magnitudes, counts = magnitudes[is_nonzero], counts[is_nonzero]
    binades = np.frexp(magnitudes)[1].astype(np.int64) - 1
    exponents = np.arange(binades[0], binades[-1] + 1) if binades.size else np.zeros(0, dtype=np.int64)
    in_binade = np.zeros(exponents.size, dtype=np.int64)
    if binades.size:
        np.add.at(in_binade, binades - binades[0], counts)
    return Occupancy(
        exponents=exponents,
        counts=in_binade,
        zero=digest.tallies.zero,
        nan=digest.tallies.nan,
        inf=digest.tallies.inf,
        magnitudes=magnitudes,
        magnitude_counts=counts,
        largest=digest.tallies.largest_finite if magnitudes.size else None,
        is_exact=digest.is_exact,
    )


def aligned_exponent(occupied: Occupancy, row: Format) -> int | None:
    """The smallest exponent of a scale with which no finite value is beyond the format's largest; None without any."""
    return row.largest_alignment(occupied.largest) if occupied.largest else None


def held_by(occupied: Occupancy, row: Format, scale_exponent: int = 0) -> HeldRange:
    """What a format does to each value x after division by 2**`scale_exponent`, with its own rounding.

    Exactly, unless the values are wider than 16 bits and the format has more than six mantissa bits.
    """
    # Scaled are the limits, of which there are few; what has no float64 is beyond all values, or below.
    with np.errstate(over="ignore", under="ignore"):
        overflow_start, min_normal, flush_limit = np.ldexp(
            [row.overflow_start, row.min_normal, row.flush_limit], scale_exponent
        ).tolist()
    magnitudes, counts = occupied.magnitudes, occupied.magnitude_counts
    is_above = magnitudes >= overflow_start
    is_flushed = magnitudes <= flush_limit
    is_small = magnitudes < min_normal
    return HeldRange(
        format=row.name,
        scale_exponent=scale_exponent,
        highest_exponent=row.emax + scale_exponent,
        lowest_normal_exponent=math.frexp(row.min_normal)[1] - 1 + scale_exponent,
        lowest_exponent=math.frexp(row.min_subnormal)[1] - 1 + scale_exponent,
        above=int(counts[is_above].sum()),
        normal=int(counts[~is_above & ~is_small].sum()),
        subnormal=int(counts[is_small & ~is_flushed].sum()),
        flushed=int(counts[is_flushed].sum()),
        zero=occupied.zero,
        nan=occupied.nan,
        inf=occupied.inf,
    )
