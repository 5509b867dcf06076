"""Quantises what users pass, arrays of numpy, tensors of torch or lists, and warns of what is lost.

Compiled loops round what they know on a CPU; everything else is rounded in float64 by operations of torch, piece by
piece, on the tensor's device. Both give the same bits.

Rotations by Hadamard matrices spread an outlier over its neighbours along an axis. A product whose two operands are
rotated along what it sums over is the same, but for rounding: the matrices are orthonormal.
"""

# Shapes: G = groups that are rotated, N = the size of the matrix, I = elements after the axis.

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Rounding, uniforms
from ranktape.analyze.numerics.formats.values import HYBRID_BITS
from ranktape.analyze.numerics.pieces import check_readable, tensor_of, tensor_or_array
from ranktape.analyze.numerics.quantization.encoded import (
    LOSSES,
    Losses,
    LossSeverity,
    QuantizationWarning,
    Quantized,
    code_dtype,
    element_codes,
)
from ranktape.analyze.numerics.quantization.kernels import CompiledRows, is_compiled
from ranktape.analyze.numerics.quantization.plan import QuantizeOptions, QuantizePlan, plan_of
from ranktape.analyze.numerics.quantization.scales import GroupScales, ScaleGroups, factors_of, stored_scales
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.numerics.histograms.histogram import AnyArray


def quantize(
    x: AnyArray | torch.Tensor, scheme: str, *, warn: bool = True, **options: Unpack[QuantizeOptions]
) -> Quantized:
    """The tensor in a low-precision format: its values, codes and scales, and what was lost.

    A block that holds NaN or Inf becomes NaN as a whole; elsewhere NaN stays NaN, and Inf becomes the largest value, or
    with `saturate=False` Inf, or NaN where the format has none. Zeros keep their sign where the format has a negative
    zero. A block of zeros has the smallest scale there is, and so has a tensor or channel of zeros whose scales are
    powers of two; by the rule `exact` it has the scale 1. Empty tensors give empty results; a tensor without dimensions
    is a row of one element.

    `scheme` is a name of `SCHEMES` or `TABLE_SCHEMES`, which come in blocks, or of `FORMATS`, whose elements have no
    scale unless `scaling` gives them one: `tensor`, `channel` (one for each index along `axis`) or `block` (of
    `block_size` neighbours along `axis`, the last one shorter; 32 unless given; or tiles of so many rows and columns,
    those at the edges smaller). `scale_rule` is `floor` for blocks whose scales are powers of two; for all others
    `exact`, the largest finite magnitude over the largest value of the format (8 for hif8), rounded to what the scale
    is stored in. The exponent of a scale is that of the rule plus `scale_offset`, as far as `scale_bits` bits can say
    it. With `four_over_six` a block has the scale with which the squared errors of its values add up to less; the one
    for 6 of two that are as good (arXiv 2512.02010). Stochastic rounding draws for each element a number that follows
    from `seed` and its index in C order alone; hybrid rounding looks at the bits of scaled elements as float32, of
    unscaled ones in their own type. With a `rotation` codes, scales and losses are those of the rotated tensor (see
    `rotated`), and `values` are rotated back.

    Numpy gives numpy and torch gives torch, detached and on its device. Float64 gives float64 values, every other type
    float32. Accepted are all types of real floating-point numbers.

    Raises:
        UsageError: the elements are not real floating-point numbers, or lists are ragged; an option is unknown, out of
            its range or without effect; the axis is no multiple of the rotation.

    Warns:
        QuantizationWarning: more than 0.1 % of the elements are nonzero and below the smallest normal value of the
            format; not with `warn=False`. The result is the same.
    """
    given = tensor_or_array(x)
    plan = plan_of(scheme, num_dims=given.ndim, **options)
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
        _check_floats(x.dtype.name, plan=plan)
        return quantize_planned(tensor_of(x), plan=plan).as_arrays()
    scaled = ScaledTensor.of(x, plan=plan)
    values, codes, counts = scaled.encoded()
    scales = scaled.scales
    scale_shape = scaled.groups.scale_shape if x.ndim else ()
    return Quantized(
        scheme=plan.scheme,
        values=scaled.turned_back(values),
        scales=None if scales is None else stored_scales(scales, plan=plan).reshape(scale_shape),
        scale_values=None if scales is None else scales.values.reshape(scale_shape),
        tensor_scale=None if scales is None or scales.tensor is None else scales.tensor.scale,
        losses=Losses(num_elements=x.numel(), **dict(zip(LOSSES, counts, strict=True))),
        stored_codes=codes.reshape(x.shape),
    )


