"""Describes distributions: values in bins, values after rounding to a format, distances, and a normal fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.digest import MAX_RANK_ERROR, Digest, Finite, finite
from ranktape.analyze.numerics.formats import Format
from ranktape.analyze.numerics.histograms.histogram import format_limits

_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """Finite values in bins of equal width, or magnitudes in bins of an equal ratio of the edges.

    A bin includes its lower edge and not its upper one, except that the last bin of equal width includes both.
    """

    edges: NDArray[np.float64]
    """The edges of the bins, ascending, one more than there are bins; empty if there is no bin.

    The last edge is infinite if bins of magnitudes extend beyond 2**1023.
    """
    widths: NDArray[np.float64]
    """Width of each bin, in units of the values, or in binades for magnitudes."""
    counts: NDArray[np.int64]
    """Number of values in each bin."""
    num_negative: NDArray[np.int64]
    """Number of negative values in each bin."""

    @property
    def num_values(self) -> int:
        """Number of values in all bins."""
        return int(self.counts.sum())

    def ratio(self) -> NDArray[np.float64]:
        """The fraction of all values in the bins that is in each bin; zeros if all bins are empty."""
        ratio: NDArray[np.float64] = self.counts / max(1, self.num_values)
        return ratio

    def density(self) -> NDArray[np.float64]:
        """`ratio` divided by `widths`, so that the sum of density times `widths` is 1."""
        # The width between subnormal edges may be so small that its reciprocal overflows.
        with np.errstate(over="ignore"):
            density: NDArray[np.float64] = self.ratio() / self.widths
        return density

    def relative_density(self) -> NDArray[np.float64]:
        """The density divided by its maximum: from 0 to 1; zeros if all bins are empty."""
        # Not from `density`, which may be infinite.
        relative = self.ratio() * (self.widths.max(initial=0.0) / self.widths)
        normalised: NDArray[np.float64] = relative / (relative.max(initial=0.0) or 1.0)
        return normalised


def linear_bins(digest: Digest, num_bins: int, *, low: float | None = None, high: float | None = None) -> Bins:
    """Bins of equal width from `low` to `high`, by default from the smallest finite value to the largest.

    There is no bin if a limit is missing because there are no finite values. If both limits are equal, bins extend to
    either side by half their magnitude, or by 0.5 if they are 0. There are fewer bins than requested if float64 has
    too few numbers between the limits.
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
    """The edges of bins of equal width; fewer than requested if float64 has too few numbers between the limits."""
    if math.isfinite(last - first):
        return np.unique(np.linspace(first, last, num_bins + 1))
    # The difference of the limits overflows; that of their halves does not.
    return np.unique(2 * np.linspace(first / 2, last / 2, num_bins + 1))


def count_between(digest: Digest, edges: NDArray[np.float64]) -> Bins:
    """The values in bins between ascending edges, for example those of the bins of another digest."""
    numbers = finite(digest)
    bin_indices = np.searchsorted(edges, numbers.values, side="right") - 1
    if edges.size:
        bin_indices[numbers.values == edges[-1]] = edges.size - 2
    with np.errstate(over="ignore"):
        widths = np.diff(edges)
    return _count(digest, edges=edges, widths=widths, bin_indices=bin_indices)


def log2_bins(digest: Digest, per_binade: int = 1) -> Bins:
    """Magnitudes in binades [2**e, 2**(e+1)) from the smallest to the largest, each split into `per_binade` bins.

    The edges of the bins of a binade have equal ratios. Zeros are in no bin. There is no bin if there are no nonzero
    finite values.
    """
    numbers = finite(digest)
    magnitudes = np.abs(numbers.values)
    _, exponents = np.frexp(magnitudes[magnitudes > 0])
    edges = np.zeros(0)
    if exponents.size:
        # frexp gives [0.5, 1) * 2**exponent.
        edges = binade_edges(int(exponents.min()) - 1, int(exponents.max()), per_binade=per_binade)
    bin_indices = np.searchsorted(edges, magnitudes, side="right") - 1
    widths = np.full(max(0, edges.size - 1), 1 / per_binade)
    return _count(digest, edges=edges, widths=widths, bin_indices=bin_indices)


