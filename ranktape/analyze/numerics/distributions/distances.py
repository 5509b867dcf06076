"""How far apart the distributions of two digests are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.digest import MAX_RANK_ERROR, Finite, finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Four distances between two distributions, each 0 between equal ones.

    The first two compare finite values, and are None where either has none. The last two compare classes: the binades
    of either sign, zero, each infinity and NaN; they are None where either has no value at all.
    """

    kolmogorov_smirnov: float | None
    """Largest difference between the two cumulative distributions, from 0 to 1."""
    wasserstein: float | None
    """Area between the two cumulative distributions, in the unit of the values; None where beyond all numbers."""
    relative_wasserstein: float | None
    """`wasserstein` over the standard deviation of the first; None where that is 0 or not known."""
    total_variation: float | None
    """Part of the values that would have to move into another class, from 0 to 1."""
    jensen_shannon: float | None
    """Divergence of the two from their middle, in bits, from 0 to 1. Lin 1991, IEEE Trans. Inf. Theory 37."""
    is_exact: bool
    """Whether the values of both are known, and not only a summary of them."""

    @property
    def differ(self) -> bool | None:
        """Whether the two are certainly not the same distribution; None where neither kind of distance is known."""
        known = [value for value in (self.kolmogorov_smirnov, self.total_variation) if value is not None]
        least = 0.0 if self.is_exact else MAX_RANK_ERROR
        return (self.kolmogorov_smirnov or 0.0) > least or bool(self.total_variation) if known else None


def distance(a: Digest, b: Digest) -> Distances:
    """The distances from one digest to another; all None where of either statistics alone were kept.

    Of complex values the larger parts are compared.
    """
    if not (a.has_values and b.has_values):
        return Distances(
            kolmogorov_smirnov=None,
            wasserstein=None,
            relative_wasserstein=None,
            total_variation=None,
            jensen_shannon=None,
            is_exact=False,
        )
    largest_gap, area = _between_finite(a, b)
    std = a.statistics.std
    variation, divergence = _between_classes(a, b)
    return Distances(
        kolmogorov_smirnov=largest_gap,
        wasserstein=area,
        relative_wasserstein=area / std if area is not None and std else None,
        total_variation=variation,
        jensen_shannon=divergence,
        is_exact=a.is_exact and b.is_exact,
    )


def _between_finite(a: Digest, b: Digest) -> tuple[float | None, float | None]:
    ours, theirs = finite(a), finite(b)
    if not (ours.values.size and theirs.values.size):
        return None, None
    values = np.union1d(ours.values, theirs.values)
    parts = [_cumulative(numbers, at=values) for numbers in (ours, theirs)]
    gaps = np.abs(parts[0] - parts[1])
    # Both are 1 at the last value. Two numbers may be farther apart than any number is large.
    with np.errstate(over="ignore", invalid="ignore"):
        area = float((gaps[:-1] * np.diff(values)).sum())
    return float(gaps.max()), area if math.isfinite(area) else None


def _cumulative(numbers: Finite, *, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Which part of the values is below or at each place."""
    ends = np.append(0, np.cumsum(numbers.counts))
    part: NDArray[np.float64] = ends[np.searchsorted(numbers.values, at, side="right")] / int(ends[-1])
    return part


def _between_classes(a: Digest, b: Digest) -> tuple[float | None, float | None]:
    ours, theirs = _classes(a), _classes(b)
    num_ours, num_theirs = sum(ours.values()), sum(theirs.values())
    if not (num_ours and num_theirs):
        return None, None
    names = sorted(ours.keys() | theirs.keys())
    p = np.array([ours.get(name, 0) for name in names]) / num_ours
    q = np.array([theirs.get(name, 0) for name in names]) / num_theirs
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(part > 0, part * np.log2(part / middle), 0.0).sum() for part in (p, q)]
    return float(np.abs(p - q).sum() / 2), min(1.0, max(0.0, float(sum(terms) / 2)))


def _classes(digest: Digest) -> dict[int, int]:
    """How many values are of each class: one for each sign and exponent, each infinity, zero, and NaN."""
    exponents = np.frexp(digest.values)[1].astype(np.int64)
    exponents[np.isinf(digest.values)] = _BEYOND
    keys, places = np.unique(4 * exponents + np.sign(digest.values).astype(np.int64), return_inverse=True)
    totals = np.zeros(keys.size, dtype=np.int64)
    np.add.at(totals, places, digest.counts)
    classes = dict(zip(keys.tolist(), totals.tolist(), strict=True))
    return classes | ({4 * _BEYOND: digest.tallies.nan} if digest.tallies.nan else {})


_BEYOND = 1 << 12
"""In the place of the exponent of infinities, and without a sign of NaN."""
