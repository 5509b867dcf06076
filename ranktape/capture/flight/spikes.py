"""Finds a number that is far above what it was in the iterations before: a loss, a gradient norm."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WINDOW = 64
"""Numbers that one is compared with, the last ones."""

LEAST = 12
"""Numbers from which on one is compared with them: a training begins with steep steps."""

ROBUST_Z = 10.0
"""How many deviations above the median make a spike."""

LEAST_RISE = 0.25
"""Part of the median by which a spike is at least above it: a series that hardly moves has tiny deviations."""

_NORMAL = 1.4826
"""Of a normal distribution, the standard deviation over the median absolute deviation."""


class Series:
    """One number of each iteration."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)

    def add(self, value: float) -> tuple[float, float] | None:
        """The next number: where it is a spike, the median before it and how many deviations it is above that.

        One that is not finite is none, and is not remembered.
        """
        if not math.isfinite(value):
            return None
        found = self._judge(value)
        # One that stays high is the new normal after half of a window.
        self._values.append(value)
        return found

    def _judge(self, value: float) -> tuple[float, float] | None:
        if len(self._values) < LEAST:
            return None
        known = np.array(self._values)
        median = float(np.median(known))
        deviation = _NORMAL * float(np.median(np.abs(known - median)))
        least = LEAST_RISE * abs(median)
        rise = value - median
        if rise <= least or rise <= ROBUST_Z * deviation:
            return None
        return median, rise / deviation if deviation else math.inf
