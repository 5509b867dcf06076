"""Which scales do groups of elements get, whose largest magnitudes are known?"""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.formats import FORMATS, codes_of, round_to
from ranktape.analyze.quantization.blocks import Box
from ranktape.analyze.quantization.plan import Plan
from ranktape.analyze.quantization.scales import scale_exponents
from ranktape.analyze.quantization.schemes import Scaling

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

MIN_TENSOR_SCALE = 2.0**-121
"""Smallest scale of an NVFP4 tensor: the reciprocals of its products with scales of blocks are float32 numbers."""

MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScales:
    """The scales of groups, in the shape of their largest magnitudes; NaN for blocks that hold NaN or Inf."""

    stored: NDArray[Any]
    """As they are stored: codes of blocks, float32 otherwise."""
    values: NDArray[np.float64]
    """The numbers that are stored."""
    tensor_scale: float | None
    """The scale of the scales of NVFP4."""

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
    tensor_scale = _tensor_scale(largest_of_all, plan=plan) if plan.scheme.has_tensor_scale else None
    stored = np.empty(largest.size, dtype=np.uint8 if plan.scheme.scaling is Scaling.BLOCK else np.float32)
    values = largest.reshape(-1)
    for start in range(0, values.size, CHUNK):
        part = slice(start, start + CHUNK)
        if tensor_scale is not None:
            stored[part], values[part] = _nvfp4_scales(values[part], tensor_scale=tensor_scale)
        elif plan.scale_rule is None:
            stored[part] = values[part] = _exact_scales(values[part], plan=plan)
        else:
            stored[part], values[part] = _powers_of_two(values[part], plan=plan)
    return GroupScales(
        stored=stored.reshape(largest.shape), values=values.reshape(largest.shape), tensor_scale=tensor_scale
    )


def nvfp4_reciprocals(scales: NDArray[np.float64], *, tensor_scale: float) -> NDArray[np.float64]:
    """What elements of blocks with these scales are multiplied by, in float32, before they are rounded."""
    return _float32(_float32(1.0 / tensor_scale) / scales)


def nvfp4_factors(scales: NDArray[np.float64], *, tensor_scale: float) -> NDArray[np.float64]:
    """What rounded elements of blocks with these scales are multiplied by: a float32, the largest one at most."""
    return np.minimum(_float32(scales * tensor_scale), MAX_FLOAT32)


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


def _tensor_scale(largest: float, *, plan: Plan) -> float:
    """That with which the scale of the block of the largest magnitude is the largest one."""
    assert plan.scheme.scale is not None, "only schemes with scales of blocks have a scale of those"
    if largest == 0:
        return 1.0
    exact = _float32(largest / (plan.scheme.scale.maximum * plan.scheme.element.maximum))
    return float(np.clip(_float32(np.ldexp(exact, plan.scale_offset)), MIN_TENSOR_SCALE, MAX_FLOAT32))


def _nvfp4_scales(largest: NDArray[np.float64], *, tensor_scale: float) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """As NVIDIA computes them, each operation rounded to float32: of float32 numbers that is what is done here.

    Products of two float32 are exact in float64, and quotients that are rounded twice are those rounded once. Maxima
    that float32 does not hold are not rounded to it, and what they ask for is the largest float32 at most.
    """
    scale, element = FORMATS["fp8_e4m3"], FORMATS["nvfp4"]
    is_spoiled = ~np.isfinite(largest)
    finite = np.where(is_spoiled, 0.0, largest)
    narrow = _float32(finite)
    share = _float32(np.where(np.isinf(narrow), finite, narrow) / element.maximum)
    wanted = _float32(np.minimum(share, MAX_FLOAT32) / tensor_scale)
    # Subnormal scales are not used (torchao).
    values = round_to(np.clip(wanted, scale.min_normal, scale.maximum), target=scale)
    codes = codes_of(values, target=scale)
    return np.where(is_spoiled, E4M3_NAN, codes), np.where(is_spoiled, np.nan, values)


@np.errstate(over="ignore", invalid="ignore")
def _float32(numbers: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """The nearest float32 numbers, as float64."""
    return np.asarray(numbers, dtype=np.float64).astype(np.float32).astype(np.float64)
