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

    Of complex values the magnitudes are meant. Of 64-bit floats beyond 1e77 in magnitude the higher moments are
    infinite or NaN, and of those within 1e-73 of each other they are too small to be held: what follows from them is
    None.
    """

    num_elements: int
    """Elements of any kind."""
    num_finite: int
    """Those that are neither NaN nor infinite: n, over which everything else is."""
    sum: float
    """Sum of x; 0 where nothing is finite."""
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
    def mean(self) -> float | None:
        """`sum` / n."""
        return self.sum / self.num_finite if self.num_finite else None

    @property
    def mean_magnitude(self) -> float | None:
        """`sum_magnitudes` / n."""
        return self.sum_magnitudes / self.num_finite if self.num_finite else None

    @property
    def variance(self) -> float | None:
        """`moment_2` / n: of the values themselves, not of what they would be a sample of."""
        return self._mean_of(self.moment_2, power=2)

    @property
    def std(self) -> float | None:
        """The square root of `variance`."""
        return None if self.variance is None else math.sqrt(self.variance)

    @property
    def rms(self) -> float | None:
        """The square root of the mean of x^2."""
        if self.variance is None or self.mean is None:
            return None
        return math.hypot(math.sqrt(self.variance), self.mean)

    @property
    def norm(self) -> float | None:
        """The Euclidean norm: the square root of the sum of x^2; 0 where nothing is finite."""
        if not self.num_finite:
            return 0.0
        return None if self.rms is None else self.rms * math.sqrt(self.num_finite)

    @property
    def skewness(self) -> float | None:
        """(`moment_3` / n) / `std`^3; None where all values are equal."""
        return self._standardised(self.moment_3, power=3)

    @property
    def kurtosis(self) -> float | None:
        """(`moment_4` / n) / `std`^4, which is 3 for a normal distribution; None where all values are equal."""
        return self._standardised(self.moment_4, power=4)

    def _standardised(self, moment: float, *, power: int) -> float | None:
        mean = self._mean_of(moment, power=power)
        if mean is None or not self.std:
            return None
        return _known(mean / self.std / self.std**2 / self.std ** (power - 3))

    def _mean_of(self, moment: float, *, power: int) -> float | None:
        """The moment over n; None where it is beyond float64, or below the numbers that have all digits."""
        if self.minimum is None or self.maximum is None:
            return None
        # The largest difference from the mean is half of that at least.
        is_lost = 0 < self.maximum - self.minimum < 2.0 ** (_LEAST_EXPONENT / power)
        return None if is_lost else _known(moment / self.num_finite)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both parts together."""
        return merge_statistics([self, other])

    def to_vector(self) -> np.ndarray[Any, Any]:
        """The ten numbers as they are stored, in the order of `STATISTICS`; NaN for None."""
        values = [getattr(self, name) for name in STATISTICS]
        return np.array([math.nan if value is None else value for value in values], dtype="<f8")

    @classmethod
    def from_vector(cls, vector: np.ndarray[Any, Any]) -> Statistics:
        """Rebuild what `to_vector` wrote.

        Raises:
            DataError: it is no such vector.
        """
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
        return cls(**values | (dict.fromkeys(_ENDS) if has_none else {}))


STATISTICS = tuple(field.name for field in dataclasses.fields(Statistics))
"""The names of the numbers that are stored, in their order."""

_COUNTS = STATISTICS[:2]
_MOMENTS = STATISTICS[3:6]
_ENDS: dict[str, Callable[..., Any]] = {"minimum": min, "maximum": max, "absmax": max}
_MAX_COUNT = 2.0**53
_LEAST_EXPONENT = -1022 + 53 + 4
"""Of a power of the spread, so that powers half of it have all digits, and what is lost below them does not matter."""


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all parts together; of no elements where there is no part."""
    total, moments = merge_moments(
        np.array([part.num_finite for part in parts], dtype=np.float64),
        np.array([part.sum for part in parts], dtype=np.float64),
        [np.array([getattr(part, name) for part in parts], dtype=np.float64) for name in _MOMENTS],
    )
    finite = [part for part in parts if part.num_finite]
    # None of the three is None there.
    ends = {name: choose((getattr(part, name) for part in finite), default=None) for name, choose in _ENDS.items()}
    if ends["minimum"] == ends["maximum"]:
        # One value: what is left of it is what rounding left of its mean.
        moments = [0.0, 0.0, 0.0]
    return Statistics(
        num_elements=sum(part.num_elements for part in parts),
        num_finite=sum(part.num_finite for part in parts),
        sum=total,
        **dict(zip(_MOMENTS, moments, strict=True)),
        sum_magnitudes=math.fsum(part.sum_magnitudes for part in parts),
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
    # What the largest float64 give is infinite or NaN, and said to be unknown by whoever asks for it.
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
