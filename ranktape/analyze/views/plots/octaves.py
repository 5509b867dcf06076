"""Counts how many values of each layer or rank lie in each octave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digests.digest import Digest

LOWEST, HIGHEST = -160, 135
"""Exponents of the first and the last octave, which hold what lies beyond them too; float32 has those in between."""


class Octaves:
    """Counts of finite magnitudes by octave, [2^e, 2^(e+1)) for an exponent e; zeros are apart."""

    def __init__(
        self,
        *,
        operations: Sequence[str],
        operation_of: NDArray[np.int64],
        values: Sequence[Any],
        of: NDArray[np.int64],
    ) -> None:
        """A row for each operation and value of a field; of each record the place of either."""
        self.operations, self.values = operations, values
        self._row_of = operation_of * len(values) + of
        num_rows = len(self.operations) * len(self.values)
        self._has_records = np.bincount(self._row_of, minlength=num_rows) > 0
        self._counts = np.zeros((num_rows, HIGHEST - LOWEST + 1), dtype=np.float64)
        self._zeros = np.zeros(num_rows)
        self._others = np.zeros(num_rows)

    def add(self, index: int, digest: Digest) -> None:
        """Add the values of the record in that place."""
        row = self._row_of[index]
        self._counts[row] += octave_counts(digest)
        self._zeros[row] += digest.tallies.zero
        self._others[row] += digest.tallies.nan + digest.tallies.inf

    def shares(self, operation: str, *, with_zeros: bool = False) -> NDArray[np.float64]:
        """For each value of the field, in order, the part of all its elements in each octave.

        With zeros in a column of their own behind. NaN where no record is, or no value is known.
        """
        start = self.operations.index(operation) * len(self.values)
        rows = slice(start, start + len(self.values))
        counts, zeros = self._counts[rows], self._zeros[rows]
        total = counts.sum(axis=1) + zeros + self._others[rows]
        wanted = np.column_stack([counts, zeros]) if with_zeros else counts
        return np.where(total[:, np.newaxis] > 0, wanted / np.maximum(1, total)[:, np.newaxis], np.nan)


def octave_counts(digest: Digest) -> NDArray[np.float64]:
    """How many finite magnitudes other than zero lie in each octave from `LOWEST` to `HIGHEST`."""
    is_wanted = np.isfinite(digest.values) & (digest.values != 0)
    # frexp has mantissas from 0.5 to 1, and is exact for subnormals too.
    exponents = np.frexp(digest.values[is_wanted])[1] - 1
    places = np.clip(exponents, LOWEST, HIGHEST) - LOWEST
    counts = np.bincount(places, weights=digest.counts[is_wanted], minlength=HIGHEST - LOWEST + 1)
    return counts.astype(np.float64)


def exponents() -> NDArray[np.int64]:
    """The exponent of each octave."""
    return np.arange(LOWEST, HIGHEST + 1)


def filled(counts: NDArray[np.float64]) -> slice:
    """From the first octave that holds anything, in any row, to the last; all empty ones give a few about 2^0."""
    held = np.flatnonzero(counts.reshape(-1, counts.shape[-1]).any(axis=0))
    return slice(int(held[0]), int(held[-1]) + 1) if held.size else slice(-LOWEST - 2, -LOWEST + 3)
