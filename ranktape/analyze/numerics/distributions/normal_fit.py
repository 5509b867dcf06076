"""How near the finite values are to a normal distribution of their own mean and standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.digest import Finite, finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest

_FEWEST = 20
"""Values below which it matters whether the deviation is that of a sample or of the values themselves."""

_CRITICAL_AT_5_PERCENT = 0.886
"""The distance that one in twenty normal samples of n values exceeds, times the root of n (Lilliefors 1967)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormalFit:
    """The normal distribution with the mean and the standard deviation of the finite values, and how far they are."""

    num_values: int
    """Finite values."""
    mean: float | None
    """Their mean; None where there is none."""
    std: float | None
    """Their standard deviation; None where there are none, or it is beyond all numbers."""
    ks_distance: float | None
    """Largest difference between the two cumulative distributions; None where `std` is 0 or None."""
    ks_p_value: float | None
    """How often normal values, as many and fitted likewise, would be as far away or farther.

    None with fewer than 20 values, and where the values lie on a grid so coarse that ties alone move the distance: the
    16-bit values of a large tensor do.
    """
    probabilities: NDArray[np.float64]
    """Parts of the values, for `theoretical` and `observed`; empty where `std` is 0 or None."""
    theoretical: NDArray[np.float64]
    """Below which such a part of the normal distribution lies."""
    observed: NDArray[np.float64]
    """Below or at which such a part of the values lies."""

    @property
    def qq_correlation(self) -> float | None:
        """Correlation of `observed` with `theoretical`: 1 where they lie on a line; None without `observed`."""
        if not self.observed.size:
            return None
        theoretical, observed = _centred(self.theoretical), _centred(self.observed)
        norms = math.sqrt(float(theoretical @ theoretical) * float(observed @ observed))
        return float(theoretical @ observed) / norms if norms else None


def _centred(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The differences from their mean, the largest of which is 1: squares of the points may be beyond all numbers."""
    scaled = points / (np.abs(points).max() or 1.0)
    centred = scaled - scaled.mean()
    unit: NDArray[np.float64] = centred / (np.abs(centred).max() or 1.0)
    return unit


def fit_normal(digest: Digest, *, num_points: int = 101) -> NormalFit:
    """The fit to the finite values of a digest, of complex values to the larger parts.

    Mean and standard deviation are exact where the digest's are: those that were summed, not those of `values`.
    """
    numbers = finite(digest)
    mean, std = _moments(digest, numbers)
    empty = np.zeros(0)
    if not numbers.values.size or mean is None or not std:
        return NormalFit(
            num_values=numbers.num_values,
            mean=mean,
            std=std,
            ks_distance=None,
            ks_p_value=None,
            probabilities=empty,
            theoretical=empty,
            observed=empty,
        )
    probabilities = (np.arange(num_points) + 0.5) / num_points
    normal = NormalDist(mean, std)
    distance = _ks_distance(numbers, normal)
    ends = np.cumsum(numbers.counts)
    places = np.searchsorted(ends, np.ceil(probabilities * ends[-1]))
    return NormalFit(
        num_values=numbers.num_values,
        mean=mean,
        std=std,
        ks_distance=distance,
        ks_p_value=_p_value(distance, numbers),
        probabilities=probabilities,
        theoretical=np.array([normal.inv_cdf(part) for part in probabilities.tolist()]),
        observed=numbers.values[places],
    )


def _moments(digest: Digest, numbers: Finite) -> tuple[float | None, float | None]:
    if "complex" not in digest.dtype:
        return digest.statistics.mean, digest.statistics.std
    if not numbers.values.size:
        return None, None
    weights = numbers.counts / numbers.num_values
    mean = float((numbers.values * weights).sum())
    return mean, math.sqrt(float(((numbers.values - mean) ** 2 * weights).sum()))


def _ks_distance(numbers: Finite, normal: NormalDist) -> float:
    expected = np.array([normal.cdf(value) for value in numbers.values.tolist()])
    after = np.cumsum(numbers.counts) / numbers.num_values
    before = np.append(0.0, after[:-1])
    return float(max((after - expected).max(), (expected - before).max()))


def _p_value(distance: float, numbers: Finite) -> float | None:
    """Of a distance to a normal distribution that was fitted to the same values.

    Kolmogorov's distribution is for one that was known before. Up to 0.1 by Dallal and Wilkinson, An analytic
    approximation to the distribution of Lilliefors's test statistic for normality, American Statistician 40, 1986;
    above by Stephens's modified statistic, as in Thode, Testing for normality, 2002, 5.1.1.
    """
    num_values = numbers.num_values
    if num_values < _FEWEST:
        return None
    most_alike = (int(numbers.counts.max()) - 1) / num_values
    if most_alike > _CRITICAL_AT_5_PERCENT / math.sqrt(num_values) / 3:
        return None
    is_many = num_values > 100  # noqa: PLR2004 - where the approximation stands for all that are more
    scaled = distance * (num_values / 100) ** 0.49 if is_many else distance
    size = 100 if is_many else num_values
    p_value = math.exp(
        -7.01256 * scaled**2 * (size + 2.78019)
        + 2.99587 * scaled * math.sqrt(size + 2.78019)
        - 0.122119
        + 0.974598 / math.sqrt(size)
        + 1.67997 / size
    )
    if p_value <= 0.1:  # noqa: PLR2004 - up to here the formula holds
        return p_value
    root = math.sqrt(num_values)
    return _modified_p_value((root - 0.01 + 0.85 / root) * distance)


def _modified_p_value(statistic: float) -> float:
    for limit, coefficients in _MODIFIED:
        if statistic <= limit:
            return min(1.0, max(0.0, float(np.polynomial.polynomial.polyval(statistic, coefficients))))
    return 0.0


_MODIFIED = (
    (0.302, (1.0,)),
    (0.5, (2.76773, -19.828315, 80.709644, -138.55152, 81.218052)),
    (0.9, (-4.901232, 40.662806, -97.490286, 94.029866, -32.355711)),
    (1.31, (6.198765, -19.558097, 23.186922, -12.234627, 2.423045)),
)
"""Up to which modified statistic the p value is which polynomial of it, the coefficient of the constant first."""
