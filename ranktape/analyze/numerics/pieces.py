"""Divides the work on an array into pieces of bounded memory, and among threads; takes arrays as users pass them.

A box is a range of indices along each dimension. What is copied of a tensor at a time is one box, whatever its shape,
its strides, the axis and the size of the blocks.
"""

# Shapes: O = everything before the axis of blocks, B = blocks, E = elements of a block, I = everything after.

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, HALF_NBYTES

if TYPE_CHECKING:
    import torch
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


class _Share:
    """Of this process."""

    num_threads = MAX_THREADS


def share_cores(num_processes: int) -> int:
    """Let this process use no more than its part of the cores where nobody says how many threads, and tell how many."""
    _Share.num_threads = max(1, num_threads(None) // num_processes)
    return _Share.num_threads


def num_threads(threads: int | None) -> int:
    """`threads`, or for None the cores that this process may use: 16 at most, or its part of them.

    Raises:
        UsageError: it is less than 1.
    """
    if threads is None:
        is_known = hasattr(os, "sched_getaffinity")
        return min(_Share.num_threads, len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1)
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


BATCH = 32
"""Items whose results are held at a time."""


def in_batches(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int | None) -> Iterator[Result]:
    """What `work` gives for each item, in their order; a few of them are held at a time."""
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, BATCH)):
        yield from each(work, batch, threads=threads)


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


def boxes(shape: tuple[int, ...], *, axis: int, block_size: int, box_size: int) -> Iterator[Box]:
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


def numbers_of(x: Any) -> NDArray[Any]:
    """The numbers of an array of numpy, of nested lists or of a tensor of torch, in the byte order of this machine.

    Of any shape, and of any type that records hold: NaN, infinities and signs of zeros stay. No copy is made of an
    array in that order, nor of a tensor in the memory of the CPU; other tensors are copied there.

    Raises:
        UsageError: the elements are of another type, lists are ragged, or a tensor is sparse or has no values.
    """
    given = tensor_or_array(x)
    if not isinstance(given, np.ndarray):
        check_readable(given)
        _check_known(str(given.dtype).removeprefix("torch."))
        return array_of(given.cpu())
    _check_known(given.dtype.name)
    return given if given.dtype.isnative else given.astype(given.dtype.newbyteorder("="))


def tensor_or_array(x: Any) -> torch.Tensor | NDArray[Any]:
    """A tensor of torch itself, and anything else as an array of numpy; no element is looked at.

    Raises:
        UsageError: lists are ragged.
    """
    imported = sys.modules.get("torch")
    if imported is not None and isinstance(x, imported.Tensor):  # who has a tensor has imported torch
        return cast("torch.Tensor", x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise UsageError(f"this is no array of numbers ({error}): give lists of the same length") from error


def _check_known(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UsageError(f"elements of {dtype} are no numbers that records hold: give one of {', '.join(DTYPES)}")


def check_readable(tensor: torch.Tensor) -> None:
    """Whether the tensor has values, one after the other.

    Raises:
        UsageError: it is sparse, or on the device meta.
    """
    import torch

    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor in the layout {tensor.layout} cannot be read: make it dense with .to_dense() first")
    if tensor.is_meta:
        raise UsageError("a tensor on the device meta has a shape and no values: there is nothing to read")


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The same memory as an array of numpy, to be read: of a dense tensor on a CPU, of a type that records hold.

    FSDP frees parameters by resizing their storage, which is an error after `Tensor.numpy`, and none after DLPack.
    """
    import torch

    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")].numpy_dtype
    plain = tensor.detach().resolve_conj().resolve_neg()
    if dtype.itemsize > HALF_NBYTES:
        return np.from_dlpack(plain)
    pattern = torch.int16 if dtype.itemsize == HALF_NBYTES else torch.uint8
    return np.from_dlpack(plain.view(pattern)).view(dtype)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """The same numbers as a tensor on a CPU, of an array of a type that records hold.

    Its memory, where it can be written and torch knows the type; float32 numbers of floats that torch does not know.
    """
    import torch

    name = array.dtype.name
    if not hasattr(torch, name):
        array, name = array.astype(np.float32), "float32"
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    dtype = getattr(torch, name)
    if array.dtype.itemsize > HALF_NBYTES:
        return torch.from_numpy(array)
    pattern = np.int16 if array.dtype.itemsize == HALF_NBYTES else np.uint8
    return torch.from_numpy(array.view(pattern)).view(dtype)
