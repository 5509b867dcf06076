"""Quantises numpy arrays, torch tensors and lists, and warns of losses.

On a CPU, compiled loops round what they support. Everything else is rounded in float64 by torch operations, piece by
piece, on the device of the tensor. Both give the same bits.

Rotations by Hadamard matrices spread an outlier over its neighbours along an axis. The matrices are orthonormal, so
rotating both operands along the dimension that a product sums over changes the product only by rounding.
"""

# Shapes: G = groups that are rotated, N = size of the matrix, I = elements after the axis.

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Rounding, uniforms
from ranktape.analyze.numerics.formats.values import HYBRID_BITS
from ranktape.analyze.numerics.pieces import array_to_tensor, check_readable, tensor_or_array
from ranktape.analyze.numerics.quantization.encoded import (
    LOSSES,
    Losses,
    LossSeverity,
    QuantizationWarning,
    Quantized,
)
from ranktape.analyze.numerics.quantization.kernels import CompiledGroups, is_compiled
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
    """Quantise a tensor to a low-precision format: the values, codes, scales and losses.

    A block with NaN or Inf becomes NaN as a whole. Elsewhere NaN stays NaN, and Inf becomes the largest value, or with
    `saturate=False` Inf, or NaN if the format has no Inf. Zeros keep their sign if the format has a negative zero. A
    block of zeros has the smallest scale, and so has a tensor or channel of zeros if scales are powers of two; by the
    rule `exact` it has the scale 1. Empty tensors give empty results. A tensor without dimensions is a row of one
    element.

    `scheme` is a name in `SCHEMES` or `TABLE_SCHEMES`, which have blocks, or in `FORMATS`, whose elements have no scale
    unless `scaling` is `tensor`, `channel` (a scale for each index along `axis`) or `block`. `block_size` is the number
    of neighbours along `axis` in a block (by default 32; the last block may be shorter), or the rows and columns of a
    tile (tiles at the edges may be smaller). `scale_rule` is by default `floor` for blocks whose scales are powers of
    two, else `exact`: the largest finite magnitude over the largest value of the format (8 for hif8), rounded to the
    format of the scale. `scale_offset` is added to the exponent of each scale, which is clamped to `scale_bits` bits.
    With `four_over_six` each block has the scale with the smaller sum of squared errors, and the scale for 6 if both
    sums are equal (arXiv 2512.02010). Stochastic rounding draws a number for each element, which depends only on `seed`
    and the index in C order. Hybrid rounding reads the bits of scaled elements as float32, and of unscaled elements in
    their own type. With a `rotation`, codes, scales and losses are those of the rotated tensor (see `rotated`), and
    `values` are rotated back.

    The results are numpy arrays, or for a torch tensor detached tensors on its device. Values are float64 if the input
    is, else float32. All types of real floating-point numbers are accepted.

    Raises:
        UsageError: the elements are not real floating-point numbers, or lists are ragged; an option is unknown, out of
            range or has no effect; or the size of the axis is not a multiple of the rotation.

    Warns:
        QuantizationWarning: more than 0.1 % of the elements are nonzero and below the smallest normal value of the
            format, and `warn` is True. The result is the same.
    """
    tensor = tensor_or_array(x)
    plan = plan_of(scheme, num_dims=tensor.ndim, **options)
    quantized = quantize_planned(tensor, plan=plan)
    losses = quantized.losses
    if warn and losses.level is not LossSeverity.NONE:
        warnings.warn(f"{plan.scheme.name}: {losses}", QuantizationWarning, stacklevel=2)
    return quantized


