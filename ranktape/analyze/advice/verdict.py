"""Tells what a level of a sweep loses beyond the limits of its format, and how much the level matters."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.formats import Rounding, round_to
from ranktape.analyze.numerics.quantization.encoded import LossSeverity, severity_of
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import MAX_SCALE_BITS, SCHEMES, Scaling
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel, legacy_result
from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.options import SweepMode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one level puts beyond the format's limits.

    The counts are those of `Level`; of a legacy sweep they are the original's: see `LegacyLevel`.
    """

    level: Level
    """What is judged."""
    overflow_count: int
    """Values beyond the largest one."""
    overflow_ratio: float
    """`overflow_count` as a part of the values that ratios are of."""
    underflow_count: int
    """Nonzero values below the limit of underflow."""
    underflow_ratio: float
    """`underflow_count` as a part."""
    flushed_count: int
    """Values that are said to become zero."""
    flushed_ratio: float
    """`flushed_count` as a part."""

    @property
    def overflow(self) -> LossSeverity:
        """Of `overflow_ratio`."""
        return severity_of(self.overflow_ratio)

    @property
    def underflow(self) -> LossSeverity:
        """Of `underflow_ratio`."""
        return severity_of(self.underflow_ratio)

    @property
    def flushed(self) -> LossSeverity:
        """Of `flushed_ratio`."""
        return severity_of(self.flushed_ratio)

    @property
    def severity(self) -> LossSeverity:
        """The worse of overflow and underflow."""
        return severity_of(self.worst_ratio)

    @property
    def worst_ratio(self) -> float:
        """The larger of the parts that overflow and underflow."""
        return max(self.overflow_ratio, self.underflow_ratio)

    @property
    def gone_ratio(self) -> float:
        """The parts that overflow and that become zero, by the level's own counts: what is left of them is wrong."""
        return self.level.overflow_ratio + self.level.flushed_ratio

    @property
    def is_clean(self) -> bool:
        """Whether the level is without severity; the original asks for the flushed as well."""
        worst = max(self.worst_ratio, self.flushed_ratio) if isinstance(self.level, LegacyLevel) else self.worst_ratio
        return severity_of(worst) is LossSeverity.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Levels of one severity that follow one another, in the order of the sweep."""

    exponents: Range
    """Of the scales, or offsets in `mx` mode: lowest and highest."""
    num_levels: int
    """How many."""
    overflows: bool
    """Whether each of them has the severity by overflow."""
    underflows: bool
    """Whether each of them has the severity by underflow."""


class Position(enum.StrEnum):
    """Where among the levels the recommended one is."""

    BALANCED = "balanced"
    """Between others: larger and smaller scales are no better."""
    LARGEST = "largest"
    """It is the largest scale that was tried: see `Direction`."""
    SMALLEST = "smallest"
    """It is the smallest scale that was tried: see `Direction`."""
    ONLY = "only"
    """No other scale was tried."""


class Direction(enum.StrEnum):
    """Which scales beyond those that were tried may be better."""

    LARGER = "larger"
    """What is lost is lost by overflow."""
    SMALLER = "smaller"
    """What is lost is lost by underflow."""
    NEITHER = "neither"
    """The limits of the format are not what is lost by."""


KEPT_SQNR = 1.0
"""In dB: a level that has no more than this keeps nothing of a tensor; 0 dB is what zeros in its place have."""


def is_lossless(level: Level) -> bool:
    """Whether nothing at all is lost; squares of errors may be too small for float64, errors hardly."""
    return level.max_abs_error == 0


def keeps_nothing(levels: Sequence[Level]) -> bool:
    """Whether not one of the levels keeps more than `KEPT_SQNR` of the tensor; not so of no levels."""
    return bool(levels) and all(level.sqnr <= KEPT_SQNR for level in levels)


def verdict_of(level: Level) -> Verdict:
    """What a level puts beyond the limits, by its own counts or, of a legacy sweep, the original's."""
    is_legacy = isinstance(level, LegacyLevel)
    names = {
        "overflow": "original_overflow" if is_legacy else "overflow",
        "underflow": "original_underflow" if is_legacy else "underflow",
        "flushed": "original_flush" if is_legacy else "flushed",
    }
    counts = {f"{kind}_{what}": getattr(level, f"{name}_{what}") for kind, name in names.items() for what in _COUNTED}
    return Verdict(level=level, **counts)


