"""What was kept of a record in the place of its values, and how is it asked for?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ranktape.errors import DataError, UsageError
from ranktape.storage.format.block_counts import BLOCK_AXES, unpack_blocks
from ranktape.storage.format.record_info import Keep
from ranktape.storage.format.statistics import Statistics

if TYPE_CHECKING:
    from typing import Any

    import numpy as np

    from ranktape.storage.format.block_counts import BlockCounts
    from ranktape.storage.records.record import Record

_READ_BY = {Keep.VALUES: "read", Keep.HISTOGRAM: "counts", Keep.STATISTICS: "statistics"}
"""The method of a record that gives what was kept of it."""


def expect(record: Record, keep: Keep) -> None:
    """That this was kept of a record.

    Raises:
        UsageError: something else was.
    """
    if record.keep != keep:
        raise UsageError(f"of {record!r} {otherwise_kept(record.keep, wanted=keep)}")


def otherwise_kept(keep: str, *, wanted: Keep) -> str:
    """What to say where something else was kept than is wanted: which, and what reads it."""
    verb = "was" if keep == Keep.HISTOGRAM else "were"
    return f"the {keep} {verb} kept, not the {wanted}: use {_READ_BY[Keep(keep)]}()"


def statistics_in(vector: np.ndarray[Any, Any], *, record: Record) -> Statistics:
    """The statistics of a record, from what was kept of it.

    Raises:
        DataError: they are of another tensor.
    """
    statistics = Statistics.from_vector(vector)
    if statistics.num_elements != math.prod(record.shape):
        raise DataError(f"the statistics of {record!r} are damaged: they are of {statistics.num_elements} elements")
    return statistics


def block_counts_in(words: np.ndarray[Any, Any], *, record: Record, axis: str) -> BlockCounts:
    """The counts of the blocks of a record along an axis, from what was kept of it.

    Raises:
        DataError: they are damaged, or of another tensor.
        UsageError: such blocks were not counted.
    """
    try:
        found = {one.axis: one for one in unpack_blocks(words)}
    except DataError as error:
        raise DataError(f"{record!r} is damaged: {error}") from error
    if axis not in found:
        raise UsageError(
            f"of {record!r} no blocks along {axis!r} were counted, but {', '.join(found) or 'single values alone'}: "
            f"since schema 4 blocks are counted along {' and '.join(BLOCK_AXES)}"
        )
    if found[axis].num_elements != math.prod(record.shape):
        raise DataError(f"the counts of blocks of {record!r} are damaged: they are of other elements than it had")
    return found[axis]
