"""Which kinds of blocks are told apart, so that every scale rule has the answer it would have from the maximum itself?

The kind of a block is the exponent of its largest magnitude and the class of that magnitude's significand: how many
of a few cuts it has passed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from ranktape.analyze.numerics.histograms.block_kernels import NUM_MAGNITUDES
from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.quantization.scales import Cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

CUTS = (
    Cut(1.0, is_inclusive=False),
    Cut(1.5, is_inclusive=False),
    Cut(1.75, is_inclusive=True),
    Cut(1.75, is_inclusive=False),
    Cut(1.875, is_inclusive=True),
    Cut(1.875, is_inclusive=False),
    Cut(1.9375, is_inclusive=True),
    Cut(127 / 64, is_inclusive=False),
    Cut(255 / 128, is_inclusive=True),
)
"""Where any rule changes its mind for the elements of any scheme."""


def is_above(significands: NDArray[np.float64], cut: Cut) -> NDArray[np.bool_]:
    """Which significands have passed the cut."""
    return significands >= cut.at if cut.is_inclusive else significands > cut.at


def classes_of(significands: NDArray[np.float64], *, cuts: tuple[Cut, ...]) -> NDArray[np.int64]:
    """How many of the cuts each significand has passed."""
    classes = np.zeros(significands.shape, dtype=np.int64)
    for cut in cuts:
        classes += is_above(significands, cut)
    return classes


@functools.cache
def significands_of(dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """All significands of a floating type, in [1, 2)."""
    num_bits = ml_dtypes.finfo(dtype).nmant  # type: ignore[no-untyped-call]
    return 1 + np.arange(1 << num_bits) / (1 << num_bits)


class Rows(NamedTuple):
    """The kinds of blocks of a 16-bit type: row 0 is that of zeros, the last one that of NaN and infinities."""

    of_magnitude: NDArray[np.uint16]
    """The row of a block whose largest magnitude has that pattern; rows are in the order of magnitudes."""
    exponents: NDArray[np.int16]
    """Of each row; of no meaning for the first and the last."""
    classes: NDArray[np.uint8]
    """Of each row, as `exponents`."""
    ends: NDArray[np.int64]
    """Of each row the first pattern that no element of its blocks can have."""
    infinity: int
    """The pattern of infinity."""


@functools.cache
def rows_of(dtype: np.dtype[Any]) -> Rows:
    """The rows of a 16-bit floating type, by `CUTS`."""
    magnitudes = pattern_values(dtype)[:NUM_MAGNITUDES]
    infinity = int(np.flatnonzero(np.isinf(magnitudes))[0])
    halves, upper = np.frexp(magnitudes[1:infinity])
    kinds = np.stack([upper - 1, classes_of(2 * halves, cuts=CUTS)])
    is_first = np.any(np.diff(kinds, axis=1, prepend=kinds[:, :1] - 1), axis=0)
    of_magnitude = np.zeros(NUM_MAGNITUDES, dtype=np.uint16)
    of_magnitude[1:infinity] = np.cumsum(is_first)
    of_magnitude[infinity:] = is_first.sum() + 1
    exponents, classes = np.pad(kinds[:, is_first], ((0, 0), (1, 1)))
    return Rows(
        of_magnitude=of_magnitude,
        exponents=exponents.astype(np.int16),
        classes=classes.astype(np.uint8),
        ends=np.searchsorted(of_magnitude, np.arange(exponents.size), side="right"),
        infinity=infinity,
    )
