"""Gives the scales of NVFP4, inside of compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.formats.kernels import constants_of, round_even
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe

MAX_FLOAT32 = FORMATS["fp32"].maximum

MIN_FLOAT32 = FORMATS["fp32"].min_subnormal

_CODES = constants_of(FORMATS["fp8_e4m3"])
"""What rounds the scales of blocks."""

_TRANSFORMER_ENGINE, _MODELOPT, _TORCHAO = map(int, ScaleRecipe)
"""As plain numbers, which the compiler knows."""

_ELEMENT_MAXIMUM = FORMATS["fp4_e2m1"].maximum

_MODELOPT_MIN_CODE, _TORCHAO_MIN_CODE = 2.0**-9, 2.0**-6
"""Smallest scale of a block; TransformerEngine has none."""


class SharedScale(NamedTuple):
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


@compiled
def tensor_scale_of(level: float, recipe: int) -> SharedScale:
    """What follows from what `level_of` gives."""
    if recipe == _TRANSFORMER_ENGINE:
        sixth = _nearest_float32(1.0 / _ELEMENT_MAXIMUM)
        return SharedScale(recipe, _nearest_float32(1.0 / level), _nearest_float32(level * sixth))
    if recipe == _MODELOPT:
        return SharedScale(recipe, np.float64(level), _nearest_float32(_ELEMENT_MAXIMUM * level))
    return SharedScale(recipe, np.float64(level), np.float64(level))


@compiled
def block_scale(largest: float, tensor: SharedScale, stretch: float = 1.0) -> np.float64:
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


@compiled
def factors_of(scale: float, tensor: SharedScale) -> tuple[np.float64, np.float64]:
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
