"""Gives the scales of groups of elements, NVFP4's two levels among them."""

# Shapes: G = blocks that share a scale.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import FORMATS, codes_of
from ranktape.analyze.numerics.formats.kernels import RoundingConstants, constants_of, round_even
from ranktape.analyze.numerics.formats.values import NARROW_BITS
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe, Scaling, exact_target, scale_exponents

MAX_FLOAT32 = FORMATS["fp32"].maximum

MIN_FLOAT32 = FORMATS["fp32"].min_subnormal

_CODES = constants_of(FORMATS["fp8_e4m3"])
"""What rounds the scales of blocks."""

_TRANSFORMER_ENGINE, _MODELOPT, _TORCHAO = map(int, ScaleRecipe)
"""As plain numbers, which the compiler knows."""

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


class TensorScale(NamedTuple):
    """What all blocks of a tensor share; a named tuple, because numba takes it apart by name."""

    recipe: int
    """The `ScaleRecipe`."""
    scale: float
    """What scales of blocks are multiplied by."""
    to_code: float
    """What the largest magnitude of a block is multiplied by, or divided by, for its scale."""


@compiled
def _nearest_float32(number: float) -> np.float64:
    """The nearest float32, the largest one at most."""
    nearest = np.float64(np.float32(number))
    return np.float64(MAX_FLOAT32) if nearest > MAX_FLOAT32 else nearest


def level_of(largest: float, *, recipe: ScaleRecipe, offset: int = 0, four_over_six: bool = False) -> float:
    """The float32 from which the scale of a tensor with that largest finite magnitude follows: see `tensor_scale_of`.

    `offset` is added to the exponent of the scale. A tensor of what is 0 in float32 has the scale 1. Where blocks have
    two scales to choose from, the first one of the largest block is 256 and not 448.
    """
    product = _LARGEST_OF_TWO if four_over_six else _LARGEST_PRODUCT
    narrow = _nearest_float32(largest)
    if narrow == 0:
        return 1.0
    with np.errstate(over="ignore", under="ignore"):
        if recipe is ScaleRecipe.TRANSFORMER_ENGINE:
            encoding = np.ldexp(_nearest_float32(product / narrow), -offset)
            return float(max(_nearest_float32(encoding), _MIN_ENCODING_SCALE))
        scale = np.ldexp(_nearest_float32(narrow / product), offset)
        return float(max(_nearest_float32(scale), _MIN_TENSOR_SCALE))


@compiled
def tensor_scale_of(level: float, recipe: int) -> TensorScale:
    """What follows from what `level_of` gives."""
    if recipe == _TRANSFORMER_ENGINE:
        sixth = _nearest_float32(1.0 / _ELEMENT_MAXIMUM)
        return TensorScale(recipe, _nearest_float32(1.0 / level), _nearest_float32(level * sixth))
    if recipe == _MODELOPT:
        return TensorScale(recipe, np.float64(level), _nearest_float32(_ELEMENT_MAXIMUM * level))
    return TensorScale(recipe, np.float64(level), np.float64(level))


@compiled
def block_scale(largest: float, tensor: TensorScale, stretch: float = 1.0) -> np.float64:
    """The e4m3 number that is the scale of a block with that largest magnitude, which is finite.

    It asks for `stretch` times what makes that magnitude the largest element.
    """
    narrow = _nearest_float32(largest)
    if tensor.recipe == _TRANSFORMER_ENGINE:
        wanted = _nearest_float32(_nearest_float32(narrow * tensor.to_code) * stretch)
    elif tensor.recipe == _MODELOPT:
        quotient = _nearest_float32(_nearest_float32(narrow / tensor.to_code) * stretch)
        wanted = np.float64(max(quotient, _MODELOPT_MIN_CODE) if quotient > 0.0 else 1.0)
    else:
        quotient = _nearest_float32(_nearest_float32(narrow / _ELEMENT_MAXIMUM) / tensor.to_code)
        wanted = np.float64(max(_nearest_float32(quotient * stretch), _TORCHAO_MIN_CODE))
    return np.float64(round_even(wanted, _CODES))


class ExactScale(NamedTuple):
    """How a scale that is no power of two follows from a largest magnitude, which becomes the target."""

    target: float
    """What the largest magnitude becomes."""
    offset: int
    """Added to the exponent of the scale."""
    stored: RoundingConstants
    """What the scale is rounded to."""
    smallest: float
    """Smallest scale: none is zero."""


def exact_scale_of(plan: QuantizePlan) -> ExactScale:
    """What the kernels take of a plan whose scales are no powers of two and have no scale of their own."""
    stored = plan.scheme.scale or FORMATS["fp32"]
    return ExactScale(exact_target(plan.scheme.element), plan.scale_offset, constants_of(stored), stored.min_subnormal)


@compiled
def exact_scale(largest: float, how: ExactScale, stretch: float = 1.0) -> np.float64:
    """The scale of a group with that largest magnitude, which is finite; 1 for nothing but zeros."""
    if largest == 0.0:
        return np.float64(1.0)
    nearest = np.float64(np.float32(largest * stretch / how.target))
    shifted = np.float64(np.float32(math.ldexp(nearest, how.offset)))
    return np.float64(max(round_even(shifted, how.stored), how.smallest))


@compiled
def exact_scales(
    largest_G: NDArray[np.float64], how: ExactScale, stretch: float, scales_G: NDArray[np.float64]
) -> None:
    """Write the scales of groups with these largest magnitudes: NaN of blocks that hold NaN or Inf."""
    for group in range(largest_G.size):
        largest = largest_G[group]
        scales_G[group] = exact_scale(largest, how, stretch) if largest < np.inf else np.nan


