"""Quantises what users pass, arrays of numpy, tensors of torch or lists, and warns of what is lost."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats import Rounding, round_to
from ranktape.analyze.numerics.pieces import Box, array_of, boxes, check_readable, grouped_shape, tensor_or_array
from ranktape.analyze.numerics.quantization import array_ops
from ranktape.analyze.numerics.quantization.encoded import Losses, LossSeverity, QuantizationWarning, Quantized
from ranktape.analyze.numerics.quantization.group_scales import GroupScales, group_scales, nvfp4_factors
from ranktape.analyze.numerics.quantization.schemes import (
    MAX_SCALE_BITS,
    QuantizePlan,
    ScaleRecipe,
    Scaling,
    plan_of,
)
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


def quantize_planned(x: AnyArray | torch.Tensor, *, plan: QuantizePlan, is_apart: bool = False) -> Quantized:
    """What `quantize` gives, once the options have been read; it warns of nothing.

    With `is_apart` values lack the scale of the tensor, or of their channel: elements times the scales of blocks.

    Raises:
        UsageError: the elements are not real floating-point numbers.
    """
    if isinstance(x, np.ndarray):
        _check(x.dtype.name)
        return quantize_pieces(x, plan=plan, ops=array_ops, is_apart=is_apart)
    _check(str(x.dtype).removeprefix("torch."))
    check_readable(x)
    if x.device.type == "cpu":
        return _as_tensors(quantize_pieces(array_of(x), plan=plan, ops=array_ops, is_apart=is_apart))
    from ranktape.analyze.numerics.quantization import tensor_ops

    return quantize_pieces(x.detach(), plan=plan, ops=tensor_ops, is_apart=is_apart)


def quantize_pieces(x: Any, *, plan: QuantizePlan, ops: ModuleType, is_apart: bool = False) -> Quantized:
    """An array of numpy, or with `tensor_ops` a tensor of torch, quantised piece by piece."""
    work = _Pieces(x, plan=plan, ops=ops, is_apart=is_apart)
    with np.errstate(all="ignore"):  # what overflows, vanishes or is NaN is part of the answer
        scales = work.scales()
        work.quantize(scales)
    names = (field.name for field in dataclasses.fields(Losses))
    losses = Losses(**dict(zip(names, [math.prod(x.shape), *work.counts.tolist()], strict=True)))
    return Quantized(
        scheme=plan.scheme,
        values=work.values.reshape(x.shape),
        scales=None if scales is None else work.moved(scales.stored).reshape(work.scales_shape),
        scale_values=None if scales is None else work.moved(scales.values).reshape(work.scales_shape),
        tensor_scale=None if scales is None else scales.tensor_scale,
        losses=losses,
        stored_codes=work.codes.reshape(x.shape),
    )


class _Pieces:
    """A tensor with at least one dimension, and what it has become so far."""

    def __init__(self, x: Any, *, plan: QuantizePlan, ops: ModuleType, is_apart: bool) -> None:
        self._plan, self._ops, self._xp, self._is_apart = plan, ops, ops.namespace(), is_apart
        self._rows = x.reshape(1) if x.ndim == 0 else x
        self._shape, scheme = tuple(self._rows.shape), plan.scheme
        self.scales_shape: tuple[int, ...] = ()  # of a tensor without dimensions they have none either
        if x.ndim and scheme.scaling is Scaling.CHANNEL:
            self.scales_shape = (self._shape[plan.axis],)
        elif x.ndim and scheme.scaling is Scaling.BLOCK:
            self.scales_shape = grouped_shape(self._shape, axis=plan.axis, block_size=scheme.block_size)
        is_double = self._rows.dtype == self._xp.float64
        kinds = self._xp.float64 if is_double else self._xp.float32, ops.code_dtype(scheme.element)
        self.values, self.codes = (self._xp.empty(self._shape, dtype=kind, device=x.device) for kind in kinds)
        self.counts = self._new((len(dataclasses.fields(Losses)) - 1,), self._xp.int64)

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._xp.zeros(shape, dtype=dtype, device=self._rows.device)

    def moved(self, array: AnyArray) -> Any:
        """An array as what the tensor is, beside it."""
        return self._xp.asarray(array, device=self._rows.device)

    def _boxes(self) -> Iterator[Box]:
        length = self._plan.group_length(self._shape)
        return boxes(self._shape, axis=self._plan.axis, block_size=length, box_size=self._ops.BOX_SIZE)

    def _values(self, box: Box) -> Any:
        """The elements of a box by their block, as float64."""
        return self._xp.asarray(self._rows[box.place], dtype=self._xp.float64).reshape(box.shape_OBEI)

    def scales(self) -> GroupScales | None:
        """The scales of all groups; None without."""
        xp, plan, scaling = self._xp, self._plan, self._plan.scheme.scaling
        if scaling is Scaling.NONE:
            return None
        # One more dimension than none, so that parts of it are views.
        of_groups, of_all = self._new(self.scales_shape or (1,), xp.float64), self._new((1,), xp.float64)
        for box in self._boxes():
            magnitudes = xp.abs(self._values(box))
            if scaling is Scaling.BLOCK:
                kept, found = of_groups[box.groups], xp.amax(magnitudes, axis=2)
                kept[...] = xp.maximum(kept, found.reshape(kept.shape))
            if scaling is not Scaling.BLOCK or plan.scheme.has_tensor_scale:
                is_channel = scaling is Scaling.CHANNEL
                finite = xp.where(magnitudes < np.inf, magnitudes, 0.0)
                kept = of_groups[box.place[plan.axis]] if is_channel else of_all
                kept[...] = xp.maximum(kept, xp.amax(finite, axis=(0, 2, 3) if is_channel else (0, 1, 2, 3)))
        largest = of_all if scaling is Scaling.TENSOR else of_groups
        host = largest if isinstance(largest, np.ndarray) else largest.cpu().numpy()
        return group_scales(host, plan=plan, largest_of_all=float(of_all[0]))

    def quantize(self, scales: GroupScales | None) -> None:
        """Write the values and codes of every piece, and add up what is lost."""
        xp, plan, element = self._xp, self._plan, self._plan.scheme.element
        has_spoiled = scales is not None and bool(np.isnan(scales.values).any())
        for box in self._boxes():
            values = self._values(box)
            magnitudes, scale, factor = self._scaled(xp.abs(values), box, scales)
            rounded, lost = self._ops.finish(
                values,
                magnitudes,
                self._rounded(magnitudes, box, is_scaled=scales is not None),
                element=element,
                rounding=plan.rounding,
                saturate=plan.saturate,
            )
            self.counts += lost
            # A block that is NaN as a whole has the codes 0.
            kept = xp.where(xp.isnan(scale), 0.0, rounded) if has_spoiled else rounded
            self.codes[box.place] = self._ops.encode(kept, element=element).reshape(box.shape)
            self.values[box.place] = (rounded if factor is None else rounded * factor).reshape(box.shape)

    def _scaled(self, magnitudes: Any, box: Box, scales: GroupScales | None) -> tuple[Any, Any, Any]:
        """The magnitudes of a piece divided by their scales, the scales, and the factors of rounded elements."""
        if scales is None:
            return magnitudes, None, None
        scaling, own = self._plan.scheme.scaling, scales.values
        before, count, _, after = box.shape_OBEI
        if scaling is Scaling.BLOCK:
            own = own[box.groups].reshape(before, count, 1, after)
        elif scaling is Scaling.CHANNEL:
            own = own[box.place[self._plan.axis]].reshape(1, count, 1, 1)
        scale = self.moved(own)
        if scales.tensor is None:
            return magnitudes / scale, scale, None if self._is_apart and scaling is not Scaling.BLOCK else scale
        first, factor = map(self.moved, nvfp4_factors(own, scales.tensor))
        wide = magnitudes / first if scales.tensor.recipe == ScaleRecipe.MODELOPT else magnitudes * first
        narrow = self._xp.asarray(self._xp.asarray(wide, dtype=self._xp.float32), dtype=self._xp.float64)
        return narrow, scale, scale if self._is_apart else factor

    def _rounded(self, magnitudes: Any, box: Box, *, is_scaled: bool) -> Any:
        plan, element = self._plan, self._plan.scheme.element
        if plan.rounding is Rounding.HYBRID:
            # On a CPU: it looks at bits of several types, and few ask for it.
            source = self._xp.asarray(magnitudes, dtype=self._xp.float32) if is_scaled else self._rows[box.place]
            array = source if isinstance(source, np.ndarray) else array_of(source.cpu())
            found = round_to(array, target=element, rounding=plan.rounding, saturate=plan.saturate)
            return self._xp.abs(self.moved(found)).reshape(box.shape_OBEI)
        places = self._places(box) if plan.rounding is Rounding.STOCHASTIC else None
        return self._ops.round_magnitudes(
            magnitudes, element=element, rounding=plan.rounding, seed=plan.seed, places=places
        )

    def _places(self, box: Box) -> Any:
        """The indices of the elements of a box in C order of the tensor."""
        found = self._new(box.shape, self._xp.int64)
        for dim, part in enumerate(box.place):
            indices = self._xp.arange(part.start, part.stop, device=self._rows.device)
            steps = indices * math.prod(self._shape[dim + 1 :])
            found += steps.reshape(-1, *[1] * (len(self._shape) - 1 - dim))
        return found.reshape(box.shape_OBEI)


def _check(dtype: str) -> None:
    row = DTYPES.get(dtype)
    if row is None or not row.is_floating:
        allowed = ", ".join(row.name for row in DTYPES.values() if row.is_floating)
        raise UsageError(
            f"elements of {dtype} cannot be quantised: convert them to real floating-point numbers, of {allowed}"
        )


def _as_tensors(quantized: Quantized) -> Quantized:
    import torch

    tensors: dict[str, Any] = {}
    for name in ("values", "scales", "scale_values", "stored_codes"):
        array = getattr(quantized, name)
        tensors[name] = None if array is None else torch.from_numpy(array)
    return dataclasses.replace(quantized, **tensors)
