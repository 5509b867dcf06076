"""Which of several levels is the one to name, where less lies between them than matters?

A score, and any single figure, tells the best of the levels from the worst however little lies between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranktape.analyze.numerics.sweeps.metrics import Level

SAME_SQNR = 0.01
"""In dB: less than this between two offsets is no reason to prefer one."""

SAME_RATIO = 1e-3
"""Nor is this much more overflow: the share from which on it counts as moderate."""


def settled(levels: Sequence[Level], found: Level, *, has_offsets: bool) -> Level:
    """The level to name in the place of `found`, one of those that are as good.

    Of offsets that is the one nearest to 0, which is what the rule of the scales says of itself: of those whose SQNR
    and overflow are no worse, but for `SAME_SQNR` and `SAME_RATIO`. Of scales of a whole tensor at which nothing is
    lost it is the middle one, with most room on both sides. Else `found`.
    """
    if has_offsets:
        as_good = [level for level in levels if level is found or is_as_good(level, found)]
        return min(as_good, key=lambda level: (abs(level.exponent), -level.score))
    lossless = [level for level in levels if level.sqnr == math.inf]
    return lossless[(len(lossless) - 1) // 2] if any(level is found for level in lossless) else found


def is_as_good(level: Level, found: Level) -> bool:
    """Whether nothing that matters is lost at the one level beyond what is lost at the other."""
    return (
        level.sqnr >= found.sqnr - SAME_SQNR
        and level.overflow_ratio <= found.overflow_ratio + SAME_RATIO
        and level.flushed_ratio <= found.flushed_ratio + SAME_RATIO
    )
