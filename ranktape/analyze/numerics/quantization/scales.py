"""The scales of groups of elements, including the two levels of NVFP4, as numpy arrays or torch tensors.

The groups of a tensor on any device are scaled and rounded in float64 by torch operations, piece by piece.
"""

# Shapes: O = elements before the axis, L = along the axis, B = groups along it, I = elements after it.

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, Coding, Rounding
from ranktape.analyze.numerics.formats.values import (
    NARROW_BITS,
    at_least,
    at_most,
    namespace,
    narrow_codes,
    nearest_in_table,
    powers_of_two,
    round_magnitudes,
)
from ranktape.analyze.numerics.quantization.encoded import LOSSES, code_dtype, element_codes
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe, Scaling, exact_target, scale_exponents

if TYPE_CHECKING:
    import torch

MAX_FLOAT32 = FORMATS["fp32"].maximum

_ELEMENT_MAXIMUM = FORMATS["fp4_e2m1"].maximum

_LARGEST_PRODUCT = FORMATS["fp8_e4m3"].maximum * _ELEMENT_MAXIMUM

_LARGEST_OF_TWO = 256.0 * _ELEMENT_MAXIMUM
"""The largest product with four over six, whose second scale is 3/2 of the first: e4m3 has 384 but not 3/2 of 448.

Source: github.com/mit-han-lab/fouroversix, by the authors of arXiv 2512.02010.
"""

STRETCH = 1.5
"""The ratio of the second scale of four over six to the first: 6 / 4."""

_MIN_TENSOR_SCALE = 2.0**-121
"""Smallest tensor scale of ModelOpt and torchao; reciprocals of smaller ones would exceed float32."""

_MIN_ENCODING_SCALE = 2.0**-127
"""Smallest level of TransformerEngine, reached only with offsets; its reciprocal is a float32 number."""

_MODELOPT_MIN_CODE, _TORCHAO_MIN_CODE = 2.0**-9, 2.0**-6
"""Smallest scales of a block in ModelOpt and torchao; TransformerEngine has none."""

_FURTHEST_OFFSET = 400
"""A limit of offsets: a float32 times 2 to this power or its inverse is already infinite or 0."""

_E8M0_BIAS, _E8M0_NAN = 127, 0xFF


