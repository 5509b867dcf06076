"""Computes the metrics and the score of each level of a sweep, and selects one of equally good levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranktape.analyze.numerics.sweeps.options import scale_of
from ranktape.analyze.numerics.sweeps.sums import Sums

DECIBELS_PER_BIT = 20 * math.log10(2)
"""The increase of PSNR by one more bit of precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The effect of rounding the finite values x of a tensor to a format with one scale, or one offset to all scales.

    y is x divided by the scale, rounded to the format, and multiplied by the scale.
    """

    exponent: float
    """Exponent of the scale, which need not be a whole number, or offset to the exponents of all scales."""
    scale: float
    """2**`exponent`: the scale, or the factor by which an offset multiplies all scales."""
    mse: float
    """Mean of (x - y) squared."""
    rmse: float
    """Square root of `mse`."""
    mae: float
    """Mean of |x - y|."""
    max_abs_error: float
    """Largest |x - y|."""
    relative_error: float
    """`mae` over the mean of |x|."""
    cosine: float
    """Cosine of the angle between x and y; 0 if all values become zero."""
    psnr: float
    """Largest |x| over `rmse`, in dB; infinite if there is no error, minus infinity if `mse` is infinite."""
    sqnr: float
    """Signal to quantisation noise ratio: mean of x squared over `mse`, in dB.

    Infinite if there is no error, also for zeros (`LOSSLESS`); minus infinity if errors are infinite.
    """
    overflow_count: int
    """Number of values that round to beyond the largest value of the format and are saturated."""
    overflow_ratio: float
    """`overflow_count` over the number of finite values."""
    underflow_count: int
    """Number of nonzero values below the smallest normal value of the format at this scale."""
    underflow_ratio: float
    """`underflow_count` over the number of finite values."""
    flushed_count: int
    """Number of nonzero values that become zero, part of `underflow_count`.

    With stochastic rounding, it is the expected number, rounded.
    """
    flushed_ratio: float
    """`flushed_count` before it is rounded, over the number of finite values."""
    score: float
    """Weighted sum of the metrics, from 0 to 1 (see `scores`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelMetric:
    """A metric by which levels are compared."""

    name: str
    """Name of the field of `Level`."""
    label: str
    """Name that is displayed."""
    unit: str
    """Unit; empty for a pure number, or for the unit of the values or its square."""
    is_error: bool
    """Whether smaller is better."""

    def of(self, level: Level) -> float:
        """The metric of a level."""
        return float(getattr(level, self.name))

    def goodness(self, level: Level) -> float:
        """The metric of a level, negated if it is an error, so that larger is better."""
        return -self.of(level) if self.is_error else self.of(level)


METRICS: dict[str, LevelMetric] = {
    name: LevelMetric(name=name, label=label, unit=unit, is_error=is_error)
    for name, label, unit, is_error in (
        ("mse", "MSE", "", True),
        ("rmse", "RMSE", "", True),
        ("cosine", "Cosine Similarity", "", False),
        ("psnr", "PSNR", "dB", False),
        ("sqnr", "SQNR", "dB", False),
        ("mae", "MAE", "", True),
        ("max_abs_error", "Max Absolute Error", "", True),
        ("relative_error", "Relative Error", "", True),
    )
}
"""All metrics, by the name of the field."""


LOSSLESS: Mapping[str, float] = {
    **{name: 0.0 if metric.is_error else math.inf for name, metric in METRICS.items()},
    "cosine": 1.0,
    **{f"{kind}_{what}": 0 for kind in ("overflow", "underflow", "flushed") for what in ("count", "ratio")},
}
"""The metrics of a tensor of zeros, which has no levels and no errors in any format, by the field of `Level`."""


class Loss(NamedTuple):
    """The metrics from which a score is computed, which do not depend on the unit of the values."""

    squared: float
    """Sum of (x - y) squared over the sum of x squared."""
    cosine: float
    """`Level.cosine`."""
    psnr: float
    """`Level.psnr`."""
    absolute: float
    """Sum of |x - y| over the sum of |x|, which serves both as the MAE and as the relative error."""


def levels_of(sums: Sums, *, exponents: Sequence[float]) -> tuple[Level, ...]:
    """The levels for the exponents, in their order."""
    losses = [_loss(sums, index=index) for index in range(len(exponents))]
    return tuple(
        _level(sums, index=index, exponent=exponent, loss=loss, score=score)
        for index, (exponent, loss, score) in enumerate(zip(exponents, losses, scores(losses), strict=True))
    )


def scores(losses: Sequence[Loss]) -> list[float]:
    """The composite score of each level: 30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error.

    The weights are those of the legacy tool. MSE, PSNR, MAE and relative error are scaled to a range from 0 for the
    worst level to 1 for the best; they are 1 if all levels are equal. Errors are relative to the tensor, so that
    multiplying a tensor by a number does not change its scores. The PSNR of a level without any error is taken as one
    bit better than the best finite one, and an infinite error scores 0. A score is never NaN.
    """
    finite = [loss.psnr for loss in losses if math.isfinite(loss.psnr)]
    lossless = max(finite, default=0.0) + DECIBELS_PER_BIT
    squared = _normalised([-loss.squared for loss in losses])
    psnr = _normalised([min(loss.psnr, lossless) for loss in losses])
    absolute = _normalised([-loss.absolute for loss in losses])
    return [
        0.3 * squared[index] + 0.3 * loss.cosine + 0.2 * psnr[index] + (0.1 + 0.1) * absolute[index]
        for index, loss in enumerate(losses)
    ]


def _normalised(values: Sequence[float]) -> list[float]:
    """Scale finite values to a range from 0 for the lowest to 1 for the highest; infinite values become 0."""
    finite = [value for value in values if math.isfinite(value)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)
    width = highest - lowest if highest > lowest else 1.0
    return [
        (1.0 if lowest == highest else (value - lowest) / width) if math.isfinite(value) else 0.0 for value in values
    ]


def _logarithm(ratio: float) -> float:
    """The decimal logarithm, which is minus infinity for 0 and infinity for infinity."""
    return math.log10(ratio) if ratio > 0 else -math.inf


def _error(total: float) -> float:
    """The sum of errors, or infinity, the worst value, if it is NaN."""
    return math.inf if math.isnan(total) else float(total)


def _loss(sums: Sums, *, index: int) -> Loss:
    squared_error = _error(sums.squared_error_L[index])
    lengths = math.sqrt(sums.squared) * math.sqrt(sums.squared_result_L[index])
    product, rmse = float(sums.product_L[index]), math.sqrt(squared_error / sums.num_finite)
    # 0 if x or y is 0, or if the product or the norms exceed float64.
    has_angle = lengths > 0 and math.isfinite(product) and math.isfinite(lengths)
    return Loss(
        squared=_error(squared_error / sums.squared),
        cosine=min(1.0, product / lengths) if has_angle else 0.0,  # rounding errors may exceed 1
        psnr=-20 * _logarithm(rmse / sums.largest),
        absolute=_error(sums.absolute_error_L[index]) / sums.absolute,
    )


def _level(sums: Sums, *, index: int, exponent: float, loss: Loss, score: float) -> Level:
    count = sums.num_finite
    mean_square = _error(sums.squared_error_L[index]) / count
    overflow, underflow = int(sums.overflow_L[index]), int(sums.underflow_L[index])
    flushed = float(sums.flushed_L[index])
    return Level(
        exponent=float(exponent),
        scale=scale_of(exponent),
        mse=_unshifted(mean_square, 2 * sums.shift),
        rmse=_unshifted(math.sqrt(mean_square), sums.shift),
        mae=_unshifted(_error(sums.absolute_error_L[index]) / count, sums.shift),
        max_abs_error=_unshifted(_error(sums.largest_error_L[index]), sums.shift),
        relative_error=loss.absolute,
        cosine=loss.cosine,
        psnr=loss.psnr,
        sqnr=-10 * _logarithm(loss.squared),
        overflow_count=overflow,
        overflow_ratio=overflow / count,
        underflow_count=underflow,
        underflow_ratio=underflow / count,
        flushed_count=round(flushed),
        flushed_ratio=flushed / count,
        score=score,
    )


def _unshifted(value: float, shift: int) -> float:
    try:
        return math.ldexp(value, shift)
    except OverflowError:  # squares of float64 values beyond 1e154
        return math.inf


TIE = 1e-12
"""Relative difference up to which levels are equally good. It exceeds the effect of the order of sums."""


def best_level(levels: Sequence[Level], metric: Callable[[Level], float]) -> Level | None:
    """The first level whose metric is the largest up to `TIE`; None if there are no levels."""
    level_of_maximum = max(levels, key=metric, default=None)
    if level_of_maximum is None or not math.isfinite(top := metric(level_of_maximum)):
        return level_of_maximum
    return next(level for level in levels if metric(level) >= top - TIE * abs(top))


SAME_SQNR = 0.01
"""Difference in SQNR, in dB, up to which offsets are equally good."""

SAME_RATIO = 1e-3
"""Difference in the ratio of overflow or flushing up to which levels are equally good.

It is the ratio from which the severity of overflow is medium.
"""


def settled(levels: Sequence[Level], best: Level, *, has_offsets: bool) -> Level:
    """The level to recommend instead of `found`, from those that are as good.

    Among offsets, it is the one nearest to 0, the choice of the scale rule, of those that are as good by `is_as_good`.
    Among scales of a whole tensor, if `found` is without error, it is the middle one of those without error, which has
    the most room on both sides. Otherwise it is `found`.
    """
    if has_offsets:
        as_good = [level for level in levels if level is best or is_as_good(level, best)]
        return min(as_good, key=lambda level: (abs(level.exponent), -level.score))
    lossless = [level for level in levels if level.sqnr == math.inf]
    return lossless[(len(lossless) - 1) // 2] if any(level is best for level in lossless) else best


def is_as_good(level: Level, best: Level) -> bool:
    """Whether a level is no worse than `found` in SQNR, overflow and flushing, up to `SAME_SQNR` and `SAME_RATIO`."""
    return (
        level.sqnr >= best.sqnr - SAME_SQNR
        and level.overflow_ratio <= best.overflow_ratio + SAME_RATIO
        and level.flushed_ratio <= best.flushed_ratio + SAME_RATIO
    )
