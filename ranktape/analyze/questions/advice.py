"""Recommends a level of a sweep, a common scale for many tensors, and a format, with reasons.

`Recommendation` judges one tensor. The losses at a level have severities (`Verdict`), the metrics have a spread over
the levels, and `advice` has the conclusions as text. Except for metrics in the tensor's own unit, the results do not
change if the tensor is multiplied by a number, and nothing is NaN.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Rounding, round_to
from ranktape.analyze.numerics.quantization.encoded import LossSeverity, severity_of
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import MAX_SCALE_BITS, SCHEMES, Scaling, Scheme
from ranktape.analyze.numerics.sweeps.legacy import UNSET_EXPONENTS, LegacyLevel, legacy_result
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level, is_as_good
from ranktape.analyze.numerics.sweeps.options import MAX_SCALE_EXPONENT, SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.errors import UsageError

MIN_USEFUL_SQNR = 1.0
"""A level with at most this SQNR, in dB, keeps nothing of a tensor. Zeros instead of the tensor have 0 dB."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The losses at one level, by kind: `overflow`, `underflow` or `flushed`.

    The counts are those of `Level`, or the original ones of a legacy sweep (see `LegacyLevel`).
    """

    level: Level

    def _of(self, kind: str, what: str) -> float:
        is_legacy = isinstance(self.level, LegacyLevel)
        name = f"original_{kind.replace('flushed', 'flush')}" if is_legacy else kind
        return float(getattr(self.level, f"{name}_{what}"))

    def count(self, kind: str) -> int:
        """Number of values."""
        return int(self._of(kind, "count"))

    def ratio(self, kind: str) -> float:
        """Ratio of the count, to the same total as the ratios of `Level`."""
        return self._of(kind, "ratio")

    def severity_by(self, *kinds: str) -> LossSeverity:
        """The severity of the worst of some kinds."""
        return severity_of(max(map(self.ratio, kinds)))

    @property
    def severity(self) -> LossSeverity:
        """The worse of overflow and underflow."""
        return self.severity_by("overflow", "underflow")

    @property
    def is_clean(self) -> bool:
        """Whether the level has no severity. The legacy tool includes flushed values."""
        kinds = ("overflow", "underflow", "flushed")
        return self.severity_by(*kinds[: 3 if isinstance(self.level, LegacyLevel) else 2]) is LossSeverity.NONE


class Range(NamedTuple):
    """A closed interval."""

    minimum: float
    maximum: float


class Stretch(NamedTuple):
    """Consecutive levels with the same severity, in the order of the sweep."""

    exponents: Range
    """The exponents of the scales, or offsets in `mx` mode."""
    num_levels: int
    overflows: bool
    """Whether overflow has the severity at each of them."""
    underflows: bool
    """Whether underflow has the severity at each of them."""


class Position(enum.StrEnum):
    """The position of the recommended level among all levels. `direction_of` evaluates the first and the last."""

    BALANCED = "balanced"
    """Between other levels: larger and smaller scales are not better."""
    LARGEST = "largest"
    SMALLEST = "smallest"
    ONLY = "only"


def is_lossless(level: Level) -> bool:
    """Whether nothing is lost. Squares of errors may be too small for float64, unlike the errors."""
    return level.max_abs_error == 0


def loses_everything(levels: Sequence[Level]) -> bool:
    """Whether all levels have an SQNR of at most `MIN_USEFUL_SQNR`; false if there are no levels."""
    return bool(levels) and all(level.sqnr <= MIN_USEFUL_SQNR for level in levels)


def _severe_stretches(verdicts: Sequence[Verdict], *, but: Sequence[Level]) -> tuple[Stretch, ...]:
    """The runs of levels of high severity, split where the cause changes between overflow, underflow and both.

    The levels of `but` belong to no run and split the runs around them.
    """
    spared = {id(level) for level in but}

    def causes(verdict: Verdict) -> tuple[bool, bool] | None:
        if verdict.severity is not LossSeverity.HIGH or id(verdict.level) in spared:
            return None
        overflow, underflow = map(verdict.severity_by, ("overflow", "underflow"))
        return overflow is LossSeverity.HIGH, underflow is LossSeverity.HIGH

    runs = ((key, [verdict.level for verdict in run]) for key, run in itertools.groupby(verdicts, key=causes))
    return tuple(Stretch(_range_of(levels), len(levels), *key) for key, levels in runs if key is not None)


def _range_of(levels: Sequence[Level]) -> Range:
    """The lowest and the highest exponent of at least one level."""
    exponents = [level.exponent for level in levels]
    return Range(min(exponents), max(exponents))


def _position_of(levels: Sequence[Level], recommended: Level) -> Position:
    lowest, highest = _range_of(levels)
    if lowest == highest:
        return Position.ONLY
    if recommended.exponent == highest:
        return Position.LARGEST
    return Position.SMALLEST if recommended.exponent == lowest else Position.BALANCED


def direction_of(levels: Sequence[Level], recommended: Level, *, is_tapered: bool) -> str:
    """Which scales beyond those tried may be better, judged by the losses: larger, smaller or neither.

    A tapered format loses less in the middle of its range, so that its limits are not conclusive.
    """
    position = _position_of(levels, recommended)
    by_overflow = recommended.overflow_ratio > recommended.flushed_ratio
    if loses_everything(levels):
        return "larger" if by_overflow else "smaller"
    may_grow = position is Position.LARGEST or (position is Position.ONLY and by_overflow)
    if may_grow and (recommended.overflow_count > 0 or is_tapered):
        return "larger"
    may_shrink = position is Position.SMALLEST or (position is Position.ONLY and not by_overflow)
    if may_shrink and (recommended.underflow_count > 0 or (is_tapered and position is Position.SMALLEST)):
        return "smaller"
    return "neither"


def range_before(sweep: ScaleSweep) -> Range:
    """The smallest and the largest finite value of a tensor that has levels.

    If only magnitudes were counted, these are the largest magnitude with either sign.
    """
    low = -sweep.largest if sweep.minimum is None else max(sweep.minimum, -sweep.largest)
    return Range(low, sweep.largest if sweep.maximum is None else min(sweep.maximum, sweep.largest))


def range_after(sweep: ScaleSweep, *, level: Level) -> Range:
    """The results for the ends of `range_before` at a level of the sweep.

    If elements share scales in blocks or channels, each end is quantized as the largest value of its own block, which
    the end with the larger magnitude always is. Stochastic rounding is replaced by the rounding of the format.
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
    """Little: all levels are suitable."""
    MODERATE = "moderate"
    VARIES = "varies"
    """Much: the level has to be chosen carefully."""


