"""The finite numbers in a digest, how often each is there, and from where to where they reach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digests.digest import Digest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finite:
    """The finite numbers of a digest; of complex values, the larger part of each."""

    values: NDArray[np.float64]
    """Those that occur, ascending."""
    counts: NDArray[np.int64]
    """How often each of `values` occurs."""

    @property
    def minimum(self) -> float:
        """The smallest; NaN where there is none."""
        return float(self.values[0]) if self.values.size else math.nan

    @property
    def maximum(self) -> float:
        """The largest; NaN where there is none."""
        return float(self.values[-1]) if self.values.size else math.nan

    @property
    def num_values(self) -> int:
        """How many numbers there are, each as often as it occurs."""
        return int(self.counts.sum())


def finite(digest: Digest) -> Finite:
    """The finite numbers of a digest: none where it has none, or where statistics alone were kept.

    Where the digest is not exact, each of `values` stands for those just below it, too: `quantile_summary`.
    """
    is_finite = np.isfinite(digest.values) if digest.has_values else np.zeros(digest.values.size, dtype=bool)
    return Finite(values=digest.values[is_finite], counts=digest.counts[is_finite])
