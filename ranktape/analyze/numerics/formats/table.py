"""Gives the table of low-precision formats and the numbers that each holds.

One row for each format; a new format is one row, and everything that rounds, encodes or sweeps takes it from here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranktape.errors import UsageError, nearest


class Rounding(enum.StrEnum):
    """Which of the two neighbours a value becomes: the choices of `--rounding`."""

    EVEN = "even"
    """The nearest; of two equally near ones that with an even significand, or the larger where all are odd."""
    AWAY = "away"
    """The nearest; of two equally near ones the larger in magnitude."""
    FLOOR = "floor"
    """The smaller in magnitude."""
    STOCHASTIC = "stochastic"
    """Either, the nearer the likelier: right on average. Drawn from a seed."""
    HYBRID = "hybrid"
    """HiF8's: away where it has all its significand bits, elsewhere as the discarded bits of the value itself say."""


class Coding(enum.StrEnum):
    """How a code is made of bits."""

    FIELDS = "fields"
    """A sign, an exponent field and a significand field, as in IEEE 754."""
    INTEGER = "integer"
    """A two's complement integer, in units of `min_subnormal`."""
    EXPONENT = "exponent"
    """An exponent field alone: a power of two."""
    TAPERED = "tapered"
    """HiF8: the width of the exponent says of itself how wide it is, and the significand has what is left."""
    TABLE = "table"
    """The place of the value in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of single values, symmetric about 0 unless it has no sign or a table."""

    name: str
    """The word in options, tables and plots."""
    dtype: str | None
    """The element type that stores it, in torch's words; None where torch has none."""
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the significand field, without the implicit bit; of a tapered format where it is widest."""
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
    coding: Coding = Coding.FIELDS
    """How a code is made of bits."""
    is_signed: bool = True
    """Whether there are negative values; a format of scales has none."""
    taper: tuple[int, ...] = ()
    """Magnitudes of the exponent beyond each of which the significand has one bit less."""
    lowest: int | None = None
    """Exponent below which steps no longer get smaller, where that is not `emin`."""
    rounding: Rounding = Rounding.EVEN
    """What is meant where no rounding is named."""
    table: tuple[float, ...] = ()
    """The values of a format that is a table of them, ascending: the code of each is its place."""

    @property
    def num_bits(self) -> int:
        """Width of a code."""
        return self.is_signed + self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.maximum)[1] - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return (1 if self.coding is not Coding.EXPONENT else 0) - self.bias

    @property
    def lowest_exponent(self) -> int:
        """Exponent below which steps no longer get smaller."""
        return self.emin if self.lowest is None else self.lowest

    @property
    def minimum(self) -> float:
        """Most negative finite value that rounding gives; of what has no sign the smallest one there is."""
        if self.is_signed:
            return -self.maximum
        return self.min_normal if self.coding is Coding.EXPONENT else 0.0

    @property
    def min_normal(self) -> float:
        """Smallest positive value that is not subnormal: of integers, which all have the same step, the step.

        Of a tapered format the smallest that has any significand bits.
        """
        if self.coding is Coding.TABLE:
            return self.min_subnormal
        return self.min_subnormal if self.coding is Coding.INTEGER else float(np.ldexp(1.0, self.emin))

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        if self.coding is Coding.TABLE:
            return min(value for value in self.table if value > 0)
        return float(np.ldexp(1.0, self.unit_exponent(self.lowest_exponent)))

    @property
    def num_finite(self) -> int:
        """Codes that stand for a finite value, a negative zero included."""
        return (1 << self.num_bits) - self.num_infinities - self.num_nans

    @property
    def has_overflow_code(self) -> bool:
        """Whether rounding has anything but `maximum` to give for what is beyond it: an infinity, or else NaN."""
        return self.num_infinities + self.num_nans > 0

    def overflow_value(self, *, saturate: bool) -> float:
        """What a positive number beyond `maximum` becomes: `maximum`, or else an infinity, or NaN without one.

        Raises:
            UsageError: it is not to saturate, and the format has neither infinity nor NaN.
        """
        if saturate:
            return self.maximum
        if not self.has_overflow_code:
            raise UsageError(f"{self.name} has no infinity and no NaN to overflow to: leave `saturate` True")
        return math.inf if self.num_infinities else math.nan

    def unit_exponent(self, exponent: int) -> int:
        """The exponent of the step between the values with that exponent, which is not below `lowest_exponent`."""
        return exponent - self.mantissa_bits + sum(abs(exponent) > limit for limit in self.taper)

    @property
    def overflow_threshold(self) -> float:
        """Half a step beyond `maximum`: from about here, rounding to nearest goes past the largest value.

        Infinite for fp64, where no finite float64 lies beyond.
        """
        return self.maximum + float(np.ldexp(0.5, self.unit_exponent(self.emax)))

    @property
    def overflow_start(self) -> float:
        """`overflow_start_of` the format's own rounding."""
        return self.overflow_start_of(self.rounding)

    def overflow_start_of(self, rounding: Rounding) -> float:
        """Smallest float64 magnitude that overflows: that rounds to beyond `maximum`, could the format go on.

        To nearest even, a value on the threshold goes to the even neighbour: for fp8_e4m3 that is 448, so 464
        itself fits; for the others it is the power of two beyond `maximum`, so the threshold overflows. Rounding
        toward zero overflows a whole step beyond `maximum`. What chance may decide overflows from the first
        value beyond `maximum`, as does what is beyond a table; hybrid rounding is that of HiF8, whose largest value is
        among them.
        """
        if self.coding is Coding.TABLE:
            return float(np.nextafter(self.maximum, np.inf))
        threshold = self.overflow_threshold
        if rounding is Rounding.AWAY:
            return threshold
        if rounding is Rounding.EVEN:
            unit = float(np.ldexp(1.0, self.unit_exponent(self.emax)))
            is_even = self.maximum / unit % 2 == 0
            return float(np.nextafter(threshold, np.inf)) if is_even else threshold
        if rounding is Rounding.FLOOR:
            return self.maximum + float(np.ldexp(1.0, self.unit_exponent(self.emax)))
        return float(np.nextafter(self.maximum, np.inf))

    def largest_alignment(self, largest: float) -> int:
        """The smallest exponent of a scale with which `largest`, finite and above 0, does not exceed `maximum`.

        Block formats choose theirs so, but for one thing: those of OCP MX 1.0 compare exponents alone, and may let the
        largest value be saturated.
        """
        mantissa, exponent = math.frexp(largest)
        limit_mantissa, limit_exponent = math.frexp(self.maximum)
        return exponent - limit_exponent + (mantissa > limit_mantissa)

    def smallest_alignment(self, smallest: float) -> int:
        """The largest exponent of a scale with which `smallest`, finite and above 0, is not below `min_normal`."""
        return math.frexp(smallest)[1] - math.frexp(self.min_normal)[1]

    @property
    def flush_limit(self) -> float:
        """`flush_limit_of` the format's own rounding."""
        return self.flush_limit_of(self.rounding)

    def flush_limit_of(self, rounding: Rounding) -> float:
        """Largest magnitude that rounds to zero; of what chance may decide, the largest that may.

        To nearest even that is half of `min_subnormal`, a tie that goes to the even zero; ties away from zero
        stop just below it, rounding toward zero just below `min_subnormal`. Zero for fp64, of which nothing is
        flushed, and for e8m0, which has no zero.
        """
        if self.coding is Coding.EXPONENT:
            return 0.0
        half = self.min_subnormal / 2
        if rounding is Rounding.EVEN:
            return half
        return float(np.nextafter(half if rounding is Rounding.AWAY else self.min_subnormal, 0.0))


