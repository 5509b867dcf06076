"""Quantises float32 and narrower tensors on a CPU by compiled loops, in several threads, where only values are asked.

The results do not depend on the number of threads, which is that of torch.
"""

# Shapes: O = everything before the axis, L = elements along the axis, I = everything after.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ranktape.analyze.numerics.formats import Coding, Rounding
from ranktape.analyze.numerics.pieces import each
from ranktape.analyze.numerics.quantization.block_kernels import (
    round_channels,
    round_columns,
    round_rows,
    round_tiles,
)
from ranktape.analyze.numerics.quantization.fast_kernels import (
    block_scheme,
    has_low_bits,
    largest_finite,
    largest_of_channels,
)
from ranktape.analyze.numerics.quantization.group_scales import group_scales, tensor_scale
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.rotation import check_rotation, rotate_groups, rotation_factors
from ranktape.analyze.numerics.quantization.schemes import Scaling

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

PIECE_SIZE = 1 << 17
"""Elements that a thread takes at a time: they stay in a core's cache."""

Result = TypeVar("Result")


def is_fast(x: torch.Tensor, *, plan: QuantizePlan) -> bool:
    """Whether `fast_values` knows such tensors and plans."""
    import torch

    is_plain = x.device.type == "cpu" and x.layout is torch.strided and x.is_floating_point() and x.numel() > 0
    is_known = plan.rounding is not Rounding.HYBRID and plan.scheme.element.coding is not Coding.TABLE
    has_known_end = plan.saturate or not plan.scheme.element.has_overflow_code
    return is_plain and x.dtype is not torch.float64 and is_known and has_known_end


