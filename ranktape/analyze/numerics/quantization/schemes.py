"""The schemes: formats with scales, and the rules that choose powers of two as scales from largest magnitudes."""

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
    """The elements that share a scale."""

    NONE = "none"
    """No scales: every element is rounded without one."""
    TENSOR = "tensor"
    """All elements of the tensor."""
    CHANNEL = "channel"
    """All elements with the same index along an axis."""
    BLOCK = "block"
    """A run of neighbours along an axis, or a tile; the last one may be shorter."""


class ScaleRecipe(enum.IntEnum):
    """The library whose computation of the scales of NVFP4 is used: see `level_of` and `block_scales`."""

    TRANSFORMER_ENGINE = 0
    MODELOPT = 1
    TORCHAO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to store a tensor in few bits."""

    name: str
    """Name in options, tables and plots."""
    element: Format
    """The format of the elements."""
    scaling: Scaling
    """The elements that share a scale."""
    block_size: int = 0
    """Elements of a block along its axis; 0 if there are no blocks."""
    block_rows: int = 1
    """Rows of a tile of a matrix, which is `block_size` columns wide; 1 if blocks are runs along an axis."""
    scale: Format | None = None
    """The format of the scales of blocks, in which e8m0 is a power of two; None if there are no blocks."""
    recipe: ScaleRecipe | None = None
    """How the scales of NVFP4 are computed; None for other schemes."""

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the scales of blocks have a float32 scale themselves, as in NVFP4."""
        return self.recipe is not None

    @property
    def has_power_scales(self) -> bool:
        """Whether there are blocks whose scales are powers of two."""
        return self.scale is not None and self.scale.coding is Coding.EXPONENT


SCALE_FORMATS = ("e8m0", "fp8_e4m3", "ue5m3", "fp32")
"""The formats in which the scales of blocks can be stored."""

MX_BLOCK_SIZE = 32
"""The size of a block in OCP microscaling formats 1.0, 5.2."""

NVFP4_BLOCK_SIZE = 16
"""The size of a block in NVIDIA's NVFP4, which has e4m3 scales for blocks and one float32 scale for the tensor."""


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
"""The schemes with blocks, by name; every format is a scheme without blocks, too."""

TABLE_SCHEMES = {
    "nf4": Scheme(name="nf4", element=NF4, scaling=Scaling.BLOCK, block_size=64, scale=FORMATS["fp32"]),
}
"""The schemes with blocks whose elements are a table of values, without exponents to sweep or count.

The source of `nf4` is arXiv 2305.14314; its second quantisation, that of the scales, is left out.
"""

ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3", "mxfp4": "mxfp4_e2m1"}
"""The schemes that names without an element format mean."""


def parse_scheme(name: str, *, with_tables: bool = False) -> Scheme:
    """The scheme with this name; the name of a format gives its elements without scales.

    `mxfp8`, `mxfp6` and `mxfp4` have e4m3, e2m3 and e2m1 elements. With `with_tables` the scheme may be one of
    `TABLE_SCHEMES`, which only support quantisation.

    Raises:
        UsageError: no scheme has the name, and the message lists the nearest schemes and formats; or it is one of
            `TABLE_SCHEMES` without `with_tables`.
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
    """The scheme with blocks; if it has none, the MX scheme with its elements, by default in blocks of 32."""
    blocks = scheme if scheme.scaling is Scaling.BLOCK else SCHEMES.get(f"mx{scheme.name}") or _mx(scheme.name)
    return blocks if block_size is None else dataclasses.replace(blocks, block_size=block_size)


class ScaleRule(enum.StrEnum):
    """How the exponent of a scale follows from the largest magnitude of a group: the choices of `--scale-rule`."""

    FLOOR = "floor"
    """That of the magnitude minus `emax`; the magnitude may be clamped (OCP microscaling formats 1.0, 6.3)."""
    CEIL = "ceil"
    """As `FLOOR`, after rounding the magnitude up to a power of two."""
    EVEN = "even"
    """As `FLOOR`, after rounding the magnitude half up to the significand of the elements, as in torchao."""
    RCEIL = "rceil"
    """The smallest exponent that clamps nothing: the magnitude over the format's largest value, rounded up."""


def raise_of(rule: ScaleRule, *, element: Format) -> int:
    """The integer that, added to the bits of a float64 magnitude, makes its exponent that of the scale plus `emax`.

    The sum carries into the exponent for the significands whose scale is twice as large.
    """
    if rule is ScaleRule.EVEN:
        return 1 << (51 - element.mantissa_bits)
    if rule is ScaleRule.RCEIL:
        # Carries from the first significand above that of the largest element on.
        return int((2.0 - float(np.ldexp(element.maximum, -element.emax))) * 2.0**52) - 1
    return (1 << 52) - 1 if rule is ScaleRule.CEIL else 0


MIN_SCALE_BITS, MAX_SCALE_BITS = 2, 8
"""The limits of the width of a scale's exponent; 8 bits are e8m0."""


def scale_exponents(
    largest: Any, *, rule: ScaleRule, element: Format, offset: int = 0, scale_bits: int = MAX_SCALE_BITS
) -> Any:
    """The exponents of the scales of groups, given their largest magnitudes as a float64 array or tensor.

    The magnitudes are finite. A magnitude of 0 gives the lowest exponent. `offset` is added to the exponent of the
    rule, and the sum is clamped to the range of `scale_bits` bits, which is -127 to 127 for 8 bits.
    """
    end, xp, raised = (1 << (scale_bits - 1)) - 1, namespace(largest), raise_of(rule, element=element)
    if offset < _ONE_FIELD - end:  # zeros and subnormals, whose exponent field is 0, are clamped to the lower end
        fields = (largest.view(xp.int64) + raised) >> 52
        return xp.clip(fields + (offset - _ONE_FIELD - element.emax), -end, end)
    half, exponent = xp.frexp(largest)
    carried = ((2 * half).view(xp.int64) + raised) >> 52
    exponents = xp.clip(exponent + (carried + (offset - _ONE_FIELD - 1 - element.emax)), -end, end)
    return xp.where(largest == 0, -end, exponents)


_ONE_FIELD = (1 << 10) - 1
"""The exponent field of the float64 1.0."""

HIF8_TARGET = 8.0
"""The target of the largest magnitude of a tensor in HiF8, whose values near 8 have all significand bits.

Source: `quant_hif8` of github.com/Charles2530/fake_quant_ops.
"""


def exact_target(element: Format) -> float:
    """The value that the largest magnitude of a group becomes by the rule `exact`."""
    return HIF8_TARGET if element.name == "hif8" else element.maximum
