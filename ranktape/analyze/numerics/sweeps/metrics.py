"""Gives the metrics of each level of a sweep, its score, and which of equally good levels is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranktape.analyze.numerics.sweeps.options import scale_of
from ranktape.analyze.numerics.sweeps.sums import Sums

DECIBELS_PER_BIT = 20 * math.log10(2)
"""How much PSNR one more bit of precision gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One scale and what rounding to the format at that scale does to the finite values x of a tensor.

    y is x divided by the scale, rounded to the format, and multiplied by the scale.
    """

    exponent: float
    """Of the scale; not a whole number in general."""
    scale: float
    """2**`exponent`: what values are divided by before they are rounded."""
    mse: float
    """Mean of (x - y) squared."""
    rmse: float
    """Root of `mse`."""
    mae: float
    """Mean of |x - y|."""
    max_abs_error: float
    """Largest |x - y|."""
    relative_error: float
    """`mae` over the mean of |x|."""
    cosine: float
    """Cosine of the angle between x and y; 0 where all values became zero."""
    psnr: float
    """Largest |x| over `rmse`, in dB; infinite where nothing is lost, minus infinity where `mse` is infinite."""
    sqnr: float
    """Signal to quantisation noise ratio: mean of x squared over `mse`, in dB. Infinite where nothing is lost, so of
    zeros (`LOSSLESS`), too; minus infinity where the errors are infinite."""
    overflow_count: int
    """Values that round to beyond the format's largest value, and are saturated."""
    overflow_ratio: float
    """`overflow_count` over the finite values."""
    underflow_count: int
    """Nonzero values below the format's smallest normal value at this scale."""
    underflow_ratio: float
    """`underflow_count` over the finite values."""
    flushed_count: int
    """Nonzero values that become zero; part of `underflow_count`. Where chance decides, as many as are to be expected,
    rounded."""
    flushed_ratio: float
    """`flushed_count`, not rounded, over the finite values."""
    score: float
    """Weighted sum of the metrics, from 0 to 1: see `scores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelMetric:
    """One of the metrics of a level that levels are compared by."""

    name: str
    """The field of `Level`."""
    label: str
    """What people read."""
    unit: str
    """Empty for a pure number, and for what is in the tensor's own unit or its square."""
    is_error: bool
    """Whether less is better."""

    def of(self, level: Level) -> float:
        """The metric of that level."""
        return float(getattr(level, self.name))

    def goodness(self, level: Level) -> float:
        """The same, negative for an error: more is better."""
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
"""Every metric, by the name of its field."""


LOSSLESS: Mapping[str, float] = {
    **{name: 0.0 if one.is_error else math.inf for name, one in METRICS.items()},
    "cosine": 1.0,
    **{f"{kind}_{what}": 0 for kind in ("overflow", "underflow", "flushed") for what in ("count", "ratio")},
}
"""What a format loses of a tensor of zeros, which has no levels, by the fields of `Level`: nothing."""


class Loss(NamedTuple):
    """What a score is made of; independent of the unit that the values are in."""

    squared: float
    """Sum of (x - y) squared over the sum of x squared."""
    cosine: float
    """As in `Level`."""
    psnr: float
    """As in `Level`."""
    absolute: float
    """Sum of |x - y| over the sum of |x|: MAE and the relative error are both this number."""


def levels_of(sums: Sums, *, exponents: Sequence[float]) -> tuple[Level, ...]:
    """One level for each exponent, in their order."""
    losses = [_loss(sums, index=index) for index in range(len(exponents))]
    return tuple(
        _level(sums, index=index, exponent=exponent, loss=loss, score=score)
        for index, (exponent, loss, score) in enumerate(zip(exponents, losses, scores(losses), strict=True))
    )


