"""Quantises what is multiplied: values alone, fast, whole or without the factor that a product can take afterwards."""

# Shapes: R = rows of an operand, S = what the product sums over.
# ruff: noqa: N803 - the letters of a shape end the name of the tensor

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.formats.kernels import constants_of
from ranktape.analyze.numerics.pieces import array_of, check_readable
from ranktape.analyze.numerics.quantization import array_ops, tensor_ops
from ranktape.analyze.numerics.quantization.fast_kernels import (
    block_scheme,
    has_low_bits,
    largest_finite,
    round_all,
    round_columns,
    round_rows,
)
from ranktape.analyze.numerics.quantization.group_scales import group_scales, level_of, tensor_scale_of
from ranktape.analyze.numerics.quantization.plan import (
    OperandOptions,
    QuantizeOptions,
    QuantizePlan,
    check_rotation_options,
    plan_of,
)
from ranktape.analyze.numerics.quantization.quantizer import quantize_planned
from ranktape.analyze.numerics.quantization.rotation import rotated
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def quantized_values(x: torch.Tensor, scheme: str, **options: Unpack[QuantizeOptions]) -> torch.Tensor:
    """The `values` that `quantize` gives, bit for bit, in the type of `x`.

    Of float32 and narrower numbers on a CPU some ten times as fast, in the roundings that formats have by themselves.

    Raises:
        UsageError: as `quantize`.
    """
    return _values_and_factor(x, plan=plan_of(scheme, num_dims=x.ndim, **options), is_apart=False)[0].to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedOperand:
    """A quantised matrix of which rows are multiplied and the last dimension is summed over."""

    values: torch.Tensor
    """Float32, contiguous: what times `factor` is the operand. NaN where a block or an element is NaN."""
    factor: float | torch.Tensor
    """Constant along the sum, and finite: a number, or a float32 for each row."""
    is_bf16_exact: bool
    """Whether every value is a number of bfloat16, so that a product in bfloat16 loses nothing; NaN counts as one."""


def quantized_operand(
    x_RS: torch.Tensor, scheme: str | None = None, **options: Unpack[OperandOptions]
) -> QuantizedOperand:
    """The matrix as a product takes it, quantised along its last dimension, over which the product sums.

    Values times factor are the `values` of `quantize`, but for the rounding of the products of two scales in NVFP4,
    and rounded to float32 where `x_RS` is float64. Blocks lie along the last dimension, and `scaling="channel"` is one
    scale for each row: options are else those of `quantize`, and so are NaN, Inf, zeros and empty matrices. With a
    `rotation` they stay rotated, as both operands of a product are. Without a scheme the values are those of the
    matrix, or of the rotated one. The matrix may be any view; the result is on its device, detached, and may share its
    memory.

    Raises:
        UsageError: `x_RS` is no matrix; an option goes with no scheme; or as `quantize`.
    """
    import torch

    if x_RS.ndim != 2:  # noqa: PLR2004
        raise UsageError(f"an operand is a matrix, and this has {x_RS.ndim} dimensions: reshape it to [rows, summed]")
    rotation, rotation_seed = options.pop("rotation", 0), options.pop("rotation_seed", None)
    # Without a scheme values are float32 numbers, which is to say, of the format fp32.
    axis = 0 if options.get("scaling") == Scaling.CHANNEL else 1
    plan = plan_of(scheme or "fp32", num_dims=2, axis=axis, **options)
    if scheme is None and options:
        raise UsageError(
            f"{', '.join(options)} has no effect on an operand that is left as it is: give a scheme, or leave it out"
        )
    check_readable(x_RS)
    x = x_RS.detach()
    if check_rotation_options(rotation, seed=rotation_seed):
        x = _rotated(x, size=rotation, seed=rotation_seed)
    if scheme is None:
        values = x.to(torch.float32).contiguous()
        return QuantizedOperand(values=values, factor=1.0, is_bf16_exact=_is_bf16(values))
    values, factor = _values_and_factor(x, plan=plan, is_apart=True)
    return QuantizedOperand(values=values, factor=factor, is_bf16_exact=_is_bf16(values))


