"""Gives the schemes: formats with scales, and the rules by which powers of two follow from largest magnitudes."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, Coding, Format, parse_format
from ranktape.analyze.numerics.formats.table import NF4
from ranktape.analyze.numerics.formats.values import namespace
from ranktape.errors import UsageError


class Scaling(enum.StrEnum):
    """Which elements share a scale."""

    NONE = "none"
    """None: every element is rounded as it is."""
    TENSOR = "tensor"
    """All of the tensor."""
    CHANNEL = "channel"
    """All with the same index along an axis."""
    BLOCK = "block"
    """A run of neighbours along an axis; the last one may be shorter."""


class ScaleRecipe(enum.IntEnum):
    """Whose way of computing the scales of NVFP4: `nvfp4` says how each does it."""

    TRANSFORMER_ENGINE = 0
    MODELOPT = 1
    TORCHAO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to store a tensor in few bits."""

    name: str
    """The word in options, tables and plots."""
    element: Format
    """What the elements are rounded to."""
    scaling: Scaling
    """Which elements share a scale."""
    block_size: int = 0
    """Elements of a block along its axis; 0 without blocks."""
    block_rows: int = 1
    """Rows of a tile of a matrix, which is `block_size` columns wide; 1: blocks lie along an axis alone."""
    scale: Format | None = None
    """What the scales of blocks are stored in: e8m0 is a power of two; None without blocks."""
    recipe: ScaleRecipe | None = None
    """Of NVFP4, how its scales are computed; None for all others."""

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the scales of the blocks have a float32 scale of their own, as in NVFP4."""
        return self.recipe is not None

    @property
    def has_power_scales(self) -> bool:
        """Whether there are blocks, and their scales are powers of two."""
        return self.scale is not None and self.scale.coding is Coding.EXPONENT


SCALE_FORMATS = ("e8m0", "fp8_e4m3", "ue5m3", "fp32")
"""What the scales of blocks can be stored in."""

MX_BLOCK_SIZE = 32
"""OCP microscaling formats 1.0, 5.2."""

NVFP4_BLOCK_SIZE = 16
"""NVIDIA's NVFP4: e4m3 scales for blocks of 16, one float32 scale for the tensor."""


def _blocks(name: str, element: str, size: int, scale: str, recipe: ScaleRecipe | None = None) -> Scheme:
    return Scheme(
        name=name,
        element=FORMATS[element],
        scaling=Scaling.BLOCK,
        block_size=size,
        scale=FORMATS[scale],
        recipe=recipe,
    )


def _mx(element: str) -> Scheme:
    return _blocks(f"mx{element}", element, MX_BLOCK_SIZE, "e8m0")


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        *map(_mx, ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int8", "int4")),
        _blocks("nvfp4", "nvfp4", NVFP4_BLOCK_SIZE, "fp8_e4m3", ScaleRecipe.TRANSFORMER_ENGINE),
        _blocks("nvfp4_modelopt", "nvfp4", NVFP4_BLOCK_SIZE, "fp8_e4m3", ScaleRecipe.MODELOPT),
        _blocks("nvfp4_torchao", "nvfp4", NVFP4_BLOCK_SIZE, "fp8_e4m3", ScaleRecipe.TORCHAO),
    )
}
"""The schemes with blocks, by name; any format without blocks is a scheme too."""

TABLE_SCHEMES = {
    "nf4": Scheme(name="nf4", element=NF4, scaling=Scaling.BLOCK, block_size=64, scale=FORMATS["fp32"]),
}
"""The schemes with blocks whose elements are a table of values: with no exponents, there is nothing to sweep or count.

Source of `nf4`: arXiv 2305.14314, without the second quantisation, that of the scales.
"""

ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3", "mxfp4": "mxfp4_e2m1"}
"""The element format that a name without one stands for."""


