"""Recommends one of the levels of a sweep, says how sure that is, and what is lost by it.

`Recommendation` judges one tensor. What is beyond the format's limits has a severity, the metrics have a spread over
the levels, and `advice` says in words what follows. All of it is the same for a tensor and a multiple of it,
metrics in the tensor's own unit aside, and nothing is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ranktape.analyze.advice.verdict import (
    Direction,
    Position,
    Range,
    Spread,
    Stretch,
    Variation,
    Verdict,
    clean_range,
    direction_of,
    is_lossless,
    is_square_beyond,
    keeps_nothing,
    position_of,
    range_of,
    spread_of,
    stretches,
)
from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level, is_as_good
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep


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
        """What is judged."""
        levels, chosen = sweep.levels, sweep.recommended
        self.verdicts = tuple(map(Verdict, levels))
        """One for each level, in their order."""
        self.recommended = None if chosen is None else Verdict(chosen)
        """The level with the best composite score, or one that is as good: see `metrics.settled`."""
        as_good = [] if chosen is None else _as_good(list(levels), chosen)
        self.as_good: Range | None = range_of(as_good) if as_good else None
        """Of the exponents or offsets next to the recommended one, itself included, at which no more is lost: see
        `metrics.is_as_good`."""
        self.keeps_nothing = keeps_nothing(levels)
        """Whether nothing is left of the tensor at any level: see `verdict.keeps_nothing`."""
        self.best = {name: level for name in METRICS if (level := best_by(sweep, name)) is not None}
        """For each metric, by its field in `Level`, the best level: see `best_by`."""
        scores = [level.original_score for level in levels if isinstance(level, LegacyLevel)]
        # As the tool: numpy's argmax takes NaN for the largest.
        self.original_choice = levels[int(np.argmax(scores))] if scores else None
        """Of a legacy sweep the level that the legacy tool recommended, the first of those that it scored NaN if there
        are any; None in other modes."""
        self.spreads: dict[str, Spread] = (
            {name: spread_of(levels, name) for name in ("mse", "cosine", "psnr")} if levels else {}
        )
        """How far these metrics move over the levels."""
        self.is_mse_beyond = any(map(is_square_beyond, levels))
        """Whether the mean squared error of a level is too large or too small for float64."""
        self.extremes = {kind: ends for kind in ("overflow", "underflow") if (ends := _extremes(self.verdicts, kind))}
        """Of overflow and of underflow, where any level has some, the worst and the best one; the first on a tie."""
        self.optimal = clean_range(self.verdicts)
        """Of the exponents or offsets of the longest run of clean levels; None where none is clean."""
        spared = [] if self.keeps_nothing else as_good
        self.avoid: tuple[Stretch, ...] = stretches(self.verdicts, severity=LossSeverity.HIGH, but=spared)
        """Runs of levels of high severity, each with its cause; the recommended one and those as good are in none."""
        self.least_bad: Verdict | None = None
        """Where no level is without severity, the one at which the fewest values overflow or become zero."""
        self.position: Position | None = None
        """Where the recommended level is."""
        self.direction: Direction | None = None
        """Which scales that were not tried may be better."""
        if chosen is not None:
            self.position = position_of(levels, chosen)
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
    if not sweep.levels:
        return None
    is_beyond = any(map(is_square_beyond, sweep.levels))
    metric = METRICS["rmse" if name == "mse" and is_beyond else name]
    return sweep.settled(max(sweep.levels, key=metric.goodness))


def _extremes(verdicts: Sequence[Verdict], kind: str) -> tuple[Verdict, Verdict] | None:
    if not any(verdict.ratio(kind) > 0 for verdict in verdicts):
        return None
    return max(verdicts, key=lambda one: one.ratio(kind)), min(verdicts, key=lambda one: one.ratio(kind))


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
        elif found.position is not None and found.direction is not None:
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
    (Position.LARGEST, Direction.LARGER): "a larger one may be better",
    (Position.LARGEST, Direction.NEITHER): "nothing overflows there, so that a larger one will hardly be better",
    (Position.SMALLEST, Direction.SMALLER): "a smaller one may be better",
    (Position.SMALLEST, Direction.NEITHER): "nothing underflows there, so that a smaller one will hardly be better",
    (Position.ONLY, Direction.LARGER): ": values overflow, a larger one may be better",
    (Position.ONLY, Direction.SMALLER): ": values underflow, a smaller one may be better",
}


def _levels(found: Recommendation, exponents: Range) -> str:
    low, high = f"{exponents.minimum:.4g}", f"{exponents.maximum:.4g}"
    return f"{found.word} {low}" if low == high else f"{found.word}s {low} to {high}"


def _parts(verdict: Verdict) -> str:
    overflow, underflow, flushed = (f"{verdict.ratio(kind):.2%}" for kind in ("overflow", "underflow", "flushed"))
    if isinstance(verdict.level, LegacyLevel):
        return f"as the original counts: overflow {overflow}, underflow {underflow}, flushed {flushed}"
    return f"overflow {overflow}, underflow {underflow}, of which {flushed} become zero"
