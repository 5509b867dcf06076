"""Sums over the finite values of a tensor, and the statistics that follow from them.

A tensor that is stored as `statistics` has ten numbers. They include sums of powers of the differences from the mean.
Those of two parts of a tensor give those of the whole, and no precision is lost if the values are close to a large
mean, as it would be with sums of powers of the values.
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
    """Sums over the finite values of a tensor. NaN and infinities count in `num_elements` only.

    For complex values, x is the magnitude. Sums and moments are those of x divided by 2**`exponent`.
    """

    num_elements: int
    """Number of elements."""
    num_finite: int
    """Number n of finite elements."""
    sum: float
    """Sum of x; 0 if no element is finite."""
    moment_2: float
    """Sum of (x - mean)^2. All three moments are exactly 0 if all values are equal or no element is finite."""
    moment_3: float
    """Sum of (x - mean)^3."""
    moment_4: float
    """Sum of (x - mean)^4."""
    sum_magnitudes: float
    """Sum of |x|."""
    minimum: float | None
    """Smallest finite value; None if no element is finite."""
    maximum: float | None
    """Largest finite value; None if no element is finite."""
    absmax: float | None
    """Largest finite magnitude; None if no element is finite."""

    @property
    def exponent(self) -> int:
        """The exponent of `absmax` if `absmax` is below 2**-180 or above 2**180, else 0."""
        return exponent_of(self.absmax)

    @property
    def mean(self) -> float | None:
        """Mean of x: `sum` / n times 2**`exponent`."""
        if self.minimum is None or self.maximum is None or not math.isfinite(self.sum):
            return None
        return min(max(self._times(self.sum / self.num_finite), self.minimum), self.maximum)

    @property
    def mean_magnitude(self) -> float | None:
        """Mean of |x|: `sum_magnitudes` / n times 2**`exponent`."""
        return self._size(self.sum_magnitudes / max(1, self.num_finite))

    @property
    def variance(self) -> float | None:
        """Population variance, with the divisor n; None if it is not a normal float64 number."""
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
        """The Euclidean norm: the square root of the sum of x^2; 0 if no element is finite."""
        if not self.num_finite:
            return 0.0
        return None if self.rms is None else _known(self.rms * math.sqrt(self.num_finite))

    @property
    def skewness(self) -> float | None:
        """(`moment_3` / n) / (`moment_2` / n)^1.5; None if all values are equal."""
        return self._standardised(self.moment_3, power=3)

    @property
    def kurtosis(self) -> float | None:
        """(`moment_4` / n) / (`moment_2` / n)^2: 3 for a normal distribution; None if all values are equal."""
        return self._standardised(self.moment_4, power=4)

    @property
    def _divided_std(self) -> float:
        return math.sqrt(self.moment_2 / max(1, self.num_finite))

    def _standardised(self, moment: float, *, power: int) -> float | None:
        std = self._divided_std
        return _known(moment / self.num_finite / std / std**2 / std ** (power - 3)) if std else None

    def _size(self, divided: float) -> float | None:
        """A magnitude that was divided by 2**`exponent`, scaled back and limited to `absmax`; None if not finite."""
        if self.absmax is None or not math.isfinite(divided):
            return None
        return min(self._times(divided), self.absmax)

    def _times(self, value: float, *, power: int = 1) -> float:
        """The value times 2**(`power` * `exponent`); infinite if it exceeds float64."""
        try:
            return math.ldexp(value, power * self.exponent)
        except OverflowError:
            return math.copysign(math.inf, value)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both parts as one tensor."""
        return merge_statistics([self, other])

    def to_vector(self) -> np.ndarray[Any, Any]:
        """The ten stored numbers in the order of `STATISTICS`, with NaN for None."""
        values = [getattr(self, name) for name in STATISTICS]
        return np.array([math.nan if value is None else value for value in values], dtype="<f8")

    @classmethod
    def from_vector(cls, vector: np.ndarray[Any, Any]) -> Statistics:
        """The statistics from the result of `to_vector`."""
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
            # Sums in runs of early versions are not divided.
            values |= {name: float(np.ldexp(values[name], -power * exponent)) for name, power in POWERS.items()}
        return cls(**values | (dict.fromkeys(_ENDS) if has_none else {}))


STATISTICS = tuple(field.name for field in dataclasses.fields(Statistics))
"""The names of the stored numbers, in their order."""

_COUNTS = STATISTICS[:2]
_MOMENTS = STATISTICS[3:6]
POWERS = {"sum": 1, "moment_2": 2, "moment_3": 3, "moment_4": 4, "sum_magnitudes": 1}
"""The power of x in each sum."""

_ENDS: dict[str, Callable[..., Any]] = {"minimum": min, "maximum": max, "absmax": max}
_MAX_COUNT = 2.0**53
_MIN_NORMAL = 2.0**-1022

MAX_EXPONENT = 180
"""The largest exponent for which fourth powers of a value and of its last bit are normal float64 numbers."""


def exponent_of(absmax: float | None) -> int:
    """`Statistics.exponent` for values whose largest magnitude is `absmax`."""
    exponent = math.frexp(absmax or 0.0)[1]
    return exponent if abs(exponent) > MAX_EXPONENT else 0


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all parts as one tensor; those of an empty tensor if there are no parts."""
    if len(parts) == 1:
        return parts[0]
    finite = [part for part in parts if part.num_finite]
    # In a part with finite values, none of the three is None.
    ends = {name: choose((getattr(part, name) for part in finite), default=None) for name, choose in _ENDS.items()}
    steps = np.array([part.exponent for part in parts], dtype=np.int64) - exponent_of(ends["absmax"])
    sums = {
        name: np.ldexp(np.array([getattr(part, name) for part in parts], dtype=np.float64), power * steps)
        for name, power in POWERS.items()
    }
    counts = np.array([part.num_finite for part in parts], dtype=np.float64)
    total, moments = merge_moments(counts, sums["sum"], [sums[name] for name in _MOMENTS])
    if ends["minimum"] == ends["maximum"]:
        # All values are equal. What remains is the rounding error of the mean.
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
    """The sum and the three moments of a tensor from those of its parts.

    Args:
        counts: Number of finite values in each part.
        sums: Their sums.
        moments: The three moments of each part about its own mean.
    """
    # Sums of early versions may be infinite; the properties of `Statistics` are then None.
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(sums.sum())
        # (x - m) = (x - m') + (m' - m), where m' is the mean of the part, so that the first term sums to 0.
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
