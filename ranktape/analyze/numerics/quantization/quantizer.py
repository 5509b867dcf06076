"""Quantises what users pass, arrays of numpy, tensors of torch or lists, and warns of what is lost.

Elements are rounded in float64, by operations of torch on the tensor's device, piece by piece.
"""

# Shapes: O = everything before the axis, L = elements along it, B = groups along it, I = everything after it;
# R = rows, C = columns of a matrix.

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Unpack

import numpy as np

from ranktape.analyze.numerics.formats import Coding, Format, Rounding, codes_of
from ranktape.analyze.numerics.formats.values import (
    HYBRID_BITS,
    NARROW_BITS,
    narrow_codes,
    nearest_in_table,
    round_magnitudes,
)
from ranktape.analyze.numerics.pieces import check_readable, tensor_of, tensor_or_array
from ranktape.analyze.numerics.quantization.encoded import Losses, LossSeverity, QuantizationWarning, Quantized
from ranktape.analyze.numerics.quantization.plan import QuantizeOptions, QuantizePlan, plan_of
from ranktape.analyze.numerics.quantization.rotation import rotated
from ranktape.analyze.numerics.quantization.scales import (
    STRETCH,
    GroupScales,
    factors_of,
    group_scales,
    is_divided,
    stored_scales,
)
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

Part: TypeAlias = tuple[slice, slice, slice]
"""A piece of a tensor in three dimensions."""

PIECE_SIZE, DEVICE_PIECE_SIZE = 1 << 17, 1 << 22
"""Elements of a piece on a CPU, where it stays in a cache, and on other devices, where each operation is a launch."""


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


def quantize_planned(x: AnyArray | torch.Tensor, *, plan: QuantizePlan, is_apart: bool = False) -> Quantized:
    """What `quantize` gives, once the options have been read; it warns of nothing.

    With `is_apart` values lack the scale of the tensor, or of their channel: elements times the scales of blocks.

    Raises:
        UsageError: the elements are not real floating-point numbers.
    """
    is_array = isinstance(x, np.ndarray)
    name = x.dtype.name if isinstance(x, np.ndarray) else str(x.dtype).removeprefix("torch.")
    row = DTYPES.get(name)
    if row is None or not row.is_floating:
        allowed = ", ".join(row.name for row in DTYPES.values() if row.is_floating)
        raise UsageError(
            f"elements of {name} cannot be quantised: convert them to real floating-point numbers, of {allowed}"
        )
    if plan.rounding is Rounding.HYBRID and plan.scheme.scaling is Scaling.NONE and name not in HYBRID_BITS:
        known = ", ".join(HYBRID_BITS)
        raise UsageError(f"hybrid rounding looks at the bits of the type that values come in: give {known}, not {name}")
    tensor = tensor_of(x) if isinstance(x, np.ndarray) else x.detach()
    check_readable(tensor)
    found = _quantized(tensor, plan=plan, is_apart=is_apart)
    return found.as_arrays() if is_array else found


def _quantized(x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool) -> Quantized:
    import torch

    shape, scheme = tuple(x.shape), plan.scheme
    turned = x.reshape(shape or (1,))
    if plan.rotation:
        turned = rotated(turned, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed)
    groups = ScaleGroups.of(turned, plan=plan)
    scales = groups.scales()
    factors, after = None, None
    if scales is not None:
        factors = tuple(groups.in_three(one) for one in factors_of(scales, plan=plan))
        # What is apart is the scale of the tensor or of channels; of NVFP4, whose blocks have scales, that of these.
        after = (
            factors[1] if not is_apart else groups.in_three(scales.values) if scheme.scaling is Scaling.BLOCK else None
        )
    values = torch.empty(groups.x_OLI.shape, dtype=groups.value_dtype, device=x.device)
    codes = torch.empty(groups.x_OLI.shape, dtype=_code_dtype(scheme.element), device=x.device)
    counts = torch.zeros(len(dataclasses.fields(Losses)) - 1, dtype=torch.int64, device=x.device)
    for part in groups.parts():
        scaled, rounded = groups.rounded(part, factors)
        signed, lost = _finished(groups.x_OLI[part].to(torch.float64), scaled, rounded, plan=plan)
        counts += lost
        values[part] = signed if after is None else signed * groups.part_of(after, part)
        if factors is not None:  # a block that is NaN as a whole has the codes of 0
            signed = signed.masked_fill(groups.part_of(factors[1], part).isnan(), 0.0)
        codes[part] = _codes(signed, scheme.element)
    found = values.view(turned.shape)
    if plan.rotation:
        found = rotated(found, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed, is_back=True)
    names, scale_shape = (field.name for field in dataclasses.fields(Losses)), groups.scale_shape if shape else ()
    return Quantized(
        scheme=scheme,
        values=found.reshape(shape),
        scales=None if scales is None else stored_scales(scales, plan=plan).reshape(scale_shape),
        scale_values=None if scales is None else scales.values.reshape(scale_shape),
        tensor_scale=None if scales is None or scales.tensor is None else scales.tensor.scale,
        losses=Losses(**dict(zip(names, [x.numel(), *counts.tolist()], strict=True))),
        stored_codes=codes.reshape(shape),
    )


