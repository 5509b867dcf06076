"""The scales of groups of elements whose largest magnitudes are known."""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, codes_of
from ranktape.analyze.numerics.quantization.blocks import Box
from ranktape.analyze.numerics.quantization.nvfp4 import (
    MAX_FLOAT32,
    TensorScale,
    block_scales,
    factors,
    level_of,
    tensor_scale_of,
)
from ranktape.analyze.numerics.quantization.plan import Plan
from ranktape.analyze.numerics.quantization.scales import scale_exponents
from ranktape.analyze.numerics.quantization.schemes import Scaling

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1 << 15
"""Groups whose scales are computed at once: memory for intermediate results does not grow with the tensor."""

E8M0_BIAS = 127
"""The code of the scale 1; the same for narrower exponents of scales."""

E8M0_NAN = 0xFF

E4M3_NAN = 0x7F

MIN_FLOAT32 = 2.0**-149
"""Smallest positive float32: a scale is not zero."""


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

    def of_box(self, box: Box, *, plan: Plan) -> NDArray[np.float64]:
        """The scales of a piece's groups, [O, B, 1, I] of blocks and as many dimensions of others."""
        before, count, _, after = box.shape_OBEI
        if plan.scheme.scaling is Scaling.BLOCK:
            return self.values[box.groups].reshape(before, count, 1, after)
        if plan.scheme.scaling is Scaling.CHANNEL:
            return self.values[box.place[plan.axis]].reshape(1, count, 1, 1)
        return self.values.reshape(1, 1, 1, 1)


@np.errstate(over="ignore", invalid="ignore")  # what is beyond the largest scale becomes it
def group_scales(largest: NDArray[np.float64], *, plan: Plan, largest_of_all: float) -> GroupScales:
    """The scales of groups with these largest magnitudes, which are overwritten.

    Those of blocks are NaN or infinite where the block holds NaN or Inf, those of tensors and channels always finite.
    `largest_of_all` is the largest finite magnitude of the tensor, which the scales of NVFP4 need.
    """
    recipe, tensor = plan.scheme.recipe, None
    if recipe is not None:
        tensor = tensor_scale_of(level_of(largest_of_all, recipe=recipe, offset=plan.scale_offset), int(recipe))
    stored = np.empty(largest.size, dtype=np.uint8 if plan.scheme.scaling is Scaling.BLOCK else np.float32)
    values = largest.reshape(-1)
    for start in range(0, values.size, CHUNK):
        part = slice(start, start + CHUNK)
        if tensor is not None:
            block_scales(values[part].copy(), tensor, values[part])
            codes = codes_of(np.nan_to_num(values[part]), target=FORMATS["fp8_e4m3"])
            stored[part] = np.where(np.isnan(values[part]), E4M3_NAN, codes)
        elif plan.scale_rule is None:
            stored[part] = values[part] = _exact_scales(values[part], plan=plan)
        else:
            stored[part], values[part] = _powers_of_two(values[part], plan=plan)
    return GroupScales(stored=stored.reshape(largest.shape), values=values.reshape(largest.shape), tensor=tensor)


def nvfp4_factors(scales: NDArray[np.float64], tensor: TensorScale) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What elements of blocks with these scales are multiplied by (of ModelOpt divided by), and rounded ones after it.

    In the first step the product, or quotient, is rounded to float32.
    """
    flat = np.ascontiguousarray(scales).reshape(-1)
    before, after = np.empty((2, flat.size))
    factors(flat, tensor, before, after)
    return before.reshape(scales.shape), after.reshape(scales.shape)


def _powers_of_two(largest: NDArray[np.float64], *, plan: Plan) -> tuple[NDArray[Any], NDArray[np.float64]]:
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


def _exact_scales(largest: NDArray[np.float64], *, plan: Plan) -> NDArray[np.float64]:
    """The largest magnitude over the target, in float32; 1 for groups of nothing but zeros."""
    exact = _float32(largest / plan.target)
    shifted = np.clip(_float32(np.ldexp(exact, plan.scale_offset)), MIN_FLOAT32, MAX_FLOAT32)
    return np.where(largest == 0, 1.0, shifted)


@np.errstate(over="ignore", invalid="ignore")
def _float32(numbers: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """The nearest float32 numbers, as float64."""
    return np.asarray(numbers, dtype=np.float64).astype(np.float32).astype(np.float64)
