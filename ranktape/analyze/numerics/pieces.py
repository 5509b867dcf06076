"""Divides the work on an array into pieces of bounded memory, and among threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 1 << 21
"""Elements of a piece, unless a single block has more: they are read twice, the second time from a cache."""


def contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """The same elements in C order at an aligned address, copied only if they are not so already."""
    return np.require(array, requirements=["C", "A"])


def frozen(array: NDArray[Any], *, shape: tuple[int, ...]) -> NDArray[Any]:
    """A read-only contiguous view in that shape: numba compiles one variant instead of one for each kind of buffer."""
    view = contiguous(array).reshape(shape).view()
    view.flags.writeable = False
    return view


def pieces(array: NDArray[Any], *, axis: int, block_size: int) -> list[NDArray[Any]]:
    """Views that hold each element of the array once, with the same axis; none of them cuts a block.

    They depend on the array alone; of one that `by_memory` gave most lie in one run. `axis` counts from the front.
    """
    return list(_cut(array, axis=axis, block_size=block_size))


def in_three(piece: NDArray[Any], *, axis: int) -> NDArray[Any]:
    """The piece in three dimensions, with the axis as the second; copied where it does not lie in one run."""
    before = int(np.prod(piece.shape[:axis], dtype=np.int64))
    after = int(np.prod(piece.shape[axis + 1 :], dtype=np.int64))
    return frozen(piece, shape=(before, piece.shape[axis], after))


def by_memory(array: NDArray[Any], *, axis: int) -> tuple[NDArray[Any], int]:
    """The array with its axes in the order of their strides, and where the axis is then; no element is copied."""
    order = sorted(range(array.ndim), key=lambda dim: -abs(array.strides[dim]))
    return array.transpose(order), order.index(axis)


def _cut(array: NDArray[Any], *, axis: int, block_size: int) -> Iterator[NDArray[Any]]:
    if array.size == 0:
        return
    for dim, extent in enumerate(array.shape):
        unit = block_size if dim == axis else 1
        if array.size <= PIECE or extent <= unit:
            continue
        step = max(1, PIECE // (array.size // extent) // unit) * unit
        for start in range(0, extent, step):
            part = array[(slice(None),) * dim + (slice(start, start + step),)]
            yield from _cut(part, axis=axis, block_size=block_size) if step == unit else iter((part,))
        return
    yield array


Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 16
"""More threads than this read memory no faster."""


def num_threads(threads: int | None) -> int:
    """`threads`, or for None the cores that this process may use, 16 at most.

    Raises:
        UsageError: it is less than 1.
    """
    if threads is None:
        is_known = hasattr(os, "sched_getaffinity")
        return min(MAX_THREADS, len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1)
    if threads < 1:
        raise UsageError(f"threads={threads} is not a number of threads: give 1 or more, or None for one on each core")
    return threads


def each(work: Callable[[Item], Result], items: Sequence[Item], *, threads: int | None) -> list[Result]:
    """What `work` gives for each item, in the order of the items; the work must release the GIL to take less time.

    No thread is started where one is enough.

    Raises:
        UsageError: `threads` is less than 1; or whatever the work raises first, in the order of the items.
    """
    count = min(num_threads(threads), len(items))
    if count <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, items))