_COUNTED = ("count", "ratio")


def extremes(
    verdicts: Sequence[Verdict], ratio: Callable[[Verdict], float]
) -> tuple[Verdict, Verdict] | tuple[None, None]:
    """The worst and the best level by a part of the values, the first of them on a tie; None where all are 0."""
    if not any(ratio(verdict) > 0 for verdict in verdicts):
        return None, None
    return max(verdicts, key=ratio), min(verdicts, key=ratio)


def stretches(verdicts: Sequence[Verdict], *, severity: LossSeverity, but: Sequence[Level] = ()) -> tuple[Stretch, ...]:
    """The runs of levels of that severity, parted where what has it changes from overflow to underflow or both.

    The levels of `but` belong to no run, and part those on their two sides.
    """
    spared = {id(level) for level in but}
    keys = [
        (verdict.overflow is severity, verdict.underflow is severity)
        if verdict.severity is severity and id(verdict.level) not in spared
        else None
        for verdict in verdicts
    ]
    found = []
    for key, run in itertools.groupby(zip(keys, verdicts, strict=True), key=lambda pair: pair[0]):
        levels = [verdict.level for _, verdict in run]
        if key is not None:
            found.append(
                Stretch(exponents=range_of(levels), num_levels=len(levels), overflows=key[0], underflows=key[1])
            )
    return tuple(found)


def range_of(levels: Sequence[Level]) -> Range:
    """From the lowest to the highest exponent of at least one level."""
    exponents = [level.exponent for level in levels]
    return Range(minimum=min(exponents), maximum=max(exponents))


def clean_range(verdicts: Sequence[Verdict]) -> Range | None:
    """From the lowest to the highest exponent of the longest run of clean levels; None where there is none."""
    runs = [list(run) for is_clean, run in itertools.groupby(verdicts, key=lambda one: one.is_clean) if is_clean]
    longest = max(runs, key=len, default=None)
    return None if longest is None else range_of([verdict.level for verdict in longest])


def position_of(levels: Sequence[Level], recommended: Level) -> Position:
    """Where among the levels one of them is."""
    exponents = [level.exponent for level in levels]
    if min(exponents) == max(exponents):
        return Position.ONLY
    if recommended.exponent == max(exponents):
        return Position.LARGEST
    return Position.SMALLEST if recommended.exponent == min(exponents) else Position.BALANCED


