"""Which finite numbers are in a digest, how often is each, and from where to where do they reach?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.digest import Digest

WIDEST = float(np.finfo(np.float32).max)
"""The largest magnitude that values which are not exact can have: what is larger is counted as nearly this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finite:
    """The finite numbers of a digest; of complex values, the larger part of each."""

    values: NDArray[np.float64]
    """Those that occur, ascending; where the digest is not exact, none beyond `minimum` and `maximum`."""
    counts: NDArray[np.int64]
    """How often each of `values` occurs."""
    minimum: float
    """The smallest, exactly where that is known; NaN where there is none."""
    maximum: float
    """The largest, exactly where that is known; NaN where there is none."""
    is_exact: bool
    """Whether `values` are those that were recorded."""

    @property
    def num_values(self) -> int:
        """How many numbers there are, each as often as it occurs."""
        return int(self.counts.sum())


def finite(digest: Digest) -> Finite:
    """The finite numbers of a digest: none where it has none, or where statistics alone were kept.

    Values that are not exact are within 2**-8 of what was recorded, relative to it, or within 2**-134 where they are
    smaller than 2**-126; magnitudes beyond that of float32 are counted as its largest.
    """
    is_finite = np.isfinite(digest.values) if digest.has_values else np.zeros(digest.values.size, dtype=bool)
    values, counts = digest.values[is_finite], digest.counts[is_finite]
    if not values.size:
        return Finite(values=values, counts=counts, minimum=np.nan, maximum=np.nan, is_exact=digest.is_exact)
    minimum, maximum = float(values[0]), float(values[-1])
    known = digest.statistics
    # Statistics of complex values are those of magnitudes.
    has_ends = not digest.is_exact and "complex" not in digest.dtype and not is_beyond_float32(digest)
    if has_ends and known.minimum is not None and known.maximum is not None:
        minimum, maximum = known.minimum, known.maximum
        values = np.clip(values, minimum, maximum)
    return Finite(values=values, counts=counts, minimum=minimum, maximum=maximum, is_exact=digest.is_exact)


def is_beyond_float32(digest: Digest) -> bool:
    """Whether some finite values are so large that the digest does not know where they are."""
    largest = digest.tallies.largest_finite
    return not digest.is_exact and largest is not None and largest > WIDEST
