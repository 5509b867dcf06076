"""Makes what is kept of a tensor where there is no room for its values, or where they are not asked for.

How often each bit pattern of a 16-bit value occurs in it, and each magnitude in blocks of each kind: every question
about single values, and about the scales of blocks, can be answered from that (`Keep.HISTOGRAM`). Wider values are
rounded to what the operation computed in, as analysis would do. Or what its values add up to (`Keep.STATISTICS`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.histograms.block_histogram import count_blocks
from ranktape.analyze.numerics.histograms.histogram import count_values
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.capture.writing.kept_nbytes import counted_dtype
from ranktape.storage.format.block_counts import BLOCK_AXES, NUM_CODES, BlockCounts, pack_histogram
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage.format.record_info import RecordInfo

BLOCK_SIZE = 32
"""Elements of a block, as in the OCP microscaling formats."""

_MAX_ROUNDED = 1 << 20
"""Wide values that are rounded at once: a copy of a whole tensor could be larger than the budget."""


def reduce_to(
    keep: str, array: np.ndarray[Any, Any], *, info: RecordInfo
) -> tuple[np.ndarray[Any, Any], RecordInfo] | None:
    """What is kept of a tensor in the place of its values, with its identity; None where the values are kept.

    That is so where they are asked for, and where a histogram is and cannot be: only the values can stand for what
    was computed in 32 bits.
    """
    if keep == Keep.STATISTICS:
        kept = statistics_of(array).to_vector()
    elif keep == Keep.HISTOGRAM and (dtype := counted_dtype(info.dtype, compute_dtype=info.compute_dtype)) is not None:
        kept = pack_histogram(count_codes(array, dtype=dtype), list(count_block_kinds(array, dtype=dtype)))
    else:
        return None
    return kept, dataclasses.replace(info, keep=keep, nbytes=kept.nbytes)


def is_countable(info: RecordInfo) -> bool:
    """Whether a histogram can stand for the values of a tensor."""
    return counted_dtype(info.dtype, compute_dtype=info.compute_dtype) is not None


def count_codes(array: np.ndarray[Any, Any], *, dtype: str) -> NDArray[np.int64]:
    """How often each of the 65,536 patterns of the dtype occurs."""
    flat = array.reshape(-1)
    target = numpy_dtype(dtype)
    if flat.dtype == target:
        return count_values(flat, threads=1).counts
    counts = np.zeros(NUM_CODES, dtype=np.int64)
    for start in range(0, flat.size, _MAX_ROUNDED):
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = flat[start : start + _MAX_ROUNDED].astype(target)
        counts += count_values(rounded, threads=1).counts
    return counts


def count_block_kinds(array: np.ndarray[Any, Any], *, dtype: str) -> Iterator[BlockCounts]:
    """The same in blocks along both axes of the matrix that a multiplication sees: [all dimensions but last, last].

    An array of one dimension is one row of it, one without dimensions a single element.
    """
    shape = array.shape or (1,)
    matrix = array.reshape(math.prod(shape[:-1]), shape[-1])
    for name, axis in zip(BLOCK_AXES, (1, 0), strict=True):
        counted = count_blocks(matrix, axis=axis, block_size=BLOCK_SIZE, threads=1, rounded_to=numpy_dtype(dtype))
        yield dataclasses.replace(counted, axis=name)
