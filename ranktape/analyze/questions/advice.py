"""Recommends a level of a sweep, one scale for many tensors and a format, and says how sure that is.

`Recommendation` judges one tensor. What a level puts beyond the format's limits has a severity (`Verdict`), the metrics
have a spread over the levels, and `advice` says in words what follows. All of it is the same for a tensor and a
multiple of it, metrics in the tensor's own unit aside, and nothing is NaN.
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

KEPT_SQNR = 1.0
"""In dB: a level that has no more than this keeps nothing of a tensor; 0 dB is what zeros in its place have."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one level puts beyond the format's limits, by its kind: `overflow`, `underflow` or `flushed`.

    The counts are those of `Level`; of a legacy sweep they are the original's: see `LegacyLevel`.
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
        """The same as a part of the values that ratios are of."""
        return self._of(kind, "ratio")

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


class Range(NamedTuple):
    """From one value to another, both included."""

    minimum: float
    maximum: float


class Stretch(NamedTuple):
    """Levels of one severity that follow one another, in the order of the sweep."""

    exponents: Range
    """Of the scales, or offsets in `mx` mode."""
    num_levels: int
    overflows: bool
    """Whether each of them has the severity by overflow."""
    underflows: bool
    """Whether each of them has the severity by underflow."""


class Position(enum.StrEnum):
    """Where among the levels the recommended one is; of the first and the last see `direction_of`."""

    BALANCED = "balanced"
    """Between others: larger and smaller scales are no better."""
    LARGEST = "largest"
    SMALLEST = "smallest"
    ONLY = "only"


def is_lossless(level: Level) -> bool:
    """Whether nothing at all is lost; squares of errors may be too small for float64, errors hardly."""
    return level.max_abs_error == 0


def keeps_nothing(levels: Sequence[Level]) -> bool:
    """Whether not one of the levels keeps more than `KEPT_SQNR` of the tensor; not so of no levels."""
    return bool(levels) and all(level.sqnr <= KEPT_SQNR for level in levels)


