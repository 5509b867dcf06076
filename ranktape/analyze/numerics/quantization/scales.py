"""Gives the scales of groups of elements, NVFP4's two levels among them, as arrays of numpy or tensors of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, Rounding
from ranktape.analyze.numerics.formats.values import (
    NARROW_BITS,
    namespace,
    narrow_codes,
    powers_of_two,
    round_magnitudes,
)
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe, Scaling, exact_target, scale_exponents

MAX_FLOAT32 = FORMATS["fp32"].maximum

_ELEMENT_MAXIMUM = FORMATS["fp4_e2m1"].maximum

_LARGEST_PRODUCT = FORMATS["fp8_e4m3"].maximum * _ELEMENT_MAXIMUM

_LARGEST_OF_TWO = 256.0 * _ELEMENT_MAXIMUM
"""Of four over six, whose second scale is 3/2 times the first: 384 is an e4m3 number, as 3/2 of 448 is not.

Source: github.com/mit-han-lab/fouroversix, by the authors of arXiv 2512.02010.
"""

STRETCH = 1.5
"""How many times the first scale of four over six is the second one: 6 / 4."""

_MIN_TENSOR_SCALE = 2.0**-121
"""Of ModelOpt and torchao: with smaller ones, reciprocals would not be float32 numbers."""

_MIN_ENCODING_SCALE = 2.0**-127
"""Of TransformerEngine, reached with offsets alone: its reciprocal is a float32 number."""

_MODELOPT_MIN_CODE, _TORCHAO_MIN_CODE = 2.0**-9, 2.0**-6
"""Smallest scale of a block; TransformerEngine has none."""

_FURTHEST_OFFSET = 400
"""A float32 times 2 to a larger power is infinite or 0, as it is times this one."""

_E8M0_BIAS, _E8M0_NAN = 127, 0xFF


class TensorScale(NamedTuple):
    """What all blocks of a tensor in NVFP4 share."""

    recipe: ScaleRecipe
    """Whose way of computing scales it is."""
    scale: float
    """What scales of blocks are multiplied by."""
    to_code: float
    """What the largest magnitude of a block is multiplied by, or divided by, for its scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScales:
    """The scales of groups, in the shape of their largest magnitudes."""

    values: Any
    """Float64; NaN for blocks that hold NaN or Inf."""
    largest: Any
    """The largest magnitudes that they follow from."""
    tensor: TensorScale | None
    """The scale of the scales of NVFP4."""


def level_of(largest: float, *, recipe: ScaleRecipe, offset: int = 0, four_over_six: bool = False) -> float:
    """The float32 from which the scale of a tensor with that largest finite magnitude follows: see `tensor_scale_of`.

    `offset` is added to the exponent of the scale. A tensor of what is 0 in float32 has the scale 1. Where blocks have
    two scales to choose from, the first one of the largest block is 256 and not 448.
    """
    product = _LARGEST_OF_TWO if four_over_six else _LARGEST_PRODUCT
    narrow = _nearest_float32(largest)
    if narrow == 0:
        return 1.0
    if recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        return max(_nearest_float32(_shifted(_nearest_float32(product / narrow), -offset)), _MIN_ENCODING_SCALE)
    return max(_nearest_float32(_shifted(_nearest_float32(narrow / product), offset)), _MIN_TENSOR_SCALE)


def tensor_scale_of(level: float, recipe: ScaleRecipe) -> TensorScale:
    """What follows from what `level_of` gives."""
    if recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        sixth = _nearest_float32(1.0 / _ELEMENT_MAXIMUM)
        return TensorScale(recipe, _nearest_float32(1.0 / level), _nearest_float32(level * sixth))
    to_code = _nearest_float32(_ELEMENT_MAXIMUM * level) if recipe is ScaleRecipe.MODELOPT else level
    return TensorScale(recipe, level, to_code)


def _nearest_float32(number: float) -> float:
    """The nearest float32, the largest one at most."""
    with np.errstate(over="ignore"):
        return min(float(np.float32(number)), MAX_FLOAT32)


def _shifted(number: float, offset: int) -> float:
    return number * 2.0 ** min(max(offset, -_FURTHEST_OFFSET), _FURTHEST_OFFSET)


def _number(number: float, like: Any) -> Any:
    """A number beside an array or a tensor: a GPU multiplies by the reciprocal of one that is none of its own."""
    return namespace(like).asarray(number, dtype=like.dtype, device=like.device)


@np.errstate(all="ignore")  # what is beyond the largest scale becomes it
def group_scales(largest: Any, *, plan: QuantizePlan, largest_of_all: float = 0.0, stretch: float = 1.0) -> GroupScales:
    """The scales of groups with these largest magnitudes, float64 numbers of any shape.

    Those of blocks are NaN or infinite where the block holds NaN or Inf, those of tensors and channels always finite.
    `largest_of_all` is the largest finite magnitude of the tensor, which the scales of NVFP4 need. Scales that are no
    powers of two are `stretch` times as large as those that make a largest magnitude the largest element.
    """
    xp, tensor = namespace(largest), None
    if plan.scale_rule is not None:
        # What is not finite has some exponent: it is NaN below.
        exponents = scale_exponents(
            largest,
            rule=plan.scale_rule,
            element=plan.scheme.element,
            offset=plan.scale_offset,
            scale_bits=plan.scale_bits,
        )
        values = powers_of_two(exponents)
    elif plan.scheme.recipe is not None:
        recipe = plan.scheme.recipe
        level = level_of(largest_of_all, recipe=recipe, offset=plan.scale_offset, four_over_six=plan.four_over_six)
        tensor = tensor_scale_of(level, recipe)
        values = block_scales(largest, tensor, stretch=stretch)
    else:
        values = exact_scales(largest, plan=plan, stretch=stretch)
    return GroupScales(values=xp.where(xp.isfinite(largest), values, xp.nan), largest=largest, tensor=tensor)


