"""Turns stored arrays into arrays again, and refuses damaged ones.

The twin of `encode.py`, and the only way by which values are read here: an array is rebuilt from bytes that are
there, each chunk compared with its checksum. Nothing is allocated because a document says so: zarr gives zeros
for what is missing, in any size that a document declares.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from ranktape.errors import DataError, RunFormatError
from ranktape.storage.format.documents import MAX_PACKED_NBYTES, array_document, chunk_key, decode_document, unpack
from ranktape.storage.format.dtypes import DTYPES, DtypeRow
from ranktape.storage.format.encode import CRC_NBYTES, INDEX_ENTRY_NBYTES, checksum, crc_of
from ranktape.storage.format.layout import document_key
from ranktape.storage.format.memory import expect_memory
from ranktape.storage.format.record_info import Compression
from ranktape.storage.format.validation import check_shape
from ranktape.storage.places.backend import Backend

MAX_DOCUMENT_NBYTES = 64 << 20
"""The document of a full stack has a tenth of that; a larger one is not read, whoever wrote it."""

_PIECE_NBYTES = 64 << 20
_NUM_THREADS = 4
"""Pieces in flight."""

_AT_ONCE_NBYTES = 4 << 20
"""Slices are fetched together up to this size: what is looked at next still is in the processor's cache."""

_MAX_SPREAD = 4
"""Slices that are fetched for each that is wanted, where they are fetched together."""

_ASK = "see 'ranktape check'"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """What the document of an array says of its object."""

    path: str
    """Below the run."""
    shape: tuple[int, ...]
    """Of the array, in elements."""
    row: DtypeRow
    """Its dtype."""
    inner_chunk: tuple[int, ...] | None
    """The chunks of its shard; None where the object is one chunk."""
    cut_axis: int | None
    """The axis along which its shard is cut, into slices of one; None where the object is one chunk."""
    compression: Compression
    """How chunks are packed."""
    attributes: Mapping[str, Any]
    """What the document says beside it."""
    sample_checksums: tuple[str, ...] | None
    """Of the values of each sample; None where samples have no chunks of their own."""

    @property
    def key(self) -> str:
        """Of the object."""
        return f"{self.path}/{chunk_key(len(self.shape))}"

    @property
    def num_chunks(self) -> int:
        """Of the object."""
        return 1 if self.cut_axis is None else self.shape[self.cut_axis]

    @property
    def chunk_nbytes(self) -> int:
        """Values in one chunk, unpacked."""
        return self.row.itemsize * math.prod(self.shape if self.inner_chunk is None else self.inner_chunk)

    def object_nbytes(self) -> int | None:
        """The exact size of the object; None where chunks are compressed."""
        if self.compression is not Compression.NONE:
            return None
        chunk = self.chunk_nbytes + CRC_NBYTES
        return chunk if self.inner_chunk is None else self.num_chunks * (chunk + INDEX_ENTRY_NBYTES) + CRC_NBYTES


