"""Quantises tensors of torch on the device where they are, bit for bit as numpy arrays are."""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Format, Rounding, round_to
from ranktape.analyze.numerics.formats.codes import NARROW_BITS, code_table, codes_of
from ranktape.analyze.numerics.formats.kernels import (
    FIRST_FACTOR,
    GOLDEN,
    HALF,
    ONE_FIELD,
    SECOND_FACTOR,
    UNIFORM_UNIT,
    state_of,
)
from ranktape.analyze.numerics.inputs import array_of
from ranktape.analyze.numerics.quantization.array_quantizer import COUNTS
from ranktape.analyze.numerics.quantization.blocks import Box, boxes, grouped_shape
from ranktape.analyze.numerics.quantization.encoded import Losses, Quantized
from ranktape.analyze.numerics.quantization.group_scales import GroupScales, group_scales, nvfp4_factors
from ranktape.analyze.numerics.quantization.schemes import QuantizePlan, ScaleRecipe, Scaling, plan_of
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

FIELD_SHIFT = 52
"""Bits of a float64 below its exponent field."""


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2.0 to each int64 exponent from -1022 to 1023, as float64."""
    import torch

    return ((exponent + ONE_FIELD) << FIELD_SHIFT).view(torch.float64)


def exponent_of(magnitude: torch.Tensor) -> torch.Tensor:
    """The exponent of each nonnegative float64, as int64: -1023 for zeros and subnormals, 1024 for NaN and Inf."""
    import torch

    return (magnitude.view(torch.int64) >> FIELD_SHIFT) - ONE_FIELD


def uniforms_at(index: torch.Tensor, *, seed: int) -> torch.Tensor:
    """`formats.uniforms` of the elements with these int64 indices in C order."""
    import torch

    def mix(state: torch.Tensor) -> torch.Tensor:
        first = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * FIRST_FACTOR
        second = (first ^ ((first >> 27) & 0x1FFFFFFFFF)) * SECOND_FACTOR
        return second ^ ((second >> 31) & 0x1FFFFFFFF)

    mixed = mix(state_of(seed) + (index + 1) * GOLDEN)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(torch.float64) * UNIFORM_UNIT


def round_elements(
    scaled: torch.Tensor,
    *,
    target: Format,
    rounding: Rounding,
    saturate: bool,
    uniform: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `formats.round_to` gives for float64 elements.

    Stochastic rounding takes the numbers `uniform`, hybrid rounding the bits of `source`, which holds the same
    elements in the type that they came in.
    """
    import torch

    if rounding is Rounding.HYBRID:
        assert source is not None, "the caller gives what hybrid rounding looks at"
        return _hybrid(source, target=target, saturate=saturate)
    endless = _round(scaled.abs(), target=target, rounding=rounding, uniform=uniform)
    overflow = target.overflow_value(saturate=saturate)
    signed = torch.where(endless > target.maximum, overflow, endless).copysign(scaled)
    return signed if target.has_negative_zero else signed + 0.0


def _round(
    magnitude: torch.Tensor, *, target: Format, rounding: Rounding, uniform: torch.Tensor | None
) -> torch.Tensor:
    step = float(np.ldexp(1.0, target.unit_exponent(target.emax)))
    bounded = magnitude.clamp(max=target.maximum + 2 * step)
    exponent = exponent_of(bounded).clamp(target.lowest_exponent, target.emax)
    unit_exponent = exponent - target.mantissa_bits
    for limit in target.taper:
        unit_exponent += exponent.abs() > limit
    # In units of the last place every value of the format is an integer, and powers of two scale exactly.
    in_units = bounded * power_of_two(-unit_exponent)
    if rounding is Rounding.EVEN:
        return in_units.round() * power_of_two(unit_exponent)
    whole = in_units.floor()
    if rounding is Rounding.AWAY:
        whole += in_units - whole >= HALF
    elif rounding is Rounding.STOCHASTIC:
        assert uniform is not None, "the caller draws what stochastic rounding compares with"
        whole += uniform < in_units - whole
    return whole * power_of_two(unit_exponent)


def _hybrid(source: torch.Tensor, *, target: Format, saturate: bool) -> torch.Tensor:
    """By the code for the CPU, on the CPU: it looks at bits of several types, and few ask for it."""
    import torch

    rounded = round_to(array_of(source.cpu()), target=target, rounding=Rounding.HYBRID, saturate=saturate)
    return torch.from_numpy(rounded).to(source.device)


