"""Gives the schemes: formats with scales, the rules of the scales, and the plan of one quantisation."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, Format, Rounding, parse_format
from ranktape.analyze.numerics.formats.kernels import ONE_FIELD, check_values
from ranktape.analyze.numerics.formats.values import parse_rounding
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


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
    """Elements in a block; 0 without blocks."""
    scale: Format | None = None
    """What the scales of blocks are stored in: e8m0 is a power of two; None without blocks."""
    recipe: ScaleRecipe | None = None
    """Of NVFP4, how its scales are computed; None for all others."""

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the scales of the blocks have a float32 scale of their own, as in NVFP4."""
        return self.recipe is not None


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
        *map(_mx, ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int8")),
        _blocks("nvfp4", "nvfp4", NVFP4_BLOCK_SIZE, "fp8_e4m3", ScaleRecipe.TRANSFORMER_ENGINE),
        _blocks("nvfp4_modelopt", "nvfp4", NVFP4_BLOCK_SIZE, "fp8_e4m3", ScaleRecipe.MODELOPT),
        _blocks("nvfp4_torchao", "nvfp4", NVFP4_BLOCK_SIZE, "fp8_e4m3", ScaleRecipe.TORCHAO),
    )
}
"""The schemes with blocks, by name; any format without blocks is a scheme too."""

ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3", "mxfp4": "mxfp4_e2m1"}
"""The element format that a name without one stands for."""


def parse_scheme(name: str) -> Scheme:
    """The scheme of that name; of the name of a format its elements without scales.

    `mxfp8`, `mxfp6` and `mxfp4` are those with e4m3, e2m3 and e2m1 elements.

    Raises:
        UsageError: there is none; the message lists the nearest ones, of schemes and of formats.
    """
    if not isinstance(name, str):
        raise UsageError(f"format {name!r} is not a name: give one such as mxfp8_e4m3, nvfp4 or hif8")
    scheme = SCHEMES.get(ALIASES.get(name, name))
    if scheme is not None:
        return scheme
    with_blocks = [*SCHEMES, *ALIASES]
    if name.startswith(("mx", "nv")):
        nearest = difflib.get_close_matches(name, with_blocks, n=3, cutoff=0.5) or with_blocks
        raise UsageError(f"format {name!r} is not known: did you mean {' or '.join(nearest)}?")
    element = parse_format(name, besides=with_blocks)
    return Scheme(name=element.name, element=element, scaling=Scaling.NONE)


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


MAX_SCALE_BITS = 8
"""Width of a scale's exponent: with 8 bits it is e8m0."""


def scale_exponents(
    largest: ArrayLike, *, rule: ScaleRule, element: Format, offset: int = 0, scale_bits: int = MAX_SCALE_BITS
) -> NDArray[np.int64]:
    """The exponents of the scales of groups with these largest magnitudes.

    Groups of nothing but zeros have the lowest exponent there is. The magnitudes are finite. `offset` is added to
    what the rule says; the sum is clamped to what `scale_bits` bits can say: -127 to 127 for 8 of them.
    """
    end = (1 << (scale_bits - 1)) - 1
    found = np.clip(unbounded_exponents(largest, rule=rule, element=element) + offset, -end, end)
    return np.where(np.asarray(largest) == 0, -end, found)


def unbounded_exponents(largest: ArrayLike, *, rule: ScaleRule, element: Format) -> NDArray[np.int64]:
    """What the rule says of groups with these largest magnitudes, however few bits there are to say it; of 0, anything.

    The magnitudes are finite.
    """
    half, exponent = np.frexp(np.asarray(largest, dtype=np.float64))
    carried = (np.asarray(2 * half).view(np.int64) + raise_of(rule, element=element)) >> 52
    found: NDArray[np.int64] = exponent + (carried - ONE_FIELD - 1 - element.emax)
    return found


EXACT = "exact"
"""The scale rule of tensors and channels: the largest magnitude becomes the target, by a scale of any value."""

MIN_SCALE_BITS = 2

MAX_SCALE_OFFSET = 4096
"""Long before it, every scale is at an end of its range."""

HIF8_TARGET = 8.0
"""What the largest magnitude of a scaled tensor becomes in HiF8, whose values near 8 have all their significand bits.

Source: `quant_hif8` of github.com/Charles2530/fake_quant_ops.
"""


def exact_target(element: Format) -> float:
    """What the largest magnitude of a tensor or channel becomes by the exact rule."""
    return HIF8_TARGET if element.name == "hif8" else element.maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan:
    """Every choice that a quantisation depends on, none left open."""

    scheme: Scheme
    """Elements, groups and the size of blocks."""
    axis: int
    """Along which blocks lie, or which counts channels; not negative."""
    scale_rule: ScaleRule | None
    """None: the scale is the largest magnitude over the target, rounded to float32 (and for NVFP4, its own rule)."""
    rounding: Rounding
    """Of the elements."""
    scale_offset: int
    """Added to the exponent of each scale; for NVFP4 of the tensor's scale."""
    saturate: bool
    """Whether what is beyond the largest value becomes the largest value."""
    seed: int
    """Of stochastic rounding; without meaning for the others."""
    scale_bits: int
    """Width of the exponent of a scale that is a power of two."""

    def group_length(self, shape: tuple[int, ...]) -> int:
        """How long the runs along the axis are that share a scale, in a tensor of that shape."""
        if self.scheme.scaling is Scaling.BLOCK:
            return self.scheme.block_size
        return 1 if self.scheme.scaling is Scaling.CHANNEL else max(1, shape[self.axis])