def parse_array(document: Mapping[str, Any], *, path: str, place: str) -> StoredArray:
    """What the document of an array says, if it is one that `encode.py` writes.

    Raises:
        RunFormatError: it is none.
    """
    try:
        shape = tuple(document["shape"])
        row = DTYPES[document["data_type"]]
        codecs = document["codecs"]
        is_sharded = codecs[0]["name"] == "sharding_indexed"
        inner = tuple(codecs[0]["configuration"]["chunk_shape"]) if is_sharded else None
        names = [codec["name"] for codec in (codecs[0]["configuration"]["codecs"] if is_sharded else codecs)]
        compression = next((one for one in Compression if one in names), Compression.NONE)
        for extents in (shape, inner or ()):
            check_shape(extents, itemsize=row.itemsize)
        if compression is not Compression.NONE and row.itemsize * math.prod(shape) > MAX_PACKED_NBYTES:
            raise ValueError(f"a packed array of more than {MAX_PACKED_NBYTES} bytes")
        expected = array_document(
            shape=shape,
            row=row,
            inner_chunk=inner,
            dimension_names=document["dimension_names"],
            attributes=document["attributes"],
            compression=compression,
        ) | {"fill_value": document["fill_value"]}
        cut_axis = None if inner is None else _cut_axis(shape, inner)
        attributes = document["attributes"]
        is_stack = "captures" in attributes
        checksums = None if cut_axis is None or is_stack else tuple(map(str, attributes["sample_checksums"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RunFormatError(f"{place} is not an array that ranktape writes ({error!r}): {_ASK}") from error
    if expected != document:
        raise RunFormatError(f"{place} is not an array that ranktape writes (other chunks or codecs): {_ASK}")
    return StoredArray(
        path=path,
        shape=shape,
        row=row,
        inner_chunk=inner,
        cut_axis=cut_axis,
        compression=compression,
        attributes=attributes,
        sample_checksums=checksums,
    )


def open_stored(backend: Backend, path: str) -> StoredArray:
    """What the document of the array at a path says.

    Raises:
        DataError: the document is missing, or not what was written.
        RunFormatError: it is not one of our arrays.
    """
    key = document_key(path)
    place = f"{backend.url}/{key}"
    data = backend.get(key, max_nbytes=MAX_DOCUMENT_NBYTES)
    if data is None:
        raise DataError(f"{place} is committed, but missing: {_ASK}")
    return parse_array(decode_document(data, place=place, key=key), path=path, place=place)


def read_stored(
    backend: Backend, stored: StoredArray, *, index: int | None = None, axis: int = 0
) -> np.ndarray[Any, Any]:
    """The values of an array; with `index` those at one place along an axis, without that axis.

    One place is two small requests where the chunks are cut along the axis; else the whole is read for it.

    Raises:
        DataError: bytes are missing, or not what was written.
    """
    if index is not None and axis == stored.cut_axis:
        return _read_one(backend, stored, index)
    values = _read_whole(backend, stored)
    return values if index is None else np.ascontiguousarray(np.take(values, index, axis=axis))


def read_slices(backend: Backend, stored: StoredArray) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """The values of an array that is cut, slice after slice, each without the axis; and the CRC-32C of its values.

    No more than one of them is in memory, or a few of small ones. They cannot be written to.

    Raises:
        DataError: bytes are missing, or not what was written.
    """
    assert stored.cut_axis is not None
    place = f"{backend.url}/{stored.key}"
    shape = _without(stored.shape, stored.cut_axis)
    exact = stored.object_nbytes()
    groups: Iterator[tuple[np.ndarray[Any, Any], memoryview]]
    if exact is not None and exact <= _AT_ONCE_NBYTES:
        data = backend.get(stored.key, max_nbytes=exact)
        if data is None or len(data) != exact:
            raise _wrong_size(place, data, expected=exact)
        groups = iter([(_index(data[-_index_nbytes(stored) :], stored, place=place), memoryview(data))])
    else:
        groups = _ranges(backend, stored, _read_index(backend, stored))
    for entries, view in groups:
        first = int(entries[0, 0])
        for start, nbytes in (entries - (first, 0)).tolist():
            chunk = view[start : start + nbytes]
            values = _values(_unpack(chunk, stored, place=place), stored, is_copied=False).reshape(shape)
            is_packed = stored.compression is not Compression.NONE
            yield values, crc_of(checksum(values)) if is_packed else int.from_bytes(chunk[-CRC_NBYTES:], "little")


def read_rows(backend: Backend, stored: StoredArray, indices: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """The slices of an array at places of its first axis, fetched together; compared with no checksum.

    None where the chunks are packed or not cut along that axis, or where most of what lies between is not wanted.

    Raises:
        DataError: bytes are missing, or not what was written.
    """
    first, last = min(indices), max(indices)
    is_plain = stored.cut_axis == 0 and stored.compression is Compression.NONE and stored.chunk_nbytes
    if not is_plain or last - first >= _MAX_SPREAD * len(indices):
        return None
    _read_index(backend, stored)  # which says that chunks follow one another
    step = stored.chunk_nbytes + CRC_NBYTES
    nbytes = (last + 1 - first) * step
    data = backend.get_range(stored.key, first * step, nbytes)
    if data is None or len(data) != nbytes:
        raise _wrong_size(f"{backend.url}/{stored.key}", data, expected=nbytes)
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, step)[np.asarray(indices) - first, : stored.chunk_nbytes]
    values = np.ascontiguousarray(rows).view(stored.row.numpy_dtype)
    return values.reshape(len(indices), *_without(stored.shape, 0))


def read_runs(
    backend: Backend, stored: StoredArray, *, num_elements: int
) -> Generator[np.ndarray[Any, Any], None, int]:
    """The values of an array in one chunk that is not packed, in runs of so many elements in C order.

    What is yielded cannot be written to. What is returned is the CRC-32C of the whole: nothing holds before.

    Raises:
        DataError: bytes are missing, or, behind the last run, they are not what was written.
    """
    place = f"{backend.url}/{stored.key}"
    size, exact = backend.size(stored.key), stored.object_nbytes()
    if size is None or size != exact:
        raise _wrong_size(place, size, expected=exact)
    crc = 0
    step = num_elements * stored.row.itemsize
    for start in range(0, stored.chunk_nbytes, step):
        nbytes = min(step, stored.chunk_nbytes - start)
        data = backend.get_range(stored.key, start, nbytes)
        if data is None or len(data) != nbytes:
            raise _wrong_size(place, None if data is None else start + len(data), expected=exact)
        crc = google_crc32c.extend(crc, data)
        yield _values(memoryview(data), stored, is_copied=False)
    if crc != int.from_bytes(backend.get_range(stored.key, stored.chunk_nbytes, CRC_NBYTES) or b"", "little"):
        raise DataError(f"{place} is not what was written: the checksum of its chunk differs; {_ASK}")
    return int(crc)


def _read_whole(backend: Backend, stored: StoredArray) -> np.ndarray[Any, Any]:
    if not math.prod(stored.shape):
        return np.empty(stored.shape, dtype=stored.row.numpy_dtype)
    place = f"{backend.url}/{stored.key}"
    exact = stored.object_nbytes()
    size = backend.size(stored.key)
    if size is None or (exact is not None and size != exact):
        raise _wrong_size(place, size, expected=exact)
    data = fetch_object(backend, stored.key, size)
    if data is None or len(data) != size:
        raise _wrong_size(place, data, expected=size)
    view = memoryview(data)
    if stored.inner_chunk is None:
        return _values(_unpack(view, stored, place=place), stored).reshape(stored.shape)
    chunks = (
        _values(_unpack(view[start : start + nbytes], stored, place=place), stored, is_copied=False)
        for start, nbytes in _index(data[-_index_nbytes(stored) :], stored, place=place)
    )
    assert stored.cut_axis is not None
    slices = [chunk.reshape(_without(stored.shape, stored.cut_axis)) for chunk in chunks]
    return np.stack(slices, axis=stored.cut_axis)


def fetch_object(backend: Backend, key: str, nbytes: int) -> bytes | None:
    """An object of that size; a large one in pieces, each of which has a request's time."""
    if nbytes <= _PIECE_NBYTES:
        return backend.get(key, max_nbytes=nbytes)
    expect_memory(2 * nbytes, place=f"{backend.url}/{key}")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        starts = range(0, nbytes, _PIECE_NBYTES)
        pieces = pool.map(lambda start: backend.get_range(key, start, min(_PIECE_NBYTES, nbytes - start)), starts)
        return b"".join(piece or b"" for piece in pieces)


def _read_one(backend: Backend, stored: StoredArray, index: int) -> np.ndarray[Any, Any]:
    place = f"{backend.url}/{stored.key}"
    start, nbytes = _read_index(backend, stored)[index].tolist()
    data = backend.get_range(stored.key, start, nbytes)
    assert stored.cut_axis is not None
    chunk = _values(_unpack(memoryview(data or b""), stored, place=place), stored)
    return chunk.reshape(_without(stored.shape, stored.cut_axis))


def _read_index(backend: Backend, stored: StoredArray) -> np.ndarray[Any, Any]:
    """The offset and the size of each chunk, none of them larger than it can be."""
    place = f"{backend.url}/{stored.key}"
    if _index_nbytes(stored) > MAX_DOCUMENT_NBYTES:
        raise DataError(
            f"{place} has an index of {_index_nbytes(stored)} bytes, at most {MAX_DOCUMENT_NBYTES} are read"
        )
    tail = backend.get_range(stored.key, -_index_nbytes(stored), _index_nbytes(stored))
    if tail is None:
        raise _wrong_size(place, None, expected=None)
    entries = _index(tail, stored, place=place)
    largest = int(entries[:, 1].max())
    # What cannot be packed grows a little when it is.
    if largest > stored.chunk_nbytes + stored.chunk_nbytes // 128 + 1024:
        raise DataError(f"{place} has a chunk of {largest} bytes for {stored.chunk_nbytes}; {_ASK}")
    return entries


def _ranges(
    backend: Backend, stored: StoredArray, entries: np.ndarray[Any, Any]
) -> Iterator[tuple[np.ndarray[Any, Any], memoryview]]:
    """The chunks of a shard in groups that are fetched with one request: their places, and the bytes from the first."""
    ends = entries.sum(axis=1)
    first = 0
    while first < len(entries):
        start = int(entries[first, 0])
        last = max(first + 1, int(np.searchsorted(ends, start + _AT_ONCE_NBYTES, side="right")))
        data = backend.get_range(stored.key, start, int(ends[last - 1]) - start)
        yield entries[first:last], memoryview(data or b"")
        first = last


def _index_nbytes(stored: StoredArray) -> int:
    return stored.num_chunks * INDEX_ENTRY_NBYTES + CRC_NBYTES


def _index(tail: bytes, stored: StoredArray, *, place: str) -> np.ndarray[Any, Any]:
    """The offset and the size of each chunk, which follow one another."""
    packed = tail[:-CRC_NBYTES]
    crc = int.from_bytes(tail[-CRC_NBYTES:], "little")
    if len(tail) != _index_nbytes(stored) or google_crc32c.value(packed) != crc:
        raise DataError(f"{place} is cut or not what was written: the index of its chunks is damaged; {_ASK}")
    entries = np.frombuffer(packed, dtype="<u8").reshape(-1, 2).astype(np.int64)
    sizes = entries[:, 1]
    if (sizes < CRC_NBYTES).any() or (entries[:, 0] != np.cumsum(sizes) - sizes).any():
        raise DataError(f"{place} is not what ranktape writes: its chunks do not follow one another; {_ASK}")
    return entries


def _unpack(chunk: memoryview, stored: StoredArray, *, place: str) -> memoryview:
    content = chunk[:-CRC_NBYTES]
    # The library takes arrays, and no memoryviews.
    crc = google_crc32c.value(np.frombuffer(content, dtype=np.uint8)) if len(content) else None
    if crc != int.from_bytes(chunk[-CRC_NBYTES:], "little"):
        raise DataError(f"{place} is cut or not what was written: the checksum of a chunk differs; {_ASK}")
    try:
        content = unpack(content, stored.compression, nbytes=stored.chunk_nbytes)
    except ValueError as error:
        raise DataError(f"{place} cannot be unpacked ({error}); {_ASK}") from error
    if len(content) != stored.chunk_nbytes:
        raise DataError(f"{place} has a chunk of {len(content)} bytes instead of {stored.chunk_nbytes}; {_ASK}")
    return content


def _values(content: memoryview, stored: StoredArray, *, is_copied: bool = True) -> np.ndarray[Any, Any]:
    # Callers may write into what they get, and bytes cannot be written.
    return np.frombuffer(bytearray(content) if is_copied else content, dtype=stored.row.numpy_dtype)


def _wrong_size(place: str, data: bytes | int | None, *, expected: int | None) -> DataError:
    if data is None:
        return DataError(f"the values are lost: {place} is missing; {_ASK}")
    size = data if isinstance(data, int) else len(data)
    return DataError(f"{place} has {size} bytes instead of {expected}; {_ASK}")


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _cut_axis(shape: Sequence[int], inner: Sequence[int]) -> int:
    """The one axis along which a shard is cut, into slices of one."""
    cut = [axis for axis, (extent, chunk) in enumerate(zip(shape, inner, strict=True)) if extent != chunk]
    if len(cut) != 1 or inner[cut[0]] != 1:
        raise ValueError(f"chunks of {list(inner)} in {list(shape)}")
    return cut[0]
