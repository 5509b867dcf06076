"""The plan of a quantisation: its options, checked and with defaults resolved."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any, TypedDict

from ranktape.analyze.numerics.formats import FORMATS, Rounding, parse_format
from ranktape.analyze.numerics.formats.table import parse_rounding
from ranktape.analyze.numerics.formats.values import check_values, state_of
from ranktape.analyze.numerics.quantization.schemes import (
    MAX_SCALE_BITS,
    MIN_SCALE_BITS,
    MX_BLOCK_SIZE,
    SCALE_FORMATS,
    ScaleRule,
    Scaling,
    Scheme,
    in_blocks,
    parse_scheme,
)
from ranktape.errors import UsageError

EXACT = "exact"
"""The rule of scales that are not powers of two: the largest magnitude becomes the target."""

MAX_SCALE_OFFSET = 4096
"""The largest magnitude of an offset; with it, every scale is at an end of its range."""

MAX_BLOCK_SIZE = 2**31 - 1
"""The largest side of a block that a kernel can count."""


class OperandOptions(TypedDict, total=False):
    """The options of `quantize` except the axis."""

    scaling: str | None
    """The elements that share a scale: a value of `Scaling`, or None for the default of the scheme."""
    block_size: int | tuple[int, int] | None
    """Elements of a block along the axis, or rows and columns of a tile; None for those of the scheme, or else 32."""
    scale_format: str | None
    """The format of the scales of blocks, one of `SCALE_FORMATS`; None for that of the scheme, or else e8m0."""
    scale_rule: str | None
    """How scales follow from largest magnitudes: a value of `ScaleRule`, or `exact`; None for the default."""
    four_over_six: bool
    """Whether each block has the better of two scales, which map its largest magnitude to 6 and to 4."""
    rounding: str | None
    """A value of `Rounding`; None for `stochastic` if there is a seed, else the default of the format."""
    scale_offset: int
    """The number added to the exponent of each scale; in NVFP4 to that of the tensor's scale."""
    saturate: bool
    """Whether values beyond the largest value become the largest value, instead of infinity or NaN."""
    seed: int | None
    """The seed of stochastic rounding."""
    scale_bits: int
    """Width of the exponent of a scale that is a power of two."""
    rotation: int
    """Size of the Hadamard matrices that rotate the elements along the axis first; 0 for no rotation."""
    rotation_seed: int | None
    """The seed of the random signs of the rotation; None for no signs."""


class QuantizeOptions(OperandOptions, total=False):
    """The options of `quantize`."""

    axis: int
    """The axis of the blocks or channels; tiles are in the last two dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan:
    """Every choice that a quantisation depends on."""

    scheme: Scheme
    """Elements, groups and the size of blocks."""
    axis: int
    """The axis of the blocks or channels; not negative."""
    scale_rule: ScaleRule | None
    """None for the largest magnitude over the target, rounded to the format of scales (in NVFP4 for its own rule)."""
    rounding: Rounding
    """The rounding of the elements."""
    scale_offset: int = 0
    """The number added to the exponent of each scale; in NVFP4 to that of the tensor's scale."""
    saturate: bool = True
    """Whether values beyond the largest value become the largest value."""
    seed: int = 0
    """The seed of stochastic rounding; other roundings ignore it."""
    scale_bits: int = MAX_SCALE_BITS
    """Width of the exponent of a scale that is a power of two."""
    four_over_six: bool = False
    """Whether each block has the better of two scales."""
    rotation: int = 0
    """Size of the Hadamard matrices that rotate the elements first; 0 for no rotation."""
    rotation_seed: int | None = None
    """The seed of the random signs of the rotation; None for no signs."""

    def group_length(self, shape: tuple[int, ...]) -> int:
        """The length of the runs along the axis that share a scale, in a tensor of this shape."""
        if self.scheme.scaling is Scaling.BLOCK:
            return self.scheme.block_size
        return 1 if self.scheme.scaling is Scaling.CHANNEL else max(1, shape[self.axis])


