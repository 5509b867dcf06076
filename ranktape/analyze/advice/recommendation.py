"""Recommends one of the levels of a sweep, says how sure that is, and what is lost by it.

`recommend` judges one tensor. What is beyond the format's limits has a severity, the metrics have a spread over
the levels, and `advice` says in words what follows. All of it is the same for a tensor and a multiple of it,
metrics in the tensor's own unit aside, and nothing is NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.advice.verdict import (
    Direction,
    Position,
    Range,
    Stability,
    Stretch,
    Variation,
    Verdict,
    clean_range,
    direction_of,
    extremes,
    is_lossless,
    is_square_beyond,
    keeps_nothing,
    position_of,
    range_after,
    range_before,
    range_of,
    stability_of,
    stretches,
    verdict_of,
)
from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level, is_as_good
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.analyze.table import json_value

if TYPE_CHECKING:
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Sentences without a full stop; empty where there is nothing to advise on."""

    metrics: tuple[str, ...]
    """What varies with the level and what is stable."""
    limits: tuple[str, ...]
    """Which levels to avoid, and which are free of overflow and underflow."""
    conclusion: tuple[str, ...]
    """Which level to use, and where among the others it is."""


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
    """Of a legacy sweep the level that the legacy tool recommended, the first of those that it scored NaN if there are
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
    in no metric.
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
        as_good=range_of(as_good) if as_good else None,
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
    return sweep.settled(max(sweep.levels, key=metric.goodness))


def _as_good(levels: Sequence[Level], chosen: Level) -> list[Level]:
    """The run of levels around the chosen one at which no more is lost; all of one tie, or of none."""
    index = next(number for number, level in enumerate(levels) if level is chosen)
    before = list(itertools.takewhile(lambda level: is_as_good(level, chosen), reversed(levels[:index])))
    after = list(itertools.takewhile(lambda level: is_as_good(level, chosen), levels[index + 1 :]))
    return [*reversed(before), chosen, *after]


def _original_choice(verdicts: Sequence[Verdict]) -> Verdict | None:
    scores = [verdict.level.original_score for verdict in verdicts if isinstance(verdict.level, LegacyLevel)]
    # As the tool: numpy's argmax takes NaN for the largest.
    return verdicts[int(np.argmax(scores))] if scores else None


def advise(found: Recommendation) -> Advice:
    """What follows from all that was found of a sweep."""
    if found.recommended is None or found.stability is None:
        return Advice(metrics=(), limits=(), conclusion=(f"no scale to recommend: {found.note}",))
    word = level_word(found.mode)
    return Advice(
        metrics=tuple(_on_metrics(found.stability)) if len(found.verdicts) > 1 and not found.keeps_nothing else (),
        limits=tuple(_on_limits(found, word=word)),
        conclusion=tuple(_conclusion(found, found.recommended, word=word)),
    )


def level_word(mode: str) -> str:
    """What the exponent of a level is: of the scale itself, or an offset to the exponents of many scales."""
    return "offset" if SweepMode(mode).has_offsets else "scale exponent"


def _on_metrics(stability: Stability) -> list[str]:
    mse, cosine, psnr = stability.mse, stability.cosine, stability.psnr
    return [
        "MSE of some levels is beyond float64, too large or too small a square: PSNR tells the levels apart"
        if stability.is_mse_beyond
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


def _on_limits(found: Recommendation, *, word: str) -> list[str]:
    said = [
        f"avoid {_levels(stretch.exponents, word=word)}: more than 1 % of the values {_what(stretch)}"
        for stretch in found.avoid
    ]
    if any(stretch.overflows for stretch in found.avoid):
        said.append("values that overflow are saturated: the largest of the tensor are lost")
    if any(stretch.underflows for stretch in found.avoid):
        said.append("values that underflow keep fewer significand bits or become zero: the smallest are lost")
    if found.optimal is not None:
        said.append(f"free of significant overflow and underflow: {_levels(found.optimal, word=word)}")
    if found.least_bad is not None and not found.keeps_nothing:
        said.append(
            f"no level is free of overflow and underflow: the fewest values are saturated or become zero at {word} "
            f"{found.least_bad.level.exponent:.4g}, {_parts(found.least_bad)}"
        )
    chosen = found.recommended
    if chosen is not None and not found.keeps_nothing and chosen.severity is not LossSeverity.NONE:
        said.append(
            f"the recommended level has {chosen.severity} overflow or underflow itself ({_parts(chosen)}) "
            "and still the best score"
        )
    return said


def _conclusion(found: Recommendation, chosen: Verdict, *, word: str) -> list[str]:
    level = chosen.level
    if found.keeps_nothing:
        said = [f"no level keeps anything of the tensor in {found.scheme}: try {found.direction} scales"]
    else:
        said = [f"use {word} {level.exponent:.4g} (factor {level.scale:.6g}) for {found.scheme}"]
        said += _on_ties(found, word=word)
        if is_lossless(level):
            said.append("nothing is lost there")
        elif found.position is not None and found.direction is not None:
            said.append(_OF_POSITION[found.position] + _OF_DIRECTION[found.position, found.direction])
    if found.original_choice is not None:
        exponent = found.original_choice.level.exponent
        same = " as well" if exponent == level.exponent else ""
        said.append(f"the tool that legacy mode reproduces would recommend {word} {exponent:.4g}{same}")
    return said


def _on_ties(found: Recommendation, *, word: str) -> list[str]:
    ties = found.as_good
    if ties is None or ties.minimum == ties.maximum:
        return []
    return [f"{_levels(ties, word=word)} are equally good: no more is lost there, to 0.01 dB of SQNR"]


_OF_POSITION = {
    Position.BALANCED: "it is balanced between overflow and underflow: larger and smaller scales are no better",
    Position.LARGEST: "it is at the edge, the largest scale that was tried: ",
    Position.SMALLEST: "it is at the edge, the smallest scale that was tried: ",
    Position.ONLY: "it is the only scale that was tried",
}

_OF_DIRECTION = {
    (Position.BALANCED, Direction.NEITHER): "",
    (Position.LARGEST, Direction.LARGER): "a larger one may be better",
    (Position.LARGEST, Direction.NEITHER): "nothing overflows there, so that a larger one will hardly be better",
    (Position.SMALLEST, Direction.SMALLER): "a smaller one may be better",
    (Position.SMALLEST, Direction.NEITHER): "nothing underflows there, so that a smaller one will hardly be better",
    (Position.ONLY, Direction.LARGER): ": values overflow, a larger one may be better",
    (Position.ONLY, Direction.SMALLER): ": values underflow, a smaller one may be better",
    (Position.ONLY, Direction.NEITHER): "",
}


def _levels(exponents: Range, *, word: str) -> str:
    low, high = f"{exponents.minimum:.4g}", f"{exponents.maximum:.4g}"
    return f"{word} {low}" if low == high else f"{word}s {low} to {high}"


def _what(stretch: Stretch) -> str:
    if stretch.overflows and stretch.underflows:
        return "overflow, and more than 1 % underflow"
    return "overflow" if stretch.overflows else "underflow"


def _parts(verdict: Verdict) -> str:
    if isinstance(verdict.level, LegacyLevel):
        return (
            f"as the original counts: overflow {verdict.overflow_ratio:.2%}, underflow {verdict.underflow_ratio:.2%}, "
            f"flushed {verdict.flushed_ratio:.2%}"
        )
    return (
        f"overflow {verdict.overflow_ratio:.2%}, underflow {verdict.underflow_ratio:.2%}, "
        f"of which {verdict.flushed_ratio:.2%} become zero"
    )
