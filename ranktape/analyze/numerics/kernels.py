"""Compiles the loops over elements when the first of them is called, and keeps what was compiled.

Loops that the compiler turns into vector instructions; everything that needs Python stays outside of them. To import
the compiler takes longer than many questions: it is imported when something is counted.
"""

# Shapes: O = everything before the dimension of samples, S = samples, I = everything after it,
# P = patterns, K = kinds of tallies, B = blocks, M = sums.

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

BLOCK = 4096
"""Elements that a kernel adds up in integers as narrow as the elements, so that the compiler vectorises it."""


def compiled(function: Function) -> Function:
    """`function` as machine code without the GIL, cached beside the source or in the user's cache.

    Where neither place can be written (a read-only container), it is compiled once for each process.
    """
    return _compiled(function, fastmath=False)


def compiled_sums(function: Function) -> Function:
    """The same, for sums of floats in any order: one after the other they take ten times as long."""
    return _compiled(function, fastmath={"reassoc"})


def compiled_products(function: Function) -> Function:
    """The same, where a product may be added before it is rounded: one instruction for two."""
    return _compiled(function, fastmath={"reassoc", "contract"})


class _Kernel:
    """A loop that is compiled when it, or any other, is first called."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *values: Any) -> Any:
        load_compiler()
        return self.dispatcher(*values)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """The compiled loop."""
        import numba

        try:
            return numba.njit(nogil=True, cache=True, **self._options)(self._function)
        except RuntimeError:  # numba found no directory for its cache
            return numba.njit(nogil=True, **self._options)(self._function)


_is_loaded = False
_loading = threading.RLock()


def load_compiler() -> None:
    """Put what the compiler makes in the place of each loop, by which loops find the ones that they call."""
    global _is_loaded  # noqa: PLW0603  # of the process
    with _loading:
        if _is_loaded:
            return
        package = __name__.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package:
                for own, value in list(vars(module).items()):
                    if isinstance(value, _Kernel):
                        setattr(module, own, value.dispatcher)
        _is_loaded = True


def _compiled(function: Function, **options: Any) -> Function:
    kernel = _Kernel(function, options)
    return cast("Function", kernel.dispatcher if _is_loaded else kernel)


@compiled
def count(patterns_OSI: NDArray[Any], counts_SP: NDArray[np.int64]) -> None:
    """Add to the counts of each sample how often each of its patterns occurs."""
    for before in range(patterns_OSI.shape[0]):
        for sample in range(patterns_OSI.shape[1]):
            counts = counts_SP[sample]
            for pattern in patterns_OSI[before, sample]:
                counts[pattern] += 1


@compiled
def scan_keys(keys_OSI: NDArray[Any], marks: NDArray[Any], counts_SK: NDArray[np.int64], ends: NDArray[Any]) -> None:
    """Add to the counts of each sample what its elements are, and widen the ends to hold all elements.

    Elements are the patterns of an IEEE type read as signed integers, `marks` the patterns where kinds begin:
    infinity, overflow, the normal numbers, what is not flushed; last the mask of the magnitude. Counts are
    in the order of `histogram.KINDS`; ends are the smallest and largest key, the largest finite and the
    smallest nonzero magnitude.
    """
    as_key = keys_OSI.dtype.type
    infinity, overflow, normal, kept, top = marks
    nothing, bottom = as_key(0), as_key(~top)
    smallest, largest, largest_finite, smallest_nonzero = ends
    for before in range(keys_OSI.shape[0]):
        for sample in range(keys_OSI.shape[1]):
            row = keys_OSI[before, sample]
            counts = counts_SK[sample]
            for start in range(0, row.size, BLOCK):
                upper = lower = subnormal = flushed = nan = inf = zero = nothing
                block_smallest, block_largest = top, bottom
                block_finite, block_nonzero = as_key(-1), top
                block = row[start : start + BLOCK]
                for index in range(block.size):
                    key = block[index]
                    magnitude = as_key(key & top)
                    is_negative = key < 0
                    is_number = magnitude <= infinity
                    is_finite = magnitude < infinity
                    is_over = is_number & (magnitude >= overflow)
                    is_zero = magnitude == 0
                    upper = as_key(upper + (is_over & (not is_negative)))
                    lower = as_key(lower + (is_over & is_negative))
                    subnormal = as_key(subnormal + (magnitude < normal))
                    flushed = as_key(flushed + (magnitude < kept))
                    nan = as_key(nan + (not is_number))
                    inf = as_key(inf + (magnitude == infinity))
                    zero = as_key(zero + is_zero)
                    # Keys in the order of the values; both zeros are 0.
                    ordered = as_key(-magnitude) if is_negative else magnitude
                    block_smallest = min(block_smallest, ordered if is_number else top)
                    block_largest = max(block_largest, ordered if is_number else bottom)
                    block_finite = max(block_finite, magnitude if is_finite else as_key(-1))
                    block_nonzero = min(block_nonzero, magnitude if is_finite & (not is_zero) else top)
                counts[0] += upper
                counts[1] += lower
                counts[2] += subnormal - zero
                counts[3] += flushed - zero
                counts[4] += nan
                counts[5] += inf
                counts[6] += zero
                smallest, largest = min(smallest, block_smallest), max(largest, block_largest)
                largest_finite = max(largest_finite, block_finite)
                smallest_nonzero = min(smallest_nonzero, block_nonzero)
    ends[0], ends[1], ends[2], ends[3] = smallest, largest, largest_finite, smallest_nonzero


@compiled_sums
def sum_powers(values: NDArray[Any], sums_BM: NDArray[np.float64]) -> None:
    """Write what the finite values of each block of `BLOCK` add up to.

    That is how many there are, their sum, the sums of the second, third and fourth power of their differences from
    the block's mean, and the sum of their magnitudes.
    """
    for number in range(sums_BM.shape[0]):
        block = values[number * BLOCK : (number + 1) * BLOCK]
        count, total, magnitudes = 0.0, 0.0, 0.0
        for index in range(block.size):
            value = np.float64(block[index])
            is_finite = abs(value) < np.inf
            count += 1.0 if is_finite else 0.0
            total += value if is_finite else 0.0
            magnitudes += abs(value) if is_finite else 0.0
        mean = total / count if count else 0.0
        second, third, fourth = 0.0, 0.0, 0.0
        for index in range(block.size):
            value = np.float64(block[index])
            difference = value - mean if abs(value) < np.inf else 0.0
            square = difference * difference
            second += square
            third += square * difference
            fourth += square * square
        sums = sums_BM[number]
        sums[0], sums[1], sums[2], sums[3], sums[4], sums[5] = count, total, second, third, fourth, magnitudes