def variation_of(name: str, lowest: float, highest: float) -> Variation:
    """How much a metric depends on the level, by the legacy thresholds: PSNR 10 and 20 dB, cosine 0.01, MSE 10 %."""
    if lowest == highest:
        return Variation.STABLE
    width = highest - lowest
    if name == "psnr" and 10 < width <= 20:  # noqa: PLR2004 - the limits above
        return Variation.MODERATE
    is_stable = width <= 10 if name == "psnr" else width < (0.1 * lowest if name == "mse" else 0.01)  # noqa: PLR2004
    return Variation.STABLE if is_stable else Variation.VARIES


class Spread(NamedTuple):
    """The spread of one metric over the levels."""

    lowest: float
    highest: float
    """Infinite for PSNR if a level loses nothing."""
    deviation: float
    """Population standard deviation of the finite metrics; 0 if there are none."""
    variation: Variation

    @property
    def width(self) -> float:
        """`highest` minus `lowest`; 0 if both are infinite."""
        return 0.0 if self.lowest == self.highest else self.highest - self.lowest


def spread_of(levels: Sequence[Level], name: str) -> Spread:
    """The spread of `mse`, `cosine` or `psnr` over at least one level. It may be infinite but is not NaN."""
    metrics = np.array([float(getattr(level, name)) for level in levels])
    lowest, highest = float(metrics.min()), float(metrics.max())
    deviation = 0.0
    if lowest != highest:
        # Divide by the largest first, because squares of metrics near the limits of float64 overflow or underflow.
        finite = metrics[np.isfinite(metrics)]
        largest = float(np.abs(finite).max(initial=0.0))
        deviation = largest * float(np.std(finite / largest)) if largest > 0 else 0.0
    return Spread(lowest, highest, deviation, variation_of(name, lowest, highest))