class TensorScale(NamedTuple):
    """The scale of the scales of a tensor in NVFP4."""

    recipe: ScaleRecipe
    """How the scales are computed."""
    scale: float
    """The factor of the scales of blocks."""
    to_code: float
    """The factor, or divisor, that turns the largest magnitude of a block into its scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScales:
    """The scales of groups, in the shape of their largest magnitudes."""

    values: Any
    """The scales as float64; NaN if the block has NaN or Inf."""
    largest: Any
    """The largest magnitudes of the groups."""
    tensor: TensorScale | None
    """The scale of the scales of NVFP4; None for other schemes."""


def level_of(largest: float, *, recipe: ScaleRecipe, offset: int = 0, four_over_six: bool = False) -> float:
    """The float32 from which `tensor_scale_of` computes the scale of a tensor with this largest finite magnitude.

    `offset` is added to the exponent of the scale. If the magnitude is 0 in float32, the scale is 1. With
    `four_over_six`, the first scale of the largest block is 256 instead of 448.
    """
    product = _LARGEST_OF_TWO if four_over_six else _LARGEST_PRODUCT
    narrow = _nearest_float32(largest)
    if narrow == 0:
        return 1.0
    if recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        return max(_nearest_float32(_shifted(_nearest_float32(product / narrow), -offset)), _MIN_ENCODING_SCALE)
    return max(_nearest_float32(_shifted(_nearest_float32(narrow / product), offset)), _MIN_TENSOR_SCALE)


def tensor_scale_of(level: float, recipe: ScaleRecipe) -> TensorScale:
    """The scale of a tensor, given the result of `level_of`."""
    if recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        sixth = _nearest_float32(1.0 / _ELEMENT_MAXIMUM)
        return TensorScale(recipe, _nearest_float32(1.0 / level), _nearest_float32(level * sixth))
    to_code = _nearest_float32(_ELEMENT_MAXIMUM * level) if recipe is ScaleRecipe.MODELOPT else level
    return TensorScale(recipe, level, to_code)


def _nearest_float32(number: float) -> float:
    """The nearest float32, at most the largest finite one."""
    return float(np.float32(min(number, MAX_FLOAT32)))


def _shifted(number: float, offset: int) -> float:
    return number * 2.0 ** min(max(offset, -_FURTHEST_OFFSET), _FURTHEST_OFFSET)


def _scalar_like(number: float, like: Any) -> Any:
    """A number in the type and on the device of `like`; a GPU multiplies by the reciprocal of a Python divisor."""
    return namespace(like).asarray(number, dtype=like.dtype, device=like.device)


@np.errstate(all="ignore")  # overflow is clamped to the largest scale
def group_scales(largest: Any, *, plan: QuantizePlan, largest_of_all: float = 0.0, stretch: float = 1.0) -> GroupScales:
    """The scales of groups, given their largest magnitudes as float64 of any shape.

    The magnitude of a block is NaN or infinite if the block has NaN or Inf; those of tensors and channels are finite.
    `largest_of_all` is the largest finite magnitude of the tensor, which NVFP4 needs. Scales that are not powers of two
    are multiplied by `stretch`, compared with those that map the largest magnitude to the largest element.
    """
    tensor = None
    if plan.scale_rule is not None:
        # Magnitudes that are not finite get some exponent here, and become NaN below.
        exponents = scale_exponents(
            largest,
            rule=plan.scale_rule,
            element=plan.scheme.element,
            offset=plan.scale_offset,
            scale_bits=plan.scale_bits,
        )
        values = powers_of_two(exponents)
    elif plan.scheme.recipe is not None:
        recipe = plan.scheme.recipe
        level = level_of(largest_of_all, recipe=recipe, offset=plan.scale_offset, four_over_six=plan.four_over_six)
        tensor = tensor_scale_of(level, recipe)
        values = block_scales(largest, tensor, stretch=stretch)
    else:
        values = exact_scales(largest, plan=plan, stretch=stretch)
    # 0 times a magnitude is 0, or NaN if the magnitude is not finite.
    return GroupScales(values=values + 0.0 * largest, largest=largest, tensor=tensor)


def block_scales(largest: Any, tensor: TensorScale, *, stretch: float = 1.0) -> Any:
    """The e4m3 scales of NVFP4 blocks, as float32, given their largest finite magnitudes.

    They are multiplied by `stretch` before they are rounded to e4m3. Every step is rounded to float32.
    """
    xp = namespace(largest)
    narrow = at_most(xp.asarray(largest, dtype=xp.float32), MAX_FLOAT32)
    if tensor.recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        scaled = narrow * tensor.to_code * stretch
    elif tensor.recipe is ScaleRecipe.MODELOPT:
        scaled = narrow / _scalar_like(tensor.to_code, narrow) * stretch
        scaled = xp.where(scaled > 0, xp.clip(scaled, _MODELOPT_MIN_CODE, None), 1.0)
    else:
        scaled = narrow / _scalar_like(_ELEMENT_MAXIMUM, narrow) / _scalar_like(tensor.to_code, narrow)
        scaled = at_least(scaled * stretch, _TORCHAO_MIN_CODE)
    stored = FORMATS["fp8_e4m3"]
    return round_magnitudes(at_most(scaled, stored.maximum), element=stored, rounding=Rounding.EVEN)


def exact_scales(largest: Any, *, plan: QuantizePlan, stretch: float = 1.0) -> Any:
    """The scales that map these largest finite magnitudes to the target over `stretch`; 1 if a magnitude is 0."""
    xp, stored = namespace(largest), plan.scheme.scale or FORMATS["fp32"]
    nearest = xp.asarray(largest * stretch / _scalar_like(exact_target(plan.scheme.element), largest), dtype=xp.float32)
    shifted = xp.asarray(_shifted(xp.asarray(nearest, dtype=xp.float64), plan.scale_offset), dtype=xp.float32)
    bounded = at_most(xp.asarray(shifted, dtype=xp.float64), stored.maximum)
    rounded = at_least(round_magnitudes(bounded, element=stored, rounding=Rounding.EVEN), stored.min_subnormal)
    return xp.where(largest == 0, 1.0, rounded)


def stored_scales(scales: GroupScales, *, plan: QuantizePlan) -> Any:
    """The scales as they are stored: uint8 codes for blocks with 8-bit scales, else float32."""
    values, scale = scales.values, plan.scheme.scale
    xp = namespace(values)
    if scale is None or scale.num_bits > NARROW_BITS:
        return xp.asarray(values, dtype=xp.float32)
    if plan.scheme.scaling is Scaling.BLOCK and plan.scale_rule is not None:
        exponents = xp.frexp(xp.where(xp.isnan(values), 1.0, values))[1] - 1
        return xp.asarray(xp.where(xp.isnan(values), _E8M0_NAN, exponents + _E8M0_BIAS), dtype=xp.uint8)
    return narrow_codes(values, target=scale)


def is_divided(plan: QuantizePlan) -> bool:
    """Whether elements are divided by the first factor of `factors_of`, instead of multiplied."""
    return plan.scale_rule is None and plan.scheme.recipe in {None, ScaleRecipe.MODELOPT}


def is_float32(plan: QuantizePlan) -> bool:
    """Whether scaled elements are rounded to float32, as libraries do if scales are not powers of two."""
    return plan.scale_rule is None and plan.scheme.scaling is not Scaling.NONE


@np.errstate(all="ignore")
def factors_of(scales: GroupScales, *, plan: QuantizePlan) -> tuple[Any, Any]:
    """The factors or divisors of elements before rounding, and the factors of rounded elements.

    They are float32 in NVFP4, else float64. If scales are not powers of two, the caller rounds scaled elements to
    float32. If the scale of a block is 0, both are 0, so the block becomes 0. They are NaN where the scale is NaN.
    """
    values, tensor = scales.values, scales.tensor
    xp = namespace(values)
    if tensor is None:
        return 1.0 / values if plan.scale_rule is not None else values, values
    narrow = xp.asarray(values, dtype=xp.float32)
    after = at_most(narrow * tensor.scale, MAX_FLOAT32)
    if tensor.recipe is ScaleRecipe.MODELOPT:
        before = after
    elif tensor.recipe is ScaleRecipe.TRANSFORMER_ENGINE:
        before = xp.where(narrow == 0, 0.0, xp.clip(1.0 / after, None, MAX_FLOAT32))
    else:
        # Not a Python number: torch would then multiply by the reciprocal.
        inverse = _scalar_like(_nearest_float32(1.0 / tensor.scale), narrow)
        before = at_most(inverse / narrow, MAX_FLOAT32)
    return before, after


Part: TypeAlias = tuple[slice, slice, slice]
"""The slices of a piece of a tensor with three dimensions."""

PIECE_SIZE, DEVICE_PIECE_SIZE = 1 << 17, 1 << 22
"""Number of elements of a piece on a CPU, where it fits a cache, and on other devices, where launches cost time."""

_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
"""The bit pattern of infinity; larger patterns are NaN."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleGroups:
    """A tensor reshaped to three dimensions, and the groups along the second one whose elements share a scale."""

    x_OLI: torch.Tensor
    """The elements."""
    shape: tuple[int, ...]
    """The original shape of the tensor."""
    plan: QuantizePlan
    """How the tensor is quantised."""
    length: int
    """Number of elements of a group along the axis; a tile is such a run in several rows."""

    @classmethod
    def of(cls, x: torch.Tensor, *, plan: QuantizePlan) -> ScaleGroups:
        """The groups of a tensor with at least one dimension."""
        shape = tuple(x.shape)
        sizes = math.prod(shape[: plan.axis]), shape[plan.axis], math.prod(shape[plan.axis + 1 :])
        length = min(plan.group_length(shape), max(1, sizes[1]))
        return cls(x_OLI=x.reshape(sizes), shape=shape, plan=plan, length=length)

    @property
    def value_dtype(self) -> torch.dtype:
        """The type of dequantised values: float64 if the elements are, else float32."""
        import torch

        return torch.float64 if self.x_OLI.dtype is torch.float64 else torch.float32

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile, at most that of the tensor; the last tile may be padded."""
        rows = self.plan.scheme.block_rows
        return min(rows, max(1, self.shape[-2])) if rows > 1 else 1

    @property
    def num_runs(self) -> int:
        """Number of groups along the axis; the last one may be shorter."""
        return -(-self.x_OLI.shape[1] // self.length)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales."""
        axis, scheme = self.plan.axis, self.plan.scheme
        if scheme.scaling is not Scaling.BLOCK:
            return (self.shape[axis],) if scheme.scaling is Scaling.CHANNEL else ()
        shape = [*self.shape[:axis], self.num_runs, *self.shape[axis + 1 :]]
        if scheme.block_rows > 1:
            shape[-2] = -(-shape[-2] // scheme.block_rows)
        return tuple(shape)

    def parts(self, unit: int = 1) -> Iterator[Part]:
        """Pieces that cover the tensor once, with whole runs of `unit` elements along the axis."""
        outer, along, inner = self.x_OLI.shape
        size = PIECE_SIZE if self.x_OLI.device.type == "cpu" else DEVICE_PIECE_SIZE
        columns = max(1, min(inner, size // unit))
        rows = max(1, size // (columns * unit)) * unit
        planes = max(1, size // max(1, columns * along)) if columns == inner and rows >= along else 1
        cuts = zip((outer, along, inner), (planes, rows, columns), strict=True)
        yield from itertools.product(
            *([slice(start, min(start + step, end)) for start in range(0, end, step)] for end, step in cuts)
        )

    def scales(self) -> GroupScales | None:
        """The scales of all groups, in `scale_shape`; None if the scheme has no scales.

        With four over six, a block has the scale with the smaller sum of squared errors.
        """
        if self.plan.scheme.scaling is Scaling.NONE:
            return None
        largest, largest_of_all = self._largest()
        first = group_scales(largest, plan=self.plan, largest_of_all=largest_of_all)
        if not self.plan.four_over_six:
            return first
        second = group_scales(largest, plan=self.plan, largest_of_all=largest_of_all, stretch=STRETCH)
        is_better = self._squared_errors(second) < self._squared_errors(first)
        return dataclasses.replace(first, values=second.values.where(is_better, first.values))

    def _largest(self) -> tuple[torch.Tensor, float]:
        """The largest magnitude of each group, NaN or infinite for blocks with NaN or Inf, and the largest finite one.

        The latter is 0 unless scales have a scale. Bit patterns are compared, which takes less time.
        """
        import torch

        scheme, x_OLI = self.plan.scheme, self.x_OLI
        wide = x_OLI if x_OLI.dtype.itemsize > 1 else x_OLI.to(torch.float32)
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wide.dtype.itemsize]
        patterns, top = wide.view(kind), torch.iinfo(kind).max
        infinity = _INFINITIES[str(wide.dtype).removeprefix("torch.")]

        def finite(part: Part) -> torch.Tensor:
            magnitudes = patterns[part] & top
            return magnitudes.masked_fill_(magnitudes >= infinity, 0)

        if scheme.scaling is Scaling.BLOCK:
            largest = torch.zeros((x_OLI.shape[0], self.num_runs, x_OLI.shape[2]), dtype=kind, device=x_OLI.device)
            for part in self.parts(self.length):
                largest[self._runs(part)] = _split_runs(patterns[part] & top, self.length).amax(2)
        else:
            dims = (0, 2) if scheme.scaling is Scaling.CHANNEL else (0, 1, 2)
            largest = torch.zeros(self.scale_shape or (1,), dtype=kind, device=x_OLI.device)
            for part in self.parts():
                group_part = largest[part[1]] if scheme.scaling is Scaling.CHANNEL else largest
                group_part.copy_(group_part.maximum(finite(part).amax(dims)))
        largest_of_all = 0.0
        if scheme.has_tensor_scale and largest.numel():
            top_pattern = largest.amax()
            if top_pattern >= infinity:
                top_pattern = torch.stack([finite(part).amax() for part in self.parts()]).amax()
            largest_of_all = float(top_pattern.view(wide.dtype))
        return self._to_scale_shape(largest.view(wide.dtype).to(torch.float64), torch.maximum), largest_of_all

    def encoded(self, before: torch.Tensor | None, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The values and codes in the shape of the tensor, and the counts in the order of `LOSSES`.

        Elements are scaled by `before` and, once they are rounded, multiplied by `after`. Both are in `scale_shape`.
        `before` is None if the scheme has no scales.
        """
        import torch

        plan, element, x_OLI = self.plan, self.plan.scheme.element, self.x_OLI
        before_OBI = None if before is None else self.by_group(before)
        after_OBI = self.by_group(after)
        values = torch.empty(x_OLI.shape, dtype=self.value_dtype, device=x_OLI.device)
        codes = torch.empty(x_OLI.shape, dtype=code_dtype(element), device=x_OLI.device)
        counts = torch.zeros(len(LOSSES), dtype=torch.int64, device=x_OLI.device)
        for part in self.parts():
            scaled, rounded = self.rounded(part, before_OBI)
            signed, losses = _finished(x_OLI[part].to(torch.float64), scaled, rounded, plan=plan)
            counts += losses
            factors = self.element_values(after_OBI, part)
            values[part] = signed * factors
            # A block that is NaN as a whole has the codes of 0.
            codes[part] = element_codes(signed.masked_fill(factors.isnan(), 0.0), element)
        return values.view(self.shape), codes.view(self.shape), counts.tolist()

    def _runs(self, part: Part) -> Part:
        """The groups of the elements of a piece."""
        return part[0], slice(part[1].start // self.length, -(-part[1].stop // self.length)), part[2]

    def _squared_errors(self, scales: GroupScales) -> torch.Tensor:
        """The sum of the squared errors of each block, added in order along a run, then over the rows of a tile."""
        import torch

        factors = tuple(self.by_group(factor) for factor in factors_of(scales, plan=self.plan))
        sums = torch.zeros_like(self.by_group(scales.values))
        for part in self.parts(self.length):
            rounded = self.rounded(part, factors[0])[1].clamp(max=self.plan.scheme.element.maximum)
            values = (rounded * self.element_values(factors[1], part)).to(self.value_dtype).to(torch.float64)
            squares = (values - self.x_OLI[part].to(torch.float64).abs()).square_()
            # Adds one after the other, as the compiled loop does; `sum` adds in pairs.
            sums[self._runs(part)] = functools.reduce(operator.add, _split_runs(squares, self.length).unbind(2))
        return self._to_scale_shape(sums, operator.add)

    def _to_scale_shape(
        self, run_values: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Values of runs in `scale_shape`; `combine` reduces those of the rows of a tile."""
        rows = self.tile_rows
        if rows == 1:
            return run_values.view(self.scale_shape)
        values_by_tile = _split_runs(run_values.view(math.prod(self.shape[:-2]), self.shape[-2], self.num_runs), rows)
        return functools.reduce(combine, values_by_tile.unbind(2)).view(self.scale_shape)

    def by_group(self, group_values: torch.Tensor) -> torch.Tensor:
        """Values of groups, from `scale_shape` to three dimensions; those of a tile are repeated for its rows."""
        if self.plan.scheme.scaling is not Scaling.BLOCK:
            return group_values.view(1, -1, 1)
        rows = self.tile_rows
        if rows > 1:
            group_values = group_values.repeat_interleave(rows, dim=-2)[..., : self.shape[-2], :]
        return group_values.reshape(self.x_OLI.shape[0], self.num_runs, self.x_OLI.shape[2])

    def element_values(self, values_OBI: torch.Tensor, part: Part) -> torch.Tensor:
        """The value of the group of each element of a piece, or a single value that broadcasts."""
        import torch

        if self.plan.scheme.scaling is not Scaling.BLOCK:
            return values_OBI if values_OBI.shape[1] == 1 else values_OBI[:, part[1]]
        indices = torch.arange(part[1].start, part[1].stop, device=values_OBI.device) // self.length
        return values_OBI[self._runs(part)].index_select(1, indices - part[1].start // self.length)

    def rounded(self, part: Part, before_OBI: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The scaled magnitudes of a piece, and what they round to if the format had values beyond its largest."""
        import torch

        plan, element, part_OLI = self.plan, self.plan.scheme.element, self.x_OLI[part]
        exact = part_OLI.to(torch.float64)
        scaled = exact.abs()
        if before_OBI is not None:
            before = self.element_values(before_OBI, part)
            scaled = scaled / before if is_divided(plan) else scaled * before
            if is_float32(plan):
                scaled = scaled.to(torch.float32).to(torch.float64)
        if element.coding is Coding.TABLE:
            return scaled, nearest_in_table(scaled.copysign(exact), target=element).abs()
        source = part_OLI if before_OBI is None else scaled.copysign(exact).to(torch.float32)
        indices = self._element_indices(part) if plan.rounding is Rounding.STOCHASTIC else None
        rounded: torch.Tensor = round_magnitudes(
            scaled, element=element, rounding=plan.rounding, seed=plan.seed, indices=indices, source=source
        )
        return scaled, rounded

    def _element_indices(self, part: Part) -> torch.Tensor:
        """The indices of the elements of a piece, in C order of the tensor."""
        import torch

        _, along, inner = self.x_OLI.shape
        outer, row, index = (torch.arange(cut.start, cut.stop, device=self.x_OLI.device) for cut in part)
        return (outer[:, None, None] * along + row[:, None]) * inner + index


def _split_runs(x_OLI: torch.Tensor, length: int) -> torch.Tensor:
    """The elements with the second dimension split into runs, the last of which is padded with zeros."""
    import torch

    missing = -x_OLI.shape[1] % length
    filled = torch.nn.functional.pad(x_OLI, (0, 0, 0, missing)) if missing else x_OLI
    runs: torch.Tensor = filled.unflatten(1, (filled.shape[1] // length, length))
    return runs


def _finished(
    values: torch.Tensor, scaled: torch.Tensor, rounded: torch.Tensor, *, plan: QuantizePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded magnitudes, clamped and with the signs of the values, and the counts in the order of `LOSSES`.

    `scaled` are the magnitudes before rounding, NaN where the value or its scale is NaN.
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
