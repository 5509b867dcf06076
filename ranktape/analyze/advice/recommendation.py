"""Recommends one of the levels of a sweep, says how sure that is, and what is lost by it.

`recommend` judges one tensor. What is beyond the format's limits has a severity, the metrics have a spread over
the levels, and `advice` says in words what follows. All of it is the same for a tensor and a multiple of it,
figures in the tensor's own unit aside, and nothing is NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.advice.sentences import Advice, advise
from ranktape.analyze.advice.stability import Stability, is_square_beyond, stability_of
from ranktape.analyze.advice.value_range import Range, range_after, range_before
from ranktape.analyze.advice.verdict import (
    Direction,
    Position,
    Stretch,
    Verdict,
    clean_range,
    direction_of,
    extremes,
    keeps_nothing,
    position_of,
    stretches,
    verdict_of,
)
from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.sweeps.legacy import UNSET_EXPONENTS, LegacyLevel
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level, best, is_as_good
from ranktape.analyze.numerics.sweeps.options import MAX_SCALE_EXPONENT, SweepMode
from ranktape.analyze.table import json_value
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.numerics.quantization.schemes import Scheme
    from ranktape.analyze.numerics.sweeps.options import SweepOptions
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What follows from a sweep.

    Without levels (no finite number other than zero) everything that needs one is None or empty, and `note` says why.
    """

    scheme: str
    """Name of the format and its scaling."""
    mode: str
    """What the levels are, in the words of `SweepMode`."""
    note: str
    """What is unusual about the tensor; empty for an ordinary one."""
    recommended: Verdict | None
    """The level with the best composite score, or one that is as good: see `ties.settled`."""
    as_good: Range | None
    """Of the exponents or offsets next to the recommended one, itself included, at which no more is lost: see
    `ties.is_as_good`."""
    keeps_nothing: bool
    """Whether nothing is left of the tensor at any level: see `verdict.keeps_nothing`."""
    best: dict[str, Verdict]
    """For each metric, by its field in `Level`, the best level: see `best_by`."""
    original_choice: Verdict | None
    """Of a legacy sweep the level that the older tool recommended, the first of those that it scored NaN if there are
    any; None in other modes."""
    verdicts: tuple[Verdict, ...]
    """One for each level, in their order."""
    stability: Stability | None
    """How far the metrics move over the levels."""
    before: Range | None
    """Smallest and largest finite value of the tensor: see `range_before`."""
    after: tuple[Range, ...]
    """For each level, what these become: see `range_after`."""
    worst_overflow: Verdict | None
    """The level that overflows most; None where none does."""
    best_overflow: Verdict | None
    """The level that overflows least; None where none overflows."""
    worst_underflow: Verdict | None
    """The level that underflows most; None where none does."""
    best_underflow: Verdict | None
    """The level that underflows least; None where none underflows."""
    optimal: Range | None
    """Of the exponents or offsets of the longest run of clean levels; None where none is clean."""
    avoid: tuple[Stretch, ...]
    """Runs of levels of high severity, each with its cause; the recommended one and those as good are in none."""
    least_bad: Verdict | None
    """Where no level is without severity, the one at which the fewest values overflow or become zero."""
    position: Position | None
    """Where the recommended level is."""
    direction: Direction | None
    """Which scales that were not tried may be better."""
    advice: Advice
    """What follows, in sentences."""

    @property
    def num_severe(self) -> int:
        """Levels that are not clean."""
        return sum(not verdict.is_clean for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """All of it as one document for `json.dumps`; what is infinite is the string "inf" or "-inf"."""
        document = json_value(dataclasses.asdict(self))
        assert isinstance(document, dict)
        return document | {"num_severe": self.num_severe}


def recommend(sweep: ScaleSweep) -> Recommendation:
    """The level to use and all that speaks for and against it.

    Levels without any error, a single level and no level at all are fine. NaN and infinities of the tensor are
    in no figure.
    """
    verdicts = tuple(map(verdict_of, sweep.levels))
    chosen = sweep.recommended
    recommended = next((verdict for verdict in verdicts if verdict.level is chosen), None)
    stability = stability_of(sweep.levels) if verdicts else None
    optimal = clean_range(verdicts)
    as_good = [] if chosen is None else _as_good(sweep.levels, chosen)
    worst_overflow, best_overflow = extremes(verdicts, lambda verdict: verdict.overflow_ratio)
    worst_underflow, best_underflow = extremes(verdicts, lambda verdict: verdict.underflow_ratio)
    found = Recommendation(
        scheme=sweep.scheme.name,
        mode=sweep.mode.value,
        note=sweep.note,
        recommended=recommended,
        as_good=_range_of(as_good) if as_good else None,
        keeps_nothing=keeps_nothing(sweep.levels),
        best={name: verdict_of(level) for name in METRICS if (level := best_by(sweep, name)) is not None},
        original_choice=_original_choice(verdicts),
        verdicts=verdicts,
        stability=stability,
        before=range_before(sweep) if verdicts else None,
        after=tuple(range_after(sweep, level=level) for level in sweep.levels),
        worst_overflow=worst_overflow,
        best_overflow=best_overflow,
        worst_underflow=worst_underflow,
        best_underflow=best_underflow,
        optimal=optimal,
        avoid=stretches(verdicts, severity=LossSeverity.HIGH, but=[] if keeps_nothing(sweep.levels) else as_good),
        least_bad=None
        if chosen is None or optimal is not None
        else min(verdicts, key=lambda verdict: (verdict.gone_ratio, verdict.level is not chosen)),
        position=None if chosen is None else position_of(sweep.levels, chosen),
        direction=None if chosen is None else direction_of(sweep.levels, chosen, is_tapered=bool(sweep.target.taper)),
        advice=Advice(metrics=(), limits=(), conclusion=()),
    )
    return dataclasses.replace(found, advice=advise(found))


def best_by(sweep: ScaleSweep, name: str) -> Level | None:
    """The best level by one metric alone, or one that is as good: see `ties.settled`; None without levels.

    Squares beyond float64 are all the same: then their roots, which are not, tell the levels apart.
    """
    if not sweep.levels:
        return None
    is_beyond = any(map(is_square_beyond, sweep.levels))
    metric = METRICS["rmse" if name == "mse" and is_beyond else name]
    return sweep.settled(best(sweep.levels, figure=metric.goodness))


def _as_good(levels: Sequence[Level], chosen: Level) -> list[Level]:
    """The run of levels around the chosen one at which no more is lost; all of one tie, or of none."""
    index = next(number for number, level in enumerate(levels) if level is chosen)
    before = list(itertools.takewhile(lambda level: is_as_good(level, chosen), reversed(levels[:index])))
    after = list(itertools.takewhile(lambda level: is_as_good(level, chosen), levels[index + 1 :]))
    return [*reversed(before), chosen, *after]


def _range_of(levels: Sequence[Level]) -> Range:
    exponents = [level.exponent for level in levels]
    return Range(minimum=min(exponents), maximum=max(exponents))


def _original_choice(verdicts: Sequence[Verdict]) -> Verdict | None:
    scores = [verdict.level.original_score for verdict in verdicts if isinstance(verdict.level, LegacyLevel)]
    # As the tool: numpy's argmax takes NaN for the largest.
    return verdicts[int(np.argmax(scores))] if scores else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one tensor has of a scale that it shares with others."""

    level: Level
    """At the common scale."""
    own: Level
    """At the one of the scales that were tried that keeps its SQNR largest."""

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
        shares=tuple(Share(level=tried[index], own=best(tried, figure=METRICS["sqnr"].goodness)) for tried in levels),
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
    taken, and where none keeps enough the one that keeps most. Tensors without levels ask for nothing; None where no
    tensor has levels.

    Raises:
        UsageError: the target is NaN.
    """
    if math.isnan(target_sqnr):
        raise UsageError("--target-sqnr nan is not allowed: give a number of dB")
    choices = []
    for found in sweeps.values():
        best_levels = [best(sweep.levels, figure=METRICS["sqnr"].goodness) for sweep in found if sweep.levels]
        if best_levels:
            scheme, worst = found[0].scheme, min(level.sqnr for level in best_levels)
            choices.append(
                FormatChoice(
                    scheme=scheme,
                    bits_per_element=bits_per_element(scheme),
                    worst_sqnr=worst,
                    meets_target=worst >= target_sqnr,
                )
            )
    enough = [choice for choice in choices if choice.meets_target]
    if enough:
        return min(enough, key=lambda choice: (choice.bits_per_element, -choice.worst_sqnr))
    return max(choices, key=lambda choice: (choice.worst_sqnr, -choice.bits_per_element), default=None)


def bits_per_element(scheme: Scheme) -> float:
    """Width of an element with its part of the scale of its block; the one scale of a tensor counts as nothing."""
    shared = scheme.scale.num_bits / scheme.block_size if scheme.scale is not None else 0.0
    return scheme.element.num_bits + shared