def is_square_beyond(level: Level) -> bool:
    """Whether the mean square of the error overflows or underflows in float64, while the error itself does not.

    A level with infinite errors also has an infinite MSE, which does not count.
    """
    return (level.mse == math.inf and level.rmse < math.inf) or (level.mse == 0 and level.max_abs_error > 0)


class Advice(NamedTuple):
    """Sentences without a full stop; empty if there is no advice."""

    metrics: tuple[str, ...]
    """Which metrics vary with the level and which are stable."""
    limits: tuple[str, ...]
    """Which levels to avoid, and which are free of overflow and underflow."""
    conclusion: tuple[str, ...]
    """Which level to use, and its position among the others."""


class Recommendation:
    """The level to use, with the reasons for and against it.

    Levels without any error, a single level, and no levels are valid. Without levels (no finite nonzero number),
    everything that needs a level is None or empty, and the note of the sweep gives the reason. NaN and infinities of
    the tensor are not included in any metric.
    """

    def __init__(self, sweep: ScaleSweep) -> None:
        self.sweep = sweep
        levels, chosen = sweep.levels, sweep.recommended
        self.verdicts = tuple(map(Verdict, levels))
        """One for each level, in order."""
        self.recommended = None if chosen is None else Verdict(chosen)
        """The level with the best composite score, or an equally good one: see `metrics.settled`."""
        as_good = [] if chosen is None else _as_good(list(levels), chosen)
        self.as_good = _range_of(as_good) if as_good else None
        """Exponents or offsets of the consecutive levels around and including the recommended one that lose no more:
        see `metrics.is_as_good`."""
        self.loses_everything = loses_everything(levels)
        """Whether no level keeps anything of the tensor."""
        self.best = {name: level for name in METRICS if (level := best_by(sweep, name)) is not None}
        """The best level for each metric, by its field in `Level`."""
        scores = [level.original_score for level in levels if isinstance(level, LegacyLevel)]
        # As in the legacy tool, NaN counts as the largest in numpy's argmax.
        self.original_choice = levels[int(np.argmax(scores))] if scores else None
        """The level that the legacy tool recommends in a legacy sweep; None in other modes."""
        self.spreads = {name: spread_of(levels, name) for name in ("mse", "cosine", "psnr") if levels}
        """The spread of these metrics over the levels."""
        self.is_mse_beyond = any(map(is_square_beyond, levels))
        """Whether the mean squared error of a level is too large or too small for float64."""
        self.extremes: dict[str, tuple[Verdict, Verdict]] = {}
        """The worst and the best level for overflow and underflow, if any level has some; the first one in a tie."""
        for kind in ("overflow", "underflow"):
            ratios = [verdict.ratio(kind) for verdict in self.verdicts]
            if any(ratio > 0 for ratio in ratios):
                worst, least = (self.verdicts[ratios.index(end(ratios))] for end in (max, min))
                self.extremes[kind] = worst, least
        runs = itertools.groupby(self.verdicts, key=lambda one: one.is_clean)
        clean = [[verdict.level for verdict in run] for is_clean, run in runs if is_clean]
        self.optimal = _range_of(max(clean, key=len)) if clean else None
        """Exponents or offsets of the longest run of clean levels; None if none is clean."""
        self.avoid = _severe_stretches(self.verdicts, but=[] if self.loses_everything else as_good)
        """Runs of levels of high severity with their causes, without the recommended level and those as good."""
        self.least_bad: Verdict | None = None
        """If no level is clean, the level at which the fewest values overflow or become zero."""
        self.position: Position | None = None
        self.direction = "neither"
        """The position of the recommended level, and which scales that were not tried may be better."""
        if chosen is not None:
            self.position = _position_of(levels, chosen)
            self.direction = direction_of(levels, chosen, is_tapered=bool(sweep.target.taper))
            if self.optimal is None:
                gone = min(levels, key=lambda one: (one.overflow_ratio + one.flushed_ratio, one is not chosen))
                self.least_bad = Verdict(gone)
        self.word = "offset" if sweep.has_offsets else "scale exponent"
        """The meaning of a level's exponent: that of the scale itself, or an offset to the exponents of many scales."""
        self.advice = _advice(self)
        """The conclusions as sentences."""


