"""Tells how much of a tensor a level puts beyond the limits of its format, and how bad that is."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ranktape.analyze.advice.value_range import Range
from ranktape.analyze.numerics.quantization.encoded import LossSeverity, severity_of
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.metrics import Level


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
    if isinstance(level, LegacyLevel):
        return Verdict(
            level=level,
            overflow_count=level.original_overflow_count,
            overflow_ratio=level.original_overflow_ratio,
            underflow_count=level.original_underflow_count,
            underflow_ratio=level.original_underflow_ratio,
            flushed_count=level.original_flush_count,
            flushed_ratio=level.original_flush_ratio,
        )
    return Verdict(
        level=level,
        overflow_count=level.overflow_count,
        overflow_ratio=level.overflow_ratio,
        underflow_count=level.underflow_count,
        underflow_ratio=level.underflow_ratio,
        flushed_count=level.flushed_count,
        flushed_ratio=level.flushed_ratio,
    )


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
    found = []
    spared = {id(level) for level in but}
    keys = [
        (verdict.overflow is severity, verdict.underflow is severity)
        if verdict.severity is severity and id(verdict.level) not in spared
        else None
        for verdict in verdicts
    ]
    for key, run in itertools.groupby(zip(keys, verdicts, strict=True), key=lambda pair: pair[0]):
        exponents = [verdict.level.exponent for _, verdict in run]
        if key is not None:
            overflows, underflows = key
            found.append(
                Stretch(
                    exponents=Range(minimum=min(exponents), maximum=max(exponents)),
                    num_levels=len(exponents),
                    overflows=overflows,
                    underflows=underflows,
                )
            )
    return tuple(found)


def clean_range(verdicts: Sequence[Verdict]) -> Range | None:
    """From the lowest to the highest exponent of the longest run of clean levels; None where there is none."""
    runs = [
        [verdict.level.exponent for verdict in run]
        for is_clean, run in itertools.groupby(verdicts, key=lambda verdict: verdict.is_clean)
        if is_clean
    ]
    longest = max(runs, key=len, default=None)
    return None if longest is None else Range(minimum=min(longest), maximum=max(longest))


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
