"""Which scale of one tensor loses least in a format?

One scale for the whole tensor (`tensor` mode): a power of two with a fractional exponent e. A value x becomes
2**e * round(x / 2**e). The exponents are spread evenly from the alignment of the largest value, where nothing
overflows, to that of the smallest, where nothing is subnormal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.histogram import count_values, own_limits, scan
from ranktape.analyze.metrics import Level, best, levels_of
from ranktape.analyze.scaling import largest_alignment, smallest_alignment, sums_of_pairs, sums_of_values
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.formats import Format
    from ranktape.analyze.histogram import Histogram
    from ranktape.analyze.scaling import Sums

MAX_SCALE_EXPONENT = 1000
"""Largest magnitude of an exponent that may be asked for."""

MAX_NUM_LEVELS = 10_000
"""Most levels that may be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Which scales are tried.

    Raises:
        UsageError: a value is not allowed.
    """

    num_levels: int = 21
    """How many."""
    max_scale_exp: float | None = None
    """First exponent; where the largest value is aligned if None."""
    min_scale_exp: float | None = None
    """Last exponent; where the smallest value is aligned if None."""

    def __post_init__(self) -> None:
        """Check every value."""
        if not 1 <= self.num_levels <= MAX_NUM_LEVELS:
            raise UsageError(f"--num-levels {self.num_levels} is not allowed: give 1 to {MAX_NUM_LEVELS}")
        for option, exponent in (("max", self.max_scale_exp), ("min", self.min_scale_exp)):
            if exponent is not None and not abs(exponent) <= MAX_SCALE_EXPONENT:
                raise UsageError(
                    f"--{option}-scale-exp {exponent} is not allowed: "
                    f"give an exponent from -{MAX_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}"
                )

    def exponents(self, *, largest: float, smallest: float, target: Format) -> NDArray[np.float64]:
        """The exponents for a tensor whose magnitudes are, zeros aside, between these two."""
        first = largest_alignment(largest, target=target) if self.max_scale_exp is None else self.max_scale_exp
        last = smallest_alignment(smallest, target=target) if self.min_scale_exp is None else self.min_scale_exp
        return np.linspace(first, last, self.num_levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSweep:
    """What one tensor loses at each scale, and which scale loses least.

    A tensor without a finite number other than zero has no levels and no best one: `note` says why.
    """

    target: Format
    """The format that values are rounded to."""
    num_elements: int
    """Elements of any kind."""
    nan: int
    """Elements that are not a number; in no figure."""
    inf: int
    """Infinities; in no figure."""
    zero: int
    """Zeros of either sign."""
    levels: tuple[Level, ...]
    """One for each exponent, from the alignment of the largest value to that of the smallest."""
    note: str
    """What is unusual; empty for an ordinary tensor."""

    def best(self, figure: Callable[[Level], float]) -> Level | None:
        """The level with the largest figure, the first of them on a tie; None without levels."""
        return best(self.levels, figure=figure) if self.levels else None

    @property
    def recommended(self) -> Level | None:
        """The level with the best composite score; None without levels."""
        return self.best(lambda level: level.score)


def sweep_array(array: NDArray[Any], *, target: Format, options: SweepOptions | None = None) -> ScaleSweep:
    """Round an array to a format at many scales, each exactly, and judge what is lost.

    NaN and infinities are counted and left out of the figures. Empty arrays, and arrays of nothing but zeros,
    NaN and infinities, have no levels. Complex elements are judged part by part. Any shape and layout.

    Raises:
        UsageError: records do not hold such a dtype; the format is fp64, which has no room for a scale.
    """
    _check_target(target)
    real = np.stack([array.real, array.imag]) if array.dtype.kind == "c" else array
    if real.dtype.itemsize <= 2:  # noqa: PLR2004 - bytes that can be counted
        return sweep_histogram(count_values(real), target=target, options=options)
    found = _population_of_values(real)
    floats = real if real.dtype.kind == "f" else real.astype(np.float64)
    return _sweep(
        found,
        lambda exponents: sums_of_values(floats, largest=found.largest, exponents=exponents, target=target),
        target=target,
        options=options,
    )


def sweep_histogram(histogram: Histogram, *, target: Format, options: SweepOptions | None = None) -> ScaleSweep:
    """What `sweep_array` finds for the array that the histogram was counted from.

    Raises:
        UsageError: the format is fp64, which has no room for a scale.
    """
    _check_target(target)
    values, counts = histogram.pairs()
    return _sweep(
        _population_of_pairs(values, counts),
        lambda exponents: sums_of_pairs(values, counts=counts, exponents=exponents, target=target),
        target=target,
        options=options,
    )


def _check_target(target: Format) -> None:
    if target.dtype == "float64":
        raise UsageError("format 'fp64' holds every captured value: give a narrower one, such as fp8_e4m3")


def _sweep(
    found: _Population,
    sums_at: Callable[[NDArray[np.float64]], Sums],
    *,
    target: Format,
    options: SweepOptions | None,
) -> ScaleSweep:
    levels: tuple[Level, ...] = ()
    if found.largest:
        exponents = (options or SweepOptions()).exponents(largest=found.largest, smallest=found.smallest, target=target)
        levels = levels_of(sums_at(exponents), exponents=exponents.tolist())
    return ScaleSweep(
        target=target,
        num_elements=found.num_elements,
        nan=found.nan,
        inf=found.inf,
        zero=found.zero,
        levels=levels,
        note=_note(found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Population:
    """Which kinds of numbers a tensor holds."""

    num_elements: int
    """Elements of any kind."""
    nan: int
    """Not a number."""
    inf: int
    """Infinities."""
    zero: int
    """Zeros of either sign."""
    largest: float
    """Largest finite magnitude; 0 where there is no finite number other than zero."""
    smallest: float
    """Smallest finite magnitude that is not zero; 0 where there is none."""


def _population_of_values(array: NDArray[Any]) -> _Population:
    tallies = scan(array, limits=own_limits(array.dtype))
    return _Population(
        num_elements=tallies.num_elements,
        nan=tallies.nan,
        inf=tallies.inf,
        zero=tallies.zero,
        largest=tallies.largest_finite or 0.0,
        smallest=tallies.smallest_nonzero or 0.0,
    )


def _population_of_pairs(values: NDArray[np.float64], counts: NDArray[np.int64]) -> _Population:
    magnitudes = np.abs(values)
    ordinary = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    return _Population(
        num_elements=int(counts.sum()),
        nan=int(counts[np.isnan(values)].sum()),
        inf=int(counts[np.isinf(values)].sum()),
        zero=int(counts[values == 0].sum()),
        largest=float(ordinary.max(initial=0.0)),
        smallest=float(ordinary.min()) if ordinary.size else 0.0,
    )


def _note(found: _Population) -> str:
    num_finite = found.num_elements - found.nan - found.inf
    if found.num_elements == 0:
        return "empty"
    if num_finite == 0:
        return "no finite number"
    if not found.largest:
        return (
            "all zero: exact at any scale" if num_finite == found.num_elements else "no finite number other than zero"
        )
    return "NaN or Inf left out" if num_finite < found.num_elements else ""
