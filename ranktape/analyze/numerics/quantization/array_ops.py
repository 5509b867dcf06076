"""Rounds, judges and encodes pieces of numpy arrays: what `quantizer` needs of arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats import Coding, Format, Rounding
from ranktape.analyze.numerics.formats.kernels import BEYOND, RoundingConstants, constants_of
from ranktape.analyze.numerics.formats.values import (
    NARROW_BITS,
    code_table,
    codes_of,
    round_magnitudes,  # noqa: F401 - as `tensor_ops` has one
)
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.pieces import num_threads as usual_threads
from ranktape.analyze.numerics.quantization.rotation import rotate_groups
from ranktape.storage.format.dtypes import numpy_dtype

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

BOX_SIZE = 1 << 17
"""Elements of a piece: with smaller ones threads wait for each other between two operations."""

NUM_COUNTS = 6
"""Kinds of losses: see `finish`."""


def namespace() -> ModuleType:
    """The functions on arrays that numpy and torch have alike."""
    return np


def num_threads() -> int:
    """How many threads work at once: as many as torch has where there is torch, or else one on each core."""
    torch = sys.modules.get("torch")
    return usual_threads(None) if torch is None else int(torch.get_num_threads())


def on_host(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself."""
    return array


def butterflies(groups_GNI: NDArray[Any], before_N: NDArray[Any], after_N: NDArray[Any]) -> NDArray[Any]:
    """The groups times the first factors, rotated by the Hadamard matrix of their size, times the second ones."""
    rotated = groups_GNI.copy()
    rotate_groups(rotated, before_N.astype(rotated.dtype), after_N.astype(rotated.dtype))
    return rotated


@compiled
def _finish(  # noqa: PLR0917 - numba knows no keyword-only arguments
    values: NDArray[np.float64],
    magnitudes: NDArray[np.float64],
    constants: RoundingConstants,
    limits: tuple[float, float, bool],
    rounded: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """Bound rounded magnitudes, give them the signs of the values, and add up what is lost, in the order of `COUNTS`.

    `magnitudes` are those before rounding: NaN where the value or its scale is. `limits` are the largest value of the
    format, what becomes of magnitudes beyond it, and whether the sign of a zero is kept.
    """
    maximum, beyond, has_negative_zero = limits
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
        bounded = beyond if result > maximum else result
        signed = np.copysign(bounded, value)
        signed = signed if has_negative_zero else signed + 0.0
        rounded[index] = signed if is_number else np.nan
    counts[0] += underflow
    counts[1] += flushed
    counts[2] += overflow
    counts[3] += spoiled
    counts[4] += nan
    counts[5] += inf


def finish(
    values: NDArray[np.float64],
    magnitudes: NDArray[np.float64],
    rounded: NDArray[np.float64],
    *,
    element: Format,
    rounding: Rounding,
    saturate: bool,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rounded magnitudes, bounded and with the signs of the values, and the counts of `Losses` in their order."""
    counts = np.zeros(NUM_COUNTS, dtype=np.int64)
    limits = element.maximum, element.overflow_value(saturate=saturate), element.has_negative_zero
    constants = constants_of(element, rounding, beyond=BEYOND)
    _finish(values.reshape(-1), magnitudes.reshape(-1), constants, limits, rounded.reshape(-1), counts)
    return rounded, counts


def code_dtype(element: Format) -> np.dtype[Any]:
    """The type of the codes of a format."""
    return np.dtype(f"u{max(1, element.num_bits // 8)}")


def encode(rounded: NDArray[np.float64], *, element: Format) -> NDArray[Any]:
    """The codes of values of the format; of NaN that of 0 where it has none."""
    codes: NDArray[Any]
    if element.coding is Coding.TABLE:
        codes = codes_of(np.nan_to_num(rounded), target=element)
    elif element.num_bits <= NARROW_BITS:
        codes = code_table(element.name)[rounded.astype(np.float32).view(np.uint32) >> 16]
    else:
        codes = rounded.astype(numpy_dtype(str(element.dtype))).view(code_dtype(element))
    return codes