def plan_of(
    name: str,
    *,
    num_dims: int,
    scaling: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    scale_format: str | None = None,
    axis: int = -1,
    scale_rule: str | None = None,
    four_over_six: bool = False,
    rounding: str | None = None,
    scale_offset: int = 0,
    saturate: bool = True,
    seed: int | None = None,
    scale_bits: int = MAX_SCALE_BITS,
    rotation: int = 0,
    rotation_seed: int | None = None,
) -> QuantizePlan:
    """The plan of `QuantizeOptions` for a tensor with `num_dims` dimensions.

    Raises:
        UsageError: an option is unknown, out of range, or has no effect on this scheme.
    """
    for option, value in (("scale_format", scale_format), ("scale_rule", scale_rule)):
        _check_string(value, name=option)
    scheme = _with_scale(_scheme(name, scaling=scaling, block_size=block_size), scale_format=scale_format)
    element = scheme.element
    check_values(element)
    element.overflow_value(saturate=saturate)  # raises if it is False and the format has no infinity and no NaN
    return QuantizePlan(
        scheme=scheme,
        axis=_axis(axis, num_dims=num_dims, scheme=scheme),
        scale_rule=_scale_rule(scale_rule, scheme=scheme),
        rounding=parse_rounding(rounding, target=element, seed=seed),
        scale_offset=_scale_offset(scale_offset, scheme=scheme),
        saturate=saturate,
        seed=0 if seed is None else seed,
        scale_bits=_scale_bits(scale_bits, scheme=scheme),
        four_over_six=_four_over_six(four_over_six, scheme=scheme),
        rotation=check_rotation_options(rotation, seed=rotation_seed),
        rotation_seed=rotation_seed,
    )


_cached_plan = functools.lru_cache(maxsize=512, typed=True)(plan_of)


def recipe_plan(name: str, **options: Any) -> QuantizePlan:
    """`plan_of` with a cache, because a replay needs the same plans for every call.

    Raises:
        UsageError: as for `plan_of`.
    """
    try:
        return _cached_plan(name, **options)
    except TypeError:  # an unhashable value, which `plan_of` refuses
        return plan_of(name, **options)


def _scheme(name: str, *, scaling: str | None, block_size: int | tuple[int, int] | None) -> Scheme:
    named = parse_scheme(name, with_tables=True)
    chosen = _scaling(scaling, named=named)
    if block_size is None and chosen is named.scaling:
        return named
    if chosen is not Scaling.BLOCK:
        if block_size is not None:
            raise UsageError(f"block_size is {block_size}, and scaling {chosen} has no blocks: leave it out")
        return dataclasses.replace(named, scaling=chosen)
    if not isinstance(block_size, tuple):
        size = MX_BLOCK_SIZE if block_size is None else _integer(block_size, name="block_size")
        sizes = (1, size)
    elif len(block_size) == 2:  # noqa: PLR2004 - rows and columns
        sizes = (_integer(block_size[0], name="block_size"), _integer(block_size[1], name="block_size"))
    else:
        raise UsageError(f"block_size is {block_size}: give a length along the axis, or (rows, columns) of a tile")
    if min(sizes) < 1 or max(sizes) > MAX_BLOCK_SIZE:
        raise UsageError(f"block_size is {block_size}: a block has at least one element, at most {MAX_BLOCK_SIZE}")
    return dataclasses.replace(in_blocks(named, block_size=sizes[1]), block_rows=sizes[0])


def _scaling(scaling: str | None, *, named: Scheme) -> Scaling:
    if scaling is None:
        return named.scaling
    try:
        chosen = Scaling(scaling)
    except ValueError as error:
        raise UsageError(f"scaling {scaling!r} is not known: use one of {', '.join(Scaling)}") from error
    if named.scaling is Scaling.BLOCK and chosen is not Scaling.BLOCK:
        element = "fp4_e2m1" if named.has_tensor_scale else named.element.name
        hint = f"name its element format {element} instead" if element in FORMATS else "leave it out"
        raise UsageError(f"{named.name} has blocks, so scaling cannot be {chosen}: {hint}")
    return chosen


def _with_scale(scheme: Scheme, *, scale_format: str | None) -> Scheme:
    if scale_format is None:
        return scheme
    if scheme.scaling is not Scaling.BLOCK:
        raise UsageError(f"scale_format is {scale_format!r}, and {scheme.name} has no blocks: give scaling='block'")
    scale = parse_format(scale_format)
    if scale.name not in SCALE_FORMATS:
        raise UsageError(f"scale_format {scale_format!r} is no format of scales: use one of {', '.join(SCALE_FORMATS)}")
    if scale is scheme.scale:
        return scheme
    if scheme.has_tensor_scale:
        raise UsageError(
            f"scale_format is {scale_format!r}, and {scheme.name} has its own scales: leave it out, or name "
            "fp4_e2m1 with scaling='block'"
        )
    return dataclasses.replace(scheme, scale=scale, name=scheme.element.name)