def _severe_stretches(verdicts: Sequence[Verdict], *, but: Sequence[Level]) -> tuple[Stretch, ...]:
    """The runs of levels of high severity, parted where its cause changes from overflow to underflow or both.

    The levels of `but` belong to no run, and part those on their two sides.
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
    """From the lowest to the highest exponent of at least one level."""
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
    """Which scales beyond those that were tried may be better, by what is lost there: larger, smaller or neither.

    A tapered format loses less in the middle of its range, so that its limits do not tell.
    """
    position = _position_of(levels, recommended)
    by_overflow = recommended.overflow_ratio > recommended.flushed_ratio
    if keeps_nothing(levels):
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
    VARIES = "varies"
    """Much: the level has to be chosen with care."""


def variation_of(name: str, lowest: float, highest: float) -> Variation:
    """How much a metric depends on the level, by the legacy limits: PSNR 10 and 20 dB, cosine 0.01, MSE 10 %."""
    if lowest == highest:
        return Variation.STABLE
    width = highest - lowest
    if name == "psnr" and 10 < width <= 20:  # noqa: PLR2004 - the limits above
        return Variation.MODERATE
    is_stable = width <= 10 if name == "psnr" else width < (0.1 * lowest if name == "mse" else 0.01)  # noqa: PLR2004
    return Variation.STABLE if is_stable else Variation.VARIES


class Spread(NamedTuple):
    """How far one metric moves over the levels."""

    lowest: float
    highest: float
    """Infinite for PSNR where a level loses nothing."""
    deviation: float
    """Standard deviation (of the levels, not of a sample of them) of the finite metrics; 0 without any."""
    variation: Variation

    @property
    def width(self) -> float:
        """`highest` minus `lowest`; 0 where both are infinite."""
        return 0.0 if self.lowest == self.highest else self.highest - self.lowest


def spread_of(levels: Sequence[Level], name: str) -> Spread:
    """How far a metric, `mse`, `cosine` or `psnr`, moves over at least one level; it may be infinite, and is no NaN."""
    metrics = np.array([float(getattr(level, name)) for level in levels])
    lowest, highest = float(metrics.min()), float(metrics.max())
    deviation = 0.0
    if lowest != highest:
        # Divided by the largest first: squares of metrics near the ends of float64 are beyond it.
        finite = metrics[np.isfinite(metrics)]
        largest = float(np.abs(finite).max(initial=0.0))
        deviation = largest * float(np.std(finite / largest)) if largest > 0 else 0.0
    return Spread(lowest, highest, deviation, variation_of(name, lowest, highest))


def is_square_beyond(level: Level) -> bool:
    """Whether the mean square of an error, which is itself a float64, is not: infinite, or 0 though something is lost.

    A level with infinite errors has an infinite MSE, which is none beyond.
    """
    return (level.mse == math.inf and level.rmse < math.inf) or (level.mse == 0 and level.max_abs_error > 0)


class Advice(NamedTuple):
    """Sentences without a full stop; empty where there is nothing to advise on."""

    metrics: tuple[str, ...]
    """What varies with the level and what is stable."""
    limits: tuple[str, ...]
    """Which levels to avoid, and which are free of overflow and underflow."""
    conclusion: tuple[str, ...]
    """Which level to use, and where among the others it is."""


class Recommendation:
    """The level to use, and all that speaks for and against it.

    Levels without any error, a single level and no level at all are fine. Without levels (no finite number other than
    zero) everything that needs one is None or empty, and the note of the sweep says why. NaN and infinities of the
    tensor are in no metric.
    """

    def __init__(self, sweep: ScaleSweep) -> None:
        self.sweep = sweep
        levels, chosen = sweep.levels, sweep.recommended
        self.verdicts = tuple(map(Verdict, levels))
        """One for each level, in their order."""
        self.recommended = None if chosen is None else Verdict(chosen)
        """The level with the best composite score, or one that is as good: see `metrics.settled`."""
        as_good = [] if chosen is None else _as_good(list(levels), chosen)
        self.as_good = _range_of(as_good) if as_good else None
        """Exponents or offsets next to the recommended one, itself included, at which no more is lost: see
        `metrics.is_as_good`."""
        self.keeps_nothing = keeps_nothing(levels)
        """Whether nothing is left of the tensor at any level."""
        self.best = {name: level for name in METRICS if (level := best_by(sweep, name)) is not None}
        """For each metric, by its field in `Level`, the best level."""
        scores = [level.original_score for level in levels if isinstance(level, LegacyLevel)]
        # As the tool: numpy's argmax takes NaN for the largest.
        self.original_choice = levels[int(np.argmax(scores))] if scores else None
        """Of a legacy sweep the level that the legacy tool recommended; None in other modes."""
        self.spreads = {name: spread_of(levels, name) for name in ("mse", "cosine", "psnr") if levels}
        """How far these metrics move over the levels."""
        self.is_mse_beyond = any(map(is_square_beyond, levels))
        """Whether the mean squared error of a level is too large or too small for float64."""
        self.extremes: dict[str, tuple[Verdict, Verdict]] = {}
        """Of overflow and of underflow, where any level has some, the worst and the best one; the first on a tie."""
        for kind in ("overflow", "underflow"):
            ratios = [verdict.ratio(kind) for verdict in self.verdicts]
            if any(ratio > 0 for ratio in ratios):
                worst, least = (self.verdicts[ratios.index(end(ratios))] for end in (max, min))
                self.extremes[kind] = worst, least
        runs = itertools.groupby(self.verdicts, key=lambda one: one.is_clean)
        clean = [[verdict.level for verdict in run] for is_clean, run in runs if is_clean]
        self.optimal = _range_of(max(clean, key=len)) if clean else None
        """Exponents or offsets of the longest run of clean levels; None where none is clean."""
        self.avoid = _severe_stretches(self.verdicts, but=[] if self.keeps_nothing else as_good)
        """Runs of levels of high severity, each with its cause; the recommended one and those as good are in none."""
        self.least_bad: Verdict | None = None
        """Where no level is without severity, the one at which the fewest values overflow or become zero."""
        self.position: Position | None = None
        self.direction = "neither"
        """Where the recommended level is, and which scales that were not tried may be better."""
        if chosen is not None:
            self.position = _position_of(levels, chosen)
            self.direction = direction_of(levels, chosen, is_tapered=bool(sweep.target.taper))
            if self.optimal is None:
                gone = min(levels, key=lambda one: (one.overflow_ratio + one.flushed_ratio, one is not chosen))
                self.least_bad = Verdict(gone)
        self.word = "offset" if sweep.has_offsets else "scale exponent"
        """What the exponent of a level is: of the scale itself, or an offset to the exponents of many scales."""
        self.advice = _advice(self)
        """What follows, in sentences."""


def best_by(sweep: ScaleSweep, name: str) -> Level | None:
    """The best level by one metric alone, or one that is as good: see `metrics.settled`; None without levels.

    Squares beyond float64 are all the same: then their roots, which are not, tell the levels apart.
    """
    is_beyond = any(map(is_square_beyond, sweep.levels))
    found = sweep.best(METRICS["rmse" if name == "mse" and is_beyond else name].goodness)
    return None if found is None else sweep.settled(found)


def _as_good(levels: list[Level], chosen: Level) -> list[Level]:
    """The run of levels around the chosen one at which no more is lost; all of one tie, or of none."""
    index = next(number for number, level in enumerate(levels) if level is chosen)
    before = list(itertools.takewhile(lambda level: is_as_good(level, chosen), reversed(levels[:index])))
    after = itertools.takewhile(lambda level: is_as_good(level, chosen), levels[index + 1 :])
    return [*reversed(before), chosen, *after]


def _advice(found: Recommendation) -> Advice:
    """What follows from all that was found of a sweep."""
    if found.recommended is None:
        return Advice((), (), (f"no scale to recommend: {found.sweep.note}",))
    is_varied = len(found.verdicts) > 1 and not found.keeps_nothing
    metrics = _on_metrics(found) if is_varied else []
    return Advice(tuple(metrics), tuple(_on_limits(found)), tuple(_conclusion(found, found.recommended.level)))


def _on_metrics(found: Recommendation) -> list[str]:
    mse, cosine, psnr = (found.spreads[name] for name in ("mse", "cosine", "psnr"))
    return [
        "MSE of some levels is beyond float64, too large or too small a square: PSNR tells the levels apart"
        if found.is_mse_beyond
        else "MSE hardly depends on the scale: any of the levels will do"
        if mse.variation is Variation.STABLE
        else f"MSE varies with the scale, from {mse.lowest:.4g} to {mse.highest:.4g}: choose the scale with care",
        f"cosine similarity is stable, within {cosine.width:.2g}: the scale hardly changes the tensor's direction"
        if cosine.variation is Variation.STABLE
        else f"cosine similarity varies, from {cosine.lowest:.6f} to {cosine.highest:.6f}: "
        "the scale changes the tensor's direction",
        f"PSNR moves by {psnr.width:.2f} dB: {_OF_PSNR[psnr.variation]}",
    ]


_OF_PSNR = {
    Variation.STABLE: "the scale has limited influence on quality",
    Variation.MODERATE: "the scale matters to quality",
    Variation.VARIES: "the scale decides over quality",
}


def _on_limits(found: Recommendation) -> list[str]:
    said = []
    for stretch in found.avoid:
        both = stretch.overflows and stretch.underflows
        what = "overflow, and more than 1 % underflow" if both else "overflow" if stretch.overflows else "underflow"
        said.append(f"avoid {_levels(found, stretch.exponents)}: more than 1 % of the values {what}")
    if any(stretch.overflows for stretch in found.avoid):
        said.append("values that overflow are saturated: the largest of the tensor are lost")
    if any(stretch.underflows for stretch in found.avoid):
        said.append("values that underflow keep fewer significand bits or become zero: the smallest are lost")
    if found.optimal is not None:
        said.append(f"free of significant overflow and underflow: {_levels(found, found.optimal)}")
    if found.keeps_nothing:
        return said
    if found.least_bad is not None:
        said.append(
            f"no level is free of overflow and underflow: the fewest values are saturated or become zero at "
            f"{found.word} {found.least_bad.level.exponent:.4g}, {_parts(found.least_bad)}"
        )
    chosen = found.recommended
    if chosen is not None and chosen.severity is not LossSeverity.NONE:
        said.append(
            f"the recommended level has {chosen.severity} overflow or underflow itself ({_parts(chosen)}) "
            "and still the best score"
        )
    return said


def _conclusion(found: Recommendation, level: Level) -> list[str]:
    scheme, word, ties = found.sweep.scheme.name, found.word, found.as_good
    if found.keeps_nothing:
        said = [f"no level keeps anything of the tensor in {scheme}: try {found.direction} scales"]
    else:
        said = [f"use {word} {level.exponent:.4g} (factor {level.scale:.6g}) for {scheme}"]
        if ties is not None and ties.minimum != ties.maximum:
            said.append(f"{_levels(found, ties)} are equally good: no more is lost there, to 0.01 dB of SQNR")
        if is_lossless(level):
            said.append("nothing is lost there")
        elif found.position is not None:
            said.append(_OF_POSITION[found.position] + _OF_DIRECTION.get((found.position, found.direction), ""))
    if found.original_choice is not None:
        exponent = found.original_choice.exponent
        same = " as well" if exponent == level.exponent else ""
        said.append(f"the tool that legacy mode reproduces would recommend {word} {exponent:.4g}{same}")
    return said


_OF_POSITION = {
    Position.BALANCED: "it is balanced between overflow and underflow: larger and smaller scales are no better",
    Position.LARGEST: "it is at the edge, the largest scale that was tried: ",
    Position.SMALLEST: "it is at the edge, the smallest scale that was tried: ",
    Position.ONLY: "it is the only scale that was tried",
}

_OF_DIRECTION = {
    (Position.LARGEST, "larger"): "a larger one may be better",
    (Position.LARGEST, "neither"): "nothing overflows there, so that a larger one will hardly be better",
    (Position.SMALLEST, "smaller"): "a smaller one may be better",
    (Position.SMALLEST, "neither"): "nothing underflows there, so that a smaller one will hardly be better",
    (Position.ONLY, "larger"): ": values overflow, a larger one may be better",
    (Position.ONLY, "smaller"): ": values underflow, a smaller one may be better",
}


def _levels(found: Recommendation, exponents: Range) -> str:
    low, high = f"{exponents.minimum:.4g}", f"{exponents.maximum:.4g}"
    return f"{found.word} {low}" if low == high else f"{found.word}s {low} to {high}"


def _parts(verdict: Verdict) -> str:
    overflow, underflow, flushed = (f"{verdict.ratio(kind):.2%}" for kind in ("overflow", "underflow", "flushed"))
    if isinstance(verdict.level, LegacyLevel):
        return f"as the original counts: overflow {overflow}, underflow {underflow}, flushed {flushed}"
    return f"overflow {overflow}, underflow {underflow}, of which {flushed} become zero"


class Share(NamedTuple):
    """What one tensor has of a scale that it shares: its level there, and the one that keeps its SQNR largest."""

    level: Level
    own: Level

    @property
    def price(self) -> float:
        """What sharing costs in SQNR, in dB: never negative, and infinite where nothing would be lost alone."""
        return 0.0 if self.own.sqnr == self.level.sqnr else self.own.sqnr - self.level.sqnr


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonScale:
    """One scale for many tensors."""

    exponent: float
    """Of the scale, or the offset that all exponents get."""
    score: float
    """Mean of the tensors' composite scores there: every tensor counts the same."""
    shares: tuple[Share, ...]
    """One for each tensor that has levels, in their order."""

    @property
    def median_price(self) -> float:
        """Half of the tensors lose at most so many dB by sharing."""
        return statistics.median_low(share.price for share in self.shares)

    @property
    def worst_price(self) -> float:
        """How many dB the tensor loses that loses most."""
        return max(share.price for share in self.shares)


