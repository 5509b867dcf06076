"""The values of a quantised tensor, for a training that asks for nothing else and waits for them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.formats.kernels import constants_of
from ranktape.analyze.numerics.quantization.fast_kernels import (
    BlockConstants,
    Flags,
    largest_finite,
    round_all,
    round_columns,
    round_rows,
    round_scaled_columns,
    round_scaled_rows,
)
from ranktape.analyze.numerics.quantization.group_scales import group_scales
from ranktape.analyze.numerics.quantization.nvfp4 import level_of, tensor_scale_of
from ranktape.analyze.numerics.quantization.plan import Plan, plan_of
from ranktape.analyze.numerics.quantization.quantizer import quantize_planned
from ranktape.analyze.numerics.quantization.scales import cut_of
from ranktape.analyze.numerics.quantization.schemes import Scaling

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def quantized_values(
    x: torch.Tensor,
    scheme: str,
    *,
    scaling: str | None = None,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str | None = None,
) -> torch.Tensor:
    """The `values` that `quantize` gives, bit for bit, in the type of `x`.

    Of float32 and narrower numbers on a CPU some ten times as fast, in the roundings that formats have by themselves.

    Raises:
        UsageError: as `quantize`.
    """
    plan = plan_of(scheme, num_dims=x.ndim, scaling=scaling, block_size=block_size, axis=axis, scale_rule=scale_rule)
    if not _is_fast(x, plan=plan):
        slow: torch.Tensor = quantize_planned(x, plan=plan).values
        return slow.to(x.dtype)
    import torch

    values = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x.detach())
    patterns = values.view(torch.int32).numpy()
    if plan.scheme.scaling is not Scaling.BLOCK:
        _quantize_together(patterns.reshape(-1), plan=plan)
    elif plan.scheme.has_tensor_scale:
        _quantize_scaled(patterns, plan=plan)
    else:
        _quantize_blocks(patterns, plan=plan)
    return values.to(x.dtype)


def _is_fast(x: torch.Tensor, *, plan: Plan) -> bool:
    import torch

    scheme, element = plan.scheme, plan.scheme.element
    is_plain = x.device.type == "cpu" and x.layout is torch.strided and x.is_floating_point() and x.numel() > 0
    if not is_plain or x.dtype is torch.float64 or scheme.scaling is Scaling.CHANNEL:
        return False
    if scheme.scaling is not Scaling.BLOCK:
        return plan.rounding in {Rounding.EVEN, Rounding.AWAY}
    # Rounding in float32 needs room for the bits that it takes away.
    return plan.rounding is Rounding.EVEN and not element.taper and element.num_bits <= 8  # noqa: PLR2004


def _quantize_together(patterns: NDArray[np.int32], *, plan: Plan) -> None:
    """With one scale for all, or without."""
    element, scale = plan.scheme.element, 1.0
    if plan.scheme.scaling is Scaling.TENSOR:
        scale = float(group_scales(np.array([largest_finite(patterns)]), plan=plan, largest_of_all=0.0).values[0])
    flags = Flags(element.has_negative_zero, plan.rounding is Rounding.AWAY)
    round_all(patterns, scale, flags, constants_of(element))


def _quantize_blocks(patterns: NDArray[np.int32], *, plan: Plan) -> None:
    """With a power of two for each block."""
    element = plan.scheme.element
    assert plan.scale_rule is not None, "blocks with powers of two have a rule"
    cut = cut_of(plan.scale_rule, element=element)
    constants = BlockConstants(
        mantissa_bits=element.mantissa_bits,
        emin=element.emin,
        emax=element.emax,
        maximum=element.maximum,
        has_negative_zero=element.has_negative_zero,
        cut=cut.at,
        is_cut_inclusive=cut.is_inclusive,
    )
    rows = _rows(patterns, plan=plan)
    if rows.shape[2] == 1:
        round_rows(patterns.reshape(-1), rows.shape[1], plan.scheme.block_size, constants, constants_of(element))
    else:
        round_columns(rows, plan.scheme.block_size, constants, constants_of(element))


def _quantize_scaled(patterns: NDArray[np.int32], *, plan: Plan) -> None:
    """With a number of a format for each block, and one for the tensor: NVFP4."""
    recipe = plan.scheme.recipe
    assert recipe is not None, "it has scales of blocks"
    tensor = tensor_scale_of(level_of(largest_finite(patterns.reshape(-1)), recipe=recipe), int(recipe))
    rows = _rows(patterns, plan=plan)
    if rows.shape[2] == 1:
        round_scaled_rows(patterns.reshape(-1), rows.shape[1], plan.scheme.block_size, tensor)
    else:
        round_scaled_columns(rows, plan.scheme.block_size, tensor)


def _rows(patterns: NDArray[np.int32], *, plan: Plan) -> NDArray[np.int32]:
    """What is before the axis of blocks, the axis, and what is after it."""
    shape = patterns.shape or (1,)
    return patterns.reshape(-1, shape[plan.axis], math.prod(shape[plan.axis + 1 :]))