def fast_values(x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The float32 values, and the factor that was left out of them: one number or one for each channel.

    The caller has looked whether `is_fast`.
    """
    import torch

    values = torch.empty(x.shape, dtype=torch.float32).copy_(x.detach())
    shape = tuple(values.shape) or (1,)
    before, length, after = math.prod(shape[: plan.axis]), shape[plan.axis], math.prod(shape[plan.axis + 1 :])
    numbers_OLI = values.numpy().reshape(before, length, after)
    patterns_OLI = numbers_OLI.view(np.int32)
    if plan.rotation:
        _rotate(numbers_OLI, size=plan.rotation, seed=plan.rotation_seed, is_back=False)
    factor: float | torch.Tensor
    if plan.scheme.scaling is Scaling.CHANNEL:
        scales = _quantize_channels(patterns_OLI, plan=plan, is_apart=is_apart)
        factor = torch.from_numpy(scales.astype(np.float32)) if is_apart else 1.0
    elif plan.scheme.scaling is Scaling.BLOCK:
        num_rows = shape[-2] if plan.scheme.block_rows > 1 else before * after
        factor = _quantize_blocks(patterns_OLI, num_rows=num_rows, plan=plan, is_apart=is_apart)
    else:
        factor = _quantize_together(patterns_OLI.reshape(-1), plan=plan, is_apart=is_apart)
    if plan.rotation:
        _rotate(numbers_OLI, size=plan.rotation, seed=plan.rotation_seed, is_back=True)
    return values, factor


def rotated_rows(x_RS: torch.Tensor, *, size: int, seed: int | None) -> torch.Tensor:
    """`rotated` along the last dimension of a matrix on a CPU that is not float64: a new one of float32.

    Raises:
        UsageError: as `rotated`.
    """
    import torch

    values = torch.empty(x_RS.shape, dtype=torch.float32).copy_(x_RS.detach())
    _rotate(values.numpy()[:, :, np.newaxis], size=size, seed=seed, is_back=False)
    return values


def are_bf16(values: torch.Tensor) -> bool:
    """Whether all of the float32 numbers, on a CPU one after the other, are of bfloat16; NaN is."""
    import torch

    patterns = values.view(torch.int32).numpy().reshape(-1)
    return not any(_each_part(patterns.size, lambda part: has_low_bits(patterns[part])))


def _each_part(count: int, work: Callable[[slice], Result], *, size: int = 1, unit: int = 1) -> list[Result]:
    """What the work gives for each run of indices below `count`, each of `size` elements, in whole units."""
    import torch

    step = max(1, PIECE_SIZE // (size * unit)) * unit
    parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]
    return each(work, parts, threads=torch.get_num_threads())


def _rotate(numbers_OLI: NDArray[np.float32], *, size: int, seed: int | None, is_back: bool) -> None:
    """Each run of that size along the axis, in place."""
    before, length, after = numbers_OLI.shape
    check_rotation(length, size=size)
    groups_GNI = numbers_OLI.reshape(before * (length // size), size, after)
    factors = [one.astype(np.float32) for one in rotation_factors(size, seed=seed, is_back=is_back)]
    _each_part(len(groups_GNI), lambda part: rotate_groups(groups_GNI[part], *factors), size=size * after)


def _largest_of(patterns: NDArray[np.int32]) -> float:
    return max(_each_part(patterns.size, lambda part: largest_finite(patterns[part])))


def _zero(plan: QuantizePlan) -> np.float32 | None:
    """What is added to results, to take the sign of a zero away; None where it stays."""
    return None if plan.scheme.element.has_negative_zero else np.float32(0.0)


def _quantize_together(patterns: NDArray[np.int32], *, plan: QuantizePlan, is_apart: bool) -> float:
    """With one scale for all, or without; gives the factor that is left out."""
    scales = np.ones(1)
    if plan.scheme.scaling is Scaling.TENSOR:
        scales = group_scales(np.array([_largest_of(patterns)]), plan=plan, largest_of_all=0.0).values
    how = *_factors(scales, plan=plan, is_apart=is_apart), block_scheme(plan, tensor=None, is_apart=is_apart)
    zero = _zero(plan)
    _each_part(patterns.size, lambda part: round_channels(patterns[part].reshape(1, 1, -1), *how, zero, part.start))
    return float(scales[0]) if is_apart else 1.0


def _quantize_channels(patterns_OLI: NDArray[np.int32], *, plan: QuantizePlan, is_apart: bool) -> NDArray[np.float64]:
    """With one scale for each index along the axis; gives the scales."""
    num_outer, length, width = patterns_OLI.shape
    scheme, zero = block_scheme(plan, tensor=None, is_apart=is_apart), _zero(plan)

    def largest_in(part: slice) -> NDArray[np.int32]:
        piece = patterns_OLI[:, part] if num_outer == 1 else patterns_OLI[part]
        found = np.empty(piece.shape[1], dtype=np.int32)
        largest_of_channels(piece, found)
        return found

    def round_part(part: slice) -> None:
        if num_outer == 1:
            own = befores[part], afters[part]
            round_channels(patterns_OLI[:, part], *own, scheme, zero, part.start * width)
        else:
            round_channels(patterns_OLI[part], befores, afters, scheme, zero, part.start * length * width)

    # Pieces are contiguous: rows of channels, or channels of the one row there is.
    count, size = (length, width) if num_outer == 1 else (num_outer, length * width)
    found = _each_part(count, largest_in, size=size)
    largest = np.concatenate(found) if num_outer == 1 else np.max(found, axis=0)
    scales = group_scales(largest.view(np.float32).astype(np.float64), plan=plan, largest_of_all=0.0).values
    befores, afters = _factors(scales, plan=plan, is_apart=is_apart)
    _each_part(count, round_part, size=size)
    return scales


def _factors(
    scales: NDArray[np.float64], *, plan: QuantizePlan, is_apart: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What elements are multiplied by, or divided by unless scales are powers of two, and rounded ones after it."""
    before, after = scales if plan.scale_rule is None else 1 / scales, np.ones_like(scales) if is_apart else scales
    return before.astype(np.float32), after.astype(np.float32)


def _quantize_blocks(patterns_OLI: NDArray[np.int32], *, num_rows: int, plan: QuantizePlan, is_apart: bool) -> float:
    """With one scale for each block; gives the factor that is left out."""
    needs_largest = plan.scheme.has_tensor_scale
    tensor = tensor_scale(_largest_of(patterns_OLI.reshape(-1)) if needs_largest else 0.0, plan=plan)
    scheme = block_scheme(plan, tensor=tensor, is_apart=is_apart)
    num_outer, length, width = patterns_OLI.shape
    zero = _zero(plan)
    block_size = plan.scheme.block_size
    factor = float(tensor.scale) if tensor is not None and is_apart else 1.0
    is_plain = not scheme.is_wide and not scheme.four_over_six
    if width > 1 and is_plain:
        if num_outer > 1:
            _each_part(
                num_outer,
                lambda part: round_columns(patterns_OLI[part], scheme, block_size, zero),
                size=length * width,
            )
        else:
            _each_part(
                length,
                lambda part: round_columns(patterns_OLI[:, part], scheme, block_size, zero),
                size=width,
                unit=block_size,
            )
        return factor
    # Rows of blocks, one after the other.
    rows = np.ascontiguousarray(patterns_OLI.transpose(0, 2, 1)).reshape(-1, num_rows, length)
    tile = plan.scheme.block_rows, block_size
    for number, matrix in enumerate(rows):
        first = number * num_rows

        def work(part: slice, matrix: NDArray[np.int32] = matrix, first: int = first) -> None:
            if is_plain and tile[0] == 1:
                round_rows(matrix[part], scheme, block_size, zero)
                return
            round_tiles(matrix[part], tile, scheme, zero, first + part.start, width)

        _each_part(num_rows, work, size=length, unit=tile[0])
    if width > 1:
        patterns_OLI[...] = rows.reshape(num_outer, width, length).transpose(0, 2, 1)
    return factor
