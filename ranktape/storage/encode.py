"""How does a tensor become the document and the object of a Zarr array?

One tensor is one object. Where the tensor has samples, the object is a shard whose inner chunks are single
samples, so that one sample is one read; it is written by hand as the specification of `sharding_indexed`
says: the chunks, then their offsets and sizes, then a checksum of those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from ranktape.storage.documents import array_document
from ranktape.storage.dtypes import DTYPES

if TYPE_CHECKING:
    from ranktape.storage.backend import Buffer
    from ranktape.storage.record import RecordInfo

MIN_SAMPLE_NBYTES = 1024
"""Samples smaller than this share one chunk: an entry of the shard's index is 16 bytes, a request costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedArray:
    """A tensor ready to be written."""

    document: dict[str, Any]
    """The array's `zarr.json`."""
    parts: list[Buffer] | None
    """What the array's object holds, to be joined; None for an empty tensor, which has no object."""


def checksum(array: np.ndarray[Any, Any]) -> str:
    """The CRC-32C of the values' little-endian bytes in C order, as records carry it."""
    return f"crc32c:{_crc(np.ascontiguousarray(array)):08x}"


def encode_array(array: np.ndarray[Any, Any], *, info: RecordInfo) -> EncodedArray:
    """The document and the object of a tensor whose identity is `info`.

    No bytes are copied, but those of samples that do not lie together.
    """
    row = DTYPES[info.dtype]
    by_sample = _samples_apart(array, sample_dim=info.sample_dim)
    inner_chunk = None
    if by_sample is not None:
        inner_chunk = [1 if dim == by_sample else extent for dim, extent in enumerate(array.shape)]
    document = array_document(
        shape=array.shape,
        data_type=row.zarr_name,
        fill_value=row.fill_value,
        itemsize=row.itemsize,
        inner_chunk=inner_chunk,
        dimension_names=dimension_names(info),
        attributes=info.to_json(),
    )
    if array.size == 0:
        return EncodedArray(document=document, parts=None)
    chunks = _samples(array, sample_dim=by_sample) if by_sample is not None else iter([np.ascontiguousarray(array)])
    parts: list[Buffer] = []
    index: list[int] = []
    offset = 0
    for chunk in chunks:
        raw = chunk.reshape(-1).view(np.uint8)
        parts += [raw, struct.pack("<I", _crc(raw))]
        index += [offset, raw.nbytes + 4]
        offset += raw.nbytes + 4
    if by_sample is not None:
        entries = struct.pack(f"<{len(index)}Q", *index)
        parts += [entries, struct.pack("<I", google_crc32c.value(entries))]
    return EncodedArray(document=document, parts=parts)


def dimension_names(info: RecordInfo) -> list[str]:
    """Names of the dimensions, such as `B_4`: the letter of the layout, or the dimension, and the extent.

    xarray reads the arrays of a group as one dataset, where a name has one extent; the extent is in the
    name, so that tensors of different shapes may stand side by side.
    """
    letters = info.layout if len(info.layout) == len(info.shape) else ""
    labels = letters or [f"dim{dim}" for dim in range(len(info.shape))]
    return [f"{label}_{extent}" for label, extent in zip(labels, info.shape, strict=True)]


def _crc(array: np.ndarray[Any, Any]) -> int:
    return int(google_crc32c.value(array.reshape(-1).view(np.uint8)))


def _samples_apart(array: np.ndarray[Any, Any], *, sample_dim: int | None) -> int | None:
    if sample_dim is None or array.size == 0 or array.shape[sample_dim] == 1:
        return None
    sample_nbytes = array.nbytes // array.shape[sample_dim]
    return sample_dim if sample_nbytes >= MIN_SAMPLE_NBYTES else None


def _samples(array: np.ndarray[Any, Any], *, sample_dim: int) -> Iterator[np.ndarray[Any, Any]]:
    for sample in np.moveaxis(array, sample_dim, 0):
        yield np.ascontiguousarray(sample)