def _axis(axis: int, *, num_dims: int, scheme: Scheme) -> int:
    """The axis, not negative; a tensor without dimensions is a row of one element."""
    index, end = _integer(axis, name="axis"), max(num_dims, 1)
    if not -end <= index < end:
        raise UsageError(f"axis is {index}: the tensor has {num_dims} dimensions, so it is {-end} to {end - 1}")
    if scheme.block_rows > 1 and (num_dims < 2 or index % end != end - 1):  # noqa: PLR2004
        raise UsageError(
            f"tiles of {scheme.block_rows} x {scheme.block_size} lie in the last two dimensions, and the tensor has "
            f"{num_dims}, the axis is {index}: give a matrix and leave the axis out"
        )
    return index % end


def _scale_rule(rule: str | None, *, scheme: Scheme) -> ScaleRule | None:
    has_exact = scheme.scaling is not Scaling.NONE and not scheme.has_power_scales and not scheme.has_tensor_scale
    if rule is None or (rule == EXACT and has_exact):
        return ScaleRule.FLOOR if scheme.has_power_scales else None
    if scheme.scaling is Scaling.NONE or scheme.has_tensor_scale:
        why = "has its own rule" if scheme.has_tensor_scale else "has no scales"
        raise UsageError(f"scale_rule is {rule!r}, and {scheme.name} {why}: leave it out, or choose another `scaling`")
    if scheme.scaling is Scaling.BLOCK and has_exact:
        scale = "" if scheme.scale is None else scheme.scale.name
        raise UsageError(f"scale_rule is {rule!r}, and scales in {scale} follow the rule {EXACT}: leave it out")
    allowed = [*ScaleRule] if scheme.scaling is Scaling.BLOCK else [EXACT, *ScaleRule]
    if rule not in set(ScaleRule):
        raise UsageError(
            f"scale_rule {rule!r} is not one for scaling {scheme.scaling}: use one of {', '.join(allowed)}"
        )
    return ScaleRule(rule)


def _scale_offset(offset: int, *, scheme: Scheme) -> int:
    value = _integer(offset, name="scale_offset")
    if abs(value) > MAX_SCALE_OFFSET:
        raise UsageError(f"scale_offset is {value}: it is {-MAX_SCALE_OFFSET} to {MAX_SCALE_OFFSET}")
    if value and scheme.scaling is Scaling.NONE:
        raise UsageError(f"scale_offset is {value}, and {scheme.name} has no scales: choose a `scaling` or leave it 0")
    return value


def _scale_bits(scale_bits: int, *, scheme: Scheme) -> int:
    bits = _integer(scale_bits, name="scale_bits")
    if not MIN_SCALE_BITS <= bits <= MAX_SCALE_BITS:
        raise UsageError(f"scale_bits is {bits}: exponents of scales have {MIN_SCALE_BITS} to {MAX_SCALE_BITS} bits")
    has_powers = scheme.scaling in {Scaling.TENSOR, Scaling.CHANNEL} or scheme.has_power_scales
    if bits != MAX_SCALE_BITS and not has_powers:
        raise UsageError(f"scale_bits is {bits}, and {scheme.name} has no scales that are such powers: leave it out")
    return bits


def _four_over_six(is_enabled: Any, *, scheme: Scheme) -> bool:
    if not isinstance(is_enabled, bool):
        raise UsageError(f"four_over_six is {is_enabled!r:.60}: it is True or False")
    floats, element = FORMATS["fp4_e2m1"], scheme.element
    is_float4 = (element.num_bits, element.maximum) == (floats.num_bits, floats.maximum)
    if is_enabled and not (is_float4 and scheme.scaling is Scaling.BLOCK and not scheme.has_power_scales):
        raise UsageError(
            f"four_over_six chooses between two scales of 4-bit floats in blocks, not powers of two, and {scheme.name} "
            "has none: name nvfp4, or fp4_e2m1 with scaling='block' and a scale_format other than e8m0"
        )
    return is_enabled


def check_rotation_options(rotation: int, *, seed: int | None) -> int:
    """Check the options of a rotation, and return its size, 0 for none.

    Raises:
        UsageError: the size is neither 0 nor a power of two; or the seed is not an integer or has no effect.
    """
    size = _integer(rotation, name="rotation")
    if size < 0 or size & (size - 1):
        raise UsageError(f"rotation is {size}: Hadamard matrices have a power of two as their size, or 0 for none")
    if seed is not None:
        state_of(seed)  # raises if it is not an integer
        if not size:
            raise UsageError(f"rotation_seed is {seed}, and nothing is rotated: give the size `rotation`")
    return size


def _check_string(value: Any, *, name: str) -> None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name} is {value!r:.60}: give a string")


def _integer(number: int, *, name: str) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise UsageError(f"{name} is {number!r}: give an integer") from error