_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
"""The pattern of an infinity: those of larger magnitude are NaN."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleGroups:
    """A tensor in three dimensions, and the groups along the second one whose elements share a scale."""

    x_OLI: torch.Tensor
    """The elements."""
    shape: tuple[int, ...]
    """The tensor's own."""
    plan: QuantizePlan
    """How it is quantised."""
    length: int
    """Elements of a group along the axis; tiles are such runs in several rows."""

    @classmethod
    def of(cls, x: torch.Tensor, *, plan: QuantizePlan) -> ScaleGroups:
        """The groups of a tensor with at least one dimension."""
        shape = tuple(x.shape)
        sizes = math.prod(shape[: plan.axis]), shape[plan.axis], math.prod(shape[plan.axis + 1 :])
        length = min(plan.group_length(shape), max(1, sizes[1]))
        return cls(x_OLI=x.reshape(sizes), shape=shape, plan=plan, length=length)

    @property
    def value_dtype(self) -> torch.dtype:
        """Of dequantised values: float64 of float64, float32 of every other type."""
        import torch

        return torch.float64 if self.x_OLI.dtype is torch.float64 else torch.float32

    @property
    def num_runs(self) -> int:
        """Groups along the axis; the last one may be shorter."""
        return -(-self.x_OLI.shape[1] // self.length)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales."""
        axis, scheme = self.plan.axis, self.plan.scheme
        if scheme.scaling is not Scaling.BLOCK:
            return (self.shape[axis],) if scheme.scaling is Scaling.CHANNEL else ()
        found = [*self.shape[:axis], self.num_runs, *self.shape[axis + 1 :]]
        if scheme.block_rows > 1:
            found[-2] = -(-found[-2] // scheme.block_rows)
        return tuple(found)

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

    def scales(
        self,
        *,
        largest: Callable[[], tuple[torch.Tensor, float]] | None = None,
        errors_of: Callable[[GroupScales], torch.Tensor] | None = None,
    ) -> GroupScales | None:
        """The scales of all groups, in `scale_shape`; None without.

        They follow from the `largest` magnitudes of groups, those of blocks not always finite, and the largest finite
        one of all, which is looked for where scales have a scale. Of two scales that a block may have, the better one
        has the smaller of `errors_of`, the squared errors of its values added up one after the other, and those of the
        rows of a tile.
        """
        if self.plan.scheme.scaling is Scaling.NONE:
            return None
        magnitudes, of_all = (largest or self._largest)()
        first = group_scales(magnitudes, plan=self.plan, largest_of_all=of_all)
        if not self.plan.four_over_six:
            return first
        second = group_scales(magnitudes, plan=self.plan, largest_of_all=of_all, stretch=STRETCH)
        squared_errors = errors_of or self._squared_errors
        is_better = squared_errors(second) < squared_errors(first)
        return dataclasses.replace(first, values=second.values.where(is_better, first.values))

    def _largest(self) -> tuple[torch.Tensor, float]:
        """See `scales`: patterns of magnitudes are in the order of the magnitudes, and compared in less time."""
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
            found = torch.zeros((x_OLI.shape[0], self.num_runs, x_OLI.shape[2]), dtype=kind, device=x_OLI.device)
            for part in self.parts(self.length):
                found[self._runs(part)] = _in_runs(patterns[part] & top, self.length).amax(2)
        else:
            dims = (0, 2) if scheme.scaling is Scaling.CHANNEL else (0, 1, 2)
            found = torch.zeros(self.scale_shape or (1,), dtype=kind, device=x_OLI.device)
            for part in self.parts():
                own = found[part[1]] if scheme.scaling is Scaling.CHANNEL else found
                own.copy_(own.maximum(finite(part).amax(dims)))
        of_all = 0.0
        if scheme.has_tensor_scale and found.numel():
            most = found.amax()
            if most >= infinity:
                most = torch.stack([finite(part).amax() for part in self.parts()]).amax()
            of_all = float(most.view(wide.dtype))
        return self._in_tiles(found.view(wide.dtype).to(torch.float64), torch.maximum), of_all

    def _runs(self, part: Part) -> Part:
        """Which groups the elements of a piece are of."""
        return part[0], slice(part[1].start // self.length, -(-part[1].stop // self.length)), part[2]

    def _squared_errors(self, scales: GroupScales) -> torch.Tensor:
        """The squared errors of the values of each block with these scales, added up one after the other."""
        import torch

        factors = tuple(self.in_three(one) for one in factors_of(scales, plan=self.plan))
        found = torch.zeros_like(self.in_three(scales.values))
        for part in self.parts(self.length):
            rounded = self.rounded(part, factors)[1].clamp(max=self.plan.scheme.element.maximum)
            values = (rounded * self.part_of(factors[1], part)).to(self.value_dtype).to(torch.float64)
            squares = (values - self.x_OLI[part].to(torch.float64).abs()).square_()
            # One after the other, as a loop does: a sum adds pairs.
            found[self._runs(part)] = functools.reduce(operator.add, _in_runs(squares, self.length).unbind(2))
        return self._in_tiles(found, operator.add)

    def _in_tiles(
        self, of_runs: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What is known of runs, in `scale_shape`: of those that are the rows of a tile together."""
        rows = self.plan.scheme.block_rows
        if rows == 1:
            return of_runs.view(self.scale_shape)
        by_rows = _in_runs(of_runs.view(math.prod(self.shape[:-2]), self.shape[-2], self.num_runs), rows)
        return functools.reduce(combine, by_rows.unbind(2)).view(self.scale_shape)

    def in_three(self, of_groups: torch.Tensor) -> torch.Tensor:
        """What is known of groups, in `scale_shape`, in three dimensions: of tiles for each of their rows."""
        if self.plan.scheme.scaling is not Scaling.BLOCK:
            return of_groups.view(1, -1, 1)
        rows = self.plan.scheme.block_rows
        if rows > 1:
            of_groups = of_groups.repeat_interleave(rows, dim=-2)[..., : self.shape[-2], :]
        return of_groups.reshape(self.x_OLI.shape[0], self.num_runs, self.x_OLI.shape[2])

    def part_of(self, in_three: torch.Tensor, part: Part) -> torch.Tensor:
        """Of each element of a piece what is known of its group, or of all at once."""
        import torch

        if self.plan.scheme.scaling is not Scaling.BLOCK:
            return in_three if in_three.shape[1] == 1 else in_three[:, part[1]]
        place = torch.arange(part[1].start, part[1].stop, device=in_three.device) // self.length
        return in_three[self._runs(part)].index_select(1, place - part[1].start // self.length)

    def rounded(self, part: Part, factors: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The magnitudes of a piece, scaled, and what they are rounded to, were the format without end."""
        import torch

        plan, element, own = self.plan, self.plan.scheme.element, self.x_OLI[part]
        exact = own.to(torch.float64)
        scaled = exact.abs()
        if factors is not None:
            before = self.part_of(factors[0], part)
            scaled = scaled / before if is_divided(plan) else scaled * before
            if plan.scale_rule is None:  # scales that programs divide by in float32
                scaled = scaled.to(torch.float32).to(torch.float64)
        if element.coding is Coding.TABLE:
            return scaled, nearest_in_table(scaled.copysign(exact), target=element).abs()
        source = own if factors is None else scaled.copysign(exact).to(torch.float32)
        places = self._places(part) if plan.rounding is Rounding.STOCHASTIC else None
        rounded: torch.Tensor = round_magnitudes(
            scaled, element=element, rounding=plan.rounding, seed=plan.seed, places=places, source=source
        )
        return scaled, rounded

    def _places(self, part: Part) -> torch.Tensor:
        """The indices of the elements of a piece in C order of the tensor."""
        import torch

        _, along, inner = self.x_OLI.shape
        outer, place, index = (torch.arange(one.start, one.stop, device=self.x_OLI.device) for one in part)
        return (outer[:, None, None] * along + place[:, None]) * inner + index


def _in_runs(x_OLI: torch.Tensor, length: int) -> torch.Tensor:
    """The elements by their runs along the second dimension, the last one filled up with zeros."""
    import torch

    missing = -x_OLI.shape[1] % length
    filled = torch.nn.functional.pad(x_OLI, (0, 0, 0, missing)) if missing else x_OLI
    runs: torch.Tensor = filled.unflatten(1, (filled.shape[1] // length, length))
    return runs


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


def _code_dtype(element: Format) -> torch.dtype:
    import torch

    return {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[max(NARROW_BITS, element.num_bits)]


def _codes(values: torch.Tensor, element: Format) -> torch.Tensor:
    """The codes of values of the format; of NaN that of 0 where it has none."""
    import torch

    if element.num_bits <= NARROW_BITS:
        codes: torch.Tensor = narrow_codes(values, target=element)
        return codes
    bits = values.to(getattr(torch, str(element.dtype))).view({16: torch.int16, 32: torch.int32}[element.num_bits])
    # Each device has its own idea of the bits of a NaN.
    bits[values.isnan()] = int(codes_of(np.nan, target=element))
    return bits.view(_code_dtype(element))