def common_grid(sweeps: Sequence[ScaleSweep]) -> SweepOptions | None:
    """Options with which all of these tensors are tried at the same whole exponents; None where none has levels.

    All sweeps are of one mode and one format. The exponents reach one beyond those that the tensors prefer for
    themselves. Offsets are common to all tensors as they are, so that the options of `mx` and `channel` sweeps stay
    the same.
    """
    with_levels = [sweep for sweep in sweeps if sweep.levels]
    if not with_levels:
        return None
    options = with_levels[0].options
    if with_levels[0].has_offsets:
        return options
    preferred = [level.exponent for sweep in with_levels if (level := sweep.recommended) is not None]
    first = min(math.ceil(max(preferred)) + 1, MAX_SCALE_EXPONENT)
    last = max(math.floor(min(preferred)) - 1, -MAX_SCALE_EXPONENT)
    if with_levels[0].mode is SweepMode.LEGACY:
        # 10 and -10 would mean that no end was given.
        first, last = first + (first == UNSET_EXPONENTS[0]), last - (last == UNSET_EXPONENTS[1])
    return dataclasses.replace(options, max_scale_exp=first, min_scale_exp=last, num_levels=first - last + 1)


def common_scale(sweeps: Sequence[ScaleSweep]) -> CommonScale | None:
    """The exponent or offset with the best mean composite score, and what sharing costs.

    Of offsets that are as good for every tensor the one nearest to 0: see `ties.is_as_good`. Tensors without levels
    are left out; None where none has any.

    Raises:
        UsageError: the tensors were tried at different exponents: see `common_grid`.
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
"""In dB: what a format has to keep where nothing else is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """One format for the tensors of a layer."""

    scheme: Scheme
    """The format and its scaling."""
    bits_per_element: float
    """The scales of blocks included: see `bits_per_element`."""
    worst_sqnr: float
    """SQNR, in dB, of the tensor that keeps least of it, each at its best level; infinite where nothing is lost."""
    meets_target: bool
    """Whether that is enough."""


