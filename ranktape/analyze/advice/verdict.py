"""Tells what a level of a sweep loses beyond the limits of its format, and how much the level matters."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Rounding, round_to
from ranktape.analyze.numerics.quantization.encoded import LossSeverity, severity_of
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import MAX_SCALE_BITS, SCHEMES, Scaling
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel, legacy_result
from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

KEPT_SQNR = 1.0
"""In dB: a level that has no more than this keeps nothing of a tensor; 0 dB is what zeros in its place have."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one level puts beyond the format's limits, by its kind: `overflow`, `underflow` or `flushed`.

    The counts are those of `Level`; of a legacy sweep they are the original's: see `LegacyLevel`.
    """

    level: Level
    """What is judged."""

    def count(self, kind: str) -> int:
        """How many values."""
        return int(self._of(kind, "count"))

    def ratio(self, kind: str) -> float:
        """The same as a part of the values that ratios are of."""
        return float(self._of(kind, "ratio"))

    def severity_by(self, *kinds: str) -> LossSeverity:
        """That of the worst of some kinds."""
        return severity_of(max(map(self.ratio, kinds)))

    @property
    def severity(self) -> LossSeverity:
        """The worse of overflow and underflow."""
        return self.severity_by("overflow", "underflow")

    @property
    def is_clean(self) -> bool:
        """Whether the level is without severity; the original asks for the flushed as well."""
        kinds = ("overflow", "underflow", "flushed")
        return self.severity_by(*kinds[: 3 if isinstance(self.level, LegacyLevel) else 2]) is LossSeverity.NONE

    def _of(self, kind: str, what: str) -> float:
        is_legacy = isinstance(self.level, LegacyLevel)
        name = f"original_{kind.replace('flushed', 'flush')}" if is_legacy else kind
        found: float = getattr(self.level, f"{name}_{what}")
        return found


class Range(NamedTuple):
    """From one value to another, both included."""

    minimum: float
    maximum: float


class Stretch(NamedTuple):
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
    """Where among the levels the recommended one is; of the first and the last see `Direction`."""

    BALANCED = "balanced"
    """Between others: larger and smaller scales are no better."""
    LARGEST = "largest"
    SMALLEST = "smallest"
    ONLY = "only"


class Direction(enum.StrEnum):
    """Which scales beyond those that were tried may be better."""

    LARGER = "larger"
    """What is lost is lost by overflow."""
    SMALLER = "smaller"
    """What is lost is lost by underflow."""
    NEITHER = "neither"
    """The limits of the format are not what is lost by."""


def is_lossless(level: Level) -> bool:
    """Whether nothing at all is lost; squares of errors may be too small for float64, errors hardly."""
    return level.max_abs_error == 0


def keeps_nothing(levels: Sequence[Level]) -> bool:
    """Whether not one of the levels keeps more than `KEPT_SQNR` of the tensor; not so of no levels."""
    return bool(levels) and all(level.sqnr <= KEPT_SQNR for level in levels)


def stretches(verdicts: Sequence[Verdict], *, severity: LossSeverity, but: Sequence[Level] = ()) -> tuple[Stretch, ...]:
    """The runs of levels of that severity, parted where what has it changes from overflow to underflow or both.

    The levels of `but` belong to no run, and part those on their two sides.
    """
    spared = {id(level) for level in but}

    def causes(verdict: Verdict) -> tuple[bool, bool] | None:
        if verdict.severity is not severity or id(verdict.level) in spared:
            return None
        return verdict.severity_by("overflow") is severity, verdict.severity_by("underflow") is severity

    runs = ((key, [verdict.level for verdict in run]) for key, run in itertools.groupby(verdicts, key=causes))
    return tuple(Stretch(range_of(levels), len(levels), *key) for key, levels in runs if key is not None)


def range_of(levels: Sequence[Level]) -> Range:
    """From the lowest to the highest exponent of at least one level."""
    exponents = [level.exponent for level in levels]
    return Range(min(exponents), max(exponents))


def clean_range(verdicts: Sequence[Verdict]) -> Range | None:
    """From the lowest to the highest exponent of the longest run of clean levels; None where there is none."""
    runs = [list(run) for is_clean, run in itertools.groupby(verdicts, key=lambda one: one.is_clean) if is_clean]
    longest = max(runs, key=len, default=None)
    return None if longest is None else range_of([verdict.level for verdict in longest])


def position_of(levels: Sequence[Level], recommended: Level) -> Position:
    """Where among the levels one of them is."""
    lowest, highest = range_of(levels)
    if lowest == highest:
        return Position.ONLY
    if recommended.exponent == highest:
        return Position.LARGEST
    return Position.SMALLEST if recommended.exponent == lowest else Position.BALANCED


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


def range_before(sweep: ScaleSweep) -> Range:
    """The smallest and the largest finite value of a tensor that has levels.

    Where only magnitudes were counted, the largest of them with either sign.
    """
    low = -sweep.largest if sweep.minimum is None else max(sweep.minimum, -sweep.largest)
    return Range(low, sweep.largest if sweep.maximum is None else min(sweep.maximum, sweep.largest))


def range_after(sweep: ScaleSweep, *, level: Level) -> Range:
    """What the ends of `range_before` become at a level of the sweep.

    Where elements share a scale in blocks or channels, each end becomes what it is as the largest of its own, which
    the larger of the two always is. What chance would decide goes to the nearest value.
    """
    ends = np.array(range_before(sweep))
    is_drawn = sweep.rounding in {Rounding.STOCHASTIC, Rounding.HYBRID}
    rounding = sweep.target.rounding if is_drawn else sweep.rounding
    if sweep.mode is SweepMode.LEGACY:
        results = legacy_result(ends, target=sweep.target, exponent=level.exponent)
    elif sweep.mode is SweepMode.TENSOR:
        with np.errstate(over="ignore"):
            results = round_to(ends / level.scale, target=sweep.target, rounding=rounding) * level.scale
    else:
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
            scale_offset=int(level.exponent),
            warn=False,
        )
        results = np.asarray(quantized.values, dtype=np.float64).ravel()
    return Range(*(results + 0.0).tolist())


class Variation(enum.StrEnum):
    """How much a metric depends on the level."""

    STABLE = "stable"
    """Little: any of the levels will do."""
    MODERATE = "moderate"
    """Noticeably."""
    VARIES = "varies"
    """Much: the level has to be chosen with care."""


class Spread(NamedTuple):
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


def is_square_beyond(level: Level) -> bool:
    """Whether the mean square of an error, which is itself a float64, is not: infinite, or 0 though something is lost.

    A level with infinite errors has an infinite MSE, which is none beyond.
    """
    return (level.mse == math.inf and level.rmse < math.inf) or (level.mse == 0 and level.max_abs_error > 0)


def spread_of(levels: Sequence[Level], name: str) -> Spread:
    """How far a metric, `mse`, `cosine` or `psnr`, moves over at least one level; it may be infinite, and is no NaN."""
    metrics = [float(getattr(level, name)) for level in levels]
    lowest, highest = min(metrics), max(metrics)
    if lowest == highest:
        return Spread(lowest, highest, 0.0, Variation.STABLE)
    finite = np.array([metric for metric in metrics if math.isfinite(metric)])
    # Divided by the largest first: squares of metrics near the ends of float64 are beyond it.
    largest = float(np.abs(finite).max(initial=0.0))
    deviation = largest * float(np.std(finite / largest)) if largest > 0 else 0.0
    if name == "psnr":
        varies, stable = highest - lowest > 20, highest - lowest <= 10  # noqa: PLR2004 - the legacy tool's limits
    else:
        stable = highest - lowest < (0.1 * lowest if name == "mse" else 0.01)
        varies = not stable
    variation = Variation.VARIES if varies else Variation.STABLE if stable else Variation.MODERATE
    return Spread(lowest, highest, deviation, variation)
