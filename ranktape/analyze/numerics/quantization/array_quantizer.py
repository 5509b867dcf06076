"""Quantises arrays of numpy piece by piece: divided by their scales, rounded, multiplied back."""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the array

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Format, Rounding, round_to
from ranktape.analyze.numerics.formats.codes import NARROW_BITS, code_table
from ranktape.analyze.numerics.formats.kernels import (
    RoundingConstants,
    constants_of,
    round_away,
    round_even,
    round_floor,
    round_random,
    state_of,
    uniform_at,
)
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.blocks import BOX_SIZE, Box, boxes, grouped_shape
from ranktape.analyze.numerics.quantization.encoded import Losses, Quantized
from ranktape.analyze.numerics.quantization.group_scales import GroupScales, group_scales, nvfp4_factors
from ranktape.analyze.numerics.quantization.schemes import QuantizePlan, ScaleRecipe, Scaling
from ranktape.storage.format.dtypes import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

BEYOND = 4.0
"""How far beyond the largest value of the format rounding goes on, where it must be seen that it goes beyond."""

COUNTS = ("underflow", "flushed", "overflow", "spoiled", "nan", "inf")
"""What is counted, in the order of the kernel: the fields of `Losses`."""


class ElementConstants(NamedTuple):
    """What the kernel knows of the element format and the rounding, besides how to round."""

    maximum: float
    """Largest finite value."""
    beyond: float
    """What is beyond becomes this."""
    overflow_start: float
    """Smallest magnitude that counts as overflow."""
    min_normal: float
    """Smallest positive normal value."""
    has_negative_zero: bool
    """Whether the sign of a zero is kept."""


def element_constants(element: Format, *, rounding: Rounding, saturate: bool) -> ElementConstants:
    """What `finish` takes of a format."""
    return ElementConstants(
        maximum=element.maximum,
        beyond=element.overflow_value(saturate=saturate),
        overflow_start=element.overflow_start_of(rounding),
        min_normal=element.min_normal,
        has_negative_zero=element.has_negative_zero,
    )


def unbounded_constants(element: Format) -> RoundingConstants:
    """What rounding takes of a format, were it to go on beyond its largest value."""
    return constants_of(element)._replace(maximum=BEYOND * element.maximum)


def round_magnitudes(
    magnitudes: NDArray[np.float64], *, constants: RoundingConstants, rounding: Rounding, rounded: NDArray[np.float64]
) -> None:
    """Write the values of the format that magnitudes round to; of NaN, anything."""
    _ROUND[rounding](magnitudes, constants, rounded)