def best_format(
    sweeps: Mapping[str, Sequence[ScaleSweep]], *, target_sqnr: float = DEFAULT_TARGET_SQNR
) -> FormatChoice | None:
    """The narrowest format in which the best level of every tensor has at least that SQNR.

    `sweeps` has for each format the sweeps of the same tensors. Of equally narrow formats the one that keeps more is
    taken, and where none keeps enough the one that keeps most. Of zeros no format loses anything; other tensors without
    levels ask for nothing, and the answer is None where there are no others.
    """
    best_levels = (
        (found[0].scheme, [one for one in map(best_sqnr, found) if one is not None]) for found in sweeps.values()
    )
    return best_format_of([(scheme, min(best)) for scheme, best in best_levels if best], target_sqnr=target_sqnr)


def best_sqnr(sweep: ScaleSweep) -> float | None:
    """The largest SQNR of a level, in dB; infinite of zeros, of which nothing is lost; None without finite numbers."""
    if sweep.is_lossless:
        return math.inf
    return max((level.sqnr for level in sweep.levels), default=None)


def best_format_of(worst: Sequence[tuple[Scheme, float]], *, target_sqnr: float) -> FormatChoice | None:
    """As `best_format`, of formats and the least SQNR that a tensor keeps in each at its best level.

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
    """Width of an element with its part of the scale of its block; the one scale of a tensor counts as nothing."""
    shared = scheme.scale.num_bits / scheme.block_size if scheme.scale is not None else 0.0
    return scheme.element.num_bits + shared
