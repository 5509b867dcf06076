"""Counts how often each bit pattern of a PyTorch tensor occurs, on the device of the tensor.

The counterpart of `histogram` and `block_histogram` in torch operations, for tensors that are not on the CPU. The
counts are integers, equal to those of the compiled kernels, and only the counts are copied from the device.
"""

# Shapes: R = kinds of blocks (rows).

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.histograms.block_counts import NUM_MAGNITUDES
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram, Counted, build_histogram, rows_of
from ranktape.analyze.numerics.histograms.histogram import Histogram
from ranktape.analyze.numerics.pieces import boxes, grouped_shape
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES, numpy_dtype

if TYPE_CHECKING:
    import torch

BOX_SIZE = 1 << 20
"""Number of elements that are counted at once. Their keys take about 30 MB of memory."""

_MAGNITUDE_BITS = 15


def count_tensor(tensor: torch.Tensor) -> Histogram:
    """`count_values` of a tensor of any shape and layout with a dtype of at most 16 bits.

    Raises:
        UsageError: the dtype is wider, as all complex ones are.
    """
    import torch

    if tensor.dtype.itemsize > HALF_NBYTES:
        raise UsageError(f"{tensor.dtype} has too many patterns to count: use a type of at most 16 bits")
    num_patterns = 1 << 8 * tensor.dtype.itemsize
    unsigned = torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    counts = torch.zeros(num_patterns, dtype=torch.int64, device=tensor.device)
    for box in boxes(tuple(rows.shape), axis=-1 % rows.ndim, block_size=1, box_size=BOX_SIZE):
        patterns = rows[box.slices].contiguous().view(unsigned).to(torch.int64) & (num_patterns - 1)
        counts += torch.bincount(patterns.reshape(-1), minlength=num_patterns)
    return Histogram(dtype=_numpy_dtype(tensor.dtype), counts=counts.cpu().numpy())


def count_tensor_blocks(tensor: torch.Tensor, *, axis: int = -1, block_size: int = 32) -> BlockHistogram:
    """`count_blocks` of a tensor with a floating-point dtype of at most 16 bits.

    Raises:
        UsageError: the dtype is wider or not a floating-point one, there is no such axis, or `block_size` is below 1.
    """
    import torch

    if not tensor.is_floating_point() or tensor.dtype.itemsize > HALF_NBYTES:
        raise UsageError(f"{tensor.dtype} cannot be counted in blocks: use a floating type of at most 16 bits")
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    if not -rows.ndim <= axis < rows.ndim:
        raise UsageError(f"axis={axis} is not an axis of a tensor of shape {tuple(tensor.shape)}")
    if block_size < 1:
        raise UsageError(f"block_size={block_size} is not a number of elements: give 1 or more")
    # bfloat16 represents every value of the 8-bit dtypes.
    halves = rows if rows.dtype.itemsize == HALF_NBYTES else rows.to(torch.bfloat16)
    from_front = axis % rows.ndim
    counted = _count(halves, axis=from_front, block_size=block_size)
    axis_from_end, dtype = str(from_front - rows.ndim), _numpy_dtype(halves.dtype)
    return build_histogram(counted, dtype=dtype, axis=axis_from_end, block_size=block_size, num_elements=tensor.numel())


def _count(halves: torch.Tensor, *, axis: int, block_size: int) -> Counted:
    import torch

    shape, device = tuple(halves.shape), halves.device
    rows = rows_of(_numpy_dtype(halves.dtype))
    row_by_magnitude = torch.from_numpy(rows.of_magnitude.astype(np.int64)).to(device)
    largest = torch.zeros(grouped_shape(shape, axis=axis, block_size=block_size), dtype=torch.int16, device=device)
    covering = list(boxes(shape, axis=axis, block_size=block_size, box_size=BOX_SIZE))

    def magnitudes(slices: tuple[slice, ...], shape_obei: tuple[int, ...]) -> torch.Tensor:
        patterns = halves[slices].contiguous().view(torch.int16) & (NUM_MAGNITUDES - 1)
        return patterns.reshape(shape_obei)

    for box in covering:
        # The patterns of a floating-point dtype are in the order of the magnitudes.
        box_largest = magnitudes(box.slices, box.shape_OBEI).amax(dim=2)
        group_largest = largest[box.groups]
        group_largest.copy_(torch.maximum(group_largest, box_largest.reshape(group_largest.shape)))
    cells = counts = torch.zeros(0, dtype=torch.int64, device=device)
    for box in covering:
        before, blocks, _, after = box.shape_OBEI
        row = row_by_magnitude[largest[box.groups].to(torch.int64)].reshape(before, blocks, 1, after)
        keys = (row << _MAGNITUDE_BITS) | magnitudes(box.slices, box.shape_OBEI)
        cells, counts = _merge_cells(cells, counts, *torch.unique(keys, return_counts=True))
    blocks_R = torch.bincount(row_by_magnitude[largest.reshape(-1).to(torch.int64)], minlength=rows.ends.size)
    cell_keys, occurrences = cells.cpu().numpy(), counts.cpu().numpy()
    patterns = (cell_keys & (NUM_MAGNITUDES - 1)).astype(np.uint16)
    row_ids, starts = np.unique(cell_keys >> _MAGNITUDE_BITS, return_index=True)
    ends = starts[1:].tolist()
    parts = zip(row_ids.tolist(), np.split(patterns, ends), np.split(occurrences, ends), strict=False)
    cells_by_row = {row: (row_patterns, row_counts) for row, row_patterns, row_counts in parts if row}
    return Counted(blocks=blocks_R.cpu().numpy(), cells=cells_by_row)


def _merge_cells(
    cells: torch.Tensor, counts: torch.Tensor, more_cells: torch.Tensor, more_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    distinct, inverse = torch.unique(torch.cat([cells, more_cells]), return_inverse=True)
    added = torch.zeros(distinct.shape, dtype=torch.int64, device=cells.device)
    return distinct, added.index_add_(0, inverse, torch.cat([counts, more_counts]))


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return numpy_dtype(str(dtype).removeprefix("torch."))
