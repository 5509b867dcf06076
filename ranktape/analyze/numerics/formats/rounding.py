"""Rounds numbers to the values of a format: nearest, stochastic, and HiFloat8's hybrid way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.analyze.numerics.formats.kernels import (
    BEYOND,
    HYBRID_BITS,
    constants_of,
    draw,
    fill_uniforms,
    round_block,
    round_hybrids,
    state_of,
)
from ranktape.analyze.numerics.formats.table import Coding, Format, Rounding
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

NUM_BITS = {np.dtype(np.float32): HYBRID_BITS, np.dtype(np.float16): 2, np.dtype(ml_dtypes.bfloat16): 2}
"""The types that hybrid rounding takes, and how many of the discarded bits are compared with the threshold."""


def round_to(
    values: ArrayLike,
    *,
    target: Format,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    seed: int | None = None,
) -> NDArray[np.float64]:
    """The values of the format that `values` round to, as float64, in the shape of `values`.

    NaN stays NaN, also where the format has no code for it: count and mask NaN first. What rounds to beyond the
    largest value, infinities included, becomes the largest value of its sign; with `saturate=False` an infinity, or
    NaN where the format has none. A zero keeps its sign, and so does what is flushed, where the format has a negative
    zero. Subnormals are kept. Empty input gives empty output. In e8m0, which has neither zero nor sign, zeros and
    what is below the smallest value become the smallest value, and negative numbers NaN.

    Exact for every input that float64 can hold. `rounding` is the format's own unless given. Stochastic rounding goes
    up if `uniforms(seed, ...)` of the element, counted in C order, is below the fraction of the step that the
    magnitude has passed, with any fraction that float64 can hold; without a seed, seed 0. Hybrid rounding looks at
    the bits of the type that the values come in: float32, float16 or bfloat16.

    Raises:
        UsageError: the rounding is not known, or is hybrid and the format is not hif8 or the type is another one; the
            seed is not an integer, or goes with a rounding that draws nothing; `saturate` is False and the format
            has neither infinity nor NaN; the values are complex.
    """
    chosen = parse_rounding(rounding, target=target, seed=seed)
    overflow = target.overflow_value(saturate=saturate)
    if np.iscomplexobj(values):
        raise UsageError("complex numbers are not rounded: give their real and imaginary parts")
    with np.errstate(invalid="ignore"):  # signalling NaN
        exact = np.asarray(values, dtype=np.float64)
    magnitude = np.abs(exact)
    if chosen is Rounding.HYBRID:
        endless = _hybrid(np.asarray(values), magnitude, target=target)
        is_over = (endless > target.maximum) | (magnitude >= target.overflow_start_of(Rounding.AWAY))
    else:
        endless = magnitude if target.name == "fp64" else _rounded(magnitude, target=target, rounding=chosen, seed=seed)
        is_over = endless > target.maximum
    rounded = np.where(np.isnan(magnitude), np.nan, np.where(is_over, overflow, endless))
    if target.coding is Coding.EXPONENT:
        return np.where(exact < 0, np.nan, np.maximum(rounded, target.min_subnormal))
    signed = np.copysign(rounded, exact)
    return np.asarray(signed if target.has_negative_zero else signed + 0.0)


def parse_rounding(rounding: Rounding | str | None, *, target: Format, seed: int | None) -> Rounding:
    """The rounding of that name, the format's own without one; a seed means stochastic where nothing else is said.

    Raises:
        UsageError: there is none of that name, it is hybrid and the format is not hif8, or it draws nothing from the
            seed that was given.
    """
    if rounding is None:
        return target.rounding if seed is None else Rounding.STOCHASTIC
    try:
        chosen = Rounding(rounding)
    except ValueError as error:
        raise UsageError(f"rounding {rounding!r} is not known: use one of {', '.join(Rounding)}") from error
    if chosen is Rounding.HYBRID and target.coding is not Coding.TAPERED:
        raise UsageError(f"rounding hybrid is that of hif8, and the format is {target.name}: use even or stochastic")
    if seed is not None and chosen is not Rounding.STOCHASTIC:
        raise UsageError(f"seed is {seed}, and rounding {chosen} draws nothing: leave it out, or round stochastic")
    return chosen


def uniforms(seed: int, *, start: int, size: int) -> NDArray[np.float64]:
    """The uniform numbers in [0, 1), multiples of 2**-53, of `size` elements from index `start` on.

    Each follows from the seed and its own index alone, so chunks, threads and machines do not change it. With int64
    arithmetic modulo 2**64, `GOLDEN` = 0x9E3779B97F4A7C15 and `mix` as `kernels.mix` has it:

        state = mix(seed + GOLDEN)
        uniform = ((mix(state + (index + 1) * GOLDEN) >> 11) & (2**53 - 1)) * 2**-53

    That is the generator splitmix64 (Steele, Lea and Flood, OOPSLA 2014) from a mixed seed, of which every number can
    be had without those before it.

    Raises:
        UsageError: the seed is not an integer.
    """
    found = np.empty(size)
    fill_uniforms(state_of(seed), start, found)
    return found


def _rounded(
    magnitude: NDArray[np.float64], *, target: Format, rounding: Rounding, seed: int | None
) -> NDArray[np.float64]:
    """The magnitudes of the format, were it without end."""
    flat = np.ascontiguousarray(magnitude).reshape(-1)
    constants = constants_of(target, rounding, beyond=BEYOND)
    rounded = np.empty(flat.size)
    if rounding is not Rounding.STOCHASTIC:
        round_block(flat, constants, rounded)
    else:
        draw(flat, constants, state_of(seed or 0), np.arange(flat.size), rounded)
    return rounded.reshape(magnitude.shape)


def _hybrid(source: NDArray[Any], magnitude: NDArray[np.float64], *, target: Format) -> NDArray[np.float64]:
    num_bits = NUM_BITS.get(source.dtype)
    if num_bits is None:
        raise UsageError(
            "hybrid rounding looks at the bits of the type that values come in: give "
            f"{', '.join(map(str, NUM_BITS))}, not {source.dtype}"
        )
    # The last bits of the significand; of the 16-bit types the last one alone, with a 1 behind it.
    flat = np.ascontiguousarray(source).reshape(-1)
    is_wide = source.dtype == np.float32
    bits = flat.view(np.uint32 if is_wide else np.uint16).astype(np.int64)
    thresholds = bits & ((1 << num_bits) - 1) if is_wide else (bits & 1) * 2 + 1
    rounded = np.empty(flat.size)
    constants = constants_of(target, Rounding.HYBRID, beyond=BEYOND)
    round_hybrids(np.ascontiguousarray(magnitude).reshape(-1), thresholds, num_bits, constants, rounded)
    return rounded.reshape(magnitude.shape)
