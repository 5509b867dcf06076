"""Cuts a tensor into pieces that hold whole blocks, without a copy of all of it.

A piece is a box: a range of indices along each dimension. What is copied of a tensor at a time is one box, whatever
its shape, its strides, the axis and the size of the blocks.
"""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.
# ruff: noqa: N815 - the letters of a shape end the name of the shape

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

BOX_SIZE = 1 << 15
"""Elements of a box: as float64, with what is computed of them, they stay in a core's cache."""

RUN = 64
"""Neighbours of the last dimension that a box keeps together where it can: memory is read in lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A piece of a tensor: along the axis whole blocks of one length, or a part of a single block."""

    place: tuple[slice, ...]
    """In the tensor."""
    groups: tuple[slice, ...]
    """In the tensor whose axis counts blocks instead of elements."""
    shape: tuple[int, ...]
    """Of the piece, a dimension for each of the tensor's."""
    shape_OBEI: tuple[int, int, int, int]
    """The same elements by their block: before the axis, blocks, elements of a block, after the axis."""

    @property
    def size(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)


def num_blocks(length: int, *, block_size: int) -> int:
    """Blocks along an axis of that length; the last one may be shorter."""
    return -(-length // block_size)


def grouped_shape(shape: tuple[int, ...], *, axis: int, block_size: int) -> tuple[int, ...]:
    """The shape of the scales: that of the tensor, with blocks along the axis."""
    return (*shape[:axis], num_blocks(shape[axis], block_size=block_size), *shape[axis + 1 :])


def boxes(shape: tuple[int, ...], *, axis: int, block_size: int, box_size: int = BOX_SIZE) -> Iterator[Box]:
    """Boxes of at most `box_size` elements that cover a tensor once, in an order that is the same for every machine.

    A block that does not fit into a box, or would leave it too thin along the last dimension, is cut into several:
    their largest magnitudes are to be combined. A tensor without elements has no boxes. There is at least one
    dimension, and blocks have at least one element.
    """
    if math.prod(shape) == 0:
        return
    longest = max(1, box_size // min(math.prod(shape[axis + 1 :]), RUN))
    extents = _extents(shape, axis=axis, step=min(block_size, shape[axis], longest), box_size=box_size)
    ranges = [
        _segments(length, block_size=block_size, extent=extents[dim])
        if dim == axis
        else [(start, min(start + extents[dim], length), 1) for start in range(0, length, extents[dim])]
        for dim, length in enumerate(shape)
    ]
    for cut in itertools.product(*ranges):
        place = tuple(slice(start, stop) for start, stop, _ in cut)
        start, stop, length = cut[axis]
        count = (stop - start) // length
        first = start // block_size
        sizes = tuple(stop - start for start, stop, _ in cut)
        yield Box(
            place=place,
            groups=(*place[:axis], slice(first, first + count), *place[axis + 1 :]),
            shape=sizes,
            shape_OBEI=(math.prod(sizes[:axis]), count, length, math.prod(sizes[axis + 1 :])),
        )


def _extents(shape: tuple[int, ...], *, axis: int, step: int, box_size: int) -> list[int]:
    """How far a box reaches along each dimension: at least `step` along the axis, then all it can of the last ones."""
    extents = [1] * len(shape)
    extents[axis] = step
    for dim in reversed(range(len(shape))):
        room = max(1, box_size // math.prod(extents))
        extents[dim] = min(extents[dim] * room, shape[dim])
    return extents


def _segments(length: int, *, block_size: int, extent: int) -> list[tuple[int, int, int]]:
    """Start, stop and length of the blocks of each stretch of an axis: whole blocks, or a part of one.

    An extent of a block or more is a multiple of it, or the whole axis.
    """
    whole = length - length % block_size
    if extent < block_size:
        return [
            (start, min(start + extent, end), min(start + extent, end) - start)
            for block in range(0, length, block_size)
            for end in [min(block + block_size, length)]
            for start in range(block, end, extent)
        ]
    stretches = [(start, min(start + extent, whole), block_size) for start in range(0, whole, extent)]
    return stretches + ([(whole, length, length - whole)] if whole < length else [])
