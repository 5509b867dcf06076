"""Quantises on a CPU by compiled loops, much faster than with torch operations and with the same bits.

If float32 or bfloat16 numbers are rounded to narrow elements with ties to even, they are scaled, rounded and scaled
back in float32. That is exact: the scales of MX are powers of two, and scaling by all others is defined in float32.
Rounding adds a power of two and subtracts it again. Everything else is rounded in float64.
"""

# Shapes: R = rows, C = columns, G = groups of rows, K = groups of columns.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Coding, Rounding
from ranktape.analyze.numerics.formats.kernels import (
    BF16_SHIFT,
    RANDOM,
    RoundingConstants,
    constants_of,
    draw,
    round_block,
)
from ranktape.analyze.numerics.formats.values import NARROW_BITS, code_table, state_of
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.pieces import frozen, map_in_threads, tensor_to_array
from ranktape.analyze.numerics.quantization.encoded import LOSSES, code_dtype, element_codes
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.scales import (
    GroupScales,
    ScaleGroups,
    factors_of,
    is_divided,
    is_float32,
)
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.storage.format.dtypes import HALF_NBYTES

if TYPE_CHECKING:
    import torch

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The mask of the bits of a float32 other than the sign."""

INFINITY = np.int32(0x7F800000)
"""The bits of the float32 infinity."""

WIDE_NBYTES = 8
"""Size of a float64, in bytes."""

FRACTION_BITS, ONE_FIELD = 23, 127
"""The number of bits below the exponent field of a float32, and the exponent field of 1.0."""


class Narrow(NamedTuple):
    """How float32 numbers are rounded to narrow elements; a named tuple, because numba supports its attributes.

    Exponents are shifted to the position of the float32 exponent field.
    """

    lowest_field: np.int32
    """Exponent field of the smallest normal element."""
    anchor_step: np.int32
    """The difference from the exponent field of a number to that of the power of two that rounding adds."""
    limit: np.int32
    """The bits of the largest element."""
    zero: np.float32
    """The number added to elements: -0.0 if the format has a negative zero, else 0.0."""


class Wide(NamedTuple):
    """How float64 numbers are rounded to elements of any kind."""

    element: RoundingConstants
    """The element format and the rounding."""
    state: int
    """The initial state of the random numbers of stochastic rounding."""
    is_float32: bool
    """Whether scaled numbers are rounded to float32 first."""
    zero: np.float32
    """As in `Narrow`."""


class Ends(NamedTuple):
    """The limits by which scaled magnitudes are counted, and the result of overflow."""

    min_normal: float
    """Smallest normal element."""
    overflow_start: float
    """Smallest magnitude that overflows."""
    beyond: float
    """The result of overflow: the largest element, infinity or NaN."""
    is_float32: bool
    """As in `Wide`."""


def _rounding_of(plan: QuantizePlan, *, num_bytes: int) -> Narrow | Wide:
    """How numbers of this size are rounded."""
    element = plan.scheme.element
    zero, is_wide = np.float32(-0.0 if element.has_negative_zero else 0.0), num_bytes == WIDE_NBYTES
    if is_wide or plan.rounding is not Rounding.EVEN or element.taper or element.num_bits > NARROW_BITS:
        reads_bf16 = num_bytes == HALF_NBYTES and plan.scheme.scaling is Scaling.NONE
        constants = constants_of(element, plan.rounding, is_bf16=reads_bf16)
        return Wide(constants, state_of(plan.seed), is_float32(plan), zero)
    return Narrow(
        lowest_field=np.int32((element.emin + ONE_FIELD) << FRACTION_BITS),
        anchor_step=np.int32((FRACTION_BITS - element.mantissa_bits) << FRACTION_BITS),
        limit=np.float32(element.maximum).view(np.int32),
        zero=zero,
    )


@compiled
def _number(numbers_C: NDArray[Any], index: int, is_pattern: int | None) -> Any:
    """A number of a row of floats, or of bfloat16 bit patterns unless `is_pattern` is None."""
    if is_pattern is None:
        return numbers_C[index]
    return np.uint32(np.uint32(numbers_C[index]) << BF16_SHIFT).view(np.float32)


@compiled
def _stored(value: float | np.floating[Any], results_C: NDArray[Any], is_pattern: int | None) -> Any:
    """A number in the type of a row of results; bfloat16 patterns lose no bits."""
    if is_pattern is None:
        return results_C.dtype.type(value)
    return np.float32(value).view(np.uint32) >> BF16_SHIFT


@compiled
def _narrow(
    value: np.float32, before: np.float32, after: np.float32, narrow: Narrow, divides: int | None
) -> np.float32:
    scaled = np.float32(value * before if divides is None else np.divide(value, before))
    bits = np.float32(scaled).view(np.int32)
    magnitude = np.int32(bits & MAGNITUDE)
    bounded = np.int32(min(magnitude, narrow.limit))
    # The sum of the magnitude and the anchor has no bits below the last bit of the element.
    anchor = np.int32(max(narrow.lowest_field, np.int32(bounded & INFINITY)) + narrow.anchor_step).view(np.float32)
    rounded = np.float32(np.float32(np.int32(bounded).view(np.float32) + anchor) - anchor).view(np.int32)
    signed = np.int32(rounded | np.int32(bits & ~MAGNITUDE)).view(np.float32)
    return np.float32(np.float32(signed + narrow.zero) * after) if magnitude <= INFINITY else scaled


@compiled
def _quantize_rows(  # noqa: PLR0917 - numba knows no keyword-only arguments
    numbers_RC: NDArray[Any],
    results_RC: NDArray[Any],
    group_R: NDArray[np.int64],
    before_GK: NDArray[np.float32],
    after_GK: NDArray[np.float32],
    run: int,
    narrow: Narrow,
    divides: int | None,
    is_pattern: int | None,
    writes_patterns: int | None,
) -> None:
    """Divide or multiply float32 numbers by the first factor of their group, round them, multiply by the second factor.

    A group is a run of `run` neighbours in a row. NaN stays NaN, and a group becomes NaN if its second factor is NaN.
    """
    for row in range(numbers_RC.shape[0]):
        numbers_C, results_C = numbers_RC[row], results_RC[row]
        before_K, after_K = before_GK[group_R[row]], after_GK[group_R[row]]
        if run == 1:
            for index in range(numbers_C.size):
                value = _number(numbers_C, index, is_pattern)
                quantized = _narrow(value, before_K[index], after_K[index], narrow, divides)
                results_C[index] = _stored(quantized, results_C, writes_patterns)
        else:
            for start in range(0, numbers_C.size, run):
                numbers, results = numbers_C[start : start + run], results_C[start : start + run]
                before, after = before_K[start // run], after_K[start // run]
                for index in range(numbers.size):
                    quantized = _narrow(_number(numbers, index, is_pattern), before, after, narrow, divides)
                    results[index] = _stored(quantized, results, writes_patterns)


@compiled
def _spread(factors_K: NDArray[np.float32], run: int, spread_C: NDArray[np.float64]) -> None:
    """Write the factor of each number of a row."""
    if run == 1:
        spread_C[:] = factors_K
    else:
        for start in range(0, spread_C.size, run):
            spread_C[start : start + run] = factors_K[start // run]


@compiled
def _scale(  # noqa: PLR0917 - as above
    numbers_C: NDArray[Any],
    is_pattern: int | None,
    before_C: NDArray[np.float64],
    is_float32: bool,  # noqa: FBT001 - as above
    divides: int | None,
    scaled_C: NDArray[np.float64],
) -> None:
    """Write the magnitudes of a row, divided by their factors, or multiplied by them if `divides` is None."""
    for index in range(numbers_C.size):
        magnitude, factor = abs(np.float64(_number(numbers_C, index, is_pattern))), before_C[index]
        scaled = magnitude * factor if divides is None else np.divide(magnitude, factor)
        scaled_C[index] = np.float64(np.float32(scaled)) if is_float32 else scaled


@compiled
def _quantize_wide_rows(  # noqa: PLR0917 - as above
    numbers_RC: NDArray[Any],
    results_RC: NDArray[Any],
    group_R: NDArray[np.int64],
    before_GK: NDArray[np.float32],
    after_GK: NDArray[np.float32],
    run: int,
    first_index: int,
    wide: Wide,
    divides: int | None,
    is_pattern: int | None,
    writes_patterns: int | None,
) -> None:
    """Do what `_quantize_rows` does, in float64 and for numbers of any size.

    `first_place` is the index of the first number in C order of the tensor. Each step is a loop that is vectorised.
    """
    num_columns = numbers_RC.shape[1]
    scratch_4C = np.empty((4, num_columns))
    before_C, after_C, scaled_C, rounded_C = scratch_4C[0], scratch_4C[1], scratch_4C[2], scratch_4C[3]
    for row in range(numbers_RC.shape[0]):
        numbers_C, results_C = numbers_RC[row], results_RC[row]
        _spread(before_GK[group_R[row]], run, before_C)
        _spread(after_GK[group_R[row]], run, after_C)
        _scale(numbers_C, is_pattern, before_C, wide.is_float32, divides, scaled_C)
        if wide.element.kind == RANDOM:
            draw(scaled_C, wide.element, wide.state, first_index + row * num_columns, rounded_C)
        else:
            round_block(scaled_C, wide.element, rounded_C)
        for index in range(num_columns):
            number = np.float64(_number(numbers_C, index, is_pattern))
            signed = np.copysign(rounded_C[index], number) + np.float64(wide.zero)
            value = signed * after_C[index] if scaled_C[index] >= 0 else np.nan
            results_C[index] = _stored(value, results_C, writes_patterns)


@compiled
def _encode_rows(  # noqa: PLR0917 - as above
    numbers_RC: NDArray[Any],
    elements_RC: NDArray[np.float32],
    values_RC: NDArray[Any],
    codes_RC: NDArray[np.uint8] | None,
    table: NDArray[np.uint8],
    group_R: NDArray[np.int64],
    before_GK: NDArray[np.float32],
    after_GK: NDArray[np.float32],
    run: int,
    ends: Ends,
    divides: int | None,
    is_pattern: int | None,
    counts: NDArray[np.int64],
) -> None:
    """Write the values and codes of rounded numbers, and the counts of `Losses`.

    In blocks that are NaN as a whole, elements become 0, and so do their codes. `table` has the code of each bfloat16
    pattern.
    """
    num_columns, kind = numbers_RC.shape[1], values_RC.dtype.type
    scratch_3C = np.empty((3, num_columns))
    before_C, after_C, scaled_C = scratch_3C[0], scratch_3C[1], scratch_3C[2]
    underflow, flushed, overflow = np.int64(0), np.int64(0), np.int64(0)
    spoiled, nan, inf = np.int64(0), np.int64(0), np.int64(0)
    for row in range(numbers_RC.shape[0]):
        numbers_C, elements_C, values_C = numbers_RC[row], elements_RC[row], values_RC[row]
        _spread(before_GK[group_R[row]], run, before_C)
        _spread(after_GK[group_R[row]], run, after_C)
        _scale(numbers_C, is_pattern, before_C, ends.is_float32, divides, scaled_C)
        for index in range(num_columns):
            magnitude, scaled = abs(np.float64(_number(numbers_C, index, is_pattern))), scaled_C[index]
            is_finite, is_scaled = magnitude < np.inf, scaled >= 0
            is_counted = is_finite & is_scaled & (magnitude > 0)
            underflow += is_counted & (scaled < ends.min_normal)
            flushed += is_counted & (elements_C[index] == 0)
            overflow += is_counted & (scaled >= ends.overflow_start)
            spoiled += is_finite & (not is_scaled)
            nan += not magnitude <= np.inf
            inf += magnitude == np.inf
        for index in range(num_columns):
            beyond = np.copysign(ends.beyond, np.float64(_number(numbers_C, index, is_pattern)))
            element = beyond if scaled_C[index] >= ends.overflow_start else np.float64(elements_C[index])
            value = element * after_C[index]
            values_C[index] = kind(value)
            elements_C[index] = np.float32(element if after_C[index] == after_C[index] else 0.0)
        if codes_RC is not None:
            codes_C = codes_RC[row]
            for index in range(num_columns):
                codes_C[index] = table[np.uint32(np.float32(elements_C[index]).view(np.uint32) >> 16)]
    counts[0], counts[1], counts[2] = underflow, flushed, overflow
    counts[3], counts[4], counts[5] = spoiled, nan, inf


@compiled
def _find_largest(  # noqa: PLR0917 - as above
    patterns_RC: NDArray[Any], group_R: NDArray[np.int64], run: int, top: Any, last: Any, largest_GK: NDArray[Any]
) -> None:
    """Update the largest magnitude of each group, as a bit pattern, ignoring patterns above `last`.

    The mask `top` removes the sign. The patterns then have the order of the magnitudes, with NaN above infinity, and
    `top` itself is a NaN.
    """
    kind = largest_GK.dtype.type
    for row in range(patterns_RC.shape[0]):
        patterns_C, largest_K = patterns_RC[row], largest_GK[group_R[row]]
        if run == 1:
            for index in range(patterns_C.size):
                magnitude = kind(patterns_C[index] & top)
                largest_K[index] = max(largest_K[index], magnitude if magnitude <= last else kind(0))
        else:
            for start in range(0, patterns_C.size, run):
                patterns, largest = patterns_C[start : start + run], kind(0)
                for index in range(patterns.size):
                    magnitude = kind(patterns[index] & top)
                    largest = max(largest, magnitude if magnitude <= last else kind(0))
                largest_K[start // run] = max(largest_K[start // run], largest)


@compiled
def _add_squared_errors(  # noqa: PLR0917 - as above
    numbers_RC: NDArray[Any],
    results_RC: NDArray[Any],
    group_R: NDArray[np.int64],
    run: int,
    is_pattern: int | None,
    errors_GK: NDArray[np.float64],
) -> None:
    """Add the squared errors of results to the sums of their groups; each run of a row is summed in order."""
    for row in range(numbers_RC.shape[0]):
        numbers_C, results_C, errors_K = numbers_RC[row], results_RC[row], errors_GK[group_R[row]]
        for start in range(0, numbers_C.size, run):
            total = 0.0
            for index in range(start, min(start + run, numbers_C.size)):
                error = np.float64(results_C[index]) - np.float64(_number(numbers_C, index, is_pattern))
                total += error * error
            errors_K[start // run] += total


def is_compiled(x: torch.Tensor, *, plan: QuantizePlan) -> bool:
    """Whether the compiled loops support the tensor, the element format and the rounding."""
    import torch

    element, rounding = plan.scheme.element, plan.rounding
    if x.device.type != "cpu" or not x.numel() or element.coding is Coding.TABLE:
        return False
    is_supported = rounding in {Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR}
    if rounding is Rounding.HYBRID:  # it reads the bits of float32 or bfloat16
        has_bits = (
            x.dtype.itemsize < WIDE_NBYTES
            if plan.scheme.scaling is not Scaling.NONE
            else x.dtype in {torch.float32, torch.bfloat16}
        )
        return has_bits and plan.saturate
    # The loops do not support stochastic or hybrid rounding beyond the largest element.
    return is_supported or plan.saturate or not element.has_overflow_code


_TOP_AND_INFINITY = {
    HALF_NBYTES: np.array([0x7FFF, 0x7F80], dtype=np.int16),
    4: np.array([MAGNITUDE, INFINITY]),
    WIDE_NBYTES: np.array([(1 << 63) - 1, 0x7FF << 52]),
}
"""The mask of the bits other than the sign, and the bits of infinity, by the size of a number in bytes."""


def _magnitudes(patterns: NDArray[Any]) -> NDArray[np.float64]:
    """The magnitudes with these bit patterns; 16-bit patterns are bfloat16."""
    if patterns.itemsize == HALF_NBYTES:
        return (patterns.astype(np.int32) << BF16_SHIFT).view(np.float32).astype(np.float64)
    return patterns.view(f"f{patterns.itemsize}").astype(np.float64)


Result = TypeVar("Result")

PIECE_SIZE = 1 << 17
"""Number of elements that a thread processes at a time, so that they stay in the cache of a core."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledGroups(ScaleGroups):
    """The groups of a contiguous CPU tensor, as a matrix for compiled loops, which use as many threads as torch."""

    numbers_RC: NDArray[Any]
    """The numbers of the tensor; bit patterns if they are bfloat16."""
    num_groups: int
    """Number of rows of the factors."""
    group_R: NDArray[np.int64]
    """The row of the factors for each row of numbers."""
    run: int
    """Number of neighbours in a row that share a factor."""
    unit: int
    """Number of consecutive rows that share no group with other rows, if groups are blocks."""
    rounding: Narrow | Wide
    """How numbers are rounded."""

    @classmethod
    def of(cls, x: torch.Tensor, *, plan: QuantizePlan) -> CompiledGroups:
        """The rows of a tensor that has elements and at least one dimension."""
        import torch

        is_supported = x.dtype in {torch.bfloat16, torch.float32, torch.float64}
        groups = ScaleGroups.of((x if is_supported else x.to(torch.float32)).contiguous(), plan=plan)
        outer, along, inner = groups.x_OLI.shape
        scaling, height = plan.scheme.scaling, plan.scheme.block_rows
        num_rows, columns = (outer * along, inner) if inner > 1 else (outer, along)
        rows, run, unit = np.arange(num_rows), columns, 1
        if scaling is Scaling.BLOCK and inner > 1:
            group_R, run, unit = rows // along * groups.num_runs + rows % along // groups.length, 1, along
        elif scaling is Scaling.BLOCK:
            unit, run = groups.shape[-2] if height > 1 else 1, groups.length
            group_R = rows // unit * -(-unit // height) + rows % unit // height
        elif scaling is Scaling.CHANNEL:
            group_R, run = (rows % along, columns) if inner > 1 else (0 * rows, 1)
        else:
            group_R = 0 * rows
        array = tensor_to_array(groups.x_OLI)
        numbers = array.view(np.uint16) if array.itemsize == HALF_NBYTES else array
        numbers_RC = frozen(numbers, shape=(num_rows, columns))
        return cls(
            **{field.name: getattr(groups, field.name) for field in fields(groups)},
            numbers_RC=numbers_RC,
            num_groups=int(group_R.max()) + 1,
            group_R=group_R,
            run=run,
            unit=unit,
            rounding=_rounding_of(plan, num_bytes=numbers_RC.itemsize),
        )

    @property
    def is_pattern(self) -> int | None:
        """1 if numbers are bfloat16 patterns, None if they are floats."""
        return 1 if self.numbers_RC.itemsize == HALF_NBYTES else None

    @property
    def saturates(self) -> bool:
        """Whether values beyond the largest element become the largest element."""
        return self.plan.saturate or not self.plan.scheme.element.has_overflow_code

    def _group_matrix(self, values: torch.Tensor) -> NDArray[Any]:
        return values.view(self.num_groups, -1).numpy()

    def _map_parts(self, work: Callable[[slice], Result], *, unit: int = 1) -> list[Result]:
        import torch

        num_rows, columns = self.numbers_RC.shape
        step = max(1, PIECE_SIZE // (columns * unit)) * unit
        parts = [slice(start, start + step) for start in range(0, num_rows, step)]
        return map_in_threads(work, parts, threads=torch.get_num_threads())

    def _round(
        self, part: slice, results_RC: NDArray[Any], before_GK: NDArray[np.float32], after_GK: NDArray[np.float32]
    ) -> None:
        """Write the values of some rows with these factors, as float32, float64 or bfloat16 patterns."""
        numbers_RC = self.numbers_RC[part]
        kinds = 1 if is_divided(self.plan) else None, self.is_pattern, 1 if results_RC.itemsize == HALF_NBYTES else None
        factors = self.group_R[part], before_GK, after_GK, self.run
        if isinstance(self.rounding, Narrow):
            _quantize_rows(numbers_RC, results_RC, *factors, self.rounding, *kinds)
        else:
            first = part.start * numbers_RC.shape[1]
            _quantize_wide_rows(numbers_RC, results_RC, *factors, first, self.rounding, *kinds)

    def quantized(self, before: torch.Tensor | None, after: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """The values that `encoded` returns, which saturate, without the codes; `dtype` may be bfloat16 if exact."""
        import torch

        values = torch.empty(self.shape, dtype=dtype)
        results_RC = (values.view(torch.uint16) if dtype is torch.bfloat16 else values).numpy()
        results_RC = results_RC.reshape(self.numbers_RC.shape)
        before_GK, after_GK = self._factors(before, after)
        self._map_parts(lambda part: self._round(part, results_RC[part], before_GK, after_GK))
        return values

    def _factors(self, before: torch.Tensor | None, after: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        import torch

        after_GK = self._group_matrix(after.to(torch.float32))
        return (after_GK if before is None else self._group_matrix(before.to(torch.float32))), after_GK

    def encoded(self, before: torch.Tensor | None, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """As in `ScaleGroups`, by compiled loops."""
        import torch

        plan, element, shape_RC = self.plan, self.plan.scheme.element, self.numbers_RC.shape
        values = torch.empty(self.shape, dtype=self.value_dtype)
        codes = torch.empty(self.shape, dtype=code_dtype(element))
        values_RC, codes_RC = values.numpy().reshape(shape_RC), codes.numpy().reshape(shape_RC)
        is_narrow, divides = element.num_bits <= NARROW_BITS, 1 if is_divided(plan) else None
        table = code_table(element.name) if is_narrow else np.zeros(0, dtype=np.uint8)
        before_GK, after_GK = self._factors(before, after)
        ones_GK = np.ones_like(after_GK)
        ends = Ends(
            min_normal=element.min_normal,
            overflow_start=element.overflow_start_of(plan.rounding),
            beyond=element.overflow_value(saturate=plan.saturate),
            is_float32=is_float32(plan),
        )

        def work(part: slice) -> NDArray[np.int64]:
            elements_RC = np.empty(values_RC[part].shape, dtype=np.float32)
            self._round(part, elements_RC, before_GK, ones_GK)
            counts, part_codes_RC = np.zeros(len(LOSSES), dtype=np.int64), codes_RC[part] if is_narrow else None
            factors = self.group_R[part], before_GK, after_GK, self.run
            matrices = self.numbers_RC[part], elements_RC, values_RC[part], part_codes_RC
            _encode_rows(*matrices, table, *factors, ends, divides, self.is_pattern, counts)
            if not is_narrow:
                has_nan = bool(counts[LOSSES.index("nan")])
                codes_RC[part] = element_codes(torch.from_numpy(elements_RC), element, has_nan=has_nan).numpy()
            return counts

        return values, codes, np.sum(self._map_parts(work), axis=0).tolist()

    def _largest(self) -> tuple[torch.Tensor, float]:
        """As in `ScaleGroups`, by compiled loops."""
        import torch

        scheme, num_columns = self.plan.scheme, self.numbers_RC.shape[1]
        top, infinity = _TOP_AND_INFINITY[self.numbers_RC.itemsize]
        # Blocks with NaN or infinities get a largest magnitude that makes their scale NaN.
        last = top if scheme.scaling is Scaling.BLOCK else infinity - 1
        largest_GK = self._reduce_largest((self.num_groups, -(-num_columns // self.run)), self.group_R, self.run, last)
        largest_of_all = 0.0
        if scheme.has_tensor_scale:
            largest = largest_GK.max(keepdims=True)
            if largest[0, 0] >= infinity:
                largest = self._reduce_largest((1, 1), 0 * self.group_R, num_columns, infinity - 1)
            largest_of_all = float(_magnitudes(largest)[0, 0])
        return torch.from_numpy(_magnitudes(largest_GK)).view(self.scale_shape or (1,)), largest_of_all

    def _reduce_largest(self, shape: tuple[int, int], group_R: NDArray[np.int64], run: int, last: Any) -> NDArray[Any]:
        """The patterns of the largest magnitudes up to `last`; parts that share groups are reduced separately first."""
        is_shared = group_R is not self.group_R or self.plan.scheme.scaling is not Scaling.BLOCK
        top = _TOP_AND_INFINITY[self.numbers_RC.itemsize][0]
        largest_GK, patterns_RC = np.zeros(shape, dtype=top.dtype), self.numbers_RC.view(top.dtype)

        def work(part: slice) -> NDArray[Any]:
            part_GK = np.zeros(shape, dtype=top.dtype) if is_shared else largest_GK
            _find_largest(patterns_RC[part], group_R[part], run, top, last, part_GK)
            return part_GK

        for part_GK in self._map_parts(work, unit=self.unit):
            if is_shared:
                np.maximum(largest_GK, part_GK, out=largest_GK)
        return largest_GK

    def _squared_errors(self, scales: GroupScales) -> torch.Tensor:
        """As in `ScaleGroups`, by compiled loops."""
        import torch

        values = self.quantized(*factors_of(scales, plan=self.plan), dtype=self.value_dtype)
        results_RC = values.numpy().reshape(self.numbers_RC.shape)
        errors = torch.zeros_like(scales.values)
        errors_GK = self._group_matrix(errors)

        def work(part: slice) -> None:
            matrices = self.numbers_RC[part], results_RC[part], self.group_R[part]
            _add_squared_errors(*matrices, self.run, self.is_pattern, errors_GK)

        self._map_parts(work, unit=self.unit)
        return errors
