"""Which values of a type of more than 16 bits occur, when each of them is rounded to odd?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digest_kernels import INFINITE_KEY, NUM_KEYS, SIGN_KEY, count_odd, count_odd_wide
from ranktape.analyze.pieces import contiguous, frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHIFT = 15
"""Bits of float32 behind the key of a value."""


def odd_values(keys: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The values that keys stand for."""
    narrow: NDArray[np.float32] = (keys << _SHIFT).view(np.float32)
    return narrow.astype(np.float64)


class OddCounter:
    """Counts the values of a wide type with eight bits of significand, and half a step more where they had more bits.

    Of complex values the larger part, as everywhere.
    """

    def __init__(self) -> None:
        self._totals = np.zeros(NUM_KEYS, dtype=np.int64)
        self._met = np.zeros(NUM_KEYS + 1, dtype=np.uint32)
        self._num_met = 0  # negative where there is no list

    def add(self, values: NDArray[Any]) -> None:
        """Count the values of an array of any wide type."""
        real = _larger_part(values) if values.dtype.kind == "c" else values
        if real.dtype == np.float32:
            bits = frozen(contiguous(real).view(np.uint32), shape=(real.size,))
            self._num_met = count_odd(bits, self._totals, self._met, self._num_met)
            return
        wide = frozen(real.astype(np.float64, copy=False), shape=(real.size,))
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = frozen(wide.astype(np.float32), shape=wide.shape)
        self._num_met = count_odd_wide(wide, nearest, self._totals, self._met, self._num_met)

    def keys(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The keys of the numbers that occurred, by ascending value, and how often each did."""
        # Both zeros are one.
        self._totals[0] += self._totals[SIGN_KEY]
        self._totals[SIGN_KEY] = 0
        if self._num_met < 0:
            met = np.flatnonzero(self._totals)
        else:
            listed = self._met[: self._num_met]
            met = np.unique(np.where(listed == SIGN_KEY, 0, listed))
        keys = met[met & (SIGN_KEY - 1) <= INFINITE_KEY].astype(np.uint32)
        order = np.argsort(odd_values(keys), kind="stable")
        return keys[order], self._totals[keys[order]]


def _larger_part(array: NDArray[Any]) -> NDArray[Any]:
    real, imaginary = array.real, array.imag
    larger = np.where(np.abs(real) >= np.abs(imaginary), real, imaginary)
    return np.where(np.isnan(real) | np.isnan(imaginary), real.dtype.type(np.nan), larger)