def parse_scheme(name: str, *, with_tables: bool = False) -> Scheme:
    """The scheme of that name; of the name of a format its elements without scales.

    `mxfp8`, `mxfp6` and `mxfp4` are those with e4m3, e2m3 and e2m1 elements. With `with_tables` it may
    be one of `TABLE_SCHEMES`, with which nothing but quantising can be done.

    Raises:
        UsageError: there is none, and the message lists the nearest ones, of schemes and of formats; or it is one of a
            table, and these are not wanted.
    """
    if not isinstance(name, str):
        raise UsageError(f"format {name!r} is not a name: give one such as mxfp8_e4m3, nvfp4 or hif8")
    scheme = SCHEMES.get(ALIASES.get(name, name))
    if scheme is not None:
        return scheme
    if name in TABLE_SCHEMES:
        if not with_tables:
            raise UsageError(
                f"format {name!r} is a table of values, without exponents to count or sweep: give a format with "
                f"exponents, such as mxfp4, or try {name} in a recipe"
            )
        return TABLE_SCHEMES[name]
    with_blocks = [*SCHEMES, *ALIASES]
    if name.startswith(("mx", "nv")):
        nearest = difflib.get_close_matches(name, with_blocks, n=3, cutoff=0.5) or with_blocks
        raise UsageError(f"format {name!r} is not known: did you mean {' or '.join(nearest)}?")
    element = parse_format(name, besides=with_blocks)
    return Scheme(name=element.name, element=element, scaling=Scaling.NONE)


def in_blocks(scheme: Scheme, *, block_size: int | None = None) -> Scheme:
    """The scheme with blocks: of a format without, that of its elements, of 32 of them unless given."""
    blocks = scheme if scheme.scaling is Scaling.BLOCK else SCHEMES.get(f"mx{scheme.name}") or _mx(scheme.name)
    return blocks if block_size is None else dataclasses.replace(blocks, block_size=block_size)


class ScaleRule(enum.StrEnum):
    """How the exponent of a scale follows from the largest magnitude: the choices of `--scale-rule`."""

    FLOOR = "floor"
    """That of the maximum: the maximum may be clamped (OCP microscaling formats 1.0, 6.3)."""
    CEIL = "ceil"
    """That of the maximum rounded up to a power of two."""
    EVEN = "even"
    """That of the maximum rounded to the element's significand, half up (torchao's)."""
    RCEIL = "rceil"
    """The smallest with which nothing is clamped: the maximum over the format's largest value, rounded up."""


def raise_of(rule: ScaleRule, *, element: Format) -> int:
    """What is added to the bits of a float64 magnitude, for its exponent to be that of the scale and `emax` together.

    It carries into the exponent from that significand on at which the scale is twice as large.
    """
    if rule is ScaleRule.EVEN:
        return 1 << (51 - element.mantissa_bits)
    if rule is ScaleRule.RCEIL:
        # From the first significand above that of the largest element.
        return int((2.0 - float(np.ldexp(element.maximum, -element.emax))) * 2.0**52) - 1
    return (1 << 52) - 1 if rule is ScaleRule.CEIL else 0


MIN_SCALE_BITS, MAX_SCALE_BITS = 2, 8
"""Width of a scale's exponent: with 8 bits it is e8m0."""


def scale_exponents(
    largest: Any, *, rule: ScaleRule, element: Format, offset: int = 0, scale_bits: int = MAX_SCALE_BITS
) -> Any:
    """The exponents of the scales of groups with these largest magnitudes, an array or a tensor of float64.

    Groups of nothing but zeros have the lowest exponent there is. The magnitudes are finite. `offset` is added to
    what the rule says; the sum is clamped to what `scale_bits` bits can say: -127 to 127 for 8 of them.
    """
    end, xp, raised = (1 << (scale_bits - 1)) - 1, namespace(largest), raise_of(rule, element=element)
    if offset < _ONE_FIELD - end:  # zeros and subnormal numbers, which have no exponent field, are at the lower end
        fields = (largest.view(xp.int64) + raised) >> 52
        return xp.clip(fields + (offset - _ONE_FIELD - element.emax), -end, end)
    half, exponent = xp.frexp(largest)
    carried = ((2 * half).view(xp.int64) + raised) >> 52
    found = xp.clip(exponent + (carried + (offset - _ONE_FIELD - 1 - element.emax)), -end, end)
    return xp.where(largest == 0, -end, found)


_ONE_FIELD = (1 << 10) - 1
"""The exponent field of the float64 1.0."""

HIF8_TARGET = 8.0
"""What the largest magnitude of a scaled tensor becomes in HiF8, whose values near 8 have all their significand bits.

Source: `quant_hif8` of github.com/Charles2530/fake_quant_ops.
"""


def exact_target(element: Format) -> float:
    """What the largest magnitude of a tensor or channel becomes by the exact rule."""
    return HIF8_TARGET if element.name == "hif8" else element.maximum