def block_scales(largest: Any, tensor: TensorScale, *, stretch: float = 1.0) -> Any:
    """The e4m3 numbers that are the scales of blocks of NVFP4 with these largest magnitudes, finite ones.

    They ask for `stretch` times what makes that magnitude the largest element. Every step is rounded to float32.
    """
    xp = namespace(largest)
    narrow = xp.clip(xp.asarray(largest, dtype=xp.float32), None, MAX_FLOAT32)
    if tensor.recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        wanted = narrow * tensor.to_code * stretch
    elif tensor.recipe is ScaleRecipe.MODELOPT:
        wanted = narrow / _number(tensor.to_code, narrow) * stretch
        wanted = xp.where(wanted > 0, xp.clip(wanted, _MODELOPT_MIN_CODE, None), 1.0)
    else:
        wanted = narrow / _number(_ELEMENT_MAXIMUM, narrow) / _number(tensor.to_code, narrow)
        wanted = xp.clip(wanted * stretch, _TORCHAO_MIN_CODE, None)
    stored = FORMATS["fp8_e4m3"]
    bounded = xp.clip(xp.asarray(wanted, dtype=xp.float64), None, stored.maximum)
    return round_magnitudes(bounded, element=stored, rounding=Rounding.EVEN)


def exact_scales(largest: Any, *, plan: QuantizePlan, stretch: float = 1.0) -> Any:
    """The scales with which these largest magnitudes, finite ones, become the target; 1 for nothing but zeros."""
    xp, stored = namespace(largest), plan.scheme.scale or FORMATS["fp32"]
    nearest = xp.asarray(largest * stretch / _number(exact_target(plan.scheme.element), largest), dtype=xp.float32)
    shifted = xp.asarray(_shifted(xp.asarray(nearest, dtype=xp.float64), plan.scale_offset), dtype=xp.float32)
    bounded = xp.clip(xp.asarray(shifted, dtype=xp.float64), None, stored.maximum)
    found = xp.clip(round_magnitudes(bounded, element=stored, rounding=Rounding.EVEN), stored.min_subnormal, None)
    return xp.where(largest == 0, 1.0, found)


def stored_scales(scales: GroupScales, *, plan: QuantizePlan) -> Any:
    """The scales as they are stored: codes of blocks as uint8, float32 otherwise."""
    values, scale = scales.values, plan.scheme.scale
    xp = namespace(values)
    if scale is None or scale.num_bits > NARROW_BITS:
        return xp.asarray(values, dtype=xp.float32)
    if plan.scheme.scaling is Scaling.BLOCK and plan.scale_rule is not None:
        exponents = xp.frexp(xp.where(xp.isnan(values), 1.0, values))[1] - 1
        return xp.asarray(xp.where(xp.isnan(values), _E8M0_NAN, exponents + _E8M0_BIAS), dtype=xp.uint8)
    return narrow_codes(values, target=scale)


def is_divided(plan: QuantizePlan) -> bool:
    """Whether elements are divided by the first of `factors_of`, and not multiplied."""
    return plan.scale_rule is None and plan.scheme.recipe in {None, ScaleRecipe.MODELOPT}


@np.errstate(all="ignore")
def factors_of(scales: GroupScales, *, plan: QuantizePlan) -> tuple[Any, Any]:
    """What elements are multiplied or divided by before they are rounded, and rounded ones are multiplied by.

    In NVFP4 the quotient, or product, is to be rounded to float32, as it is of all scales that are no powers of two.
    Where the scale of a block is 0 both are 0: nothing of it is left. NaN where the scale is.
    """
    values, tensor = scales.values, scales.tensor
    xp = namespace(values)
    if tensor is None:
        return 1.0 / values if plan.scale_rule is not None else values, values
    narrow = xp.asarray(values, dtype=xp.float32)
    after = xp.clip(narrow * tensor.scale, None, MAX_FLOAT32)
    if tensor.recipe is ScaleRecipe.MODELOPT:
        before = after
    elif tensor.recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        before = xp.where(narrow == 0, 0.0, xp.clip(1.0 / after, None, MAX_FLOAT32))
    else:
        # Not a number of Python, which torch would multiply by the reciprocal.
        inverse = _number(_nearest_float32(1.0 / tensor.scale), narrow)
        before = xp.clip(inverse / narrow, None, MAX_FLOAT32)
    return xp.asarray(before, dtype=xp.float64), xp.asarray(after, dtype=xp.float64)