def code_dtype(target: Format) -> torch.dtype:
    """The type of the codes of a format."""
    import torch

    return {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[max(NARROW_BITS, target.num_bits)]


def encode_elements(rounded: torch.Tensor, *, target: Format) -> torch.Tensor:
    """What `formats.encode` gives for float64 values of the format; of NaN 0 where there is no code for it."""
    import torch

    if target.num_bits > NARROW_BITS:
        dtype = getattr(torch, target.dtype or "")
        bits = rounded.to(dtype).view({16: torch.int16, 32: torch.int32}[target.num_bits])
        # Each device has its own idea of the bits of a NaN.
        bits[rounded.isnan()] = int(codes_of(np.nan, target=target))
        return bits.view(code_dtype(target))
    table = torch.tensor(code_table(target.name), device=rounded.device)
    patterns = (rounded.to(torch.float32).view(torch.int32) >> 16) & 0xFFFF
    return table[patterns]


CPU_BOX_SIZE = 1 << 18
"""Elements that are quantised at once on a CPU, with some 30 MB of memory."""

BOX_SIZE = 1 << 22
"""On other devices, where each operation costs a launch: some 500 MB."""


def quantize_tensor(tensor: torch.Tensor, scheme: str, **options: Any) -> Quantized:
    """What `quantize` gives for the tensor and the same options, as tensors on its device; it warns of nothing.

    Raises:
        UsageError: as `quantize`.
    """
    return quantize_planned(tensor, plan=plan_of(scheme, num_dims=tensor.ndim, **options))


def quantize_planned(tensor: torch.Tensor, plan: QuantizePlan) -> Quantized:
    """The tensor quantised as the plan says.

    Raises:
        UsageError: it does not hold real floating-point numbers.
    """
    import torch

    if not tensor.is_floating_point():
        raise UsageError(f"elements of {tensor.dtype} cannot be quantised: convert them to a floating-point type")
    work = _TensorPieces.of(tensor.detach(), plan=plan)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    element = plan.scheme.element
    values = torch.empty(work.shape, dtype=wide, device=tensor.device)
    codes = torch.empty(work.shape, dtype=code_dtype(element), device=tensor.device)
    counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=tensor.device)
    for box in work.boxes():
        piece = work.piece(box)
        counts += work.losses(piece)
        values[box.place] = (piece.rounded * piece.factor).to(wide).reshape(box.shape)
        # A block that is NaN as a whole has the codes 0.
        kept = torch.where(piece.factor.isnan(), 0.0, piece.rounded)
        codes[box.place] = encode_elements(kept, target=element).reshape(box.shape)
    losses = Losses(num_elements=tensor.numel(), **dict(zip(COUNTS, counts.tolist(), strict=True)))
    scales = work.scales
    return Quantized(
        scheme=plan.scheme,
        values=values.reshape(tensor.shape),
        scales=None if scales is None else work.moved(scales.stored.reshape(work.scales_shape)),
        scale_values=None if scales is None else work.moved(scales.values.reshape(work.scales_shape)),
        tensor_scale=None if scales is None else scales.tensor_scale,
        losses=losses,
        stored_codes=codes.reshape(tensor.shape),
    )