def best_by(sweep: ScaleSweep, name: str) -> Level | None:
    """The best level by one metric, or an equally good one (see `metrics.settled`); None without levels.

    If squared errors overflow or underflow in float64, their roots are compared instead.
    """
    is_beyond = any(map(is_square_beyond, sweep.levels))
    best = sweep.best(METRICS["rmse" if name == "mse" and is_beyond else name].goodness)
    return None if best is None else sweep.settled(best)


def _as_good(levels: list[Level], chosen: Level) -> list[Level]:
    """The run of levels around the chosen one that lose no more."""
    index = next(number for number, level in enumerate(levels) if level is chosen)
    before = list(itertools.takewhile(lambda level: is_as_good(level, chosen), reversed(levels[:index])))
    after = itertools.takewhile(lambda level: is_as_good(level, chosen), levels[index + 1 :])
    return [*reversed(before), chosen, *after]


def _advice(result: Recommendation) -> Advice:
    """The conclusions from the recommendation of a sweep."""
    if result.recommended is None:
        return Advice((), (), (f"no scale to recommend: {result.sweep.note}",))
    is_varied = len(result.verdicts) > 1 and not result.loses_everything
    metrics = _on_metrics(result) if is_varied else []
    return Advice(tuple(metrics), tuple(_on_limits(result)), tuple(_conclusion(result, result.recommended.level)))


def _on_metrics(result: Recommendation) -> list[str]:
    mse, cosine, psnr = (result.spreads[name] for name in ("mse", "cosine", "psnr"))
    return [
        "the MSE of some levels is outside the range of float64: compare the levels by PSNR"
        if result.is_mse_beyond
        else "MSE hardly depends on the scale: all levels are suitable"
        if mse.variation is Variation.STABLE
        else f"MSE varies with the scale, from {mse.lowest:.4g} to {mse.highest:.4g}: choose the scale carefully",
        f"cosine similarity is stable, within {cosine.width:.2g}: the scale hardly changes the tensor's direction"
        if cosine.variation is Variation.STABLE
        else f"cosine similarity varies, from {cosine.lowest:.6f} to {cosine.highest:.6f}: "
        "the scale changes the tensor's direction",
        f"PSNR varies by {psnr.width:.2f} dB: {_OF_PSNR[psnr.variation]}",
    ]


_OF_PSNR = {
    Variation.STABLE: "the scale has limited influence on quality",
    Variation.MODERATE: "the scale affects quality",
    Variation.VARIES: "the scale determines quality",
}


def _on_limits(result: Recommendation) -> list[str]:
    lines = []
    for stretch in result.avoid:
        both = stretch.overflows and stretch.underflows
        what = "overflow, and more than 1 % underflow" if both else "overflow" if stretch.overflows else "underflow"
        lines.append(f"avoid {_levels(result, stretch.exponents)}: more than 1 % of the values {what}")
    if any(stretch.overflows for stretch in result.avoid):
        lines.append("values that overflow are saturated: the largest values are lost")
    if any(stretch.underflows for stretch in result.avoid):
        lines.append("values that underflow lose significand bits or become zero: the smallest values are lost")
    if result.optimal is not None:
        lines.append(f"free of significant overflow and underflow: {_levels(result, result.optimal)}")
    if result.loses_everything:
        return lines
    if result.least_bad is not None:
        lines.append(
            f"no level is free of overflow and underflow: the fewest values are saturated or become zero at "
            f"{result.word} {result.least_bad.level.exponent:.4g}, {_parts(result.least_bad)}"
        )
    chosen = result.recommended
    if chosen is not None and chosen.severity is not LossSeverity.NONE:
        lines.append(
            f"the recommended level also has {chosen.severity} overflow or underflow ({_parts(chosen)}), "
            "but the best score"
        )
    return lines