def _check_floats(dtype: str, *, plan: QuantizePlan) -> None:
    row = DTYPES.get(dtype)
    if row is None or not row.is_floating:
        allowed = ", ".join(row.name for row in DTYPES.values() if row.is_floating)
        raise UsageError(
            f"elements of {dtype} cannot be quantised: convert them to real floating-point numbers, of {allowed}"
        )
    if plan.rounding is Rounding.HYBRID and plan.scheme.scaling is Scaling.NONE and dtype not in HYBRID_BITS:
        known = ", ".join(HYBRID_BITS)
        raise UsageError(
            f"hybrid rounding looks at the bits of the type that values come in: give {known}, not {dtype}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTensor:
    """A tensor, rotated where that was asked for, and the scales of its groups."""

    shape: tuple[int, ...]
    """Of the tensor."""
    groups: ScaleGroups
    """Its elements in groups."""
    rows: CompiledRows | None
    """The same for the compiled loops; None where they do not know it."""
    scales: GroupScales | None
    """None without."""
    after: torch.Tensor
    """What rounded elements are multiplied by."""
    factor: float | torch.Tensor
    """The scale that was left out of `after`: 1, a number, or a float32 for each channel."""

    @classmethod
    def of(cls, x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool = False) -> ScaledTensor:
        """The scales of a tensor; apart, the values lack the scale of the tensor or of their channel.

        Raises:
            UsageError: the elements are not real floating-point numbers.
        """
        import torch

        _check_floats(str(x.dtype).removeprefix("torch."), plan=plan)
        check_readable(x)
        given = x.detach().resolve_neg().reshape(tuple(x.shape) or (1,))
        if plan.rotation:
            given = rotated(given, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed)
        rows = CompiledRows.of(given, plan=plan) if is_compiled(given, plan=plan) else None
        groups = ScaleGroups.of(given, plan=plan) if rows is None else rows.groups
        scales = groups.scales() if rows is None else rows.scales()
        after, factor = torch.ones(1, dtype=torch.float64, device=x.device), 1.0
        if scales is not None and not is_apart:
            after = factors_of(scales, plan=plan)[1]
        elif scales is not None and plan.scheme.scaling is Scaling.BLOCK:
            after, factor = scales.values, 1.0 if scales.tensor is None else scales.tensor.scale
        elif scales is not None:
            is_channel = plan.scheme.scaling is Scaling.CHANNEL
            after = torch.ones_like(scales.values)
            factor = scales.values.to(torch.float32) if is_channel else float(scales.values)
        return cls(shape=tuple(x.shape), groups=groups, rows=rows, scales=scales, after=after, factor=factor)

    def encoded(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The values, not turned back yet, the codes, and the counts of `Losses` in their order."""
        factors = None if self.scales is None else factors_of(self.scales, plan=self.groups.plan)
        if self.rows is not None:
            return self.rows.encoded(self.after if factors is None else factors[0], self.after)
        return _by_operations(self.groups, factors, self.after)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The values: of that type where the compiled loops know the tensor."""
        if self.rows is None or not self.rows.saturates:
            return self.turned_back(self.encoded()[0])
        before = self.after if self.scales is None else factors_of(self.scales, plan=self.groups.plan)[0]
        return self.turned_back(self.rows.quantized(before, self.after, dtype=dtype))

    def turned_back(self, values: torch.Tensor) -> torch.Tensor:
        """Values without the rotation, in the shape of the tensor."""
        plan = self.groups.plan
        if plan.rotation:
            values = rotated(values, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed, is_back=True)
        return values.reshape(self.shape)


def _by_operations(
    groups: ScaleGroups, factors: tuple[torch.Tensor, torch.Tensor] | None, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The same as `CompiledRows.encoded`, on any device and by any rounding."""
    import torch

    plan, element, x_OLI = groups.plan, groups.plan.scheme.element, groups.x_OLI
    in_three = None if factors is None else tuple(groups.in_three(one) for one in factors)
    after = groups.in_three(after)
    values = torch.empty(x_OLI.shape, dtype=groups.value_dtype, device=x_OLI.device)
    codes = torch.empty(x_OLI.shape, dtype=code_dtype(element), device=x_OLI.device)
    counts = torch.zeros(len(LOSSES), dtype=torch.int64, device=x_OLI.device)
    for part in groups.parts():
        scaled, rounded = groups.rounded(part, in_three)
        signed, lost = _finished(x_OLI[part].to(torch.float64), scaled, rounded, plan=plan)
        counts += lost
        values[part] = signed * groups.part_of(after, part)
        if in_three is not None:  # a block that is NaN as a whole has the codes of 0
            signed = signed.masked_fill(groups.part_of(in_three[1], part).isnan(), 0.0)
        codes[part] = element_codes(signed, element)
    return values.view(groups.shape), codes.view(groups.shape), counts.tolist()


def _finished(
    values: torch.Tensor, scaled: torch.Tensor, rounded: torch.Tensor, *, plan: QuantizePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded magnitudes, bounded and with the signs of the values, and the counts of `Losses` in their order.

    `scaled` are the magnitudes before rounding: NaN where the value or its scale is.
    """
    import torch

    element = plan.scheme.element
    is_finite = values.isfinite()
    is_spoiled = is_finite & scaled.isnan()
    is_counted = is_finite & ~is_spoiled & (values != 0)
    kinds = (
        is_counted & (scaled < element.min_normal),
        is_counted & (rounded == 0),
        is_counted & (scaled >= element.overflow_start_of(plan.rounding)),
        is_spoiled,
        values.isnan(),
        values.isinf(),
    )
    beyond = element.overflow_value(saturate=plan.saturate)
    signed = rounded.masked_fill(rounded > element.maximum, beyond).copysign(values)
    signed = signed.masked_fill(scaled.isnan(), torch.nan)
    return signed if element.has_negative_zero else signed + 0.0, torch.stack([kind.sum() for kind in kinds])


HALF = 0.5
"""Where uniform numbers have as many below as above them."""

ROTATED, DEVICE_ROTATED = 1 << 17, 1 << 24
"""Elements that are rotated at once, on a CPU and on other devices."""


def rotation_signs(size: int, *, seed: int | None) -> NDArray[np.float64]:
    """The signs of a rotation of that size, 1 and -1; all 1 without a seed.

    They are -1 where `formats.uniforms` of the seed are below 1/2: the same everywhere.
    """
    if seed is None:
        return np.ones(size)
    return np.where(uniforms(seed, start=0, size=size) < HALF, -1.0, 1.0)


def rotation_factors(size: int, *, seed: int | None, is_back: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the elements of a run are multiplied by before they are added up, and after it."""
    signs_N, scales_N = rotation_signs(size, seed=seed), np.full(size, 1 / math.sqrt(size))
    return (np.ones(size), scales_N * signs_N) if is_back else (signs_N, scales_N)


def check_rotation(length: int, *, size: int) -> None:
    """Whether an axis of that length is one of whole groups.

    Raises:
        UsageError: it is not.
    """
    if length % size:
        raise UsageError(
            f"rotation is {size}, and {length} elements along the axis are no multiple of it: give a power of two that "
            "divides them, or 0"
        )


def rotated(x: torch.Tensor, *, axis: int, size: int, seed: int | None, is_back: bool = False) -> torch.Tensor:
    """Each run of `size` neighbours along the axis, times signs and the normalised Hadamard matrix; or else undone.

    In Sylvester's order: element i of a run becomes the sum over j of (-1)**(number of bits that i and j share) times
    sign j times element j, over sqrt(size). Added up in pairs of neighbours, then of pairs, and so on, in float32 (of
    float64 in float64), and multiplied by 1 / sqrt(size) at last. NaN and Inf spread over their run. The result is a
    new tensor in the shape of `x`.

    Raises:
        UsageError: the axis is no multiple of the size.
    """
    import torch

    shape = tuple(x.shape)
    check_rotation(shape[axis], size=size)
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    groups_GNI = x.detach().reshape(math.prod(shape[:axis]) * (shape[axis] // size), size, math.prod(shape[axis + 1 :]))
    before, after = (
        torch.asarray(factors, dtype=dtype, device=x.device).view(1, size, 1)
        for factors in rotation_factors(size, seed=seed, is_back=is_back)
    )
    found = torch.empty(groups_GNI.shape, dtype=dtype, device=x.device)
    piece = max(1, (ROTATED if x.device.type == "cpu" else DEVICE_ROTATED) // max(1, size * groups_GNI.shape[2]))
    for start in range(0, len(groups_GNI), piece):
        own = groups_GNI[start : start + piece].to(dtype) * before
        span = 1
        while span < size:
            one, other = own.view(-1, size // (2 * span), 2, span, own.shape[2]).unbind(2)
            own, span = torch.stack((one + other, one - other), dim=2), 2 * span
            own = own.view(-1, size, groups_GNI.shape[2])
        torch.mul(own, after, out=found[start : start + piece])
    return found.view(shape)
