"""Into which pieces is a large array taken apart, so that what is done with one of them needs little memory?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

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
