"""Which tensors stand for everything that a record can hold, and what are their digests?"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ranktape.analyze.engine.digests import digests
from ranktape.analyze.numerics.digest import Digest
from ranktape.storage import Records
from ranktape.storage.format.dtypes import DTYPES
from tests.analyze.runs import Tensor, describe_tensor, store

Array = np.ndarray[Any, Any]

REAL = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int32",
    "uint16",
    "bool",
)
COMPLEX = ("complex64", "complex128")

SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 448.0, 1e-7, -65504.0, 3e38, 1e-40)

CONSTANTS = {"constant": 1.75, "nan": math.nan, "zero": 0.0}

FILLINGS = ("normal", "shifted", "wide", "special", "infinite", *CONSTANTS)


def filled(dtype: str, shape: tuple[int, ...], *, filling: str, seed: int = 0) -> Array:
    """A tensor of values of one kind, as far as the dtype has them."""
    rng = np.random.default_rng(seed)
    size = math.prod(shape)
    values = _values(rng, size, filling=filling)
    row = DTYPES[dtype]
    with np.errstate(all="ignore"):
        if row.is_complex:
            return (values + 1j * values[::-1]).astype(row.numpy_dtype).reshape(shape)
        if not row.is_floating:
            values = np.clip(np.nan_to_num(np.abs(20 * values)), 0, 127)
        return values.astype(row.numpy_dtype).reshape(shape)


def _values(rng: np.random.Generator, size: int, *, filling: str) -> Array:
    normal = rng.standard_normal(size)
    if filling in CONSTANTS:
        return np.full(size, CONSTANTS[filling])
    if filling == "infinite":
        return rng.choice([math.inf, -math.inf], size)
    if filling == "special":
        return np.where(rng.random(size) < 0.5, rng.choice(SPECIALS, size), normal)
    factor = 2.0 ** rng.integers(-30, 30, size) if filling == "wide" else 1.0
    return normal * factor + 100 * (filling == "shifted")


SHAPES = ((), (3, 0, 2), (1,), (7,), (40, 60))


@functools.cache
def every(dtype: str) -> tuple[tuple[Array, Digest], ...]:
    """Tensors of each shape with each filling, and the digests of their records."""
    arrays = [filled(dtype, shape, filling=filling) for shape in SHAPES for filling in FILLINGS]
    return tuple(zip(arrays, digests(stored(*arrays)), strict=True))


def stored(*arrays: Array, **fields: Any) -> Records:
    """The records of a run of these tensors, one for each layer; in a folder that lives as long as the process."""
    return records_of(
        [describe_tensor(array, layer_idx=layer, counter=layer, **fields) for layer, array in enumerate(arrays)]
    )


def records_of(described: list[Tensor]) -> Records:
    """The records of a run of tensors with their identities."""
    folder = tempfile.TemporaryDirectory(prefix="every-tensor-")
    _FOLDERS.append(folder)
    return store(Path(folder.name), described).select()


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def digest_of_array(array: Array, **fields: Any) -> Digest:
    """The digest of one tensor."""
    (digest,) = digests(stored(array, **fields))
    return digest


def numbers_of(array: Array) -> Array:
    """All elements in float64, of complex ones the larger part; NaN left out, infinities not."""
    flat = array.reshape(-1)
    with np.errstate(invalid="ignore"):
        if flat.dtype.kind == "c":
            wide = flat.astype(np.complex128)
            larger = np.where(np.abs(wide.real) >= np.abs(wide.imag), wide.real, wide.imag)
            return larger[~np.isnan(wide)]
        exact = flat.astype(np.float64)
    return exact[~np.isnan(exact)]
