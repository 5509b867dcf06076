"""The scales of NVFP4, with each operation rounded to float32 as in the program that they are taken from.

Products of two float32 are exact in float64, and quotients of them that are rounded twice are those rounded once. What
is beyond float32 counts as its largest number.

numba caches a kernel beside its own source and does not see when a function that it calls has changed: whoever edits
this module removes the caches of the modules that call it.
"""

# Shapes: G = blocks that share a scale.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.formats.kernels import constants_of, round_even
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.schemes import Recipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FLOAT32 = float(np.finfo(np.float32).max)

_CODES = constants_of(FORMATS["fp8_e4m3"])
"""What rounds the scales of blocks."""

_TRANSFORMER_ENGINE, _MODELOPT, _TORCHAO = map(int, Recipe)
"""As plain numbers, which the compiler knows."""

_ELEMENT_MAXIMUM = FORMATS["fp4_e2m1"].maximum

_LARGEST_PRODUCT = FORMATS["fp8_e4m3"].maximum * _ELEMENT_MAXIMUM

_MIN_TENSOR_SCALE = 2.0**-121
"""Of ModelOpt and torchao: with smaller ones, reciprocals would not be float32 numbers."""

_MIN_ENCODING_SCALE = 2.0**-127
"""Of TransformerEngine, reached with offsets alone: its reciprocal is a float32 number."""

_MODELOPT_MIN_CODE, _TORCHAO_MIN_CODE = 2.0**-9, 2.0**-6
"""Smallest scale of a block; TransformerEngine has none."""


class TensorScale(NamedTuple):
    """What all blocks of a tensor share; a named tuple, because numba takes it apart by name."""

    recipe: int
    """The `Recipe`."""
    scale: float
    """What scales of blocks are multiplied by."""
    to_code: float
    """What the largest magnitude of a block is multiplied by, or divided by, for its scale."""


@compiled
def _float32(number: float) -> np.float64:
    """The nearest float32, the largest one at most."""
    nearest = np.float64(np.float32(number))
    return np.float64(MAX_FLOAT32) if nearest > MAX_FLOAT32 else nearest


def level_of(largest: float, *, recipe: Recipe, offset: int = 0) -> float:
    """The float32 from which the scale of a tensor with that largest finite magnitude follows: see `tensor_scale_of`.

    `offset` is added to the exponent of the scale. A tensor of zeros has the scale 1.
    """
    if largest == 0:
        return 1.0
    narrow = _float32(largest)
    with np.errstate(over="ignore", under="ignore"):
        if recipe is Recipe.TRANSFORMER_ENGINE:
            encoding = np.ldexp(_float32(_LARGEST_PRODUCT / narrow), -offset)
            return float(max(_float32(encoding), _MIN_ENCODING_SCALE))
        scale = np.ldexp(_float32(narrow / _LARGEST_PRODUCT), offset)
        return float(max(_float32(scale), _MIN_TENSOR_SCALE))


@compiled
def tensor_scale_of(level: float, recipe: int) -> TensorScale:
    """What follows from what `level_of` gives."""
    if recipe == _TRANSFORMER_ENGINE:
        sixth = _float32(1.0 / _ELEMENT_MAXIMUM)
        return TensorScale(recipe, _float32(1.0 / level), _float32(level * sixth))
    if recipe == _MODELOPT:
        return TensorScale(recipe, np.float64(level), _float32(_ELEMENT_MAXIMUM * level))
    return TensorScale(recipe, np.float64(level), np.float64(level))


@compiled
def block_scale(largest: float, tensor: TensorScale) -> np.float64:
    """The e4m3 number that is the scale of a block with that largest magnitude, which is finite."""
    narrow = _float32(largest)
    if tensor.recipe == _TRANSFORMER_ENGINE:
        wanted = _float32(narrow * tensor.to_code)
    elif tensor.recipe == _MODELOPT:
        quotient = _float32(narrow / tensor.to_code)
        wanted = np.float64(max(quotient, _MODELOPT_MIN_CODE) if quotient > 0.0 else 1.0)
    else:
        quotient = _float32(_float32(narrow / _ELEMENT_MAXIMUM) / tensor.to_code)
        wanted = np.float64(max(quotient, _TORCHAO_MIN_CODE))
    return round_even(wanted, _CODES)


@compiled
def factors_of(scale: float, tensor: TensorScale) -> tuple[np.float64, np.float64]:
    """What `scaled` takes of a block with that scale, and what its rounded elements are multiplied by.

    Where the scale is 0 both are 0: nothing of such a block is left.
    """
    after = _float32(scale * tensor.scale)
    if tensor.recipe == _MODELOPT:
        return after, after
    if scale == 0.0:
        return np.float64(0.0), after
    if tensor.recipe == _TRANSFORMER_ENGINE:
        return _float32(1.0 / after), after
    return _float32(_float32(1.0 / tensor.scale) / scale), after


@compiled
def block_scales(largest_G: NDArray[np.float64], tensor: TensorScale, scales_G: NDArray[np.float64]) -> None:
    """Write the scales of blocks with these largest magnitudes: NaN of those that hold NaN or Inf."""
    for group in range(largest_G.size):
        largest = largest_G[group]
        scales_G[group] = block_scale(largest, tensor) if largest < np.inf else np.nan


@compiled
def factors(
    scales_G: NDArray[np.float64], tensor: TensorScale, before_G: NDArray[np.float64], after_G: NDArray[np.float64]
) -> None:
    """Write the factors of blocks with these scales."""
    for group in range(scales_G.size):
        before_G[group], after_G[group] = factors_of(scales_G[group], tensor)
