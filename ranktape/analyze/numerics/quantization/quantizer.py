"""Quantises what users pass, arrays of numpy, tensors of torch or lists, and warns of what is lost."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.inputs import array_of, check_readable, tensor_or_array
from ranktape.analyze.numerics.quantization.array_quantizer import quantize_array
from ranktape.analyze.numerics.quantization.encoded import LossSeverity, QuantizationWarning, Quantized
from ranktape.analyze.numerics.quantization.schemes import MAX_SCALE_BITS, QuantizePlan, plan_of
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.numerics.histograms.histogram import AnyArray


def quantize(
    x: AnyArray | torch.Tensor,
    scheme: str,
    *,
    scaling: str | None = None,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str | None = None,
    rounding: str | None = None,
    scale_offset: int = 0,
    saturate: bool = True,
    seed: int | None = None,
    scale_bits: int = MAX_SCALE_BITS,
    warn: bool = True,
) -> Quantized:
    """The tensor in a low-precision format: its values, codes and scales, and what was lost.

    A block that holds NaN or Inf becomes NaN as a whole; elsewhere NaN stays NaN, and Inf becomes the largest value, or
    with `saturate=False` Inf, or NaN where the format has none. Zeros keep their sign where the format has a negative
    zero. A block of zeros has the smallest scale there is, and so has a tensor or channel of zeros whose scales are
    powers of two; by the rule `exact` it has the scale 1. Empty tensors give empty results; a tensor without dimensions
    is a row of one element.

    `scheme` is a name of `SCHEMES`, which come in blocks, or of `FORMATS`, whose elements have no scale unless
    `scaling` gives them one: `tensor`, `channel` (one for each index along `axis`) or `block` (of `block_size`
    neighbours along `axis`, the last one shorter; 32 unless given). `scale_rule` is `floor` for blocks; for tensors
    and channels `exact`, the largest finite magnitude over the largest value of the format (8 for hif8). The exponent
    of a scale is that of the rule plus `scale_offset`, as far as `scale_bits` bits can say it. Stochastic rounding
    draws for each element a number that follows from `seed` and its index in C order alone; hybrid rounding looks at
    the bits of scaled elements as float32, of unscaled ones in their own type.

    Numpy gives numpy and torch gives torch, detached and on its device. Float64 gives float64 values, every other type
    float32. Accepted are all types of real floating-point numbers.

    Raises:
        UsageError: the elements are not real floating-point numbers, or lists are ragged; an option is unknown, out of
            its range or without effect.

    Warns:
        QuantizationWarning: more than 0.1 % of the elements are nonzero and below the smallest normal value of the
            format; not with `warn=False`. The result is the same.
    """
    given = tensor_or_array(x)
    plan = plan_of(
        scheme,
        num_dims=given.ndim,
        scaling=scaling,
        block_size=block_size,
        axis=axis,
        scale_rule=scale_rule,
        rounding=rounding,
        scale_offset=scale_offset,
        saturate=saturate,
        seed=seed,
        scale_bits=scale_bits,
    )
    quantized = quantize_planned(given, plan=plan)
    losses = quantized.losses
    if warn and losses.level is not LossSeverity.NONE:
        warnings.warn(f"{plan.scheme.name}: {losses}", QuantizationWarning, stacklevel=2)
    return quantized


def quantize_planned(x: AnyArray | torch.Tensor, *, plan: QuantizePlan) -> Quantized:
    """What `quantize` gives, once the options have been read; it warns of nothing.

    Raises:
        UsageError: the elements are not real floating-point numbers.
    """
    if isinstance(x, np.ndarray):
        _check(x.dtype.name)
        return quantize_array(x, plan=plan)
    _check(str(x.dtype).removeprefix("torch."))
    check_readable(x)
    if x.device.type != "cpu":
        from ranktape.analyze.numerics.quantization import torch_quantizer

        return torch_quantizer.quantize_planned(x, plan=plan)
    return _as_tensors(quantize_array(array_of(x), plan=plan))


def _check(dtype: str) -> None:
    row = DTYPES.get(dtype)
    if row is None or not row.is_floating:
        allowed = ", ".join(row.name for row in DTYPES.values() if row.is_floating)
        raise UsageError(
            f"elements of {dtype} cannot be quantised: convert them to real floating-point numbers, of {allowed}"
        )


def _as_tensors(quantized: Quantized) -> Quantized:
    import torch

    has_scales = quantized.scales is not None
    return dataclasses.replace(
        quantized,
        values=torch.from_numpy(quantized.values),
        scales=torch.from_numpy(quantized.scales) if has_scales else None,
        scale_values=torch.from_numpy(quantized.scale_values) if has_scales else None,
        stored_codes=torch.from_numpy(quantized.stored_codes),
    )
