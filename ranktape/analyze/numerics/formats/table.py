"""The table of low-precision formats and the range of each.

Each format is one row. Code that rounds, encodes or sweeps reads this table, so a new format needs only a row.
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
    """Which of its two neighbours a value is rounded to: the choices of `--rounding`."""

    EVEN = "even"
    """The nearest; ties go to the even significand, or to the larger one if all significands are odd."""
    AWAY = "away"
    """The nearest; ties go to the larger magnitude."""
    FLOOR = "floor"
    """The smaller magnitude."""
    STOCHASTIC = "stochastic"
    """Either, drawn from a seed so that the result is right on average."""
    HYBRID = "hybrid"
    """HiF8's: `AWAY` where HiF8 has all its significand bits, elsewhere decided by the discarded bits of the value."""


class Coding(enum.StrEnum):
    """How a code is made of bits."""

    FIELDS = "fields"
    """A sign, an exponent field and a significand field, as in IEEE 754."""
    INTEGER = "integer"
    """A two's complement integer, in units of `min_subnormal`."""
    EXPONENT = "exponent"
    """Only an exponent field: a power of two."""
    TAPERED = "tapered"
    """HiF8: a prefix gives the width of the exponent, and the significand has the remaining bits."""
    TABLE = "table"
    """The index of the value in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of single values, symmetric about 0 unless it has no sign or is a table."""

    name: str
    """Name in options, tables and plots."""
    dtype: str | None
    """Name of the element type that stores it, as in torch; None if there is no such type."""
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the significand field, without the implicit bit; for a tapered format the largest width."""
    bias: int
    """The number that is subtracted from the exponent field."""
    maximum: float
    """Largest finite value."""
    num_infinities: int
    """Number of codes of infinities."""
    num_nans: int
    """Number of codes of NaN."""
    has_negative_zero: bool = True
    """Whether zeros have a sign."""
    coding: Coding = Coding.FIELDS
    """How a code is made of bits."""
    is_signed: bool = True
    """Whether there are negative values; formats of scales have none."""
    taper: tuple[int, ...] = ()
    """Magnitudes of the exponent beyond each of which the significand has one bit less."""
    lowest: int | None = None
    """Exponent below which steps no longer get smaller; None means `emin`."""
    rounding: Rounding = Rounding.EVEN
    """The default rounding."""
    table: tuple[float, ...] = ()
    """The values in ascending order if the format is a table; the code of a value is its index."""

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
        """Most negative finite value that rounding gives; the smallest value if the format has no sign."""
        if self.is_signed:
            return -self.maximum
        return self.min_normal if self.coding is Coding.EXPONENT else 0.0

    @property
    def min_normal(self) -> float:
        """Smallest positive value that is not subnormal.

        For integers and tables it is the smallest positive value; for a tapered format the smallest one with
        significand bits.
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
        """Number of codes of finite values, including a negative zero."""
        return (1 << self.num_bits) - self.num_infinities - self.num_nans

    @property
    def has_overflow_code(self) -> bool:
        """Whether the format has an infinity or NaN, which values beyond `maximum` can become."""
        return self.num_infinities + self.num_nans > 0

    def overflow_value(self, *, saturate: bool) -> float:
        """The result for a positive number beyond `maximum`.

        It is `maximum` if `saturate` is True, else infinity, or NaN if the format has no infinity.

        Raises:
            UsageError: `saturate` is False, and the format has neither infinity nor NaN.
        """
        if saturate:
            return self.maximum
        if not self.has_overflow_code:
            raise UsageError(f"{self.name} has no infinity and no NaN to overflow to: leave `saturate` True")
        return math.inf if self.num_infinities else math.nan

    def unit_exponent(self, exponent: int) -> int:
        """The exponent of the step between values with this exponent, which is at least `lowest_exponent`."""
        return exponent - self.mantissa_bits + sum(abs(exponent) > limit for limit in self.taper)

    @property
    def overflow_threshold(self) -> float:
        """`maximum` plus half a step, from about where rounding to nearest overflows.

        It is infinite for fp64, which has no finite float64 beyond `maximum`.
        """
        return self.maximum + float(np.ldexp(0.5, self.unit_exponent(self.emax)))

    @property
    def overflow_start(self) -> float:
        """`overflow_start_of` the default rounding."""
        return self.overflow_start_of(self.rounding)

    def overflow_start_of(self, rounding: Rounding) -> float:
        """Smallest float64 magnitude that overflows: it would round to a value beyond `maximum` if there were one.

        With ties to even, the threshold itself overflows unless the significand of `maximum` is even, as that of 448
        in fp8_e4m3, to which 464 rounds. Rounding toward zero overflows from a whole step beyond `maximum`. Stochastic
        and hybrid rounding and tables overflow from the first float64 beyond `maximum`.
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

        The scales of block formats are chosen so, except that OCP MX 1.0 compares only exponents and may therefore
        saturate the largest value.
        """
        mantissa, exponent = math.frexp(largest)
        limit_mantissa, limit_exponent = math.frexp(self.maximum)
        return exponent - limit_exponent + (mantissa > limit_mantissa)

    def smallest_alignment(self, smallest: float) -> int:
        """The largest exponent of a scale with which `smallest`, finite and above 0, is not below `min_normal`."""
        return math.frexp(smallest)[1] - math.frexp(self.min_normal)[1]

    @property
    def flush_limit(self) -> float:
        """`flush_limit_of` the default rounding."""
        return self.flush_limit_of(self.rounding)

    def flush_limit_of(self, rounding: Rounding) -> float:
        """Largest magnitude that rounds to zero, or with stochastic rounding can round to zero.

        With ties to even it is half of `min_subnormal`, with ties away the float64 below that. All other roundings
        give the float64 below `min_subnormal`. It is 0 for fp64, which flushes nothing, and e8m0, which has no zero.
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
        # Integers with an implicit scale of 2**-6; -2 has a code, but rounding never gives it (OCP, 5.3.4).
        _row("int8", None, (1, 6, 1), 127 / 64, (0, 0), has_negative_zero=False, coding=Coding.INTEGER),
        # The element of MXINT4, with the same convention (arXiv 2510.25602, and microxcaling).
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
        # The elements of NVFP4, the same as fp4_e2m1; its scales are in `quantization.schemes`.
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
        # Scales of blocks: the range of e5m2, the significand of e4m3 (arXiv 2601.19026). The one NaN, and so the
        # largest value, follow auto-round and AMD's FP4; arXiv 2609.02846 is said to have the maximum 61440.
        _row("ue5m3", None, (5, 3, 15), 114688.0, (0, 1), has_negative_zero=False, is_signed=False),
        # IEEE 754-2019, and the upper half of its binary32.
        _row("bf16", "bfloat16", (8, 7, 127), (2 - 2.0**-7) * 2.0**127, (2, 254)),
        _row("fp16", "float16", (5, 10, 15), 65504.0, (2, 2046)),
        _row("fp32", "float32", (8, 23, 127), (2 - 2.0**-23) * 2.0**127, (2, 2**24 - 2)),
        _row("fp64", "float64", (11, 52, 1023), (2 - 2.0**-52) * 2.0**1023, (2, 2**53 - 2)),
        # Other types that records can be stored in.
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
"""The elements of NF4, as float32 numbers (arXiv 2305.14314, appendix E). They have no exponents, and need a scale."""

BY_DTYPE = {row.dtype: row for row in FORMATS.values() if row.dtype is not None}
"""The rows of `FORMATS` by the element type that stores them."""

ALIASES = {"hifp8": "hif8", "hifloat8": "hif8", "mxint8": "int8", "mxint4": "int4", "e5m3": "ue5m3"}
"""Other common names of formats."""


def parse_format(name: str, *, besides: Sequence[str] = ()) -> Format:
    """The format with this name, alias or element type (`bfloat16` is bf16).

    `besides` are further names that the caller accepts; the error message suggests them, too.

    Raises:
        UsageError: no format has the name; the message lists the nearest ones.
    """
    row = FORMATS.get(ALIASES.get(name, name)) or BY_DTYPE.get(name)
    if row is None:
        hint = nearest(name, [*FORMATS, *BY_DTYPE, *besides])
        raise UsageError(f"format {name!r} is not known: {hint}")
    return row


def parse_rounding(rounding: Rounding | str | None, *, target: Format, seed: int | None) -> Rounding:
    """The rounding with this name; by default stochastic if a seed is given, else the default of the format.

    Raises:
        UsageError: the rounding is unknown; it is hybrid and the format is not hif8; it is not even and the format is a
            table; or a seed is given and the rounding is not stochastic.
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
