"""The sums over the finite values of a tensor, and what follows from them.

Ten numbers stand for a tensor of which `statistics` are kept. They are sums and sums of powers of differences from the
mean, so that those of two parts of a tensor give those of the whole, and nothing is lost where the mean is large and
the values are close to it, as it would be in sums of powers of the values themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranktape.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the finite values of a tensor add up to; NaN and infinities are in `num_elements` alone.

    Of complex values the magnitudes are meant. Sums and moments are those of values divided by 2**`exponent`.
    """

    num_elements: int
    """Elements of any kind."""
    num_finite: int
    """Those that are neither NaN nor infinite: n, over which everything else is."""
    sum: float
    """Sum of x, divided as said above; 0 where nothing is finite."""
    moment_2: float
    """Sum of (x - mean)^2; exactly 0 where all values are equal, or nothing is finite. So are the next two."""
    moment_3: float
    """Sum of (x - mean)^3."""
    moment_4: float
    """Sum of (x - mean)^4."""
    sum_magnitudes: float
    """Sum of |x|."""
    minimum: float | None
    """Smallest finite value; None where nothing is finite."""
    maximum: float | None
    """Largest finite value; None where nothing is finite."""
    absmax: float | None
    """Largest finite magnitude; None where nothing is finite."""

    @property
    def exponent(self) -> int:
        """0, unless `absmax` is below 2**-180 or above 2**180, as float64 may be: then that of `absmax`."""
        return exponent_of(self.absmax)

    @property
    def mean(self) -> float | None:
        """Of x: `sum` / n times 2**`exponent`."""
        if self.minimum is None or self.maximum is None or not math.isfinite(self.sum):
            return None
        return min(max(self._times(self.sum / self.num_finite), self.minimum), self.maximum)

    @property
    def mean_magnitude(self) -> float | None:
        """Of |x|: `sum_magnitudes` / n times 2**`exponent`."""
        return self._size(self.sum_magnitudes / max(1, self.num_finite))

    @property
    def variance(self) -> float | None:
        """Of the values themselves, not of what they would be a sample of; None where float64 does not hold it."""
        mean = self._times(self.moment_2 / max(1, self.num_finite), power=2)
        is_held = math.isfinite(mean) and (mean >= _MIN_NORMAL or not self.moment_2)
        return mean if is_held and self.num_finite else None

    @property
    def std(self) -> float | None:
        """The square root of the variance."""
        return self._size(self._divided_std)

    @property
    def rms(self) -> float | None:
        """The square root of the mean of x^2."""
        return self._size(math.hypot(self._divided_std, self.sum / max(1, self.num_finite)))

    @property
    def norm(self) -> float | None:
        """The Euclidean norm: the square root of the sum of x^2; 0 where nothing is finite."""
        if not self.num_finite:
            return 0.0
        return None if self.rms is None else _known(self.rms * math.sqrt(self.num_finite))

    @property
    def skewness(self) -> float | None:
        """(`moment_3` / n) / (`moment_2` / n)^1.5; None where all values are equal."""
        return self._standardised(self.moment_3, power=3)

    @property
    def kurtosis(self) -> float | None:
        """(`moment_4` / n) / (`moment_2` / n)^2: 3 for a normal distribution; None where all values are equal."""
        return self._standardised(self.moment_4, power=4)

    @property
    def _divided_std(self) -> float:
        return math.sqrt(self.moment_2 / max(1, self.num_finite))

    def _standardised(self, moment: float, *, power: int) -> float | None:
        std = self._divided_std
        return _known(moment / self.num_finite / std / std**2 / std ** (power - 3)) if std else None

    def _size(self, divided: float) -> float | None:
        """What is no larger than the largest magnitude, of that divided by 2**`exponent`; None where nothing is."""
        if self.absmax is None or not math.isfinite(divided):
            return None
        return min(self._times(divided), self.absmax)

    def _times(self, value: float, *, power: int = 1) -> float:
        """The value times 2**`exponent` to a power; infinite beyond float64."""
        try:
            return math.ldexp(value, power * self.exponent)
        except OverflowError:
            return math.copysign(math.inf, value)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both parts together."""
        return merge_statistics([self, other])

    def to_vector(self) -> np.ndarray[Any, Any]:
        """The ten numbers as they are stored, in the order of `STATISTICS`; NaN for None."""
        values = [getattr(self, name) for name in STATISTICS]
        return np.array([math.nan if value is None else value for value in values], dtype="<f8")

    @classmethod
    def from_vector(cls, vector: np.ndarray[Any, Any]) -> Statistics:
        """Rebuild what `to_vector` wrote."""
        if vector.shape != (len(STATISTICS),) or vector.dtype != np.dtype("<f8"):
            raise DataError(f"{vector.dtype}{list(vector.shape)} are no statistics: see 'ranktape check'")
        values: dict[str, Any] = dict(zip(STATISTICS, vector.tolist(), strict=True))
        for name in _COUNTS:
            if not (values[name] >= 0 and values[name] < _MAX_COUNT and values[name].is_integer()):
                raise DataError(f"{name} of statistics is {values[name]}, not a number of elements")
            values[name] = int(values[name])
        has_none = all(math.isnan(values[name]) for name in _ENDS)
        if values["num_finite"] > values["num_elements"] or has_none != (values["num_finite"] == 0):
            raise DataError(
                f"statistics of {values['num_finite']} finite values of {values['num_elements']} are damaged"
            )
        exponent = exponent_of(values["absmax"])
        if exponent and not 1 / 2 <= values["sum_magnitudes"] <= _MAX_COUNT:
            # Runs that were recorded earlier have undivided sums.
            values |= {name: float(np.ldexp(values[name], -power * exponent)) for name, power in POWERS.items()}
        return cls(**values | (dict.fromkeys(_ENDS) if has_none else {}))


STATISTICS = tuple(field.name for field in dataclasses.fields(Statistics))
"""The names of the numbers that are stored, in their order."""

_COUNTS = STATISTICS[:2]
_MOMENTS = STATISTICS[3:6]
POWERS = {"sum": 1, "moment_2": 2, "moment_3": 3, "moment_4": 4, "sum_magnitudes": 1}
"""Of which power of x each is a sum."""

_ENDS: dict[str, Callable[..., Any]] = {"minimum": min, "maximum": max, "absmax": max}
_MAX_COUNT = 2.0**53
_MIN_NORMAL = 2.0**-1022

MAX_EXPONENT = 180
"""Fourth powers of what is that far from 1, and of its last digit, are float64 numbers with all digits."""


def exponent_of(absmax: float | None) -> int:
    """`Statistics.exponent` of values with that largest magnitude."""
    exponent = math.frexp(absmax or 0.0)[1]
    return exponent if abs(exponent) > MAX_EXPONENT else 0


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all parts together; of no elements where there is no part."""
    if len(parts) == 1:
        return parts[0]
    finite = [part for part in parts if part.num_finite]
    # None of the three is None there.
    ends = {name: choose((getattr(part, name) for part in finite), default=None) for name, choose in _ENDS.items()}
    steps = np.array([part.exponent for part in parts], dtype=np.int64) - exponent_of(ends["absmax"])
    sums = {
        name: np.ldexp(np.array([getattr(part, name) for part in parts], dtype=np.float64), power * steps)
        for name, power in POWERS.items()
    }
    counts = np.array([part.num_finite for part in parts], dtype=np.float64)
    total, moments = merge_moments(counts, sums["sum"], [sums[name] for name in _MOMENTS])
    if ends["minimum"] == ends["maximum"]:
        # One value: what is left of it is what rounding left of its mean.
        moments = [0.0, 0.0, 0.0]
    return Statistics(
        num_elements=sum(part.num_elements for part in parts),
        num_finite=sum(part.num_finite for part in parts),
        sum=total,
        **dict(zip(_MOMENTS, moments, strict=True)),
        sum_magnitudes=math.fsum(sums["sum_magnitudes"].tolist()),
        **ends,
    )


def merge_moments(
    counts: np.ndarray[Any, Any], sums: np.ndarray[Any, Any], moments: Sequence[np.ndarray[Any, Any]]
) -> tuple[float, list[float]]:
    """The sum and the three moments of values, of which those of parts are known.

    Args:
        counts: Finite values in each part.
        sums: Their sums.
        moments: The three moments of each part, about the part's own mean.
    """
    # What was stored before sums were divided may be infinite, and is said to be unknown by whoever asks for it.
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(sums.sum())
        # From one mean to another: (x - m) = (x - m') + (m' - m), and the sum of the first is 0 in each part.
        shift = np.where(counts > 0, sums / np.maximum(counts, 1) - total / max(1.0, float(counts.sum())), 0.0)
        second, third, fourth = moments
        shift_2 = shift * shift
        return total, [
            float((second + counts * shift_2).sum()),
            float((third + 3 * shift * second + counts * shift_2 * shift).sum()),
            float((fourth + 4 * shift * third + 6 * shift_2 * second + counts * shift_2 * shift_2).sum()),
        ]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
