"""Quantises what is multiplied: values alone, fast, whole or without the factor that a product can take afterwards."""

# Shapes: R = rows of an operand, S = what the product sums over.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from ranktape.analyze.numerics.pieces import check_readable
from ranktape.analyze.numerics.quantization import tensor_ops
from ranktape.analyze.numerics.quantization.fast_values import are_bf16, fast_values, is_fast, rotated_rows
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


def quantized_values(x: torch.Tensor, scheme: str, **options: Unpack[QuantizeOptions]) -> torch.Tensor:
    """The `values` that `quantize` gives, bit for bit, in the type of `x`.

    Without codes, counts and float64 numbers for every element: in less time and memory on a CPU, in the threads of
    torch.

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
    # Turned over as it is, and then widened, takes a fifth of both at once.
    x = x_RS.detach().contiguous()
    if check_rotation_options(rotation, seed=rotation_seed):
        x = _rotated(x, size=rotation, seed=rotation_seed)
    if scheme is None:
        values = x.to(torch.float32)
        return QuantizedOperand(values=values, factor=1.0, is_bf16_exact=_is_bf16(values))
    values, factor = _values_and_factor(x, plan=plan, is_apart=True)
    return QuantizedOperand(values=values, factor=factor, is_bf16_exact=_is_bf16(values))


def _rotated(x_RS: torch.Tensor, *, size: int, seed: int | None) -> torch.Tensor:
    import torch

    if x_RS.device.type == "cpu" and x_RS.dtype is not torch.float64:
        return rotated_rows(x_RS, size=size, seed=seed)
    found: torch.Tensor = rotated(x_RS, axis=1, size=size, seed=seed, ops=tensor_ops)
    return found


def _is_bf16(values: torch.Tensor) -> bool:
    if values.device.type == "cpu":
        return are_bf16(values)
    rounded = values.bfloat16().float()
    return bool(((rounded == values) | values.isnan()).all())


def _values_and_factor(
    x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The values, as float32 (of float64 as such if nothing is apart), and the factor that was left out of them."""
    import torch

    if is_fast(x, plan=plan):
        return fast_values(x, plan=plan, is_apart=is_apart)
    slow = quantize_planned(x, plan=plan, is_apart=is_apart)
    if not is_apart:
        return slow.values, 1.0
    factor: float | torch.Tensor = 1.0 if slow.tensor_scale is None else slow.tensor_scale
    if plan.scheme.scaling is Scaling.TENSOR:
        factor = float(slow.scale_values)
    elif plan.scheme.scaling is Scaling.CHANNEL:
        factor = slow.scale_values.to(torch.float32)
    return slow.values.to(torch.float32), factor
