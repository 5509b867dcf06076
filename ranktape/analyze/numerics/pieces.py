"""Divides the work on an array into pieces of bounded memory and among threads, and converts arrays of users.

A box is a range of indices along each dimension. Only one box of a tensor is copied at a time, whatever the shape,
the strides, the axis and the block size.
"""

# Shapes: O = all dimensions before the axis of blocks, B = blocks, E = elements of a block, I = all after the axis.

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
"""Maximum number of elements of a piece, unless a block has more. Pieces are read twice, the second time from cache."""


def contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """The array in C order at an aligned address, copied only if necessary."""
    return np.require(array, requirements=["C", "A"])


def frozen(array: NDArray[Any], *, shape: tuple[int, ...]) -> NDArray[Any]:
    """A read-only contiguous view of that shape, so that numba compiles one variant, not one for each kind of array."""
    view = contiguous(array).reshape(shape).view()
    view.flags.writeable = False
    return view


def pieces(array: NDArray[Any], *, axis: int, block_size: int) -> list[NDArray[Any]]:
    """Split an array into views that do not cut blocks along the axis, which is not negative.

    Each element is in one view. The split depends only on the array. If its axes are in `memory_order`, most views
    are contiguous.
    """
    return list(_cut(array, axis=axis, block_size=block_size))


def as_three_dims(piece: NDArray[Any], *, axis: int) -> NDArray[Any]:
    """The piece with three dimensions, the axis being the second; copied if it is not contiguous."""
    before = int(np.prod(piece.shape[:axis], dtype=np.int64))
    after = int(np.prod(piece.shape[axis + 1 :], dtype=np.int64))
    return frozen(piece, shape=(before, piece.shape[axis], after))


def memory_order(array: NDArray[Any], *, axis: int) -> tuple[NDArray[Any], int]:
    """A view of the array with its axes in descending order of strides, and the new index of the axis."""
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
"""Maximum number of threads by default. More threads do not read memory faster."""


class _Share:
    """The share of the cores that this process uses by default."""

    num_threads = MAX_THREADS


def share_cores(num_processes: int) -> int:
    """Limit the default number of threads of this process to its share of the cores, and return that number."""
    _Share.num_threads = max(1, num_threads(None) // num_processes)
    return _Share.num_threads


def num_threads(threads: int | None) -> int:
    """`threads`; if it is None, the number of cores that this process may use, limited by `share_cores` and to 16.

    Raises:
        UsageError: `threads` is less than 1.
    """
    if threads is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        return min(_Share.num_threads, len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    if threads < 1:
        raise UsageError(f"threads={threads} is not a number of threads: give 1 or more, or None for one on each core")
    return threads


def map_in_threads(work: Callable[[Item], Result], items: Sequence[Item], *, threads: int | None) -> list[Result]:
    """Apply `work` to each item, in threads if there is more than one of both, and return results in order.

    Threads only save time if the work releases the GIL. If it raises exceptions, that of the first such item is raised.

    Raises:
        UsageError: `threads` is less than 1.
    """
    count = min(num_threads(threads), len(items))
    if count <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, items))


BATCH = 32
"""Number of items that are processed at once."""


def in_batches(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int | None) -> Iterator[Result]:
    """Apply `work` to each item and yield the results in order, keeping at most `BATCH` of them in memory."""
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, BATCH)):
        yield from map_in_threads(work, batch, threads=threads)


RUN = 64
"""Number of adjacent elements of the last dimensions that a box contains if possible, as memory is read in lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A piece of a tensor: along the axis, whole blocks of the same length or a part of one block."""

    slices: tuple[slice, ...]
    """Indices in the tensor."""
    groups: tuple[slice, ...]
    """Indices in the tensor of blocks (see `grouped_shape`)."""
    shape: tuple[int, ...]
    """Shape of the piece, with all dimensions of the tensor."""
    shape_OBEI: tuple[int, int, int, int]
    """Shape of the piece by blocks: before the axis, blocks, elements of a block, after the axis."""

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)


