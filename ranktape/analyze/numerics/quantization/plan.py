"""What is to be done with a tensor, once the options have been read?"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass

from ranktape.analyze.numerics.formats import FORMATS, Format, Rounding
from ranktape.analyze.numerics.formats.kernels import constants_of
from ranktape.analyze.numerics.formats.rounding import parse_rounding
from ranktape.analyze.numerics.quantization.scales import MAX_SCALE_BITS, ScaleRule
from ranktape.analyze.numerics.quantization.schemes import MX_BLOCK_SIZE, SCHEMES, Scaling, Scheme, parse_scheme
from ranktape.errors import UsageError

EXACT = "exact"
"""The scale rule of tensors and channels: the largest magnitude becomes the target, by a scale of any value."""

MIN_SCALE_BITS = 2

MAX_SCALE_OFFSET = 4096
"""Long before it, every scale is at an end of its range."""

HIF8_TARGET = 8.0
"""What the largest magnitude of a scaled tensor becomes in HiF8, whose values near 8 have all their significand bits.

Source: `quant_hif8` of github.com/Charles2530/fake_quant_ops.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
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

    @property
    def target(self) -> float:
        """What the largest magnitude of a tensor or channel becomes by the exact rule."""
        return HIF8_TARGET if self.scheme.element.name == "hif8" else self.scheme.element.maximum

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
) -> Plan:
    """The plan that options of `quantize` mean for a tensor with so many dimensions.

    Raises:
        UsageError: an option is unknown, out of its range, or without effect on this scheme.
    """
    scheme = _scheme(name, scaling=scaling, block_size=block_size)
    element = scheme.element
    constants_of(element)  # refuses what nothing can be quantised to
    element.overflow_value(saturate=saturate)  # refuses what has nothing to overflow to
    return Plan(
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
    if named.scaling is Scaling.BLOCK:
        return dataclasses.replace(named, block_size=size)
    return _in_blocks(named.element, block_size=size)


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


def _in_blocks(element: Format, *, block_size: int) -> Scheme:
    named = SCHEMES.get(f"mx{element.name}")
    if named is not None:
        return dataclasses.replace(named, block_size=block_size)
    return Scheme(
        name=f"mx{element.name}",
        element=element,
        scaling=Scaling.BLOCK,
        block_size=block_size,
        scale=FORMATS["e8m0"],
    )


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
    try:
        return ScaleRule(rule)
    except ValueError as error:
        allowed = [*ScaleRule] if scheme.scaling is Scaling.BLOCK else [EXACT, *ScaleRule]
        raise UsageError(
            f"scale_rule {rule!r} is not one for scaling {scheme.scaling}: use one of {', '.join(allowed)}"
        ) from error


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
