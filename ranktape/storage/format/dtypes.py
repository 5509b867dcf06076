"""The element types of records, one row for each.

The names are torch's, without "torch."; numpy, ml_dtypes, Zarr and tensorstore use the same names. The types at the end
of the table do not exist in torch. They can be read from stores that other tools wrote.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_REGISTERED = 2


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """One element type."""

    name: str
    """Torch's name without "torch."; also used in records, filters, JSON, and as `data_type` of a Zarr v3 array."""
    numpy_dtype: np.dtype[Any]
    """The little-endian numpy dtype, from ml_dtypes if numpy has none."""

    @property
    def fill_value(self) -> bool | int | float | str | list[float]:
        """The element whose bytes are all 0, as JSON: zero, except for `float8_e8m0fnu`, which has no zero."""
        if self.name == "float8_e8m0fnu":
            # The value is 2**-127. It is given as bits because tensorstore 0.1.86 misreads numbers here.
            return "0x00"
        zero = self.numpy_dtype.type(0).item() if not self.is_ml_dtype else 0.0
        return [0.0, 0.0] if self.is_complex else zero

    @property
    def itemsize(self) -> int:
        """Size of one element, in bytes. The 6- and 4-bit floats take one byte."""
        return self.numpy_dtype.itemsize

    @property
    def is_floating(self) -> bool:
        """Whether the values are real floating point numbers. As in torch, complex numbers are not."""
        return self.is_ml_dtype or self.numpy_dtype.kind == "f"

    @property
    def is_complex(self) -> bool:
        """Whether the values are pairs of floating point numbers."""
        return self.numpy_dtype.kind == "c"

    @property
    def is_ml_dtype(self) -> bool:
        """Whether numpy knows the type only through ml_dtypes, and zarr only through `zarr_floats`."""
        # numpy's mark of a type that another library registered. `kind` does not tell: it is "f" for float8_e5m2.
        return self.numpy_dtype.isbuiltin == _REGISTERED


HALF_NBYTES = 2
"""Size of the widest values that are counted by bit pattern, in bytes."""

_NAMES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
    # Without a name in torch.
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
)

DTYPES = {
    name: DtypeRow(name, np.dtype(getattr(ml_dtypes, name, None) or np.dtype(name).newbyteorder("<").str))
    for name in _NAMES
}
"""Every element type that can be stored, by name."""


def dtype_row(name: str) -> DtypeRow:
    """The row of `DTYPES` with that name.

    Raises:
        UsageError: no row has the name.
    """
    row = DTYPES.get(name)
    if row is None:
        raise UsageError(f"dtype {name!r} cannot be stored: use one of {', '.join(DTYPES)}")
    return row


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype with that name.

    Raises:
        UsageError: no row has the name.
    """
    return dtype_row(name).numpy_dtype


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a numpy dtype.

    Raises:
        UsageError: the dtype has no row, or is big-endian.
    """
    row = DTYPES.get(dtype.name)
    if row is None:
        raise UsageError(f"numpy dtype {dtype.name!r} cannot be stored: use one of {', '.join(DTYPES)}")
    if row.numpy_dtype != dtype:
        raise UsageError(
            f"numpy dtype {dtype.str!r} is big-endian and records are little-endian: "
            f"convert the array with .astype({row.numpy_dtype.str!r})"
        )
    return row.name


def round_once(values: np.ndarray[Any, Any], *, row: DtypeRow) -> np.ndarray[Any, Any]:
    """The nearest values of the dtype, with ties to even. NaN stays NaN; overflow is that of the dtype.

    ml_dtypes converts float64 to float32 first, and thus rounds twice: a number just above a tie may become the tie,
    and then round down. Here the first step rounds to odd, so that it never makes a tie of a shorter dtype.
    """
    if not row.is_ml_dtype or values.dtype != np.float64:
        return values.astype(row.numpy_dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        widened = single.astype(np.float64)
        bits = np.atleast_1d(single).view(np.uint32)
        is_inexact = np.atleast_1d(np.isfinite(values) & (widened != values))
        is_beyond = np.atleast_1d(np.abs(widened) > np.abs(values))
        odd = np.where(is_inexact, (bits - (is_inexact & is_beyond)) | 1, bits).astype(np.uint32)
        return odd.view(np.float32).reshape(values.shape).astype(row.numpy_dtype)


def to_torch(values: np.ndarray[Any, Any], *, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A copy of the values as a CPU tensor of the dtype with that name.

    Raises:
        UsageError: torch has no such dtype.
    """
    import torch

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise UsageError(f"torch has no dtype {dtype}: use read() for a numpy array")
    if not values.size:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
    return raw.view(torch_dtype).reshape(tuple(shape))
