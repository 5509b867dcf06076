"""Which numbers of a record are judged: those that were seen, or those that the operation computed with?"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.formats import BY_DTYPE
from ranktape.storage.dtypes import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Record


class View(enum.StrEnum):
    """How the values of a record are looked at: the choices of `--as`."""

    COMPUTE = "compute"
    """Rounded to `compute_dtype` first, where that cannot hold every value of `dtype`."""
    SEEN = "seen"
    """As they were captured."""


def viewed_dtype(*, dtype: str, compute_dtype: str, view: View) -> str:
    """The element type of the values that are judged.

    `dtype` itself, unless the operation rounded to a narrower floating point type and is looked at so: a
    wider one holds the same values.
    """
    seen, computed = BY_DTYPE.get(dtype), BY_DTYPE.get(compute_dtype)
    if view is View.SEEN or seen is None or computed is None:
        return dtype
    is_held = computed.mantissa_bits >= seen.mantissa_bits and computed.emax >= seen.emax and computed.emin <= seen.emin
    return dtype if is_held else compute_dtype


def read_values(record: Record, *, view: View) -> NDArray[Any]:
    """The values of a record, in the element type that `viewed_dtype` names.

    Rounding is to nearest, ties to even; what is beyond the narrower type becomes infinite, as in the
    operation itself. NaN stays NaN.

    Raises:
        StorageError: the store cannot be read.
        DataError: the record's bytes are missing or damaged.
    """
    seen = record.read()
    dtype = viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=view)
    if dtype == record.dtype:
        return seen
    with np.errstate(over="ignore", invalid="ignore"):
        return seen.astype(numpy_dtype(dtype))