def scores(losses: Sequence[Loss]) -> list[float]:
    """The composite score of each level: 30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error.

    The weights are those of the legacy tool. MSE, PSNR, MAE and relative error are placed
    between the worst (0) and the best (1) of the levels; where all levels are equal, all are best. Errors
    are taken relative to the tensor, so that the scores of a tensor and of a multiple of it are the same.
    A level without any error counts as one bit better in PSNR than the best of the others, and one with an infinite
    error as the worst. Never NaN.
    """
    finite = [loss.psnr for loss in losses if math.isfinite(loss.psnr)]
    lossless = max(finite, default=0.0) + DECIBELS_PER_BIT
    squared = _placed([-loss.squared for loss in losses])
    psnr = _placed([min(loss.psnr, lossless) for loss in losses])
    absolute = _placed([-loss.absolute for loss in losses])
    return [
        0.3 * squared[index] + 0.3 * loss.cosine + 0.2 * psnr[index] + (0.1 + 0.1) * absolute[index]
        for index, loss in enumerate(losses)
    ]


def _placed(values: Sequence[float]) -> list[float]:
    """From 0 for the worst to 1 for the best of the finite ones; 0 for those that are infinitely bad."""
    finite = [value for value in values if math.isfinite(value)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)
    width = highest - lowest if highest > lowest else 1.0
    return [
        (1.0 if lowest == highest else (value - lowest) / width) if math.isfinite(value) else 0.0 for value in values
    ]


def _logarithm(ratio: float) -> float:
    """The decimal logarithm; infinite, of either sign, of 0 and of infinity."""
    return math.log10(ratio) if ratio > 0 else -math.inf


def _error(total: float) -> float:
    """What errors add up to; infinite where that is not a number, because nothing worse can be said of a level."""
    return math.inf if math.isnan(total) else float(total)


def _loss(sums: Sums, *, index: int) -> Loss:
    squared_error = _error(sums.squared_error_L[index])
    lengths = math.sqrt(sums.squared) * math.sqrt(sums.squared_result_L[index])
    product, rmse = float(sums.product_L[index]), math.sqrt(squared_error / sums.num_finite)
    # 0 where one of the two has no length, or neither product nor lengths are within float64.
    has_angle = lengths > 0 and math.isfinite(product) and math.isfinite(lengths)
    return Loss(
        squared=_error(squared_error / sums.squared),
        cosine=min(1.0, product / lengths) if has_angle else 0.0,  # rounding may leave a hair more than 1
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
"""Part of a metric by which levels may differ and be equally good: more than sums in another order change."""


def best_level(levels: Sequence[Level], metric: Callable[[Level], float]) -> Level | None:
    """The level with the largest metric, the first of those that are as good but for `TIE`; None without levels."""
    found = max(levels, key=metric, default=None)
    if found is None or not math.isfinite(top := metric(found)):
        return found
    return next(level for level in levels if metric(level) >= top - TIE * abs(top))


SAME_SQNR = 0.01
"""In dB: less than this between two offsets is no reason to prefer one."""

SAME_RATIO = 1e-3
"""Nor is this much more overflow: the share from which on its severity is medium."""


def settled(levels: Sequence[Level], found: Level, *, has_offsets: bool) -> Level:
    """The level to name in the place of `found`, one of those that are as good.

    Of offsets that is the one nearest to 0, which is what the rule of the scales says of itself: of those whose SQNR
    and overflow are no worse, but for `SAME_SQNR` and `SAME_RATIO`. Of scales of a whole tensor at which nothing is
    lost it is the middle one, with most room on both sides. Else `found`.
    """
    if has_offsets:
        as_good = [level for level in levels if level is found or is_as_good(level, found)]
        return min(as_good, key=lambda level: (abs(level.exponent), -level.score))
    lossless = [level for level in levels if level.sqnr == math.inf]
    return lossless[(len(lossless) - 1) // 2] if any(level is found for level in lossless) else found


def is_as_good(level: Level, found: Level) -> bool:
    """Whether nothing that matters is lost at the one level beyond what is lost at the other."""
    return (
        level.sqnr >= found.sqnr - SAME_SQNR
        and level.overflow_ratio <= found.overflow_ratio + SAME_RATIO
        and level.flushed_ratio <= found.flushed_ratio + SAME_RATIO
    )