def _conclusion(result: Recommendation, level: Level) -> list[str]:
    scheme, word, ties = result.sweep.scheme.name, result.word, result.as_good
    if result.loses_everything:
        lines = [f"all levels lose nearly everything in {scheme}: try {result.direction} scales"]
    else:
        lines = [f"use {word} {level.exponent:.4g} (factor {level.scale:.6g}) for {scheme}"]
        if ties is not None and ties.minimum != ties.maximum:
            lines.append(f"{_levels(result, ties)} are equally good: their SQNR is within 0.01 dB")
        if is_lossless(level):
            lines.append("it loses nothing")
        elif result.position is not None:
            lines.append(_OF_POSITION[result.position] + _OF_DIRECTION.get((result.position, result.direction), ""))
    if result.original_choice is not None:
        exponent = result.original_choice.exponent
        same = ", too" if exponent == level.exponent else ""
        lines.append(f"the legacy tool recommends {word} {exponent:.4g}{same}")
    return lines


_OF_POSITION = {
    Position.BALANCED: "it is balanced between overflow and underflow: larger and smaller scales are not better",
    Position.LARGEST: "it is the largest scale that was tried: ",
    Position.SMALLEST: "it is the smallest scale that was tried: ",
    Position.ONLY: "it is the only scale that was tried",
}

_OF_DIRECTION = {
    (Position.LARGEST, "larger"): "a larger one may be better",
    (Position.LARGEST, "neither"): "nothing overflows, so a larger one is unlikely to be better",
    (Position.SMALLEST, "smaller"): "a smaller one may be better",
    (Position.SMALLEST, "neither"): "nothing underflows, so a smaller one is unlikely to be better",
    (Position.ONLY, "larger"): ": values overflow, a larger one may be better",
    (Position.ONLY, "smaller"): ": values underflow, a smaller one may be better",
}


def _levels(result: Recommendation, exponents: Range) -> str:
    low, high = f"{exponents.minimum:.4g}", f"{exponents.maximum:.4g}"
    return f"{result.word} {low}" if low == high else f"{result.word}s {low} to {high}"


def _parts(verdict: Verdict) -> str:
    overflow, underflow, flushed = (f"{verdict.ratio(kind):.2%}" for kind in ("overflow", "underflow", "flushed"))
    if isinstance(verdict.level, LegacyLevel):
        return f"original counts: overflow {overflow}, underflow {underflow}, flushed {flushed}"
    return f"overflow {overflow}, underflow {underflow}, of which {flushed} become zero"


class Share(NamedTuple):
    """A tensor's level at a shared scale, and the level with the largest SQNR."""

    level: Level
    own: Level

    @property
    def price(self) -> float:
        """The loss of SQNR due to sharing, in dB; at least 0, and infinite if the own level loses nothing."""
        return 0.0 if self.own.sqnr == self.level.sqnr else self.own.sqnr - self.level.sqnr


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonScale:
    """One scale for many tensors."""

    exponent: float
    """The exponent of the scale, or the offset that is added to all exponents."""
    score: float
    """Mean of the tensors' composite scores at this scale, with equal weights."""
    shares: tuple[Share, ...]
    """One for each tensor that has levels, in order."""

    @property
    def median_price(self) -> float:
        """Lower median of the tensors' losses due to sharing, in dB."""
        return statistics.median_low(share.price for share in self.shares)

    @property
    def worst_price(self) -> float:
        """Largest loss of a tensor due to sharing, in dB."""
        return max(share.price for share in self.shares)


def common_grid(sweeps: Sequence[ScaleSweep]) -> SweepOptions | None:
    """Options that sweep all of these tensors at the same integer exponents; None if none has levels.

    All sweeps have the same mode and format. The exponents extend by one beyond those that the tensors prefer. Offsets
    are already the same for all tensors, so that the options of `mx` and `channel` sweeps do not change.
    """
    with_levels = [sweep for sweep in sweeps if sweep.levels]
    if not with_levels:
        return None
    options = with_levels[0].options
    if with_levels[0].has_offsets:
        return options
    preferred = [level.exponent for sweep in with_levels if (level := sweep.recommended) is not None]
    # The preferred exponents of float64 tensors may exceed the limits of the options.
    ends = math.ceil(max(preferred)) + 1, math.floor(min(preferred)) - 1
    first, last = (max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, end)) for end in ends)
    if with_levels[0].mode is SweepMode.LEGACY:
        # The values 10 and -10 would mean that no end was given.
        first, last = first + (first == UNSET_EXPONENTS[0]), last - (last == UNSET_EXPONENTS[1])
    return dataclasses.replace(options, max_scale_exp=first, min_scale_exp=last, num_levels=first - last + 1)


