"""To which value of HiF8 does a number round when its own last bits decide?

Hybrid rounding of arXiv 2409.16626, section 3.2: where HiF8 has all its significand bits, to nearest with ties away
from zero; elsewhere up if the first of the discarded bits, read as an integer, are not below a threshold made of the
last bits of the number itself. A chip needs no random numbers for it.

The definition has an edge, which is kept: the threshold of a float32 with 14 zero bits at its end is 0, so all of them
round up, those that HiF8 holds included (16.0 becomes 20.0). Any float32 that was once bfloat16 or float16 is such a
number: round 16-bit data in its own type, whose thresholds are never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ranktape.analyze.numerics.formats.kernels import HALF
from ranktape.analyze.numerics.formats.table import FORMATS
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

NUM_BITS = {np.dtype(np.float32): 14, np.dtype(np.float16): 2, np.dtype(ml_dtypes.bfloat16): 2}
"""The types that can be rounded, and how many of the discarded bits are compared with the threshold."""


def round_hybrid(values: ArrayLike) -> NDArray[np.float64]:
    """The magnitudes that `values` round to; beyond the largest value of the format they go on.

    NaN stays NaN, an infinity infinite and zero zero. The shape is that of `values`.

    Raises:
        UsageError: the values are neither float32 nor float16 nor bfloat16.
    """
    source = np.asarray(values)
    num_bits = NUM_BITS.get(source.dtype)
    if num_bits is None:
        raise UsageError(
            "hybrid rounding looks at the bits of the type that values come in: give "
            f"{', '.join(map(str, NUM_BITS))}, not {source.dtype}"
        )
    target = FORMATS["hif8"]
    with np.errstate(invalid="ignore"):  # signalling NaN; an infinity less itself
        magnitude = np.abs(source.astype(np.float64))
        own_exponent = np.frexp(magnitude)[1] - 1
        exponent = np.maximum(own_exponent, target.lowest_exponent)
        unit_exponent = target.unit_exponents(exponent)
        in_units = np.ldexp(magnitude, -unit_exponent)
        whole = np.floor(in_units)
        fraction = in_units - whole
        is_reached = np.floor(np.ldexp(fraction, num_bits)) >= _thresholds(source, num_bits=num_bits)
        # More than one binary order below the smallest value nothing rounds up.
        is_in_reach = (magnitude > 0) & (own_exponent >= target.lowest_exponent - 1)
        is_up = np.where(np.abs(exponent) <= target.taper[0], fraction >= HALF, is_reached & is_in_reach)
        return np.asarray(np.ldexp(whole + is_up, unit_exponent))


def _thresholds(source: NDArray[np.generic], *, num_bits: int) -> NDArray[np.int64]:
    """The last bits of the significand; of the 16-bit types the last one alone, with a 1 behind it."""
    if source.dtype == np.float32:
        return (source.view(np.uint32) & ((1 << num_bits) - 1)).astype(np.int64)
    return (source.view(np.uint16) & 1).astype(np.int64) * 2 + 1
