"""The compiled loop that summarises float32 values in one pass over memory, for callers with addresses, not arrays."""

# Shapes: O = all dimensions before that of samples, S = samples, I = all after it.

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from ranktape.analyze.numerics.kernels import BLOCK, compiled, compiled_products, load_compiler

_NUM_SIZES = 7
"""Number of arguments of `summarise` that are not addresses."""


_NUM_SUMS = 6
"""Number of sums: count, mean, second to fourth moment about the mean, and sum of magnitudes."""

_SIGN = 0x80000000
"""The sign bit of a float32."""


@compiled_products
def _sum_block(block: NDArray[np.float32], sums: NDArray[np.float64], ends: NDArray[np.int64]) -> np.int64:
    """Add float32 values to the sums and ends, and return the bit pattern of their smallest magnitude.

    If a value is not finite, -1 is returned and nothing is added. The ends are the largest bit pattern as a signed and
    as an unsigned integer, and that of the smallest magnitude.
    """
    keys = block.view(np.int32)
    count, mean, second, third, fourth, _ = sums
    size, top = np.float64(block.size), np.uint32(_SIGN - 1)
    # Moments are about the mean of all blocks so far, so that the block is read once; if the mean of the block is far
    # from it, the block is read again and its moments are about its own mean.
    center, is_centered = mean, False
    while True:
        positive, negative, least = np.int32(-_SIGN), np.uint32(0), top
        total, magnitudes, block_2, block_3, block_4 = 0.0, 0.0, 0.0, 0.0, 0.0
        for index in range(block.size):
            key = keys[index]
            positive, negative = max(positive, key), max(negative, np.uint32(key))
            least = min(least, np.uint32(np.uint32(key) & top))
            value = np.float64(block[index])
            magnitudes += abs(value)
            difference = value - center
            square = difference * difference
            total += difference
            block_2 += square
            block_3 += square * difference
            block_4 += square * square
        if not magnitudes < np.inf:
            return np.int64(-1)
        shift = total / size
        if is_centered or 2.0 * shift * total <= block_2:
            break
        center, is_centered = center + shift, True
    # The moments of this block and of those before it, about their common mean.
    total_count = count + size
    new_mean = mean + (center - mean + shift) * (size / total_count)
    a, b = mean - new_mean, center - new_mean
    fourth += 4 * a * third + 6 * a * a * second + count * a * a * a * a
    fourth += block_4 + 4 * b * block_3 + 6 * b * b * block_2 + 4 * b * b * b * total + size * b * b * b * b
    third += 3 * a * second + count * a * a * a + block_3 + 3 * b * block_2 + 3 * b * b * total + size * b * b * b
    second += count * a * a + block_2 + 2 * b * total + size * b * b
    sums[0], sums[1], sums[2], sums[3], sums[4] = total_count, new_mean, second, third, fourth
    sums[5] += magnitudes
    ends[0], ends[1], ends[2] = max(ends[0], positive), max(ends[1], negative), min(ends[2], least)
    return np.int64(least)


@compiled
def _count_small(keys: NDArray[np.int32], normal: np.uint32) -> tuple[np.int32, np.int32]:
    """The number of magnitudes below the bit pattern `normal`, and the number of zeros."""
    below, zero = np.int32(0), np.int32(0)
    for index in range(keys.size):
        magnitude = np.uint32(np.uint32(keys[index]) & np.uint32(_SIGN - 1))
        zero += np.int32(magnitude == 0)
        below += np.int32(magnitude < normal)
    return below, zero


@functools.cache
def summariser() -> Callable[..., int]:
    """`summarise` as machine code that takes addresses as integers, so that a call needs no arrays.

    Compiled, or loaded from numba's cache, on the first call.
    """
    load_compiler()
    pointer: Any = types.CPointer
    floats, numbers = pointer(types.float32), pointer(types.float64)
    signature = types.int32(floats, numbers, numbers, *[types.int64] * _NUM_SIZES)
    try:
        entry: Any = numba.cfunc(signature, cache=True, fastmath={"reassoc"})(summarise)
    except RuntimeError:  # numba found no directory for its cache
        entry = numba.cfunc(signature, fastmath={"reassoc"})(summarise)
    argument_types = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * _NUM_SIZES]
    call: Any = ctypes.CFUNCTYPE(ctypes.c_int32, *argument_types)(entry.address)
    call.code = entry  # keeps the machine code alive
    return cast("Callable[..., int]", call)


def summarise(  # noqa: PLR0917  (called as machine code)
    values: Any,
    summary: Any,
    counts: Any,
    before: int,
    samples: int,
    after: int,
    normal: int,
    kinds: int,
    below_at: int,
    zero_at: int,
) -> int:
    """Summarise float32 values and count the subnormal values and the zeros of each sample, in one pass over memory.

    The summary is the count, the count of finite values, the sum, the second to fourth moment about the mean, the sum
    of magnitudes, and twice the smallest value, the largest value and the largest magnitude. `counts` has `kinds`
    numbers for each sample: at index `below_at` the number of nonzero values below the bit pattern `normal` in
    magnitude, at `zero_at` the number of zeros. Returns 1; or 0, with undefined output, if a value is not finite.
    """
    values_OSI = carray(values, (before, samples, after))
    sums, ends = np.zeros(_NUM_SUMS), np.array([-_SIGN, 0, _SIGN - 1])
    for index in range(samples * kinds):
        counts[index] = 0.0
    for outer in range(before):
        for sample in range(samples):
            for start in range(0, after, BLOCK):
                block = values_OSI[outer, sample, start : start + BLOCK]
                least = _sum_block(block, sums, ends)
                if least < 0:
                    return 0
                if least < normal:
                    below, zero = _count_small(block.view(np.int32), np.uint32(normal))
                    counts[sample * kinds + below_at] += below - zero
                    counts[sample * kinds + zero_at] += zero
    positive, negative, least = ends
    # The largest unsigned pattern is that of the smallest value if any value is negative.
    keys = np.empty(3, dtype=np.uint32)
    keys[0] = negative if negative >= _SIGN else least
    keys[1] = positive if positive >= 0 else least + _SIGN
    keys[2] = max(keys[0] & (_SIGN - 1), keys[1] & (_SIGN - 1))
    extremes = keys.view(np.float32)
    if extremes[0] == extremes[1]:
        sums[2:5] = 0.0
    summary[0], summary[1], summary[2] = sums[0], sums[0], sums[1] * sums[0]
    for index in range(2, _NUM_SUMS):
        summary[1 + index] = sums[index]
    for index in range(6):
        summary[1 + _NUM_SUMS + index] = extremes[index % 3]
    return 1