def _rotated(x_RS: torch.Tensor, *, size: int, seed: int | None) -> torch.Tensor:
    import torch

    if x_RS.device.type != "cpu":
        on_device: torch.Tensor = rotated(x_RS, axis=1, size=size, seed=seed, ops=tensor_ops)
        return on_device
    return torch.from_numpy(rotated(array_of(x_RS), axis=1, size=size, seed=seed, ops=array_ops))


def _is_bf16(values: torch.Tensor) -> bool:
    import torch

    patterns = values.view(torch.int32)
    if values.device.type == "cpu":
        return not has_low_bits(patterns.numpy().reshape(-1))
    return not bool(((patterns & 0xFFFF != 0) & ~values.isnan()).any())


def _values_and_factor(
    x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The values, as float32 (of float64 as such if nothing is apart), and the factor that was left out of them."""
    import torch

    if not _is_fast(x, plan=plan):
        slow = quantize_planned(x, plan=plan, is_apart=is_apart)
        if not is_apart:
            return slow.values, 1.0
        factor: float | torch.Tensor = 1.0 if slow.tensor_scale is None else slow.tensor_scale
        if plan.scheme.scaling is Scaling.TENSOR:
            factor = float(slow.scale_values)
        elif plan.scheme.scaling is Scaling.CHANNEL:
            factor = slow.scale_values.to(torch.float32)
        return slow.values.to(torch.float32), factor
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x.detach())
    patterns = values.view(torch.int32).numpy()
    work = _quantize_blocks if plan.scheme.scaling is Scaling.BLOCK else _quantize_together
    return values, work(patterns, plan=plan, is_apart=is_apart)


def _is_fast(x: torch.Tensor, *, plan: QuantizePlan) -> bool:
    import torch

    scheme, element = plan.scheme, plan.scheme.element
    if plan.four_over_six or plan.rotation or scheme.block_rows > 1:
        return False
    if scheme.scaling is Scaling.BLOCK and not (scheme.has_power_scales or scheme.has_tensor_scale):
        return False
    is_plain = x.device.type == "cpu" and x.layout is torch.strided and x.is_floating_point() and x.numel() > 0
    if not is_plain or x.dtype is torch.float64 or scheme.scaling is Scaling.CHANNEL:
        return False
    if scheme.scaling is not Scaling.BLOCK:
        return plan.rounding in {Rounding.EVEN, Rounding.AWAY}
    # Rounding in float32 needs room for the bits that it takes away.
    return plan.rounding is Rounding.EVEN and not element.taper and element.num_bits <= 8  # noqa: PLR2004


def _quantize_together(patterns: NDArray[np.int32], *, plan: QuantizePlan, is_apart: bool) -> float:
    """With one scale for all, or without; gives the factor that is left out."""
    element, scale = plan.scheme.element, 1.0
    flat = patterns.reshape(-1)
    if plan.scheme.scaling is Scaling.TENSOR:
        scale = float(group_scales(np.array([largest_finite(flat)]), plan=plan, largest_of_all=0.0).values[0])
    after, zero = 1.0 if is_apart else scale, -0.0 if element.has_negative_zero else 0.0
    round_all(flat, scale, after, zero, constants_of(element, plan.rounding))
    return scale if is_apart else 1.0


def _quantize_blocks(patterns: NDArray[np.int32], *, plan: QuantizePlan, is_apart: bool) -> float:
    """With one scale for each block; gives the factor that is left out."""
    recipe, tensor = plan.scheme.recipe, None
    if recipe is not None:
        level = level_of(largest_finite(patterns.reshape(-1)), recipe=recipe, offset=plan.scale_offset)
        tensor = tensor_scale_of(level, int(recipe))
    scheme = block_scheme(plan, tensor=tensor, is_apart=is_apart)
    shape = patterns.shape or (1,)
    width, block_size = math.prod(shape[plan.axis + 1 :]), plan.scheme.block_size
    zero = None if plan.scheme.element.has_negative_zero else np.float32(0.0)
    if width == 1:
        round_rows(patterns.reshape(-1), shape[plan.axis], scheme, block_size, zero)
    else:
        round_columns(patterns.reshape(-1, shape[plan.axis], width), scheme, block_size, zero)
    return float(tensor.scale) if tensor is not None and is_apart else 1.0