def binade_edges(first: int, last: int, *, per_binade: int) -> NDArray[np.float64]:
    """The edges from 2**first to 2**last, exact at powers of two, and infinite beyond the range of float64."""
    steps = np.exp2(np.arange(per_binade) / per_binade)
    with np.errstate(over="ignore"):
        inner = np.ldexp(steps, np.arange(first, last)[:, np.newaxis]).reshape(-1)
        return np.append(inner, np.ldexp(1.0, last))


def _count(
    digest: Digest, *, edges: NDArray[np.float64], widths: NDArray[np.float64], bin_indices: NDArray[np.int64]
) -> Bins:
    """The bins, given the index of the bin of each distinct value; indices out of range are ignored."""
    numbers = finite(digest)
    is_inside = (bin_indices >= 0) & (bin_indices < widths.size)

    def total(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        counts = np.zeros(widths.size, dtype=np.int64)
        np.add.at(counts, bin_indices[chosen], numbers.counts[chosen])
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
"""The formats that values are compared with by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRange:
    """The effect of a format on values that are divided by 2**`scale_exponent`. Each value is in exactly one count.

    Exponents are those of the format's values times the scale.
    """

    format: str
    """Name of the format."""
    scale_exponent: int
    """Exponent of the scale."""
    highest_exponent: int
    """Exponent of the largest value of the format."""
    lowest_normal_exponent: int
    """Exponent of the smallest value with full precision; for integers, of the step."""
    lowest_exponent: int
    """Exponent of the smallest positive value."""
    above: int
    """Number of finite values that round to beyond the largest value of the format."""
    normal: int
    """Number of finite values with all significand bits, or as many as the format has at their magnitude."""
    subnormal: int
    """Number of values below the smallest normal one that do not become zero. They lose significand bits."""
    flushed: int
    """Number of nonzero values that become zero."""
    zero: int
    """Number of zeros."""
    nan: int
    """Number of NaN."""
    inf: int
    """Number of infinities."""

    @property
    def num_elements(self) -> int:
        """Number of all values."""
        return self.above + self.normal + self.subnormal + self.flushed + self.zero + self.nan + self.inf


def binades(bins: Bins) -> NDArray[np.int64]:
    """The exponent e of each bin [2**e, 2**(e+1)), given bins of whole binades."""
    exponents: NDArray[np.int64] = np.frexp(bins.edges[:-1])[1].astype(np.int64) - 1
    return exponents


def aligned_exponent(digest: Digest, row: Format) -> int | None:
    """The smallest exponent of a scale with which no finite value exceeds the largest value of the format.

    None if there are no nonzero finite values, or if only statistics were stored.
    """
    largest = digest.tallies.largest_finite if digest.has_values else None
    return row.largest_alignment(largest) if largest else None


def format_range(digest: Digest, row: Format, scale_exponent: int = 0) -> FormatRange:
    """The effect of a format, with its own rounding, on values that are divided by 2**`scale_exponent`.

    The counts are exact unless the digest is not exact and the format has more than six mantissa bits. If only
    statistics were stored, only the counts of zeros, NaN and infinities are known, and the others are 0.
    """
    tallies = digest.count(format_limits(row, exponent=scale_exponent))
    above = tallies.upper + tallies.lower - tallies.inf if digest.has_values else 0
    num_ordinary = tallies.num_finite - tallies.zero if digest.has_values else 0
    return FormatRange(
        format=row.name,
        scale_exponent=scale_exponent,
        highest_exponent=row.emax + scale_exponent,
        lowest_normal_exponent=math.frexp(row.min_normal)[1] - 1 + scale_exponent,
        lowest_exponent=math.frexp(row.min_subnormal)[1] - 1 + scale_exponent,
        above=above,
        normal=num_ordinary - above - tallies.underflow,
        subnormal=max(0, tallies.underflow - tallies.flushed),
        flushed=tallies.flushed,
        zero=tallies.zero,
        nan=tallies.nan,
        inf=tallies.inf,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """The distances between two distributions, all 0 if they are equal.

    The first three compare finite values, and are None if either distribution has none. The last two compare the counts
    of classes: the binades of either sign, zero, each infinity, and NaN. They are None if either has no values.
    """

    kolmogorov_smirnov: float | None = None
    """Largest difference between the two cumulative distributions, from 0 to 1."""
    wasserstein: float | None = None
    """Area between the two cumulative distributions, in units of the values; None if it overflows."""
    relative_wasserstein: float | None = None
    """`wasserstein` over the standard deviation of the first distribution; None if that is 0 or None."""
    total_variation: float | None = None
    """Fraction of the values that would have to move to another class, from 0 to 1."""
    jensen_shannon: float | None = None
    """Jensen-Shannon divergence, in bits, from 0 to 1. Lin 1991, IEEE Trans. Inf. Theory 37."""
    is_exact: bool
    """Whether the values of both are known exactly, and not only as a summary."""

    @property
    def differ(self) -> bool | None:
        """Whether the distributions certainly differ; None if no distance is known."""
        distances = [value for value in (self.kolmogorov_smirnov, self.total_variation) if value is not None]
        tolerance = 0.0 if self.is_exact else MAX_RANK_ERROR
        return (self.kolmogorov_smirnov or 0.0) > tolerance or bool(self.total_variation) if distances else None


def distance(a: Digest, b: Digest) -> Distances:
    """The distances between two digests; all None if only statistics of either were stored.

    For complex values, the larger parts are compared.
    """
    if not (a.has_values and b.has_values):
        return Distances(is_exact=False)
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
    numbers_a, numbers_b = finite(a), finite(b)
    if not (numbers_a.values.size and numbers_b.values.size):
        return None, None
    values = np.union1d(numbers_a.values, numbers_b.values)
    parts = [_cumulative(numbers, at=values) for numbers in (numbers_a, numbers_b)]
    gaps = np.abs(parts[0] - parts[1])
    # Both are 1 at the last value. The difference of two values may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        area = float((gaps[:-1] * np.diff(values)).sum())
    return float(gaps.max()), area if math.isfinite(area) else None


def _cumulative(numbers: Finite, *, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """The fraction of the values that are less than or equal to each value of `at`."""
    ends = np.append(0, np.cumsum(numbers.counts))
    part: NDArray[np.float64] = ends[np.searchsorted(numbers.values, at, side="right")] / int(ends[-1])
    return part


def _between_classes(a: Digest, b: Digest) -> tuple[float | None, float | None]:
    classes_a, classes_b = _classes(a), _classes(b)
    total_a, total_b = sum(classes_a.values()), sum(classes_b.values())
    if not (total_a and total_b):
        return None, None
    names = sorted(classes_a.keys() | classes_b.keys())
    p = np.array([classes_a.get(name, 0) for name in names]) / total_a
    q = np.array([classes_b.get(name, 0) for name in names]) / total_b
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(part > 0, part * np.log2(part / middle), 0.0).sum() for part in (p, q)]
    return float(np.abs(p - q).sum() / 2), min(1.0, max(0.0, float(sum(terms) / 2)))


def _classes(digest: Digest) -> dict[int, int]:
    """The number of values in each class: each sign and exponent, each infinity, zero, and NaN."""
    exponents = np.frexp(digest.values)[1].astype(np.int64)
    exponents[np.isinf(digest.values)] = _BEYOND
    keys, inverse = np.unique(4 * exponents + np.sign(digest.values).astype(np.int64), return_inverse=True)
    totals = np.zeros(keys.size, dtype=np.int64)
    np.add.at(totals, inverse, digest.counts)
    classes = dict(zip(keys.tolist(), totals.tolist(), strict=True))
    return classes | ({4 * _BEYOND: digest.tallies.nan} if digest.tallies.nan else {})


_BEYOND = 1 << 12
"""The exponent that stands for infinities, and, with sign 0, for NaN."""


_FEWEST = 20
"""With fewer values, it matters whether the standard deviation is that of the sample or of the population."""

_CRITICAL_AT_5_PERCENT = 0.886
"""The distance that 5% of normal samples of n values exceed, times the square root of n (Lilliefors 1967)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormalFit:
    """A normal distribution with the mean and standard deviation of the finite values, and their distance from it."""

    num_values: int
    """Number of finite values."""
    mean: float | None
    """Mean of the finite values; None if there are none."""
    std: float | None
    """Standard deviation of the finite values; None if there are none or if it overflows."""
    ks_distance: float | None = None
    """Largest difference between the two cumulative distributions; None if `std` is 0 or None."""
    ks_p_value: float | None = None
    """Probability that as many normal values are at least as far from the normal distribution fitted to them.

    None if there are fewer than 20 values, or if values are so coarse that ties alone change the distance, as are the
    16-bit values of a large tensor.
    """
    probabilities: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """The probabilities of the quantiles `theoretical` and `observed`; empty if `std` is 0 or None."""
    theoretical: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Quantiles of the normal distribution."""
    observed: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Quantiles of the values."""

    @property
    def qq_correlation(self) -> float | None:
        """The correlation of `observed` with `theoretical`: 1 if they are on a line; None without `observed`."""
        if not self.observed.size:
            return None
        theoretical, observed = _centred(self.theoretical), _centred(self.observed)
        norms = math.sqrt(float(theoretical @ theoretical) * float(observed @ observed))
        return float(theoretical @ observed) / norms if norms else None


def _centred(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The differences from the mean, scaled to a maximum magnitude of 1 because squares of points may overflow."""
    scaled = points / (np.abs(points).max() or 1.0)
    centred = scaled - scaled.mean()
    unit: NDArray[np.float64] = centred / (np.abs(centred).max() or 1.0)
    return unit


def fit_normal(digest: Digest, *, num_points: int = 101) -> NormalFit:
    """The normal fit to the finite values of a digest; for complex values, to the larger parts.

    The mean and the standard deviation are those of the digest's statistics, which are exact even if its values are
    not; those of complex values are computed from the digest's values.
    """
    numbers = finite(digest)
    mean, std = _moments(digest, numbers)
    if not numbers.values.size or mean is None or not std:
        return NormalFit(num_values=numbers.num_values, mean=mean, std=std)
    odd = 2 * np.arange(num_points) + 1
    probabilities = odd / (2 * num_points)
    normal = NormalDist(mean, std)
    distance = _ks_distance(numbers, normal)
    ends = np.cumsum(numbers.counts)
    indices = np.searchsorted(ends, -(-odd * ends[-1] // (2 * num_points)))
    return NormalFit(
        num_values=numbers.num_values,
        mean=mean,
        std=std,
        ks_distance=distance,
        ks_p_value=_p_value(distance, numbers),
        probabilities=probabilities,
        theoretical=np.array([normal.inv_cdf(part) for part in probabilities.tolist()]),
        observed=numbers.values[indices],
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
    """The p-value of a distance to a normal distribution that was fitted to the same values (Lilliefors test).

    Kolmogorov's distribution does not apply to fitted parameters. Up to 0.1, the p-value is that of Dallal and
    Wilkinson, An analytic approximation to the distribution of Lilliefors's test statistic for normality, American
    Statistician 40, 1986; above, that of Stephens's modified statistic: Thode, Testing for normality, 2002, 5.1.1.
    """
    num_values = numbers.num_values
    if num_values < _FEWEST:
        return None
    largest_tie = (int(numbers.counts.max()) - 1) / num_values
    if largest_tie > _CRITICAL_AT_5_PERCENT / math.sqrt(num_values) / 3:
        return None
    is_large = num_values > 100  # noqa: PLR2004 - the formula is for up to 100 values, and larger samples are scaled
    scaled = distance * (num_values / 100) ** 0.49 if is_large else distance
    size = 100 if is_large else num_values
    p_value = math.exp(
        -7.01256 * scaled**2 * (size + 2.78019)
        + 2.99587 * scaled * math.sqrt(size + 2.78019)
        - 0.122119
        + 0.974598 / math.sqrt(size)
        + 1.67997 / size
    )
    if p_value <= 0.1:  # noqa: PLR2004 - the formula is accurate up to 0.1
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
"""Upper limits of the modified statistic, and the coefficients of the polynomial that gives the p-value below each.

The constant term is first.
"""