def plan_of(
    name: str,
    *,
    num_dims: int,
    scaling: str | None = None,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str | None = None,
    rounding: str | None = None,
    scale_offset: int = 0,
    saturate: bool = True,
    seed: int | None = None,
    scale_bits: int = MAX_SCALE_BITS,
) -> QuantizePlan:
    """The plan that options of `quantize` mean for a tensor with so many dimensions.

    Raises:
        UsageError: an option is unknown, out of its range, or without effect on this scheme.
    """
    scheme = _scheme(name, scaling=scaling, block_size=block_size)
    element = scheme.element
    check_values(element)
    element.overflow_value(saturate=saturate)  # refuses what has nothing to overflow to
    return QuantizePlan(
        scheme=scheme,
        axis=_axis(axis, num_dims=num_dims),
        scale_rule=_scale_rule(scale_rule, scheme=scheme),
        rounding=parse_rounding(rounding, target=element, seed=seed),
        scale_offset=_scale_offset(scale_offset, scheme=scheme),
        saturate=saturate,
        seed=0 if seed is None else seed,
        scale_bits=_scale_bits(scale_bits, scheme=scheme),
    )


def _scheme(name: str, *, scaling: str | None, block_size: int | None) -> Scheme:
    named = parse_scheme(name)
    wanted = _scaling(scaling, named=named)
    if block_size is None and wanted is named.scaling:
        return named
    if wanted is not Scaling.BLOCK:
        if block_size is not None:
            raise UsageError(f"block_size is {block_size}, and scaling {wanted} has no blocks: leave it out")
        return dataclasses.replace(named, scaling=wanted)
    size = MX_BLOCK_SIZE if block_size is None else _integer(block_size, name="block_size")
    if size < 1:
        raise UsageError(f"block_size is {size}: a block has at least one element")
    return in_blocks(named, block_size=size)


def _scaling(scaling: str | None, *, named: Scheme) -> Scaling:
    if scaling is None:
        return named.scaling
    try:
        wanted = Scaling(scaling)
    except ValueError as error:
        raise UsageError(f"scaling {scaling!r} is not known: use one of {', '.join(Scaling)}") from error
    if named.scaling is Scaling.BLOCK and wanted is not Scaling.BLOCK:
        element = "fp4_e2m1" if named.has_tensor_scale else named.element.name
        raise UsageError(f"{named.name} has blocks, and scaling is {wanted}: name its element format {element} instead")
    return wanted


def in_blocks(scheme: Scheme, *, block_size: int | None = None) -> Scheme:
    """The scheme with blocks: of a format without, that of its elements, of 32 of them unless given."""
    blocks = scheme if scheme.scaling is Scaling.BLOCK else SCHEMES.get(f"mx{scheme.name}") or _mx(scheme.name)
    return blocks if block_size is None else dataclasses.replace(blocks, block_size=block_size)


def _axis(axis: int, *, num_dims: int) -> int:
    """Not negative; a number without dimensions is a row of one element."""
    wanted, end = _integer(axis, name="axis"), max(num_dims, 1)
    if not -end <= wanted < end:
        raise UsageError(f"axis is {wanted}: the tensor has {num_dims} dimensions, so it is {-end} to {end - 1}")
    return wanted % end


def _scale_rule(rule: str | None, *, scheme: Scheme) -> ScaleRule | None:
    if rule is None or (rule == EXACT and scheme.scaling in {Scaling.TENSOR, Scaling.CHANNEL}):
        return ScaleRule.FLOOR if scheme.scaling is Scaling.BLOCK and not scheme.has_tensor_scale else None
    if scheme.scaling is Scaling.NONE or scheme.has_tensor_scale:
        why = "has a rule of its own" if scheme.has_tensor_scale else "has no scales"
        raise UsageError(f"scale_rule is {rule!r}, and {scheme.name} {why}: leave it out, or choose another `scaling`")
    allowed = [*ScaleRule] if scheme.scaling is Scaling.BLOCK else [EXACT, *ScaleRule]
    if rule not in set(ScaleRule):
        raise UsageError(
            f"scale_rule {rule!r} is not one for scaling {scheme.scaling}: use one of {', '.join(allowed)}"
        )
    return ScaleRule(rule)


def _scale_offset(offset: int, *, scheme: Scheme) -> int:
    wanted = _integer(offset, name="scale_offset")
    if abs(wanted) > MAX_SCALE_OFFSET:
        raise UsageError(f"scale_offset is {wanted}: it is {-MAX_SCALE_OFFSET} to {MAX_SCALE_OFFSET}")
    if wanted and scheme.scaling is Scaling.NONE:
        raise UsageError(f"scale_offset is {wanted}, and {scheme.name} has no scales: choose a `scaling` or leave it 0")
    return wanted


def _scale_bits(scale_bits: int, *, scheme: Scheme) -> int:
    wanted = _integer(scale_bits, name="scale_bits")
    if not MIN_SCALE_BITS <= wanted <= MAX_SCALE_BITS:
        raise UsageError(f"scale_bits is {wanted}: exponents of scales have {MIN_SCALE_BITS} to {MAX_SCALE_BITS} bits")
    if wanted != MAX_SCALE_BITS and (scheme.has_tensor_scale or scheme.scaling is Scaling.NONE):
        raise UsageError(f"scale_bits is {wanted}, and {scheme.name} has no scales that are such powers: leave it out")
    return wanted


def _integer(number: int, *, name: str) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise UsageError(f"{name} is {number!r}: give an integer") from error
