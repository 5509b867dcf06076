"""The options of a sweep: the scales to try, and the rounding."""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.formats import Coding, Format, Rounding
from ranktape.analyze.numerics.formats.table import parse_rounding
from ranktape.analyze.numerics.quantization.schemes import (
    MAX_SCALE_BITS,
    MIN_SCALE_BITS,
    SCHEMES,
    ScaleRule,
    Scaling,
    Scheme,
    in_blocks,
    parse_scheme,
)
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


MAX_SCALE_EXPONENT = 1000
"""Largest magnitude of an exponent."""

MAX_NUM_LEVELS = 10_000
"""Largest number of levels."""

MAX_BLOCK_SIZE = 1 << 20
"""Largest number of elements that share a scale."""

NUM_LEVELS = 21
"""Default number of levels."""

MAX_OFFSET = 10
"""Default of the first offset. The default of the last is its negative."""


class SweepMode(enum.StrEnum):
    """The kinds of levels of a sweep, the choices of `--sweep-mode`."""

    MX = "mx"
    """A scale for each block by a scale rule. A level is an integer that is added to the exponent of each scale."""
    TENSOR = "tensor"
    """One scale for the tensor, a power of two. A level is its exponent, which need not be an integer."""
    CHANNEL = "channel"
    """A scale for each index of an axis, aligned to its largest value. A level is an integer added to the exponents."""
    LEGACY = "legacy"
    """One scale for the tensor in bfloat16 arithmetic, as computed by the legacy tool."""

    @property
    def has_offsets(self) -> bool:
        """Whether levels are offsets to the exponents of a rule, which offset 0 leaves unchanged."""
        return self in {SweepMode.MX, SweepMode.CHANNEL}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The scales that a sweep tries, and the rounding of values.

    Raises:
        UsageError: a value is not allowed.
    """

    mode: SweepMode | None = None
    """Kind of levels; if None, `mx` for a scheme with blocks (mxfp8_e4m3, nvfp4), `tensor` for a format of elements."""
    scale_rule: ScaleRule | None = None
    """Rule that gives the scale of a block for its largest magnitude; `floor` if None.

    NVFP4 and modes other than `mx` have no such rule.
    """
    rounding: Rounding | None = None
    """Rounding of values; that of the format if None. With `stochastic`, metrics are expected values."""
    block_size: int | None = None
    """Number of elements that share a scale in `mx` mode; that of the scheme if None."""
    axis: int = -1
    """Axis along which blocks extend, or of which each index is a channel."""
    scale_bits: int | None = None
    """Number of bits of the exponent of a block's scale; 8 (e8m0) if None.

    NVFP4 and modes other than `mx` have no such exponent.
    """
    num_levels: int | None = None
    """Number of levels; if None, all offsets from the first to the last if levels are offsets, otherwise 21."""
    max_scale_exp: float | None = None
    """First exponent or offset; if None, the exponent that aligns the largest value, or offset +10."""
    min_scale_exp: float | None = None
    """Last exponent or offset; if None, the exponent that aligns the smallest value, or offset -10."""

    def __post_init__(self) -> None:
        """Check all values, and convert strings to members of the enumerations."""
        self._check_kinds()
        if self.num_levels is not None and not 1 <= self.num_levels <= MAX_NUM_LEVELS:
            raise UsageError(f"--num-levels {self.num_levels} is not allowed: give 1 to {MAX_NUM_LEVELS}")
        for option, exponent in (("max", self.max_scale_exp), ("min", self.min_scale_exp)):
            if exponent is not None and not abs(exponent) <= MAX_SCALE_EXPONENT:
                raise UsageError(
                    f"--{option}-scale-exp {exponent} is not allowed: "
                    f"give an exponent from -{MAX_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}"
                )
        if self.block_size is not None and not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise UsageError(f"--block-size {self.block_size} is not allowed: give 1 to {MAX_BLOCK_SIZE}")
        if not MIN_SCALE_BITS <= self.bits <= MAX_SCALE_BITS:
            raise UsageError(
                f"--scale-bits {self.scale_bits} is not allowed: give {MIN_SCALE_BITS} to {MAX_SCALE_BITS}"
            )

    def _check_kinds(self) -> None:
        for name, kind in (("mode", SweepMode), ("scale_rule", ScaleRule), ("rounding", Rounding)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                if value not in set(kind):
                    raise UsageError(f"{name}={value!r} is not allowed: give one of {', '.join(kind)}")
                object.__setattr__(self, name, kind(value))
        for name in ("block_size", "axis", "scale_bits", "num_levels"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise UsageError(f"{name}={value!r} is not a whole number: give one")

    @property
    def rule(self) -> ScaleRule:
        """The scale rule, or its default."""
        return self.scale_rule or ScaleRule.FLOOR

    @property
    def bits(self) -> int:
        """The number of bits of the exponents of scales, or its default."""
        return MAX_SCALE_BITS if self.scale_bits is None else self.scale_bits

    def exponents(self, *, largest: float, smallest: float, target: Format) -> NDArray[np.float64]:
        """The exponents for a tensor, given its largest and its smallest nonzero magnitude.

        The precision of a tapered format is highest in the middle of its range, so its exponents extend until the
        largest value is at the lower end of that part. If the same exponent aligns both magnitudes and neither limit is
        given, exponents are from 10 above it to 10 below it.
        """
        first, last = target.largest_alignment(largest), target.smallest_alignment(smallest)
        if target.taper:
            last = max(last, math.frexp(largest)[1] - 1 + target.taper[0])
        if first == last and self.max_scale_exp is None and self.min_scale_exp is None and self.num_levels != 1:
            first, last = first + MAX_OFFSET, last - MAX_OFFSET
        start = first if self.max_scale_exp is None else self.max_scale_exp
        stop = last if self.min_scale_exp is None else self.min_scale_exp
        return np.linspace(start, stop, self.num_levels or NUM_LEVELS)

    def offsets(self) -> NDArray[np.int64]:
        """The offsets to the exponents of a scale rule: distinct, evenly spaced integers.

        Raises:
            UsageError: a limit is not a whole number, or there are fewer integers between the limits than levels.
        """
        for option, end in (("max", self.max_scale_exp), ("min", self.min_scale_exp)):
            if end is not None and end != np.rint(end):
                raise UsageError(
                    f"--{option}-scale-exp {end} is not allowed with blocks: their scales are powers of two, "
                    "give a whole number"
                )
        highest, lowest = (MAX_OFFSET, -MAX_OFFSET) if self.num_levels != 1 else (self.min_scale_exp or 0, 0)
        first = int(highest if self.max_scale_exp is None else self.max_scale_exp)
        last = first if self.num_levels == 1 else int(lowest if self.min_scale_exp is None else self.min_scale_exp)
        available = abs(first - last) + 1
        num_levels = available if self.num_levels is None else self.num_levels
        if num_levels > available:
            raise UsageError(
                f"--num-levels {num_levels} is not allowed with offsets from {first} to {last}: "
                f"there are {available} whole numbers, give that many or fewer"
            )
        return np.rint(np.linspace(first, last, num_levels)).astype(np.int64)


def resolve(name: str, *, options: SweepOptions) -> tuple[Scheme, SweepMode]:
    """The scheme and the mode of a sweep of the named format with these options.

    Raises:
        UsageError: the format is unknown, does not need a scale or has no sign, or the mode or the rounding does not
            support it.
    """
    scheme = parse_scheme(name)
    mode = options.mode or (SweepMode.MX if scheme.scaling is Scaling.BLOCK else SweepMode.TENSOR)
    if scheme.element.dtype == "float64":
        raise UsageError("format 'fp64' holds every captured value: give a narrower one, such as fp8_e4m3")
    if not scheme.element.is_signed:
        raise UsageError(
            f"format {scheme.name!r} is one of scales, and has no sign: give one of values, such as fp8_e4m3"
        )
    rounding = parse_rounding(options.rounding, target=scheme.element, seed=None)
    if rounding is Rounding.HYBRID and mode is not SweepMode.TENSOR:
        raise UsageError(
            f"--rounding hybrid is not allowed with --sweep-mode {mode}: give --sweep-mode tensor, or away"
        )
    if mode is SweepMode.MX:
        if scheme.element.coding is Coding.TAPERED:
            raise UsageError(
                f"format {scheme.name!r} is not one of blocks: give one of {', '.join(SCHEMES)}, or --sweep-mode tensor"
            )
        return in_blocks(scheme, block_size=options.block_size), mode
    if scheme.scaling is Scaling.BLOCK:
        raise UsageError(
            f"format {scheme.name!r} has blocks: give --sweep-mode mx, or a format without, such as fp4_e2m1"
        )
    scaling = Scaling.CHANNEL if mode is SweepMode.CHANNEL else Scaling.TENSOR
    return dataclasses.replace(scheme, scaling=scaling), mode


def resolve_all(names: Sequence[str], *, options: SweepOptions) -> list[tuple[Scheme, SweepMode]]:
    """The schemes and the modes of the named formats.

    Raises:
        UsageError: as for `resolve`, or none of the formats uses an option that is given.
    """
    resolved = [resolve(name, options=options) for name in names]
    with_blocks = [scheme for scheme, mode in resolved if mode is SweepMode.MX]
    with_rule = [scheme for scheme in with_blocks if not scheme.has_tensor_scale]
    for field, users, example in (
        ("block_size", with_blocks, "mxfp8_e4m3 or nvfp4"),
        ("scale_rule", with_rule, "mxfp8_e4m3"),
        ("scale_bits", with_rule, "mxfp8_e4m3"),
    ):
        value = getattr(options, field)
        # 8 bits, the default of the legacy tool, are allowed with any format.
        is_given = value is not None and (field, value) != ("scale_bits", MAX_SCALE_BITS)
        if resolved and is_given and not users:
            described = ", ".join(f"{scheme.name} in {mode} mode" for scheme, mode in resolved)
            raise UsageError(
                f"--{field.replace('_', '-')} {value} has no effect on {described}: "
                f"leave it out, or give a format with such scales of blocks, as {example}"
            )
    return resolved


def scale_of(exponent: float) -> float:
    """2**`exponent` as a float64, the same on every machine; infinity or zero outside the range of float64."""
    integer = math.floor(exponent)
    try:
        return math.ldexp(2.0 ** (exponent - integer), integer)
    except OverflowError:
        return math.inf
