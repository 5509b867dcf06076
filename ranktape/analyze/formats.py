"""Which numbers can each low-precision format hold, and to which of them does a value round?

One row for each format; a new format is one row. `round_to` is the reference that every faster kernel
must equal bit for bit.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

FLOAT64_SIGNIFICAND_BITS = 52
"""Stored significand bits of the type that all arithmetic here is done in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating point format: sign, exponent, significand, with subnormals, symmetric about 0."""

    name: str
    """The word in options, tables and plots."""
    dtype: str
    """The element type that stores it, in torch's words."""
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the significand field, without the implicit bit."""
    bias: int
    """What is subtracted from the exponent field."""
    maximum: float
    """Largest finite value."""
    num_infinities: int
    """Codes that stand for an infinity."""
    num_nans: int
    """Codes that stand for NaN."""
    has_negative_zero: bool = True
    """Whether the sign of a zero is kept."""

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.maximum)[1] - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def minimum(self) -> float:
        """Most negative finite value."""
        return -self.maximum

    @property
    def min_normal(self) -> float:
        """Smallest positive value with all its significand bits."""
        return float(np.ldexp(1.0, self.emin))

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return float(np.ldexp(1.0, self.emin - self.mantissa_bits))

    @property
    def num_finite(self) -> int:
        """Codes that stand for a finite value, a negative zero included."""
        num_codes = 1 << (1 + self.exponent_bits + self.mantissa_bits)
        return num_codes - self.num_infinities - self.num_nans

    @property
    def overflow_threshold(self) -> float:
        """Half a step beyond `maximum`: from about here, rounding to nearest goes past the largest value.

        Infinite for fp64, where no finite float64 lies beyond.
        """
        return self.maximum + float(np.ldexp(0.5, self.emax - self.mantissa_bits))

    @property
    def overflow_start(self) -> float:
        """Smallest float64 magnitude that overflows.

        A value on the threshold rounds to the even neighbour: for fp8_e4m3 that is 448, so 464 itself
        fits; for the others it is the power of two beyond `maximum`, so the threshold overflows.
        """
        maximum_is_even = float(np.ldexp(self.maximum, self.mantissa_bits - self.emax)) % 2 == 0
        threshold = self.overflow_threshold
        return float(np.nextafter(threshold, np.inf)) if maximum_is_even else threshold

    @property
    def flush_limit(self) -> float:
        """Largest magnitude that rounds to zero: half of `min_subnormal`, a tie that goes to the even zero.

        Zero for fp64, of which nothing is flushed.
        """
        return self.min_subnormal / 2


def _row(
    name: str,
    dtype: str,
    bits: tuple[int, int, int],
    maximum: float,
    specials: tuple[int, int],
    *,
    has_negative_zero: bool = True,
) -> Format:
    exponent_bits, mantissa_bits, bias = bits
    return Format(
        name=name,
        dtype=dtype,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        maximum=maximum,
        num_infinities=specials[0],
        num_nans=specials[1],
        has_negative_zero=has_negative_zero,
    )


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        # OCP 8-bit floating point 1.0; OCP microscaling formats 1.0, 5.3.
        _row("fp8_e4m3", "float8_e4m3fn", (4, 3, 7), 448.0, (0, 2)),
        _row("fp8_e5m2", "float8_e5m2", (5, 2, 15), 57344.0, (2, 6)),
        _row("fp6_e2m3", "float6_e2m3fn", (2, 3, 1), 7.5, (0, 0)),
        _row("fp6_e3m2", "float6_e3m2fn", (3, 2, 3), 28.0, (0, 0)),
        _row("fp4_e2m1", "float4_e2m1fn", (2, 1, 1), 6.0, (0, 0)),
        # IEEE 754-2019, and the upper half of its binary32.
        _row("bf16", "bfloat16", (8, 7, 127), (2 - 2.0**-7) * 2.0**127, (2, 254)),
        _row("fp16", "float16", (5, 10, 15), 65504.0, (2, 2046)),
        _row("fp32", "float32", (8, 23, 127), (2 - 2.0**-23) * 2.0**127, (2, 2**24 - 2)),
        _row("fp64", "float64", (11, 52, 1023), (2 - 2.0**-52) * 2.0**1023, (2, 2**53 - 2)),
        # What else a record can be stored in.
        _row("fp8_e4m3fnuz", "float8_e4m3fnuz", (4, 3, 8), 240.0, (0, 1), has_negative_zero=False),
        _row("fp8_e5m2fnuz", "float8_e5m2fnuz", (5, 2, 16), 57344.0, (0, 1), has_negative_zero=False),
        _row("fp8_e4m3b11fnuz", "float8_e4m3b11fnuz", (4, 3, 11), 30.0, (0, 1), has_negative_zero=False),
        _row("fp8_e4m3_ieee", "float8_e4m3", (4, 3, 7), 240.0, (2, 14)),
        _row("fp8_e3m4", "float8_e3m4", (3, 4, 3), 15.5, (2, 30)),
    )
}
"""Every format, by name."""

BY_DTYPE = {row.dtype: row for row in FORMATS.values()}
"""The same rows by the element type that stores them."""


def parse_format(name: str) -> Format:
    """The format of that name, or that the element type of that name stores (`bfloat16` is bf16).

    Raises:
        UsageError: no row has the name; the message lists the nearest ones.
    """
    row = FORMATS.get(name) or BY_DTYPE.get(name)
    if row is None:
        nearest = difflib.get_close_matches(name, [*FORMATS, *BY_DTYPE], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"use one of {', '.join(FORMATS)}"
        raise UsageError(f"format {name!r} is not known: {hint}")
    return row


def round_to(values: ArrayLike, *, target: Format) -> NDArray[np.float64]:
    """The values of the format nearest to `values`, as float64: ties to even, beyond the limits saturated.

    NaN stays NaN, also where the format has no code for it: count and mask NaN first. Infinities become
    the largest finite value of their sign. A zero keeps its sign, and so does what is flushed, where the
    format has a negative zero. Subnormals are kept. Empty input gives empty output.

    The shape is that of `values`. Exact for every input that float64 can hold.
    """
    exact = np.asarray(values, dtype=np.float64)
    magnitude = np.minimum(np.abs(exact), target.maximum)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, target.emin)
    # In units of the last place every value of the format is an integer, and powers of two scale exactly.
    unit_exponent = exponent - target.mantissa_bits
    with np.errstate(invalid="ignore"):  # signalling NaN
        rounded = np.ldexp(np.rint(np.ldexp(magnitude, -unit_exponent)), unit_exponent)
    signed = np.copysign(rounded, exact)
    return np.asarray(signed if target.has_negative_zero else signed + 0.0)
