"""Gives the one scale that many tensors would share, and the narrowest format that is good enough for all."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranktape.analyze.numerics.quantization.schemes import Scheme
from ranktape.analyze.numerics.sweeps.legacy import UNSET_EXPONENTS
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level, is_as_good
from ranktape.analyze.numerics.sweeps.options import MAX_SCALE_EXPONENT, SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.errors import UsageError


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