def direction_of(levels: Sequence[Level], recommended: Level, *, is_tapered: bool) -> Direction:
    """Beyond which end of the levels a better one than the recommended may lie, by what is lost there.

    A tapered format loses less in the middle of its range, so that its limits do not tell.
    """
    position = position_of(levels, recommended)
    by_overflow = recommended.overflow_ratio > recommended.flushed_ratio
    if keeps_nothing(levels):
        return Direction.LARGER if by_overflow else Direction.SMALLER
    may_grow = position is Position.LARGEST or (position is Position.ONLY and by_overflow)
    if may_grow and (recommended.overflow_count > 0 or is_tapered):
        return Direction.LARGER
    may_shrink = position is Position.SMALLEST or (position is Position.ONLY and not by_overflow)
    if may_shrink and (recommended.underflow_count > 0 or (is_tapered and position is Position.SMALLEST)):
        return Direction.SMALLER
    return Direction.NEITHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From one value to another, both included."""

    minimum: float
    """The smaller one."""
    maximum: float
    """The larger one."""


def range_before(sweep: ScaleSweep) -> Range:
    """The smallest and the largest finite value of a tensor that has levels.

    Where only magnitudes were counted, the largest of them with either sign.
    """
    low = -sweep.largest if sweep.minimum is None else max(sweep.minimum, -sweep.largest)
    high = sweep.largest if sweep.maximum is None else min(sweep.maximum, sweep.largest)
    return Range(minimum=low, maximum=high)


def range_after(sweep: ScaleSweep, *, level: Level) -> Range:
    """What the ends of `range_before` become at a level of the sweep.

    Where elements share a scale in blocks or channels, each end becomes what it is as the largest of its own, which
    the larger of the two always is. What chance would decide goes to the nearest value.
    """
    before = range_before(sweep)
    ends = np.array([before.minimum, before.maximum])
    if sweep.mode is SweepMode.LEGACY:
        results = legacy_result(ends, target=sweep.target, exponent=level.exponent)
    else:
        is_drawn = sweep.rounding in {Rounding.STOCHASTIC, Rounding.HYBRID}
        rounding = sweep.target.rounding if is_drawn else sweep.rounding
        if sweep.mode is SweepMode.TENSOR:
            with np.errstate(over="ignore"):
                results = round_to(ends / level.scale, target=sweep.target, rounding=rounding) * level.scale
        else:
            results = _in_groups(ends, sweep=sweep, offset=int(level.exponent), rounding=rounding)
    minimum, maximum = (results + 0.0).tolist()
    return Range(minimum=minimum, maximum=maximum)


def _in_groups(ends: NDArray[np.float64], *, sweep: ScaleSweep, offset: int, rounding: Rounding) -> NDArray[np.float64]:
    is_mx = sweep.mode is SweepMode.MX
    has_rule = is_mx and not sweep.scheme.has_tensor_scale
    quantized = quantize(
        ends.reshape(-1, 1),
        sweep.scheme.name if sweep.scheme.name in SCHEMES else sweep.target.name,
        scaling=Scaling.BLOCK if is_mx else Scaling.CHANNEL,
        axis=-1 if is_mx else 0,
        scale_rule=sweep.options.rule if has_rule else None,
        scale_bits=sweep.options.bits if has_rule else MAX_SCALE_BITS,
        rounding=rounding,
        scale_offset=offset,
        warn=False,
    )
    return np.asarray(quantized.values, dtype=np.float64).ravel()


class Variation(enum.StrEnum):
    """How much a metric depends on the level."""

    STABLE = "stable"
    """Little: any of the levels will do."""
    MODERATE = "moderate"
    """Noticeably."""
    VARIES = "varies"
    """Much: the level has to be chosen with care."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far one metric moves over the levels."""

    lowest: float
    """Smallest metric of all levels."""
    highest: float
    """Largest one; infinite for PSNR where a level loses nothing."""
    deviation: float
    """Standard deviation (of the levels, not of a sample of them) of the finite metrics; 0 without any."""
    variation: Variation
    """What that means, by the legacy limits: for MSE 10 % of the lowest, for cosine 0.01, for PSNR 10 and 20 dB."""

    @property
    def width(self) -> float:
        """`highest` minus `lowest`; 0 where both are infinite."""
        return 0.0 if self.lowest == self.highest else self.highest - self.lowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """How far the metrics move over the levels."""

    mse: Spread
    """Of the mean squared error."""
    cosine: Spread
    """Of the cosine similarity."""
    psnr: Spread
    """Of the peak signal-to-noise ratio, in dB."""
    is_mse_beyond: bool
    """Whether the mean squared error of a level is too large or too small for float64."""


def is_square_beyond(level: Level) -> bool:
    """Whether the mean square of an error, which is itself a float64, is not: infinite, or 0 though something is lost.

    A level with infinite errors has an infinite MSE, which is none beyond.
    """
    return (level.mse == math.inf and level.rmse < math.inf) or (level.mse == 0 and level.max_abs_error > 0)


def stability_of(levels: Sequence[Level]) -> Stability:
    """How far the metrics move over at least one level; metrics may be infinite, and are never NaN."""
    return Stability(
        **{name: _spread([getattr(level, name) for level in levels], name) for name in ("mse", "cosine", "psnr")},
        is_mse_beyond=any(is_square_beyond(level) for level in levels),
    )


def _spread(metrics: Sequence[float], name: str) -> Spread:
    lowest, highest = min(metrics), max(metrics)
    finite = np.array([metric for metric in metrics if math.isfinite(metric)])
    # Divided by the largest first: squares of metrics near the ends of float64 are beyond it.
    largest = float(np.abs(finite).max(initial=0.0))
    deviation = largest * float(np.std(finite / largest)) if largest > 0 else 0.0
    if lowest == highest:
        return Spread(lowest=lowest, highest=highest, deviation=0.0, variation=Variation.STABLE)
    return Spread(
        lowest=lowest, highest=highest, deviation=deviation, variation=_variation(name, lowest, highest - lowest)
    )


def _variation(name: str, lowest: float, width: float) -> Variation:
    """What it means that a metric moves so far, by the legacy tool's limits."""
    if name == "psnr":
        varies, stable = 20, 10
        return Variation.VARIES if width > varies else Variation.MODERATE if width > stable else Variation.STABLE
    return Variation.STABLE if width < (0.1 * lowest if name == "mse" else 0.01) else Variation.VARIES
