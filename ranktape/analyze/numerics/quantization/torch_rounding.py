"""To which value of a format does each element of a torch tensor round, on the device where it is?

Every function is the twin of one in `formats`, equal bit for bit: operations on float64 and int64 that IEEE 754 defines
to the last bit, so that a CPU and a GPU agree. No logarithm and no power is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from ranktape.analyze.numerics.quantization.inputs import array_of

if TYPE_CHECKING:
    import torch

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