def _row(
    name: str, dtype: str | None, bits: tuple[int, int, int], maximum: float, specials: tuple[int, int], **more: Any
) -> Format:
    return Format(
        name=name,
        dtype=dtype,
        exponent_bits=bits[0],
        mantissa_bits=bits[1],
        bias=bits[2],
        maximum=maximum,
        num_infinities=specials[0],
        num_nans=specials[1],
        **more,
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
        # Integers with an implicit scale of 2**-6; -2 has a code, and rounding does not give it (OCP, 5.3.4).
        _row("int8", None, (1, 6, 1), 127 / 64, (0, 0), has_negative_zero=False, coding=Coding.INTEGER),
        # The element of MXINT4, likewise (arXiv 2510.25602, and microxcaling).
        _row("int4", None, (1, 2, 1), 7 / 4, (0, 0), has_negative_zero=False, coding=Coding.INTEGER),
        # arXiv 2409.16626: 3 significand bits up to |exponent| 3, then 2, 1 and, below 2**-15, none.
        _row(
            "hif8",
            None,
            (4, 3, 16),
            32768.0,
            (2, 1),
            has_negative_zero=False,
            coding=Coding.TAPERED,
            taper=(3, 7, 15),
            lowest=-22,
            rounding=Rounding.AWAY,
        ),
        # The elements of NVFP4, which are those of fp4_e2m1; its scales are in `quantization.schemes`.
        _row("nvfp4", None, (2, 1, 1), 6.0, (0, 0)),
        _row(
            "e8m0",
            "float8_e8m0fnu",
            (8, 0, 127),
            2.0**127,
            (0, 1),
            has_negative_zero=False,
            coding=Coding.EXPONENT,
            is_signed=False,
        ),
        # Scales of blocks: the range of e5m2, the significand of e4m3 (arXiv 2601.19026). Its one NaN, and so its
        # largest value, are those of auto-round and AMD's FP4; arXiv 2609.02846 is said to end at 61440.
        _row("ue5m3", None, (5, 3, 15), 114688.0, (0, 1), has_negative_zero=False, is_signed=False),
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
"""Every format with exponents, by name."""

NF4 = _row(
    "nf4",
    None,
    (0, 3, 0),
    1.0,
    (0, 0),
    has_negative_zero=False,
    coding=Coding.TABLE,
    table=(
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""The elements of NF4, float32 numbers: arXiv 2305.14314, appendix E. They have no exponents, and need a scale."""

BY_DTYPE = {row.dtype: row for row in FORMATS.values() if row.dtype is not None}
"""The same rows by the element type that stores them."""

ALIASES = {"hifp8": "hif8", "hifloat8": "hif8", "mxint8": "int8", "mxint4": "int4", "e5m3": "ue5m3"}
"""Other words for a format that people use."""


def parse_format(name: str, *, besides: Sequence[str] = ()) -> Format:
    """The format of that name, or that the element type of that name stores (`bfloat16` is bf16).

    `besides` are words that the caller knows already: a message names them too.

    Raises:
        UsageError: no row has the name; the message lists the nearest ones.
    """
    row = FORMATS.get(ALIASES.get(name, name)) or BY_DTYPE.get(name)
    if row is None:
        hint = nearest(name, [*FORMATS, *BY_DTYPE, *besides])
        raise UsageError(f"format {name!r} is not known: {hint}")
    return row


def parse_rounding(rounding: Rounding | str | None, *, target: Format, seed: int | None) -> Rounding:
    """The rounding of that name, the format's own without one; a seed means stochastic where nothing else is said.

    Raises:
        UsageError: there is none of that name, it is hybrid and the format is not hif8, it is not even and the format
            is a table, or it draws nothing from the seed that was given.
    """
    usual = target.rounding if seed is None else Rounding.STOCHASTIC
    try:
        chosen = usual if rounding is None else Rounding(rounding)
    except ValueError as error:
        raise UsageError(f"rounding {rounding!r} is not known: use one of {', '.join(Rounding)}") from error
    if chosen is Rounding.HYBRID and target.coding is not Coding.TAPERED:
        raise UsageError(f"rounding hybrid is that of hif8, and the format is {target.name}: use even or stochastic")
    if chosen is not Rounding.EVEN and target.coding is Coding.TABLE:
        raise UsageError(f"rounding {chosen} is not one of {target.name}, a table of values: use {Rounding.EVEN}")
    if seed is not None and chosen is not Rounding.STOCHASTIC:
        raise UsageError(f"seed is {seed}, and rounding {chosen} draws nothing: leave it out, or round stochastic")
    return chosen