@compiled
def factors_of(scale: float, tensor: TensorScale) -> tuple[np.float64, np.float64]:
    """What `scaled` takes of a block with that scale, and what its rounded elements are multiplied by.

    Where the scale is 0 both are 0: nothing of such a block is left.
    """
    after = _nearest_float32(scale * tensor.scale)
    if tensor.recipe == _MODELOPT:
        return after, after
    if scale == 0.0:
        return np.float64(0.0), after
    if tensor.recipe == _TRANSFORMER_ENGINE:
        return _nearest_float32(1.0 / after), after
    return _nearest_float32(_nearest_float32(1.0 / tensor.scale) / scale), after


@compiled
def block_scales(
    largest_G: NDArray[np.float64], tensor: TensorScale, stretch: float, scales_G: NDArray[np.float64]
) -> None:
    """Write the scales of blocks with these largest magnitudes: NaN of those that hold NaN or Inf."""
    for group in range(largest_G.size):
        largest = largest_G[group]
        scales_G[group] = block_scale(largest, tensor, stretch) if largest < np.inf else np.nan


@compiled
def _fill_factors(scales_G: NDArray[np.float64], tensor: TensorScale, factors_2G: NDArray[np.float64]) -> None:
    for group in range(scales_G.size):
        factors_2G[0, group], factors_2G[1, group] = factors_of(scales_G[group], tensor)


CHUNK = 1 << 15
"""Groups whose scales are computed at once: memory for intermediate results does not grow with the tensor."""

E8M0_BIAS = 127
"""The code of the scale 1; the same for narrower exponents of scales."""

E8M0_NAN = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScales:
    """The scales of groups, in the shape of their largest magnitudes; NaN for blocks that hold NaN or Inf."""

    stored: NDArray[Any]
    """As they are stored: codes of blocks, float32 otherwise."""
    values: NDArray[np.float64]
    """The numbers that are stored."""
    tensor: TensorScale | None
    """The scale of the scales of NVFP4."""

    @property
    def tensor_scale(self) -> float | None:
        """The number by which scales of NVFP4 are multiplied."""
        return None if self.tensor is None else float(self.tensor.scale)


def tensor_scale(largest: float, *, plan: QuantizePlan) -> TensorScale | None:
    """What multiplies the scales of NVFP4 in a tensor with that largest finite magnitude; None for other schemes."""
    recipe = plan.scheme.recipe
    if recipe is None:
        return None
    level = level_of(largest, recipe=recipe, offset=plan.scale_offset, four_over_six=plan.four_over_six)
    return tensor_scale_of(level, int(recipe))


@np.errstate(over="ignore", invalid="ignore")  # what is beyond the largest scale becomes it
def group_scales(
    largest: NDArray[np.float64], *, plan: QuantizePlan, largest_of_all: float, stretch: float = 1.0
) -> GroupScales:
    """The scales of groups with these largest magnitudes, which are overwritten.

    Those of blocks are NaN or infinite where the block holds NaN or Inf, those of tensors and channels always finite.
    `largest_of_all` is the largest finite magnitude of the tensor, which the scales of NVFP4 need. Scales that are no
    powers of two are `stretch` times as large as those that make a largest magnitude the largest element.
    """
    tensor, scale = tensor_scale(largest_of_all, plan=plan), plan.scheme.scale
    is_coded = scale is not None and scale.num_bits <= NARROW_BITS
    stored = np.empty(largest.size, dtype=np.uint8 if is_coded else np.float32)
    values = largest.reshape(-1)
    for start in range(0, values.size, CHUNK):
        part = slice(start, start + CHUNK)
        if plan.scale_rule is not None:
            stored[part], values[part] = _powers_of_two(values[part], plan=plan)
            continue
        if tensor is not None:
            block_scales(values[part].copy(), tensor, stretch, values[part])
        else:
            exact_scales(values[part].copy(), exact_scale_of(plan), stretch, values[part])
        stored[part] = codes_of(values[part], target=scale) if scale is not None and is_coded else values[part]
    return GroupScales(stored=stored.reshape(largest.shape), values=values.reshape(largest.shape), tensor=tensor)


def nvfp4_factors(scales: NDArray[np.float64], tensor: TensorScale) -> NDArray[np.float64]:
    """What elements of blocks with these scales are multiplied by (of ModelOpt divided by), and rounded ones after it.

    In the first step the product, or quotient, is rounded to float32. Both lie one after the other.
    """
    factors = np.empty((2, scales.size))
    _fill_factors(np.ascontiguousarray(scales).reshape(-1), tensor, factors)
    return factors.reshape(2, *scales.shape)


def _powers_of_two(largest: NDArray[np.float64], *, plan: QuantizePlan) -> tuple[NDArray[Any], NDArray[np.float64]]:
    assert plan.scale_rule is not None, "the caller has looked"
    is_spoiled = ~np.isfinite(largest)
    exponents = scale_exponents(
        np.where(is_spoiled, 0.0, largest),
        rule=plan.scale_rule,
        element=plan.scheme.element,
        offset=plan.scale_offset,
        scale_bits=plan.scale_bits,
    )
    values = np.where(is_spoiled, np.nan, np.ldexp(1.0, exponents))
    if plan.scheme.scaling is not Scaling.BLOCK:
        return values, values
    return np.where(is_spoiled, E8M0_NAN, exponents + E8M0_BIAS), values
