"""Rounds, judges and encodes pieces of torch tensors on their device, bit for bit as `array_ops` does arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats import Coding, Format, Rounding
from ranktape.analyze.numerics.formats.kernels import (
    GOLDEN,
    HALF,
    ONE_FIELD,
    UNIFORM_UNIT,
    mix,
    state_of,
)
from ranktape.analyze.numerics.formats.values import NARROW_BITS, code_table, codes_of

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from numpy.typing import NDArray

BOX_SIZE = 1 << 22
"""Elements of a piece, each operation on which costs a launch: some 500 MB."""

_FIELD_SHIFT = 52
"""Bits of a float64 below its exponent field."""


def namespace() -> ModuleType:
    """The functions on arrays that numpy and torch have alike."""
    import torch

    return torch


def num_threads() -> int:
    """One: the operations of torch have their own."""
    return 1


def on_host(tensor: torch.Tensor) -> NDArray[Any]:
    """The numbers in the memory of the CPU."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def butterflies(groups_GNI: torch.Tensor, before_N: NDArray[Any], after_N: NDArray[Any]) -> torch.Tensor:
    """See `array_ops`."""
    import torch

    count, size, width = groups_GNI.shape
    before, after = (
        torch.asarray(factors, dtype=groups_GNI.dtype, device=groups_GNI.device).reshape(1, size, 1)
        for factors in (before_N, after_N)
    )
    rotated, span = groups_GNI * before, 1
    while span < size:
        pairs = rotated.reshape(count, size // (2 * span), 2, span, width)
        one, other = pairs[:, :, 0], pairs[:, :, 1]
        rotated, span = torch.stack((one + other, one - other), dim=2).reshape(count, size, width), 2 * span
    return rotated * after


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2.0 to each int64 exponent from -1022 to 1023, as float64."""
    import torch

    return ((exponent + ONE_FIELD) << _FIELD_SHIFT).view(torch.float64)


def uniforms_at(index: torch.Tensor, *, seed: int) -> torch.Tensor:
    """`formats.uniforms` of the elements with these int64 indices in C order."""
    import torch

    mixed: torch.Tensor = mix.py_func(state_of(seed) + (index + 1) * GOLDEN)  # type: ignore[attr-defined]
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(torch.float64) * UNIFORM_UNIT


def round_magnitudes(
    magnitudes: torch.Tensor, *, element: Format, rounding: Rounding, seed: int, places: torch.Tensor | None
) -> torch.Tensor:
    """See `array_ops`."""
    import torch

    step = float(np.ldexp(1.0, element.unit_exponent(element.emax)))
    bounded = magnitudes.clamp(max=element.maximum + 2 * step)
    exponent = (bounded.view(torch.int64) >> _FIELD_SHIFT) - ONE_FIELD
    exponent = exponent.clamp(element.lowest_exponent, element.emax)
    unit_exponent = exponent - element.mantissa_bits
    for limit in element.taper:
        unit_exponent += exponent.abs() > limit
    # In units of the last place every value of the format is an integer, and powers of two scale exactly.
    in_units = bounded * _power_of_two(-unit_exponent)
    if rounding is Rounding.EVEN:
        return in_units.round() * _power_of_two(unit_exponent)
    whole = in_units.floor()
    if rounding is Rounding.AWAY:
        whole += in_units - whole >= HALF
    elif places is not None:
        whole += uniforms_at(places, seed=seed) < in_units - whole
    return whole * _power_of_two(unit_exponent)


def finish(
    values: torch.Tensor,
    magnitudes: torch.Tensor,
    rounded: torch.Tensor,
    *,
    element: Format,
    rounding: Rounding,
    saturate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `array_ops`."""
    import torch

    is_finite = values.isfinite()
    is_spoiled = is_finite & magnitudes.isnan()
    is_counted = is_finite & ~is_spoiled & (values != 0)
    kinds = (
        is_counted & (magnitudes < element.min_normal),
        is_counted & (rounded == 0),
        is_counted & (magnitudes >= element.overflow_start_of(rounding)),
        is_spoiled,
        values.isnan(),
        values.isinf(),
    )
    bounded = torch.where(rounded > element.maximum, element.overflow_value(saturate=saturate), rounded)
    signed = bounded.copysign(values)
    return signed if element.has_negative_zero else signed + 0.0, torch.stack([kind.sum() for kind in kinds])


def code_dtype(element: Format) -> torch.dtype:
    """The type of the codes of a format."""
    import torch

    return {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[max(NARROW_BITS, element.num_bits)]


def encode(rounded: torch.Tensor, *, element: Format) -> torch.Tensor:
    """See `array_ops`."""
    import torch

    if element.coding is Coding.TABLE:
        values = torch.tensor(element.table, dtype=torch.float64, device=rounded.device)
        return torch.searchsorted(values, rounded.nan_to_num()).to(torch.uint8)
    if element.num_bits > NARROW_BITS:
        dtype = getattr(torch, element.dtype or "")
        bits = rounded.to(dtype).view({16: torch.int16, 32: torch.int32}[element.num_bits])
        # Each device has its own idea of the bits of a NaN.
        bits[rounded.isnan()] = int(codes_of(np.nan, target=element))
        return bits.view(code_dtype(element))
    table = torch.tensor(code_table(element.name), device=rounded.device)
    patterns = (rounded.to(torch.float32).view(torch.int32) >> 16) & 0xFFFF
    return table[patterns]
