"""The numbers of a record that are judged: those that were captured, or those that the operation computed with.

If only a histogram of a record was stored, its values are known but not their positions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import BY_DTYPE
from ranktape.analyze.numerics.histograms.block_counts import BLOCK_AXES, NUM_CODES, unpack_blocks
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
from ranktape.analyze.numerics.histograms.histogram import Histogram, pattern_values
from ranktape.errors import DataError, UsageError
from ranktape.storage import Record, Records
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_row, numpy_dtype
from ranktape.storage.format.record_info import Keep
from ranktape.storage.query.columns import equal_rows


class View(enum.StrEnum):
    """The view of a record's values: the choices of `--view`."""

    COMPUTE = "compute"
    """Rounded to `compute_dtype` first, unless it can represent every value of `dtype`."""
    SEEN = "seen"
    """As they were captured."""


def viewed_dtype(*, dtype: str, compute_dtype: str, view: View) -> str:
    """The dtype in which values are judged.

    It is `compute_dtype` in the compute view if the operation rounded to a narrower floating-point type, and `dtype`
    otherwise: a wider type represents the same values.
    """
    captured, computed = BY_DTYPE.get(dtype), BY_DTYPE.get(compute_dtype)
    if view is View.SEEN or captured is None or computed is None:
        return dtype
    is_representable = (
        computed.mantissa_bits >= captured.mantissa_bits
        and computed.maximum >= captured.maximum
        and computed.min_subnormal <= captured.min_subnormal
    )
    return dtype if is_representable else compute_dtype


def viewed_dtypes(records: Records, *, view: View) -> list[str]:
    """The result of `viewed_dtype` for each record."""
    dtypes = np.empty(len(records), dtype=object)
    for (dtype, compute_dtype), rows in equal_rows([records.stored(name) for name in ("dtype", "compute_dtype")]):
        dtypes[rows] = viewed_dtype(dtype=dtype, compute_dtype=compute_dtype, view=view)
    return dtypes.tolist()


def pick(records: Records, predicate: Callable[[str, str, str], bool]) -> tuple[NDArray[np.bool_], Records]:
    """Which records have a wanted dtype, compute dtype and kind of stored data, and these records."""
    mask = np.zeros(len(records), dtype=np.bool_)
    for kind, rows in equal_rows([records.stored(name) for name in ("dtype", "compute_dtype", "keep")]):
        mask[rows] = predicate(*kind)
    return mask, records if mask.all() else records.take(np.flatnonzero(mask).tolist())


def read_values(record: Record, *, view: View) -> NDArray[Any]:
    """The values of a record in the dtype given by `viewed_dtype`.

    Rounding is to nearest, ties to even. Values beyond the narrower type become infinite, as in the operation itself.
    NaN stays NaN.
    """
    captured = record.read()
    dtype = viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=view)
    if dtype == record.dtype:
        return captured
    with np.errstate(over="ignore", invalid="ignore"):
        return captured.astype(numpy_dtype(dtype))


def read_numbers(record: Record, *, view: View) -> NDArray[Any] | Histogram:
    """The values of a record like `read_values`, or the count of each value if only these were stored.

    Raises:
        StorageError: the store cannot be read.
        DataError: the record's bytes are missing or damaged.
        UsageError: only statistics were stored, or the stored counts are rounded and the view is `seen`.
    """
    if record.keep == Keep.STATISTICS:
        raise UsageError(
            f"of {record!r} the statistics were kept, and no value that a format could be tried on: "
            f"leave such records out with --where \"keep != 'statistics'\", or read them with statistics()"
        )
    return read_histogram(record, view=view) if record.keep == Keep.HISTOGRAM else read_values(record, view=view)


def read_histogram(record: Record, *, view: View) -> Histogram:
    """The count of each value of a record, in the dtype given by `viewed_dtype`.

    Raises:
        StorageError: the store cannot be read.
        DataError: the record's bytes are missing or damaged.
        UsageError: the values were stored, or the stored counts are rounded and the view is `seen`.
    """
    counted = _counted_dtype(record)
    viewed = viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=view)
    counts = record.histogram()[:NUM_CODES].astype(np.int64)
    dtype = dtype_row(counted).numpy_dtype
    is_complete = counts.size == NUM_CODES and int(counts.sum()) == math.prod(record.shape)
    if dtype.itemsize != HALF_NBYTES or not is_complete:
        raise DataError(f"the histogram of {record!r} is damaged: it counts other elements than the tensor had")
    if viewed == counted:
        return Histogram(dtype=dtype, counts=counts)
    if viewed == record.dtype:
        raise UsageError(
            f"of {record!r} the histogram of its values in {counted} was kept, and no value as it was seen: "
            f"leave out --view seen, or leave such records out with --where \"keep == 'values'\""
        )
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = pattern_values(dtype).astype(dtype).astype(numpy_dtype(viewed))
    folded = np.zeros(1 << 8 * rounded.itemsize, dtype=np.int64)
    np.add.at(folded, rounded.view(f"u{rounded.itemsize}"), counts)
    return Histogram(dtype=numpy_dtype(viewed), counts=folded)


def read_block_histogram(record: Record, *, axis: str = "features", view: View) -> BlockHistogram:
    """The count of each magnitude in each kind of block, for a record that was stored as a histogram.

    Blocks have 32 elements along the last dimension (`features`), or along all other dimensions flattened (`tokens`).

    Raises:
        StorageError: the store cannot be read.
        DataError: the record's bytes are missing or damaged.
        UsageError: no histogram was stored, no blocks along that axis were counted, or they were counted in another
            dtype than `viewed_dtype` gives.
    """
    counted = _counted_dtype(record)
    viewed = viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=view)
    if viewed != counted:
        raise UsageError(
            f"of {record!r} blocks of values in {counted} were counted, and nothing is known of them in {viewed}: "
            f"give --view {View.SEEN if counted == record.dtype else View.COMPUTE}"
        )
    dtype = dtype_row(counted).numpy_dtype
    if dtype.itemsize != HALF_NBYTES:
        raise DataError(f"the histogram of {record!r} is damaged: no values of {counted} are counted")
    try:
        by_axis = {blocks.axis: blocks for blocks in unpack_blocks(record.histogram())}
    except DataError as error:
        raise DataError(f"{record!r} is damaged: {error}") from error
    if axis not in by_axis:
        raise UsageError(
            f"of {record!r} no blocks along {axis!r} were counted, but {', '.join(by_axis) or 'single values alone'}: "
            f"the capture counts blocks along {' and '.join(BLOCK_AXES)}"
        )
    counts = by_axis[axis]
    if counts.num_elements != math.prod(record.shape):
        raise DataError(f"the counts of blocks of {record!r} are damaged: they are of other elements than it had")
    return BlockHistogram(dtype=dtype, **{field.name: getattr(counts, field.name) for field in fields(counts)})


def _counted_dtype(record: Record) -> str:
    return record.dtype if dtype_row(record.dtype).itemsize == HALF_NBYTES else record.compute_dtype