def common_scale(sweeps: Sequence[ScaleSweep]) -> CommonScale | None:
    """The exponent or offset with the best mean composite score, and the loss due to sharing it.

    Of the offsets that are equally good for every tensor, the one nearest to 0 is used: see `metrics.is_as_good`.
    Tensors without levels are left out. None if no tensor has levels.

    Raises:
        UsageError: the tensors were swept at different exponents: see `common_grid`.
    """
    with_levels = [sweep for sweep in sweeps if sweep.levels]
    if not with_levels:
        return None
    levels = [sweep.levels for sweep in with_levels]
    grids = {tuple(level.exponent for level in tried) for tried in levels}
    if len(grids) > 1:
        raise UsageError("the tensors were tried at different scales, which do not add up: sweep them on one grid")
    means = [statistics.fmean(level.score for level in row) for row in zip(*levels, strict=True)]
    index = means.index(max(means))
    if with_levels[0].has_offsets:
        as_good = [
            number
            for number, row in enumerate(zip(*levels, strict=True))
            if all(is_as_good(level, tried[index]) for level, tried in zip(row, levels, strict=True))
        ]
        index = min(as_good, key=lambda number: abs(levels[0][number].exponent))
    return CommonScale(
        exponent=levels[0][index].exponent,
        score=means[index],
        shares=tuple(Share(level=tried[index], own=max(tried, key=METRICS["sqnr"].goodness)) for tried in levels),
    )


DEFAULT_TARGET_SQNR = 25.0
"""Default SQNR that a format should reach, in dB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """One format for the tensors of a layer."""

    scheme: Scheme
    """The format and its scaling."""
    bits_per_element: float
    """Number of bits per element, including scales of blocks: see `bits_per_element`."""
    worst_sqnr: float
    """The lowest SQNR of a tensor at its best level, in dB; infinite if nothing is lost."""
    meets_target: bool
    """Whether the SQNR reaches the target."""


def best_format(
    sweeps: Mapping[str, Sequence[ScaleSweep]], *, target_sqnr: float = DEFAULT_TARGET_SQNR
) -> FormatChoice | None:
    """The narrowest format in which the best level of every tensor has at least the target SQNR.

    `sweeps` has, for each format, the sweeps of the same tensors. Of equally narrow formats, the one with the higher
    SQNR is used. If none reaches the target, the one with the highest SQNR is used. All formats represent zeros without
    loss. Other tensors without levels are ignored; None if there are no others.
    """
    best_levels = (
        (swept[0].scheme, [one for one in map(best_sqnr, swept) if one is not None]) for swept in sweeps.values()
    )
    return best_format_of([(scheme, min(best)) for scheme, best in best_levels if best], target_sqnr=target_sqnr)


def best_sqnr(sweep: ScaleSweep) -> float | None:
    """The largest SQNR of a level, in dB; infinite for zeros, which lose nothing. None without finite numbers."""
    if sweep.is_lossless:
        return math.inf
    return max((level.sqnr for level in sweep.levels), default=None)


def best_format_of(worst: Sequence[tuple[Scheme, float]], *, target_sqnr: float) -> FormatChoice | None:
    """The choice of `best_format`, given formats with the lowest SQNR of a tensor at its best level in each.

    Raises:
        UsageError: the target is NaN.
    """
    if math.isnan(target_sqnr):
        raise UsageError("--target-sqnr nan is not allowed: give a number of dB")
    choices = [
        FormatChoice(
            scheme=scheme,
            bits_per_element=bits_per_element(scheme),
            worst_sqnr=sqnr,
            meets_target=sqnr >= target_sqnr,
        )
        for scheme, sqnr in worst
    ]
    enough = [choice for choice in choices if choice.meets_target]
    if enough:
        return min(enough, key=lambda choice: (choice.bits_per_element, -choice.worst_sqnr))
    return max(choices, key=lambda choice: (choice.worst_sqnr, -choice.bits_per_element), default=None)


def bits_per_element(scheme: Scheme) -> float:
    """Width of an element and its share of the block's scale, in bits. A single scale of a tensor is not counted."""
    shared = scheme.scale.num_bits / scheme.block_size if scheme.scale is not None else 0.0
    return scheme.element.num_bits + shared