def quantize_planned(x: AnyArray | torch.Tensor, *, plan: QuantizePlan) -> Quantized:
    """`quantize` with a plan instead of options, and without warnings.

    Raises:
        UsageError: the elements are not real floating-point numbers.
    """
    if isinstance(x, np.ndarray):
        _check_floats(x.dtype.name, plan=plan)
        return quantize_planned(array_to_tensor(x), plan=plan).as_arrays()
    scaled = ScaledTensor.of(x, plan=plan)
    values, codes, counts = scaled.groups.encoded(scaled.before, scaled.after)
    scales = scaled.scales
    scale_shape = scaled.groups.scale_shape if x.ndim else ()
    return Quantized(
        scheme=plan.scheme,
        values=scaled.rotated_back(values),
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
        allowed = ", ".join(HYBRID_BITS)
        raise UsageError(
            f"hybrid rounding looks at the bits of the type that values come in: give {allowed}, not {dtype}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTensor:
    """A tensor, rotated if the plan has a rotation, and the scales of its groups."""

    shape: tuple[int, ...]
    """Shape of the tensor."""
    groups: ScaleGroups
    """The elements in groups."""
    scales: GroupScales | None
    """The scales of the groups; None if the scheme has no scales."""
    before: torch.Tensor | None
    """The factors of elements before they are rounded (see `factors_of`); None if there are no scales."""
    after: torch.Tensor
    """The factors of rounded elements."""
    factor: float | torch.Tensor
    """The scale that is left out of `after`: a number, 1 if none is left out, or a float32 for each channel."""

    @classmethod
    def of(cls, x: torch.Tensor, *, plan: QuantizePlan, keeps_factor: bool = False) -> ScaledTensor:
        """Compute the scales of a tensor; if `is_apart`, `factor` is the scale of the tensor or of the channels.

        Raises:
            UsageError: the elements are not real floating-point numbers.
        """
        import torch

        _check_floats(str(x.dtype).removeprefix("torch."), plan=plan)
        check_readable(x)
        tensor = x.detach().resolve_neg().reshape(tuple(x.shape) or (1,))
        if plan.rotation:
            tensor = rotated(tensor, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed)
        groups = (CompiledGroups if is_compiled(tensor, plan=plan) else ScaleGroups).of(tensor, plan=plan)
        scales, factor = groups.scales(), 1.0
        before, after = None, torch.ones(1, dtype=torch.float64, device=x.device)
        if scales is not None:
            before, after = factors_of(scales, plan=plan)
            if keeps_factor and plan.scheme.scaling is Scaling.BLOCK:
                after, factor = scales.values, 1.0 if scales.tensor is None else scales.tensor.scale
            elif keeps_factor:
                is_channel = plan.scheme.scaling is Scaling.CHANNEL
                after = torch.ones_like(scales.values)
                factor = scales.values.to(torch.float32) if is_channel else float(scales.values)
        return cls(shape=tuple(x.shape), groups=groups, scales=scales, before=before, after=after, factor=factor)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The values; as `dtype` if compiled loops support the tensor and values saturate."""
        groups = self.groups
        if isinstance(groups, CompiledGroups) and groups.saturates:
            return self.rotated_back(groups.quantized(self.before, self.after, dtype=dtype))
        return self.rotated_back(groups.encoded(self.before, self.after)[0])

    def rotated_back(self, values: torch.Tensor) -> torch.Tensor:
        """Rotate values back if the plan has a rotation, and give them the shape of the tensor."""
        plan = self.groups.plan
        if plan.rotation:
            values = rotated(values, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed, is_inverse=True)
        return values.reshape(self.shape)


HALF = 0.5
"""The median of the uniform numbers."""

ROTATED, DEVICE_ROTATED = 1 << 17, 1 << 24
"""Number of elements that are rotated at once, on a CPU and on other devices."""


def rotation_signs(size: int, *, seed: int | None) -> NDArray[np.float64]:
    """The signs of a rotation of this size, 1 and -1; all 1 if the seed is None.

    A sign is -1 if the number of `formats.uniforms` of the seed is less than 1/2, so signs are the same everywhere.
    """
    if seed is None:
        return np.ones(size)
    return np.where(uniforms(seed, start=0, size=size) < HALF, -1.0, 1.0)


def rotation_factors(
    size: int, *, seed: int | None, is_inverse: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The factors of the elements of a run before and after the sums."""
    signs_N, scales_N = rotation_signs(size, seed=seed), np.full(size, 1 / math.sqrt(size))
    return (np.ones(size), scales_N * signs_N) if is_inverse else (signs_N, scales_N)


def check_rotation(length: int, *, size: int) -> None:
    """Check that an axis of this length consists of whole runs of a rotation.

    Raises:
        UsageError: the length is not a multiple of the size.
    """
    if length % size:
        raise UsageError(
            f"rotation is {size}, and {length} elements along the axis are no multiple of it: give a power of two that "
            "divides them, or 0"
        )


def rotated(x: torch.Tensor, *, axis: int, size: int, seed: int | None, is_inverse: bool = False) -> torch.Tensor:
    """Multiply each run of `size` neighbours along the axis by signs and a normalised Hadamard matrix, or undo it.

    The matrix is in Sylvester's order: element i of a run becomes the sum over j of (-1)**(number of bits that i and j
    share) times sign j times element j, over sqrt(size). Pairs of neighbours are added first, then pairs of pairs, and
    so on, in float32, or in float64 if `x` is float64; the factor 1 / sqrt(size) comes last. NaN and Inf spread over
    their run. The result is a new tensor in the shape of `x`.

    Raises:
        UsageError: the size of the axis is not a multiple of `size`.
    """
    import torch

    shape = tuple(x.shape)
    check_rotation(shape[axis], size=size)
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    groups_GNI = x.detach().reshape(math.prod(shape[:axis]) * (shape[axis] // size), size, math.prod(shape[axis + 1 :]))
    before, after = (
        torch.asarray(factors, dtype=dtype, device=x.device).view(1, size, 1)
        for factors in rotation_factors(size, seed=seed, is_inverse=is_inverse)
    )
    rotated_GNI = torch.empty(groups_GNI.shape, dtype=dtype, device=x.device)
    piece = max(1, (ROTATED if x.device.type == "cpu" else DEVICE_ROTATED) // max(1, size * groups_GNI.shape[2]))
    for start in range(0, len(groups_GNI), piece):
        block = groups_GNI[start : start + piece].to(dtype) * before
        span = 1
        while span < size:
            first, second = block.view(-1, size // (2 * span), 2, span, block.shape[2]).unbind(2)
            block, span = torch.stack((first + second, first - second), dim=2), 2 * span
            block = block.view(-1, size, groups_GNI.shape[2])
        torch.mul(block, after, out=rotated_GNI[start : start + piece])
    return rotated_GNI.view(shape)
