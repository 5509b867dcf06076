"""Torch tensors in low-precision formats, computed on the device where they are.

The twin of `quantizer` in torch operations, equal bit for bit: for tensors that are not in the memory of the CPU.
Boxes of a fixed number of elements are quantised one after the other, so that the memory beyond the result is bounded;
the scales of the groups are made of their largest magnitudes on the CPU, by the same code.
"""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.quantization.blocks import Box, boxes, grouped_shape
from ranktape.analyze.numerics.quantization.element_kernels import COUNTS
from ranktape.analyze.numerics.quantization.encoded import Quantized
from ranktape.analyze.numerics.quantization.group_scales import GroupScales, group_scales, nvfp4_factors
from ranktape.analyze.numerics.quantization.losses import Losses
from ranktape.analyze.numerics.quantization.plan import Plan, plan_of
from ranktape.analyze.numerics.quantization.schemes import Recipe, Scaling
from ranktape.analyze.numerics.quantization.torch_rounding import (
    code_dtype,
    encode_elements,
    round_elements,
    uniforms_at,
)
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

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


def quantize_planned(tensor: torch.Tensor, plan: Plan) -> Quantized:
    """The tensor quantised as the plan says.

    Raises:
        UsageError: it does not hold real floating-point numbers.
    """
    import torch

    if not tensor.is_floating_point():
        raise UsageError(f"elements of {tensor.dtype} cannot be quantised: convert them to a floating-point type")
    work = _Work.of(tensor.detach(), plan=plan)
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
class _Work:
    """A tensor with at least one dimension, what is to be done with it, and the scales of its groups."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    original_shape: tuple[int, ...]
    plan: Plan
    scales: GroupScales | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, plan: Plan) -> _Work:
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
                wide = values / before if tensor.recipe == Recipe.MODELOPT else values * before
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