class _Piece(NamedTuple):
    """The elements of a box, [O, B, E, I], in float64."""

    values: torch.Tensor
    """As they are."""
    scaled: torch.Tensor
    """Divided by their scales."""
    rounded: torch.Tensor
    """The values of the format that those become."""
    factor: torch.Tensor
    """What those are multiplied by: one for each group, or for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorPieces:
    """A tensor with at least one dimension, what is to be done with it, and the scales of its groups."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    original_shape: tuple[int, ...]
    plan: QuantizePlan
    scales: GroupScales | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, plan: QuantizePlan) -> _TensorPieces:
        row = tensor if tensor.ndim else tensor.reshape(1)
        work = cls(tensor=row, shape=tuple(row.shape), original_shape=tuple(tensor.shape), plan=plan)
        if plan.scheme.scaling is Scaling.NONE:
            return work
        largest, largest_of_all = work.largest()
        with np.errstate(all="ignore"):  # what overflows or is NaN is part of the answer
            return dataclasses.replace(work, scales=group_scales(largest, plan=plan, largest_of_all=largest_of_all))

    def boxes(self) -> Iterator[Box]:
        """The pieces of the tensor, one after the other."""
        box_size = CPU_BOX_SIZE if self.tensor.device.type == "cpu" else BOX_SIZE
        return boxes(self.shape, axis=self.plan.axis, block_size=self.plan.group_length(self.shape), box_size=box_size)

    def values(self, box: Box) -> torch.Tensor:
        """The elements of a box as they are."""
        import torch

        return self.tensor[box.place].to(torch.float64).reshape(box.shape_OBEI)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the scales; of a tensor without dimensions they have none either."""
        scheme, axis = self.plan.scheme, self.plan.axis
        if not self.original_shape or scheme.scaling is Scaling.TENSOR:
            return ()
        if scheme.scaling is Scaling.CHANNEL:
            return (self.shape[axis],)
        return grouped_shape(self.shape, axis=axis, block_size=scheme.block_size)

    def largest(self) -> tuple[NDArray[np.float64], float]:
        """The largest magnitude of each group, and the largest finite one of all.

        The former is NaN or infinite of blocks that hold NaN or Inf, and finite of tensors and channels.
        """
        import torch

        scaling, axis = self.plan.scheme.scaling, self.plan.axis
        # One more dimension than none, so that parts of it are views.
        of_groups = torch.zeros(self.scales_shape or (1,), dtype=torch.float64, device=self.tensor.device)
        of_all = torch.zeros((), dtype=torch.float64, device=self.tensor.device)
        for box in self.boxes():
            magnitudes = self.values(box).abs()
            finite = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
            of_all = torch.maximum(of_all, finite.amax())
            if scaling is Scaling.BLOCK:
                place = of_groups[box.groups]
                place.copy_(torch.maximum(place, magnitudes.amax(dim=2).reshape(place.shape)))
            elif scaling is Scaling.CHANNEL:
                place = of_groups[box.place[axis]]
                place.copy_(torch.maximum(place, finite.amax(dim=(0, 2, 3))))
        largest = of_all.reshape(1) if scaling is Scaling.TENSOR else of_groups
        return largest.cpu().numpy(), float(of_all)

    def moved(self, array: NDArray[Any]) -> torch.Tensor:
        """An array as a tensor beside the original."""
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape).to(self.tensor.device)

    def piece(self, box: Box) -> _Piece:
        """What becomes of the elements of a box."""
        import torch

        plan, values = self.plan, self.values(box)
        scaled, factor = values, torch.ones((), dtype=torch.float64, device=values.device)
        if self.scales is not None:
            scales, tensor = self.scales.of_box(box, plan=plan), self.scales.tensor
            if tensor is None:
                factor = self.moved(scales)
                scaled = values / factor
            else:
                before, factor = map(self.moved, nvfp4_factors(scales, tensor))
                wide = values / before if tensor.recipe == ScaleRecipe.MODELOPT else values * before
                scaled = wide.to(torch.float32).to(torch.float64)
        uniform = source = None
        if plan.rounding is Rounding.STOCHASTIC:
            uniform = uniforms_at(self.indices(box), seed=plan.seed)
        elif plan.rounding is Rounding.HYBRID:
            own = self.tensor[box.place].reshape(box.shape_OBEI)
            source = own if self.scales is None else scaled.to(torch.float32)
        rounded = round_elements(
            scaled,
            target=plan.scheme.element,
            rounding=plan.rounding,
            saturate=plan.saturate,
            uniform=uniform,
            source=source,
        )
        return _Piece(values, scaled, rounded, factor)

    def indices(self, box: Box) -> torch.Tensor:
        """The indices of the elements of a box in C order of the tensor."""
        import torch

        found = torch.zeros(box.shape, dtype=torch.int64, device=self.tensor.device)
        for dim, part in enumerate(box.place):
            indices = torch.arange(part.start, part.stop, device=self.tensor.device) * math.prod(self.shape[dim + 1 :])
            found += indices.reshape(-1, *[1] * (len(self.shape) - 1 - dim))
        return found.reshape(box.shape_OBEI)

    def losses(self, piece: _Piece) -> torch.Tensor:
        """How many elements are what `COUNTS` names."""
        import torch

        element = self.plan.scheme.element
        magnitudes, is_finite = piece.scaled.abs(), piece.values.isfinite()
        is_spoiled = is_finite & magnitudes.isnan()
        is_counted = is_finite & ~is_spoiled & (piece.values != 0)
        kinds = (
            is_counted & (magnitudes < element.min_normal),
            is_counted & (piece.rounded == 0),
            is_counted & (magnitudes >= element.overflow_start_of(self.plan.rounding)),
            is_spoiled,
            piece.values.isnan(),
            piece.values.isinf(),
        )
        return torch.stack([kind.sum() for kind in kinds])
