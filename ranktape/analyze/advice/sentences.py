"""Gives what somebody should do who has seen a sweep, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.advice.stability import Stability, Variation
from ranktape.analyze.advice.value_range import Range
from ranktape.analyze.advice.verdict import Direction, Position, Stretch, Verdict, is_lossless
from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.options import SweepMode

if TYPE_CHECKING:
    from ranktape.analyze.advice.recommendation import Recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Sentences without a full stop; empty where there is nothing to advise on."""

    metrics: tuple[str, ...]
    """What varies with the level and what is stable."""
    limits: tuple[str, ...]
    """Which levels to avoid, and which are free of overflow and underflow."""
    conclusion: tuple[str, ...]
    """Which level to use, and where among the others it is."""


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
