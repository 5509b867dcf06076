"""Quantises what users pass, arrays of numpy, tensors of torch or lists, and warns of what is lost."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np

from ranktape.analyze.numerics.formats import Coding, Rounding, round_to
from ranktape.analyze.numerics.pieces import (
    Box,
    array_of,
    boxes,
    check_readable,
    grouped_shape,
    in_batches,
    tensor_or_array,
)
from ranktape.analyze.numerics.quantization import array_ops
from ranktape.analyze.numerics.quantization.encoded import Losses, LossSeverity, QuantizationWarning, Quantized
from ranktape.analyze.numerics.quantization.group_scales import STRETCH, GroupScales, group_scales, nvfp4_factors
from ranktape.analyze.numerics.quantization.plan import QuantizeOptions, QuantizePlan, plan_of
from ranktape.analyze.numerics.quantization.rotation import rotated
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe, Scaling
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

Result = TypeVar("Result")


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
    turn = functools.partial(rotated, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed, ops=ops)
    work = _Pieces(turn(x.reshape(x.shape or (1,))) if plan.rotation else x, plan=plan, ops=ops, is_apart=is_apart)
    scales = work.scales()
    work.quantize(scales)
    names = (field.name for field in dataclasses.fields(Losses))
    losses = Losses(**dict(zip(names, [math.prod(x.shape), *work.counts.tolist()], strict=True)))
    values = turn(work.values, is_back=True) if plan.rotation else work.values
    return Quantized(
        scheme=plan.scheme,
        values=values.reshape(x.shape),
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
        self._runs_shape: tuple[int, ...] = (1,)
        if scheme.scaling is Scaling.CHANNEL:
            self._runs_shape = (self._shape[plan.axis],)
        elif scheme.scaling is Scaling.BLOCK:
            self._runs_shape = grouped_shape(self._shape, axis=plan.axis, block_size=scheme.block_size)
        has_scales = x.ndim and scheme.scaling in {Scaling.CHANNEL, Scaling.BLOCK}
        self.scales_shape = tuple(self._in_tiles(self._new(self._runs_shape)).shape) if has_scales else ()
        self._kind = self._xp.float64 if self._rows.dtype == self._xp.float64 else self._xp.float32
        kinds = self._kind, ops.code_dtype(scheme.element)
        self.values, self.codes = (self._xp.empty(self._shape, dtype=kind, device=x.device) for kind in kinds)
        self.counts = self._new((len(dataclasses.fields(Losses)) - 1,), self._xp.int64)

    def _new(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self._xp.zeros(shape, dtype=dtype or self._xp.float64, device=self._rows.device)

    def moved(self, array: AnyArray) -> Any:
        """An array as what the tensor is, beside it."""
        return self._xp.asarray(array, device=self._rows.device)

    def _each(self, work: Callable[[Box], Result]) -> Iterator[tuple[Box, Result]]:
        """Every piece, and what the work makes of it: on a CPU in several threads."""
        length = self._plan.group_length(self._shape)
        pieces = boxes(self._shape, axis=self._plan.axis, block_size=length, box_size=self._ops.BOX_SIZE)

        def answer(box: Box) -> tuple[Box, Result]:
            with np.errstate(all="ignore"):  # what overflows, vanishes or is NaN is part of the answer
                return box, work(box)

        return in_batches(answer, pieces, threads=self._ops.num_threads())

    def _values(self, box: Box) -> Any:
        """The elements of a box by their block, as float64."""
        return self._xp.asarray(self._rows[box.place], dtype=self._xp.float64).reshape(box.shape_OBEI)

    def scales(self) -> GroupScales | None:
        """The scales of all groups; None without."""
        plan = self._plan
        if plan.scheme.scaling is Scaling.NONE:
            return None
        largest, largest_of_all = self._largest()
        again = largest.copy() if plan.four_over_six else largest
        found = group_scales(largest, plan=plan, largest_of_all=largest_of_all)
        if not plan.four_over_six:
            return found
        other = group_scales(again, plan=plan, largest_of_all=largest_of_all, stretch=STRETCH)
        is_better = self._squared_errors(other) < self._squared_errors(found)
        return GroupScales(
            stored=np.where(is_better, other.stored, found.stored),
            values=np.where(is_better, other.values, found.values),
            tensor=found.tensor,
        )

    def _largest(self) -> tuple[NDArray[np.float64], float]:
        """The largest magnitudes of groups, those of blocks not always finite, and the largest finite one of all."""
        xp, plan, scaling = self._xp, self._plan, self._plan.scheme.scaling
        of_runs, of_all = self._new(self._runs_shape), self._new((1,))

        def largest_in(box: Box) -> tuple[Any, Any]:
            magnitudes, found, finite = xp.abs(self._values(box)), None, None
            if scaling is Scaling.BLOCK:
                found = xp.amax(magnitudes, axis=2)
            if scaling is not Scaling.BLOCK or plan.scheme.has_tensor_scale:
                are_finite = xp.where(magnitudes < np.inf, magnitudes, 0.0)
                finite = xp.amax(are_finite, axis=(0, 2, 3) if scaling is Scaling.CHANNEL else (0, 1, 2, 3))
            return found, finite

        for box, (found, finite) in self._each(largest_in):
            if found is not None:
                kept = of_runs[box.groups]
                kept[...] = xp.maximum(kept, found.reshape(kept.shape))
            if finite is not None:
                kept = of_runs[box.place[plan.axis]] if scaling is Scaling.CHANNEL else of_all
                kept[...] = xp.maximum(kept, finite)
        groups = of_all if scaling is Scaling.TENSOR else self._in_tiles(of_runs)
        return self._ops.on_host(groups), float(of_all[0])

    def _squared_errors(self, scales: GroupScales) -> NDArray[np.float64]:
        """The squared errors of the values of each block with these scales, added up one after the other."""
        xp, element = self._xp, self._plan.scheme.element
        of_runs, expanded = self._new(self._runs_shape), self._of_runs(scales)

        def errors_in(box: Box) -> Any:
            magnitudes = xp.abs(self._values(box))
            scaled, _, factor = self._scaled(magnitudes, box, expanded, is_apart=False)
            rounded = self._rounded(scaled, box, is_scaled=True).clip(max=element.maximum)
            values = xp.asarray(xp.asarray(rounded * factor, dtype=self._kind), dtype=xp.float64)
            squares = (values - magnitudes) * (values - magnitudes)
            # One after the other, as a loop does: `sum` of numpy adds pairs.
            return functools.reduce(operator.add, (squares[:, :, place] for place in range(box.shape_OBEI[2])))

        for box, found in self._each(errors_in):
            kept = of_runs[box.groups]
            kept += found.reshape(kept.shape)
        errors: NDArray[np.float64] = self._ops.on_host(self._in_tiles(of_runs, are_added=True))
        return errors

    def _in_tiles(self, of_runs: Any, *, are_added: bool = False) -> Any:
        """The largest of the runs that are the rows of a tile, or their sum; the runs themselves without tiles."""
        rows = self._plan.scheme.block_rows
        if rows == 1:
            return of_runs
        shape = tuple(of_runs.shape)
        of_tiles = self._new(grouped_shape(shape, axis=len(shape) - 2, block_size=rows))
        for row in range(min(rows, shape[-2])):
            found = of_runs[..., row::rows, :]
            kept = of_tiles[..., : found.shape[-2], :]
            kept[...] = kept + found if are_added else self._xp.maximum(kept, found)
        return of_tiles

    def _of_runs(self, scales: GroupScales) -> GroupScales:
        """The scales, those of a tile for each of its rows."""
        rows = self._plan.scheme.block_rows
        if rows == 1:
            return scales
        return dataclasses.replace(scales, values=np.repeat(scales.values, rows, axis=-2)[..., : self._shape[-2], :])

    def quantize(self, scales: GroupScales | None) -> None:
        """Write the values and codes of every piece, and add up what is lost."""
        xp, plan, element = self._xp, self._plan, self._plan.scheme.element
        expanded = None if scales is None else self._of_runs(scales)
        has_spoiled = scales is not None and bool(np.isnan(scales.values).any())

        def write(box: Box) -> Any:
            values = self._values(box)
            magnitudes, scale, factor = self._scaled(xp.abs(values), box, expanded, is_apart=self._is_apart)
            rounded, lost = self._ops.finish(
                values,
                magnitudes,
                self._rounded(magnitudes, box, is_scaled=scales is not None, signs=values),
                element=element,
                rounding=plan.rounding,
                saturate=plan.saturate,
            )
            # A block that is NaN as a whole has the codes of 0.
            kept = xp.where(xp.isnan(scale), 0.0, rounded) if has_spoiled else rounded
            self.codes[box.place] = self._ops.encode(kept, element=element).reshape(box.shape)
            self.values[box.place] = (rounded if factor is None else rounded * factor).reshape(box.shape)
            return lost

        for _, lost in self._each(write):
            self.counts += lost

    def _scaled(self, magnitudes: Any, box: Box, scales: GroupScales | None, *, is_apart: bool) -> tuple[Any, Any, Any]:
        """The magnitudes of a piece divided by their scales, the scales, and the factors of rounded elements."""
        if scales is None:
            return magnitudes, None, None
        xp, scheme, own = self._xp, self._plan.scheme, scales.values
        before, count, _, after = box.shape_OBEI
        if scheme.scaling is Scaling.BLOCK:
            own = own[box.groups].reshape(before, count, 1, after)
        elif scheme.scaling is Scaling.CHANNEL:
            own = own[box.place[self._plan.axis]].reshape(1, count, 1, 1)
        first = factor = scale = self.moved(own)
        if scales.tensor is not None:
            first, factor = map(self.moved, nvfp4_factors(own, scales.tensor))
        is_divided = scales.tensor is None or scales.tensor.recipe == ScaleRecipe.MODELOPT
        scaled = magnitudes / first if is_divided else magnitudes * first
        if self._plan.scale_rule is None:  # scales that programs divide by in float32
            scaled = xp.asarray(xp.asarray(scaled, dtype=xp.float32), dtype=xp.float64)
        if is_apart:
            return scaled, scale, scale if scheme.scaling is Scaling.BLOCK else None
        return scaled, scale, factor

    def _rounded(self, magnitudes: Any, box: Box, *, is_scaled: bool, signs: Any = None) -> Any:
        """The magnitudes rounded; `signs` are numbers with the signs that count in a table."""
        plan, element = self._plan, self._plan.scheme.element
        if plan.rounding is Rounding.HYBRID or element.coding is Coding.TABLE:
            # On a CPU: the one looks at bits of several types, the other has few values, and few ask for them.
            signed = magnitudes if signs is None else self._xp.copysign(magnitudes, signs)
            source = self._xp.asarray(signed, dtype=self._xp.float32) if is_scaled else self._rows[box.place]
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
