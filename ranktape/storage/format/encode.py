"""Turns tensors into the documents and the objects of Zarr arrays.

A large tensor is one object. Where it has samples, the object is a shard whose inner chunks are single
samples, so that one sample is one read. Small tensors of one dtype and shape share an array, whose one shard has
a tensor in each inner chunk. Shards are written by hand as the specification of `sharding_indexed` says: the
chunks, then their offsets and sizes, then a checksum of those.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from ranktape.errors import DataError, UsageError
from ranktape.storage.format.block_counts import NUM_CODES, WIDE_FROM
from ranktape.storage.format.documents import MAX_PACKED_NBYTES, array_document, pack
from ranktape.storage.format.dtypes import DTYPES, DtypeRow
from ranktape.storage.format.record_info import Compression, Keep, RecordInfo
from ranktape.storage.format.statistics import STATISTICS
from ranktape.storage.format.validation import MAX_SAID_NESTING, check_nesting
from ranktape.storage.places.backend import Buffer

MIN_SAMPLE_NBYTES = 1024
"""Samples smaller than this share one chunk: an entry of the shard's index is 16 bytes, a request costs more."""

_COMBINED_NBYTES = 1 << 18
"""Of samples smaller than this, reading the bytes again takes less time than combining checksums."""

INDEX_ENTRY_NBYTES = 16
CRC_NBYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedArray:
    """An array ready to be written."""

    document: dict[str, Any]
    """Its `zarr.json`, without the checksum."""
    parts: list[Buffer] | None
    """What its object holds, to be joined; None for an empty tensor, which has no object."""


def checksum(array: np.ndarray[Any, Any]) -> str:
    """The CRC-32C of the values' little-endian bytes in C order, as records carry it."""
    return f"crc32c:{_crc(_raw(array)):08x}"


def checksums(array: np.ndarray[Any, Any], *, info: RecordInfo) -> tuple[str, list[int] | None]:
    """The checksum of the values; and those of its samples, where they were needed for it."""
    axis = _samples_apart(array, info=info)
    if axis != 0 or not array.flags.c_contiguous or array.nbytes // len(array) < _COMBINED_NBYTES:
        return checksum(array), None
    crcs = [_crc(raw) for raw in _samples(array, sample_dim=0)]
    return f"crc32c:{combine(crcs, part_nbytes=array.nbytes // len(array)):08x}", crcs


def stored_dtype(info: RecordInfo) -> DtypeRow:
    """The dtype of the array that holds a record: its own, that of counts, or that of statistics."""
    if info.keep == Keep.STATISTICS:
        return DTYPES["float64"]
    if info.keep == Keep.HISTOGRAM:
        # Counts of patterns alone are narrow where none of them is large.
        is_narrow = info.nbytes == DTYPES["uint32"].itemsize * NUM_CODES
        return DTYPES["uint32" if is_narrow or math.prod(info.shape) < WIDE_FROM else "uint64"]
    return DTYPES[info.dtype]