def num_blocks(length: int, *, block_size: int) -> int:
    """The number of blocks along an axis of that length. The last block may be shorter."""
    return -(-length // block_size)


def grouped_shape(shape: tuple[int, ...], *, axis: int, block_size: int) -> tuple[int, ...]:
    """The shape of the scales: that of the tensor with the number of blocks as the length of the axis."""
    return (*shape[:axis], num_blocks(shape[axis], block_size=block_size), *shape[axis + 1 :])


def boxes(shape: tuple[int, ...], *, axis: int, block_size: int, box_size: int) -> Iterator[Box]:
    """Boxes of at most `box_size` elements that cover a tensor once, in the same order on every machine.

    A block that does not fit into a box, or would make it too thin along the last dimensions, is split into several
    boxes, whose largest magnitudes the caller combines. A tensor without elements has no boxes. The tensor has at least
    one dimension, and `block_size` is at least 1.
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
        slices = tuple(slice(start, stop) for start, stop, _ in cut)
        start, stop, length = cut[axis]
        count = (stop - start) // length
        first = start // block_size
        sizes = tuple(stop - start for start, stop, _ in cut)
        yield Box(
            slices=slices,
            groups=(*slices[:axis], slice(first, first + count), *slices[axis + 1 :]),
            shape=sizes,
            shape_OBEI=(math.prod(sizes[:axis]), count, length, math.prod(sizes[axis + 1 :])),
        )


def _extents(shape: tuple[int, ...], *, axis: int, step: int, box_size: int) -> list[int]:
    """The largest shape of a box: at least `step` along the axis, then as much as possible of the last dimensions."""
    extents = [1] * len(shape)
    extents[axis] = step
    for dim in reversed(range(len(shape))):
        room = max(1, box_size // math.prod(extents))
        extents[dim] = min(extents[dim] * room, shape[dim])
    return extents


def _segments(length: int, *, block_size: int, extent: int) -> list[tuple[int, int, int]]:
    """The start, the stop and the block length of each segment of an axis: whole blocks, or a part of one.

    An extent of at least a block is a multiple of it, or the whole axis.
    """
    whole_length = length - length % block_size
    if extent < block_size:
        return [
            (start, min(start + extent, end), min(start + extent, end) - start)
            for block in range(0, length, block_size)
            for end in [min(block + block_size, length)]
            for start in range(block, end, extent)
        ]
    stretches = [(start, min(start + extent, whole_length), block_size) for start in range(0, whole_length, extent)]
    return stretches + ([(whole_length, length, length - whole_length)] if whole_length < length else [])


def as_array(x: Any) -> NDArray[Any]:
    """Convert a NumPy array, nested lists or a PyTorch tensor to an array in native byte order.

    Any shape and any dtype of records is supported. NaN, infinities and signs of zeros are preserved. Arrays in native
    byte order and tensors on the CPU are not copied.

    Raises:
        UsageError: the dtype is not that of records, lists are ragged, or a tensor is sparse or has no values.
    """
    array = tensor_or_array(x)
    if not isinstance(array, np.ndarray):
        check_readable(array)
        _check_dtype(str(array.dtype).removeprefix("torch."))
        return tensor_to_array(array.cpu())
    _check_dtype(array.dtype.name)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def tensor_or_array(x: Any) -> torch.Tensor | NDArray[Any]:
    """A PyTorch tensor unchanged, and anything else as a NumPy array, without a check of its elements.

    Raises:
        UsageError: lists are ragged.
    """
    imported = sys.modules.get("torch")
    if imported is not None and isinstance(x, imported.Tensor):  # torch is imported if there is a tensor
        return cast("torch.Tensor", x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise UsageError(f"this is no array of numbers ({error}): give lists of the same length") from error


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UsageError(f"elements of {dtype} are no numbers that records hold: give one of {', '.join(DTYPES)}")


def check_readable(tensor: torch.Tensor) -> None:
    """Check that the tensor is dense and has values.

    Raises:
        UsageError: the tensor is sparse or on the meta device.
    """
    import torch

    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor in the layout {tensor.layout} cannot be read: make it dense with .to_dense() first")
    if tensor.is_meta:
        raise UsageError("a tensor on the device meta has a shape and no values: there is nothing to read")


def tensor_to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy array for reading the memory of a dense CPU tensor with a dtype of records.

    Uses DLPack because FSDP frees parameters by resizing their storage, which fails after `Tensor.numpy`.
    """
    import torch

    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")].numpy_dtype
    plain = tensor.detach().resolve_conj().resolve_neg()
    if dtype.itemsize > HALF_NBYTES:
        return np.from_dlpack(plain)
    pattern = torch.int16 if dtype.itemsize == HALF_NBYTES else torch.uint8
    return np.from_dlpack(plain.view(pattern)).view(dtype)


def array_to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A CPU tensor with the numbers of an array with a dtype of records.

    It shares the memory of the array if torch has the dtype and the array is writable, in native byte order and without
    negative strides. A dtype that torch lacks is converted to float32.
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