@compiled
def _even(magnitudes: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    for index in range(magnitudes.size):
        rounded[index] = round_even(magnitudes[index], constants)


@compiled
def _away(magnitudes: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    for index in range(magnitudes.size):
        rounded[index] = round_away(magnitudes[index], constants)


@compiled
def _floor(magnitudes: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    for index in range(magnitudes.size):
        rounded[index] = round_floor(magnitudes[index], constants)


_ROUND = {Rounding.EVEN: _even, Rounding.AWAY: _away, Rounding.FLOOR: _floor}


@compiled
def round_randomly(
    magnitudes: NDArray[np.float64],
    constants: RoundingConstants,
    state: int,
    places: NDArray[np.int64],
    rounded: NDArray[np.float64],
) -> None:
    """The same by the uniform numbers of the elements with these indices in C order."""
    for index in range(magnitudes.size):
        rounded[index] = round_random(magnitudes[index], constants, uniform_at(state, places[index]))


@compiled
def finish(
    values: NDArray[np.float64],
    magnitudes: NDArray[np.float64],
    constants: ElementConstants,
    rounded: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """Bound rounded magnitudes, give them the signs of the values, and add up what is lost, in the order of `COUNTS`.

    `magnitudes` are those before rounding: NaN where the value or its scale is.
    """
    underflow = flushed = overflow = spoiled = nan = inf = 0
    for index in range(values.size):
        value, magnitude, result = values[index], magnitudes[index], rounded[index]
        is_number = magnitude == magnitude  # noqa: PLR0124 - NaN is not itself
        is_finite = abs(value) < np.inf
        is_counted = is_finite & is_number & (value != 0.0)
        underflow += is_counted & (magnitude < constants.min_normal)
        flushed += is_counted & (result == 0.0)
        overflow += is_counted & (magnitude >= constants.overflow_start)
        spoiled += is_finite & (not is_number)
        is_nan = value != value  # noqa: PLR0124 - as above
        nan += is_nan
        inf += (not is_finite) & (not is_nan)
        bounded = constants.beyond if result > constants.maximum else result
        signed = np.copysign(bounded, value)
        signed = signed if constants.has_negative_zero else signed + 0.0
        rounded[index] = signed if is_number else np.nan
    counts[0] += underflow
    counts[1] += flushed
    counts[2] += overflow
    counts[3] += spoiled
    counts[4] += nan
    counts[5] += inf


def quantize_array(array: AnyArray, *, plan: QuantizePlan) -> Quantized:
    """The array quantised as `quantize` says; its elements are real floating-point numbers."""
    rows = array.reshape(1) if array.ndim == 0 else array
    with np.errstate(all="ignore"):  # what overflows, vanishes or is NaN is part of the answer
        scales = _scales(rows, plan=plan)
        work = _ArrayPieces.of(rows, plan=plan)
        for box in boxes(rows.shape, axis=plan.axis, block_size=plan.group_length(rows.shape)):
            work.quantize(box, scales=scales)
    losses = Losses(num_elements=array.size, **dict(zip(COUNTS, work.counts.tolist(), strict=True)))
    return Quantized(
        scheme=plan.scheme,
        values=work.values.reshape(array.shape),
        scales=None if scales is None else scales.stored.reshape(_scales_shape(array, scales)),
        scale_values=None if scales is None else scales.values.reshape(_scales_shape(array, scales)),
        tensor_scale=None if scales is None else scales.tensor_scale,
        losses=losses,
        stored_codes=work.codes.reshape(array.shape),
    )


def _scales_shape(array: AnyArray, scales: GroupScales) -> tuple[int, ...]:
    return scales.stored.shape if array.ndim else ()


def _scales(rows: AnyArray, *, plan: QuantizePlan) -> GroupScales | None:
    scheme = plan.scheme
    if scheme.scaling is Scaling.NONE:
        return None
    if scheme.scaling is not Scaling.BLOCK:
        largest = _largest_finite(rows, plan=plan)
        return group_scales(largest, plan=plan, largest_of_all=0.0)
    largest = _largest_of_blocks(rows, plan=plan)
    largest_of_all = float(_largest_finite(rows, plan=plan)) if scheme.has_tensor_scale else 0.0
    return group_scales(largest, plan=plan, largest_of_all=largest_of_all)


def _largest_of_blocks(rows: AnyArray, *, plan: QuantizePlan) -> NDArray[np.float64]:
    """The largest magnitude of each block; NaN or infinite where it holds NaN or Inf."""
    size = plan.scheme.block_size
    largest = np.zeros(grouped_shape(rows.shape, axis=plan.axis, block_size=size))
    scratch = np.empty(BOX_SIZE)
    for box in boxes(rows.shape, axis=plan.axis, block_size=size):
        magnitudes_OBEI = np.abs(_copied(rows, box, scratch)).reshape(box.shape_OBEI)
        found = largest[box.groups]
        np.maximum(found, magnitudes_OBEI.max(axis=2).reshape(found.shape), out=found)
    return largest


def _largest_finite(rows: AnyArray, *, plan: QuantizePlan) -> NDArray[np.float64]:
    """The largest finite magnitude for each index along the axis, or of all."""
    is_channel = plan.scheme.scaling is Scaling.CHANNEL
    largest = np.zeros(rows.shape[plan.axis] if is_channel else ())
    scratch = np.empty(BOX_SIZE)
    for box in boxes(rows.shape, axis=plan.axis, block_size=1):
        magnitudes = np.abs(_copied(rows, box, scratch))
        magnitudes[~(magnitudes < np.inf)] = 0.0
        place = box.place[plan.axis] if is_channel else ()
        kept = (0, 2, 3) if is_channel else None
        largest[place] = np.maximum(largest[place], magnitudes.reshape(box.shape_OBEI).max(axis=kept))
    return largest


def _copied(rows: AnyArray, box: Box, scratch: NDArray[np.float64]) -> NDArray[np.float64]:
    """The elements of the box as float64, one after the other."""
    copied = scratch[: box.size]
    np.copyto(copied.reshape(box.shape), rows[box.place], casting="unsafe")
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArrayPieces:
    """The result so far, and the memory that pieces are worked on in."""

    rows: AnyArray
    plan: QuantizePlan
    values: AnyArray
    codes: AnyArray
    counts: NDArray[np.int64]
    scratch: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]

    @classmethod
    def of(cls, rows: AnyArray, *, plan: QuantizePlan) -> _ArrayPieces:
        scratch = np.empty((3, min(BOX_SIZE, rows.size)))
        return cls(
            rows=rows,
            plan=plan,
            values=np.empty(rows.shape, dtype=np.float64 if rows.dtype.name == "float64" else np.float32),
            codes=np.empty(rows.shape, dtype=_code_dtype(plan.scheme.element)),
            counts=np.zeros(len(COUNTS), dtype=np.int64),
            scratch=(scratch[0], scratch[1], scratch[2]),
        )

    def quantize(self, box: Box, *, scales: GroupScales | None) -> None:
        """Write the values and codes of a piece, and add up what it loses."""
        element = self.plan.scheme.element
        values = _copied(self.rows, box, self.scratch[0])
        magnitudes, rounded = (scratch[: box.size] for scratch in self.scratch[1:])
        np.abs(values, out=magnitudes)
        factors_OBEI = None if scales is None else self._divide(magnitudes.reshape(box.shape_OBEI), box, scales)
        self._round(box, magnitudes, rounded)
        constants = element_constants(element, rounding=self.plan.rounding, saturate=self.plan.saturate)
        finish(values, magnitudes, constants, rounded, self.counts)
        codes = _codes(rounded, element)
        if factors_OBEI is not None:
            codes.reshape(box.shape_OBEI)[np.broadcast_to(np.isnan(factors_OBEI), box.shape_OBEI)] = 0
            np.multiply(rounded.reshape(box.shape_OBEI), factors_OBEI, out=rounded.reshape(box.shape_OBEI))
        self.codes[box.place] = codes.reshape(box.shape)
        self.values[box.place] = rounded.reshape(box.shape)

    def _divide(self, magnitudes_OBEI: NDArray[np.float64], box: Box, scales: GroupScales) -> NDArray[np.float64]:
        """Divide the magnitudes of a piece by their scales, and give the factors that undo it."""
        values_OBEI = scales.of_box(box, plan=self.plan)
        if scales.tensor is None:
            np.divide(magnitudes_OBEI, values_OBEI, out=magnitudes_OBEI)
            return values_OBEI
        before_OBEI, after_OBEI = nvfp4_factors(values_OBEI, scales.tensor)
        operation = np.divide if scales.tensor.recipe == ScaleRecipe.MODELOPT else np.multiply
        magnitudes_OBEI[...] = operation(magnitudes_OBEI, before_OBEI).astype(np.float32)
        return after_OBEI

    def _round(self, box: Box, magnitudes: NDArray[np.float64], rounded: NDArray[np.float64]) -> None:
        rounding, element = self.plan.rounding, self.plan.scheme.element
        constants = unbounded_constants(element)
        if rounding is Rounding.STOCHASTIC:
            places = _places(box, self.rows.shape)
            round_randomly(magnitudes, constants, state_of(self.plan.seed), places, rounded)
        elif rounding is Rounding.HYBRID:
            is_scaled = self.plan.scheme.scaling is not Scaling.NONE
            source = magnitudes.astype(np.float32) if is_scaled else np.abs(self.rows[box.place]).reshape(-1)
            rounded[:] = round_to(source, target=element, rounding=rounding, saturate=self.plan.saturate)
        else:
            round_magnitudes(magnitudes, constants=constants, rounding=rounding, rounded=rounded)


def _places(box: Box, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The indices of the elements of a piece in C order of the tensor."""
    places = np.zeros(box.shape, dtype=np.int64)
    for dim, part in enumerate(box.place):
        indices = np.arange(part.start, part.stop, dtype=np.int64) * math.prod(shape[dim + 1 :])
        places += indices.reshape(-1, *[1] * (len(shape) - 1 - dim))
    return places.reshape(-1)


def _code_dtype(element: Format) -> np.dtype[Any]:
    return np.dtype(f"u{max(1, element.num_bits // 8)}")


def _codes(rounded: NDArray[np.float64], element: Format) -> AnyArray:
    """The codes of values of the format; of NaN 0 where it has no code for that."""
    if element.num_bits <= NARROW_BITS:
        codes: AnyArray = code_table(element.name)[rounded.astype(np.float32).view(np.uint32) >> 16]
    else:
        codes = rounded.astype(numpy_dtype(str(element.dtype))).view(_code_dtype(element))
    return codes