def stored_shape(info: RecordInfo) -> tuple[int, ...]:
    """The shape of what is stored of a record: its own, that of counts, or that of statistics."""
    if info.keep == Keep.STATISTICS:
        return (len(STATISTICS),)
    return (info.nbytes // stored_dtype(info).itemsize,) if info.keep == Keep.HISTOGRAM else info.shape


def encode_array(
    array: np.ndarray[Any, Any],
    *,
    info: RecordInfo,
    compression: Compression = Compression.NONE,
    sample_crcs: Sequence[int] | None = None,
) -> EncodedArray:
    """The document and the object of a tensor whose identity, with its checksum, is `info`.

    No bytes are copied, but those of samples that do not lie together. `sample_crcs` are what `checksums` gave.
    """
    by_sample = _samples_apart(array, info=info)
    inner_chunk = None
    if by_sample is not None:
        inner_chunk = [1 if dim == by_sample else extent for dim, extent in enumerate(array.shape)]
    packing = _packing(compression, info=info) if array.nbytes <= MAX_PACKED_NBYTES else Compression.NONE
    raws = [] if by_sample is None else list(_samples(array, sample_dim=by_sample))
    samples = list(zip(raws, sample_crcs or map(_crc, raws), strict=True))
    attributes = info.to_attributes()
    if samples:
        # One sample is read without the others: what it must be is said where nobody can exchange it.
        attributes["sample_checksums"] = [f"crc32c:{crc:08x}" for _, crc in samples]
    row = stored_dtype(info)
    document = array_document(
        shape=array.shape,
        row=row,
        inner_chunk=inner_chunk,
        dimension_names=dimension_names(info),
        attributes=attributes,
        compression=packing,
    )
    parts: list[Buffer] | None = None
    if samples:
        parts = _shard(samples, packing=packing, itemsize=row.itemsize)
    elif array.size:
        parts = _chunk(_raw(array), crc_of(info.checksum), packing=packing, itemsize=row.itemsize)
    return EncodedArray(document=document, parts=parts)


def encode_stack(
    arrays: Sequence[np.ndarray[Any, Any]], *, infos: Sequence[RecordInfo], compression: Compression = Compression.NONE
) -> EncodedArray:
    """The document and the object of tensors of one dtype, shape and layout, none of them empty.

    `infos` are their identities with their checksums. What all of them share is in the attribute `common`, what
    tells them apart in `captures`, in their order.
    """
    first = infos[0]
    row = stored_dtype(first)
    packing = _packing(compression, info=first)
    shape = (len(arrays), *arrays[0].shape)
    common, captures = shared_fields([info.to_attributes() for info in infos])
    document = array_document(
        shape=shape,
        row=row,
        inner_chunk=[1, *shape[1:]],
        dimension_names=[f"capture_{len(arrays)}", *dimension_names(first)],
        attributes={"common": common, "captures": captures},
        compression=packing,
    )
    chunks = ((_raw(array), crc_of(info.checksum)) for array, info in zip(arrays, infos, strict=True))
    return EncodedArray(document=document, parts=_shard(chunks, packing=packing, itemsize=row.itemsize))


def _packing(compression: Compression, *, info: RecordInfo) -> Compression:
    # Most words of a histogram are zero or small: packed it takes a tenth, and no time to speak of.
    return Compression.ZSTD if info.keep == Keep.HISTOGRAM else compression


def shared_fields(documents: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all documents with the same keys share, and for each what it has of its own."""
    first = documents[0]
    common = {
        name: value
        for name, value in first.items()
        if all(document[name] == value for document in documents)
        # 1, 1.0 and True are equal, and not the same in JSON.
        and (name not in _FREE_FIELDS or value is None or len({json.dumps(one[name]) for one in documents}) == 1)
    }
    own = [name for name in first if name not in common]
    return common, [{name: document[name] for name in own} for document in documents]


_FREE_FIELDS = frozenset({"metadata", "placement", "sample_ids"})
"""Fields that may hold anything that JSON can."""


def dimension_names(info: RecordInfo) -> list[str]:
    """Names of the stored dimensions, such as `B_4`: the letter of the layout, or the dimension, and the extent.

    xarray reads the arrays of a group as one dataset, where a name has one extent; the extent is in the
    name, so that tensors of different shapes may stand side by side.
    """
    if info.keep == Keep.STATISTICS:
        return [f"statistic_{len(STATISTICS)}"]
    if info.keep == Keep.HISTOGRAM:
        (num_words,) = stored_shape(info)
        return [f"code_{NUM_CODES}" if num_words == NUM_CODES else f"word_{num_words}"]
    letters = info.layout if len(info.layout) == len(info.shape) else ""
    labels = letters or [f"dim{dim}" for dim in range(len(info.shape))]
    return [f"{label}_{extent}" for label, extent in zip(labels, info.shape, strict=True)]


def check_form(array: np.ndarray[Any, Any], *, info: RecordInfo) -> None:
    """That an array is what its identity says, and that this can be written; a reader could not read it else.

    Raises:
        DataError: it is another one.
        UsageError: what is said of it has no form in JSON.
    """
    shape, dtype = stored_shape(info), stored_dtype(info).numpy_dtype
    if array.shape != shape or array.dtype != dtype or array.nbytes != info.nbytes:
        raise DataError(
            f"an array of {array.dtype}{list(array.shape)}, {array.nbytes} bytes, is not the tensor that it is said "
            f"to be: {dtype}{list(shape)}, {info.nbytes} bytes"
        )
    free = [value for value in (info.metadata, info.placement, info.sample_ids) if value is not None]
    if not free:
        return
    try:
        check_nesting(free, limit=MAX_SAID_NESTING)
        json.dumps(free, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"what is said of a tensor has no form in JSON ({error}): give text and finite numbers"
        ) from error


def crc_of(text: str) -> int:
    """The number in a checksum as records carry it."""
    return int(text.partition(":")[2], 16)


def _shard(chunks: Iterable[tuple[np.ndarray[Any, Any], int]], *, packing: Compression, itemsize: int) -> list[Buffer]:
    parts: list[Buffer] = []
    index: list[int] = []
    offset = 0
    for raw, crc in chunks:
        chunk = _chunk(raw, crc, packing=packing, itemsize=itemsize)
        nbytes = sum(len(part) for part in chunk)
        parts += chunk
        index += [offset, nbytes]
        offset += nbytes
    entries = struct.pack(f"<{len(index)}Q", *index)
    return [*parts, entries, struct.pack("<I", google_crc32c.value(entries))]


def _chunk(raw: np.ndarray[Any, Any], crc: int, *, packing: Compression, itemsize: int) -> list[Buffer]:
    """The bytes of one chunk; `crc` is the checksum of the values."""
    if packing is Compression.NONE:
        return [raw, struct.pack("<I", crc)]
    packed = pack(raw, packing, itemsize=itemsize)
    return [packed, struct.pack("<I", google_crc32c.value(packed))]


def _raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(raw: np.ndarray[Any, Any]) -> int:
    return int(google_crc32c.value(raw))


def _samples_apart(array: np.ndarray[Any, Any], *, info: RecordInfo) -> int | None:
    dim = info.sample_dim
    if dim is None or info.keep != Keep.VALUES or array.size == 0 or array.shape[dim] == 1:
        return None
    return dim if array.nbytes // array.shape[dim] >= MIN_SAMPLE_NBYTES else None


def _samples(array: np.ndarray[Any, Any], *, sample_dim: int) -> Iterator[np.ndarray[Any, Any]]:
    return map(_raw, np.moveaxis(array, sample_dim, 0))


_POLYNOMIAL = 0x82F63B78
"""Of CRC-32C (Castagnoli), its bits reversed."""

_NUM_BITS = 32

Matrix = tuple[int, ...]
"""A linear map of checksums: what becomes of each bit."""


def combine(crcs: Sequence[int], *, part_nbytes: int) -> int:
    """The checksum of parts of equal size, one after the other, from theirs; at least one."""
    zeros = _zeros(part_nbytes)
    whole = crcs[0]
    for crc in crcs[1:]:
        whole = _apply(zeros, whole) ^ crc
    return whole


@functools.lru_cache(maxsize=64)
def _zeros(nbytes: int) -> Matrix:
    """What so many zero bytes behind a message make of its checksum."""
    power: Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(_NUM_BITS - 1)))  # one zero bit
    result: Matrix = tuple(1 << bit for bit in range(_NUM_BITS))
    count = 8 * nbytes
    while count:
        if count & 1:
            result = tuple(_apply(power, column) for column in result)
        power = tuple(_apply(power, column) for column in power)
        count >>= 1
    return result


def _apply(matrix: Matrix, crc: int) -> int:
    total = 0
    while crc:
        low = crc & -crc
        total ^= matrix[low.bit_length() - 1]
        crc ^= low
    return total
