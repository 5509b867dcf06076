"""Tells how much it matters which level of a sweep is chosen."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ranktape.analyze.numerics.sweeps.metrics import Level


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
    """Smallest figure of all levels."""
    highest: float
    """Largest one; infinite for PSNR where a level loses nothing."""
    deviation: float
    """Standard deviation (of the levels, not of a sample of them) of the finite figures; 0 without any."""
    variation: Variation
    """What that means, by the seeds' limits: for MSE 10 % of the lowest, for cosine 0.01, for PSNR 10 and 20 dB."""

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
    """How far the metrics move over at least one level; figures may be infinite, and are never NaN."""
    return Stability(
        mse=_spread([level.mse for level in levels], _variation_of_mse),
        cosine=_spread([level.cosine for level in levels], _variation_of_cosine),
        psnr=_spread([level.psnr for level in levels], _variation_of_psnr),
        is_mse_beyond=any(is_square_beyond(level) for level in levels),
    )


def _spread(figures: Sequence[float], variation: Callable[[float, float], Variation]) -> Spread:
    lowest, highest = min(figures), max(figures)
    finite = np.array([figure for figure in figures if math.isfinite(figure)])
    # Divided by the largest first: squares of figures near the ends of float64 are beyond it.
    largest = float(np.abs(finite).max(initial=0.0))
    deviation = largest * float(np.std(finite / largest)) if largest > 0 else 0.0
    steady = lowest == highest
    return Spread(
        lowest=lowest,
        highest=highest,
        deviation=0.0 if steady else deviation,
        variation=Variation.STABLE if steady else variation(lowest, highest),
    )


def _variation_of_mse(lowest: float, highest: float) -> Variation:
    return Variation.STABLE if highest - lowest < 0.1 * lowest else Variation.VARIES


def _variation_of_cosine(lowest: float, highest: float) -> Variation:
    return Variation.STABLE if highest - lowest < 0.01 else Variation.VARIES  # noqa: PLR2004 - the seeds' limit


def _variation_of_psnr(lowest: float, highest: float) -> Variation:
    if highest - lowest > 20:  # noqa: PLR2004 - dB, the seeds' limit
        return Variation.VARIES
    return Variation.MODERATE if highest - lowest > 10 else Variation.STABLE  # noqa: PLR2004 - as above
