"""Turns values into the documents and the objects of Zarr arrays, and these into values again.

A large tensor is one object. Where it has samples, the object is a shard whose inner chunks are single samples, so
that one sample is one read. Small tensors of one dtype and shape share an array, whose one shard has a tensor in each
inner chunk. Shards are written by hand as the specification of `sharding_indexed` says: the chunks, then their offsets
and sizes, then a checksum of those. Bytes that are no tensor (catalogues) lie as an array of bytes in one chunk.

Values are rebuilt from bytes that are there, each chunk compared with its checksum. Nothing is allocated because a
document says so: zarr gives zeros for what is missing, in any size that a document declares.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import google_crc32c
import msgspec
import numpy as np

from ranktape.errors import DataError, RunFormatError, UsageError
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    MAX_PACKED_NBYTES,
    MAX_SAID_NESTING,
    array_document,
    check_nesting,
    check_shape,
    chunk_key,
    decode_document,
    encode_document,
    pack,
    read_document,
    unpack,
)
from ranktape.storage.format.dtypes import DTYPES, DtypeRow, dtype_name
from ranktape.storage.format.layout import document_key
from ranktape.storage.format.record_info import FIELDS, RUN, Compression, Keep, RecordInfo, attribute_of, fields_of
from ranktape.storage.format.statistics import STATISTICS
from ranktape.storage.places.backend import Backend, Buffer, RangeFile, expect_memory

MIN_SAMPLE_NBYTES = 1024
"""Samples smaller than this share one chunk: an entry of the shard's index is 16 bytes, a request costs more."""

_COMBINED_NBYTES = 1 << 18
"""Of samples smaller than this, reading the bytes again takes less time than combining checksums."""

_SUMMED_NBYTES = 1 << 19
"""Of values, as many are summed and then written: they fit into the cache of one processor core."""

_INDEX_ENTRY_NBYTES = 16
_CRC_NBYTES = 4

_PIECE_NBYTES = 64 << 20
_NUM_THREADS = 4
"""Pieces in flight."""

_AT_ONCE_NBYTES = 4 << 20
"""Slices are fetched together up to this size: what is looked at next still is in the processor's cache."""

_MAX_SPREAD = 4
"""Slices that are fetched for each that is wanted, where they are fetched together."""

WHOLE_NBYTES = 4 << 20
"""Up to this size bytes are read with one request and compared with their checksum, and in parts above it."""

_AHEAD_NBYTES = 1 << 18

_ASK = "see 'ranktape check'"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedArray:
    """An array ready to be written: first its object, then its document."""

    document: dict[str, Any]
    """Its `zarr.json`, without the checksum of the text; its other checksums are known once the parts were made."""
    parts: Iterable[Buffer] | None
    """What its object holds, to be joined, made anew each time; None for an empty tensor, which has no object."""


def checksum(values: np.ndarray[Any, Any] | bytes) -> str:
    """The CRC-32C of bytes, or of values as little-endian bytes in C order, as records and documents carry it."""
    return crc_text(_crc(values if isinstance(values, bytes) else _raw(values)))


def crc_text(crc: int) -> str:
    """A CRC-32C as records carry it."""
    return f"crc32c:{crc:08x}"


def can_hold(info: RecordInfo, *, shape: Sequence[int], dtype: str) -> bool:
    """Whether an array of that shape and dtype is what is kept of a record: its values, its statistics, or words."""
    if info.keep == Keep.STATISTICS:
        return (tuple(shape), dtype) == ((len(STATISTICS),), "float64")
    if info.keep == Keep.HISTOGRAM:
        return dtype in _WORDS and len(shape) == 1 and shape[0] * DTYPES[dtype].itemsize == info.nbytes
    return (tuple(shape), dtype) == (info.shape, info.dtype)


_WORDS = frozenset({"uint32", "uint64"})
"""The dtypes of words: what these count is left to whoever writes and reads them."""


def encode_array(
    array: np.ndarray[Any, Any], *, info: RecordInfo, compression: Compression = Compression.NONE
) -> EncodedArray:
    """The document and the object of a tensor whose identity is `info`.

    The tensor's checksums are taken while the parts of the object are made, and are in the document then: who writes
    each part as it comes finds it in the processor's cache. No bytes are copied, but those of samples that do not lie
    together.
    """
    by_sample = _samples_apart(array, info=info)
    inner_chunk = None
    if by_sample is not None:
        inner_chunk = [1 if dim == by_sample else extent for dim, extent in enumerate(array.shape)]
    packing = _packing(compression, info=info) if array.nbytes <= MAX_PACKED_NBYTES else Compression.NONE
    document = array_document(
        shape=array.shape,
        row=DTYPES[dtype_name(array.dtype)],
        inner_chunk=inner_chunk,
        dimension_names=dimension_names(info, shape=array.shape),
        attributes=info.to_attributes(),
        compression=packing,
    )
    parts = _TensorParts(array, by_sample=by_sample, packing=packing, attributes=document["attributes"])
    if not array.size:
        document["attributes"]["checksum"] = checksum(array)
    return EncodedArray(document=document, parts=parts if array.size else None)


class _TensorParts:
    """The parts of the object of a tensor; each time they are made, its checksums are put into `attributes`."""

    def __init__(
        self, array: np.ndarray[Any, Any], *, by_sample: int | None, packing: Compression, attributes: dict[str, Any]
    ) -> None:
        self._array, self._by_sample, self._packing, self._attributes = array, by_sample, packing, attributes

    def __iter__(self) -> Iterator[Buffer]:
        array, axis, packing = self._array, self._by_sample, self._packing
        if axis is None:
            whole, _ = yield from _chunk(_raw(array), packing=packing, itemsize=array.itemsize)
        else:
            part_nbytes, whole = array.nbytes // array.shape[axis], 0
            is_combined = axis == 0 and part_nbytes >= _COMBINED_NBYTES

            def samples() -> Iterator[tuple[np.ndarray[Any, Any], None]]:
                nonlocal whole
                for sample in np.moveaxis(array, axis, 0):
                    raw = _raw(sample)
                    yield raw, None
                    if axis == 0 and not is_combined:
                        whole = google_crc32c.extend(whole, raw)

            crcs = yield from _shard(samples(), packing=packing, itemsize=array.itemsize)
            # One sample is read without the others: what it must be is said where nobody can exchange it.
            self._attributes["sample_checksums"] = [crc_text(crc) for crc in crcs]
            if is_combined:
                whole = combine(crcs, part_nbytes=part_nbytes)
            elif axis:
                whole = _crc(_raw(array))
        self._attributes["checksum"] = crc_text(whole)


def encode_stack(
    arrays: Sequence[np.ndarray[Any, Any]], *, infos: Sequence[RecordInfo], compression: Compression = Compression.NONE
) -> EncodedArray:
    """The document and the object of tensors of one dtype, shape and layout, none of them empty.

    `infos` are their identities with their checksums. What all of them share is in the attribute `common`, what
    tells them apart in `captures`, in their order.
    """
    first = infos[0]
    row = DTYPES[dtype_name(arrays[0].dtype)]
    packing = _packing(compression, info=first)
    shape = (len(arrays), *arrays[0].shape)
    common, captures = _shared_attributes(infos)
    document = array_document(
        shape=shape,
        row=row,
        inner_chunk=[1, *shape[1:]],
        dimension_names=[f"capture_{len(arrays)}", *dimension_names(first, shape=shape[1:])],
        attributes={"common": common, "captures": captures},
        compression=packing,
    )
    chunks = ((_raw(array), crc_of(info.checksum)) for array, info in zip(arrays, infos, strict=True))
    return EncodedArray(document=document, parts=list(_shard(chunks, packing=packing, itemsize=row.itemsize)))


def _packing(compression: Compression, *, info: RecordInfo) -> Compression:
    # Most words of a histogram are zero or small: packed it takes a tenth, and no time to speak of.
    return Compression.ZSTD if info.keep == Keep.HISTOGRAM else compression


def _shared_attributes(infos: Sequence[RecordInfo]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The attributes that all records share, and for each record those of its own."""
    common: dict[str, Any] = {}
    own: dict[str, list[Any]] = {}
    for name, values in zip(FIELDS, zip(*map(fields_of, infos), strict=True), strict=True):
        first = values[0]
        is_shared = values[-1] == first and values.count(first) == len(values)
        if is_shared and name in _FREE_FIELDS and first is not None:
            # 1, 1.0 and True are equal, and not the same in JSON.
            is_shared = len({json.dumps(value) for value in values}) == 1
        if is_shared:
            common[name] = attribute_of(first)
        else:
            own[name] = list(map(attribute_of, values)) if name in {"shape", "overflow"} else list(values)
    return common, [dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True)] or [{} for _ in infos]


_FREE_FIELDS = frozenset({"metadata", "placement", "sample_ids"})
"""Fields that may hold anything that JSON can."""


def dimension_names(info: RecordInfo, *, shape: Sequence[int]) -> list[str]:
    """Names of the dimensions of what is kept of a record, such as `B_4`: the letter of the layout and the extent.

    xarray reads the arrays of a group as one dataset, where a name has one extent; the extent is in the
    name, so that tensors of different shapes may stand side by side.
    """
    if info.keep != Keep.VALUES:
        labels = ["statistic" if info.keep == Keep.STATISTICS else "word"]
    else:
        labels = list(info.layout) if len(info.layout) == len(shape) else [f"dim{dim}" for dim in range(len(shape))]
    return [f"{label}_{extent}" for label, extent in zip(labels, shape, strict=True)]


def check_form(array: np.ndarray[Any, Any], *, info: RecordInfo) -> None:
    """That an array is what its identity says, and that this can be written; a reader could not read it else.

    Raises:
        UsageError: what is said of it has no form in JSON.
    """
    if array.nbytes != info.nbytes or not can_hold(info, shape=array.shape, dtype=dtype_name(array.dtype)):
        raise DataError(
            f"an array of {array.dtype}{list(array.shape)}, {array.nbytes} bytes, cannot be the {info.keep} of the "
            f"tensor that it is said to be: {info.dtype}{list(info.shape)}, {info.nbytes} bytes"
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


def _shard(
    chunks: Iterable[tuple[np.ndarray[Any, Any], int | None]], *, packing: Compression, itemsize: int
) -> Generator[Buffer, None, list[int]]:
    """The parts of a shard of chunks, each with the checksum of its values, if that is known; returns all of these."""
    crcs: list[int] = []
    index: list[int] = []
    offset = 0
    for raw, known in chunks:
        crc, nbytes = yield from _chunk(raw, packing=packing, itemsize=itemsize, known=known)
        crcs.append(crc)
        index += [offset, nbytes]
        offset += nbytes
    entries = struct.pack(f"<{len(index)}Q", *index)
    yield entries
    yield _crc_bytes(entries)
    return crcs


def _chunk(
    raw: np.ndarray[Any, Any], *, packing: Compression, itemsize: int, known: int | None = None
) -> Generator[Buffer, None, tuple[int, int]]:
    """The parts of one chunk; returns the checksum of its values, which may be known, and how many bytes it has."""
    if packing is not Compression.NONE:
        packed = pack(raw, packing, itemsize=itemsize)
        yield packed
        yield _crc_bytes(packed)
        return _crc(raw) if known is None else known, len(packed) + _CRC_NBYTES
    crc = known
    if crc is None:
        crc = 0
        for start in range(0, len(raw), _SUMMED_NBYTES):
            part = raw[start : start + _SUMMED_NBYTES]
            crc = int(google_crc32c.extend(crc, part))
            yield part
    else:
        yield raw
    yield crc.to_bytes(_CRC_NBYTES, "little")
    return crc, len(raw) + _CRC_NBYTES


def _raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(raw: np.ndarray[Any, Any] | bytes) -> int:
    return int(google_crc32c.value(raw))


def _crc_bytes(raw: bytes) -> bytes:
    """As the codec `crc32c` has it behind a chunk."""
    return _crc(raw).to_bytes(_CRC_NBYTES, "little")


def _samples_apart(array: np.ndarray[Any, Any], *, info: RecordInfo) -> int | None:
    dim = info.sample_dim
    if dim is None or info.keep != Keep.VALUES or array.size == 0 or array.shape[dim] == 1:
        return None
    return dim if array.nbytes // array.shape[dim] >= MIN_SAMPLE_NBYTES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """What the document of an array says of its object."""

    path: str
    """Below the run."""
    place: str
    """What its object is called in messages."""
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
        chunk = self.chunk_nbytes + _CRC_NBYTES
        return chunk if self.inner_chunk is None else self.num_chunks * (chunk + _INDEX_ENTRY_NBYTES) + _CRC_NBYTES


def parse_array(document: Mapping[str, Any], *, path: str, place: str) -> StoredArray:
    """What the document of an array says, if it is one that is written here."""
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
        place=f"{place.removesuffix('/zarr.json')}/{chunk_key(len(shape))}",
        shape=shape,
        row=row,
        inner_chunk=inner,
        cut_axis=cut_axis,
        compression=compression,
        attributes=attributes,
        sample_checksums=checksums,
    )


def open_stored(backend: Backend, path: str, *, without_records: bool = False) -> StoredArray:
    """What the document of the array at a path says; of the records in a stack nothing if `without_records`."""
    key = document_key(path)
    place = f"{backend.url}/{key}"
    data = read_document(backend, path, max_nbytes=MAX_COMMIT_NBYTES)
    if data is None:
        raise DataError(f"{place} is committed, but missing: {_ASK}")
    document = decode_document(data, place=place, key=key, wanted=_without_captures(data) if without_records else None)
    return parse_array(document, path=path, place=place)


def _without_captures(data: bytes) -> bytes:
    """The text of an array's document without its records: to parse these takes longer than to read their values."""
    # Whoever parses all of it says what is wrong.
    with contextlib.suppress(msgspec.DecodeError, RecursionError, KeyError):
        named = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "captures" in msgspec.json.decode(named["attributes"], type=dict[str, msgspec.Raw]):
            return msgspec.json.encode({**named, "attributes": {"captures": []}})
    return data


def read_stored(
    backend: Backend, stored: StoredArray, *, index: int | None = None, axis: int = 0
) -> np.ndarray[Any, Any]:
    """The values of an array; with `index` those at one place along an axis, without that axis.

    One place is two small requests where the chunks are cut along the axis; else the whole is read for it.
    """
    if index is not None and axis == stored.cut_axis:
        [(values, _)] = _slices(_ranges(backend, stored), stored, slice(index, index + 1))
        return values.copy()
    if not math.prod(stored.shape):
        values = np.empty(stored.shape, dtype=stored.row.numpy_dtype)
    elif stored.cut_axis is None:
        nbytes = _expect_size(backend, stored)
        content, _ = _unpack(memoryview(_fetched(backend, stored, nbytes)(0, nbytes)), stored)
        # Callers may write into what they get, and bytes cannot be written.
        values = np.frombuffer(bytearray(content), dtype=stored.row.numpy_dtype).reshape(stored.shape)
    else:
        get = _fetched(backend, stored, _expect_size(backend, stored))
        values = np.stack([one for one, _ in _slices(get, stored)], axis=stored.cut_axis)
    return values if index is None else np.ascontiguousarray(np.take(values, index, axis=axis))


def read_slices(backend: Backend, stored: StoredArray) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """The values of an array that is cut, slice after slice, each without the axis; and the CRC-32C of its values.

    No more than one of them is in memory, or a few of small ones. They cannot be written to.
    """
    exact = stored.object_nbytes()
    get = _ranges(backend, stored) if exact is None or exact > _AT_ONCE_NBYTES else _fetched(backend, stored, exact)
    yield from _slices(get, stored)


def read_rows(backend: Backend, stored: StoredArray, indices: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """The slices of an array at places of its first axis, fetched together; compared with no checksum.

    None where the chunks are packed or not cut along that axis, or where most of what lies between is not wanted.
    """
    first, last = min(indices), max(indices)
    is_plain = stored.cut_axis == 0 and stored.compression is Compression.NONE and stored.chunk_nbytes
    if not is_plain or last - first >= _MAX_SPREAD * len(indices):
        return None
    get, step = _ranges(backend, stored), stored.chunk_nbytes + _CRC_NBYTES
    _read_index(get, stored)  # which says that chunks follow one another
    data = get(first * step, (last + 1 - first) * step)
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, step)[np.asarray(indices) - first, : stored.chunk_nbytes]
    values = np.ascontiguousarray(rows).view(stored.row.numpy_dtype)
    return values.reshape(len(indices), *stored.shape[1:])


def read_runs(
    backend: Backend, stored: StoredArray, *, num_elements: int
) -> Generator[np.ndarray[Any, Any], None, int]:
    """The values of an array in one chunk that is not packed, in runs of so many elements in C order.

    What is yielded cannot be written to. What is returned is the CRC-32C of the whole: nothing holds before.
    """
    _expect_size(backend, stored)
    step, end = num_elements * stored.row.itemsize, stored.chunk_nbytes
    get, crc = _ranges(backend, stored), 0
    for start in range(0, end, step):
        data = get(start, min(step, end - start))
        crc = google_crc32c.extend(crc, data)
        yield np.frombuffer(data, dtype=stored.row.numpy_dtype)
    if crc != int.from_bytes(get(end, _CRC_NBYTES), "little"):
        raise DataError(f"{stored.place} is not what was written: the checksum of its chunk differs; {_ASK}")
    return int(crc)


def fetch_object(backend: Backend, key: str, nbytes: int) -> bytes | None:
    """An object of that size; a large one in pieces, each of which has a request's time."""
    if nbytes <= _PIECE_NBYTES:
        return backend.get(key, max_nbytes=nbytes)
    expect_memory(2 * nbytes, place=f"{backend.url}/{key}")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        starts = range(0, nbytes, _PIECE_NBYTES)
        pieces = pool.map(lambda start: backend.get_range(key, start, min(_PIECE_NBYTES, nbytes - start)), starts)
        return b"".join(piece or b"" for piece in pieces)


_Get: TypeAlias = Callable[[int, int], Any]
"""Gives some bytes of an object, from a place on; a negative one counts from its end."""


def _ranges(backend: Backend, stored: StoredArray) -> _Get:
    """From the store, with one request each time."""

    def get(start: int, nbytes: int) -> bytes:
        data = backend.get_range(stored.key, start, nbytes)
        if data is None or (start >= 0 and len(data) != nbytes):
            raise _wrong_size(stored, None if data is None else start + len(data), expected=start + nbytes)
        return data

    return get


def _fetched(backend: Backend, stored: StoredArray, nbytes: int) -> _Get:
    """From the whole object, of that size, which is in memory."""
    data = fetch_object(backend, stored.key, nbytes)
    if data is None or len(data) != nbytes:
        raise _wrong_size(stored, None if data is None else len(data), expected=nbytes)
    return lambda start, nbytes: memoryview(data)[start:][:nbytes]


def _expect_size(backend: Backend, stored: StoredArray) -> int:
    """The size of the object, which is the one that its document leads to."""
    size, exact = backend.size(stored.key), stored.object_nbytes()
    if size is None or size != (size if exact is None else exact):
        raise _wrong_size(stored, size, expected=exact)
    return size


def _slices(get: _Get, stored: StoredArray, chosen: slice = slice(None)) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """Some slices of an array that is cut, each with the checksum of its values; those of a few MB are got together."""
    assert stored.cut_axis is not None
    shape = (*stored.shape[: stored.cut_axis], *stored.shape[stored.cut_axis + 1 :])
    entries = _read_index(get, stored)[chosen]
    ends, first = entries.sum(axis=1), 0
    while first < len(entries):
        begin = int(entries[first, 0])
        last = max(first + 1, int(np.searchsorted(ends, begin + _AT_ONCE_NBYTES, side="right")))
        view = memoryview(get(begin, int(ends[last - 1]) - begin))
        for start, nbytes in (entries[first:last] - (begin, 0)).tolist():
            content, crc = _unpack(view[start : start + nbytes], stored)
            values = np.frombuffer(content, dtype=stored.row.numpy_dtype).reshape(shape)
            yield values, crc if stored.compression is Compression.NONE else _crc(_raw(values))
        first = last


def _read_index(get: _Get, stored: StoredArray) -> np.ndarray[Any, Any]:
    """The offset and the size of each chunk, which follow one another."""
    nbytes = stored.num_chunks * _INDEX_ENTRY_NBYTES + _CRC_NBYTES
    tail = bytes(get(-nbytes, nbytes))
    packed = tail[:-_CRC_NBYTES]
    if len(tail) != nbytes or tail[-_CRC_NBYTES:] != _crc_bytes(packed):
        raise DataError(f"{stored.place} is cut or not what was written: the index of its chunks is damaged; {_ASK}")
    entries = np.frombuffer(packed, dtype="<u8").reshape(-1, 2).astype(np.int64)
    sizes = entries[:, 1]
    if (sizes < _CRC_NBYTES).any() or (entries[:, 0] != np.cumsum(sizes) - sizes).any():
        raise DataError(f"{stored.place} is not what ranktape writes: its chunks do not follow one another; {_ASK}")
    return entries


def _unpack(chunk: memoryview, stored: StoredArray) -> tuple[memoryview, int]:
    """The bytes of the values in a chunk, and the checksum of what is stored of them."""
    content = chunk[:-_CRC_NBYTES]
    # The library takes arrays, and no memoryviews.
    crc = google_crc32c.value(np.frombuffer(content, dtype=np.uint8)) if len(content) else -1
    if crc != int.from_bytes(chunk[-_CRC_NBYTES:], "little"):
        raise DataError(f"{stored.place} is cut or not what was written: the checksum of a chunk differs; {_ASK}")
    try:
        content = unpack(content, stored.compression, nbytes=stored.chunk_nbytes)
    except ValueError as error:
        raise DataError(f"{stored.place} cannot be unpacked ({error}); {_ASK}") from error
    if len(content) != stored.chunk_nbytes:
        raise DataError(f"{stored.place} has a chunk of {len(content)} bytes instead of {stored.chunk_nbytes}; {_ASK}")
    return content, int(crc)


def _wrong_size(stored: StoredArray, size: int | None, *, expected: int | None) -> DataError:
    if size is None:
        return DataError(f"the values are lost: {stored.place} is missing; {_ASK}")
    return DataError(f"{stored.place} has {size} bytes instead of {expected}; {_ASK}")


def _cut_axis(shape: Sequence[int], inner: Sequence[int]) -> int:
    """The one axis along which a shard is cut, into slices of one."""
    cut = [axis for axis, (extent, chunk) in enumerate(zip(shape, inner, strict=True)) if extent != chunk]
    if len(cut) != 1 or inner[cut[0]] != 1:
        raise ValueError(f"chunks of {list(inner)} in {list(shape)}")
    return cut[0]


def blob_key(path: str) -> str:
    """The key of the object that holds the bytes at a path."""
    return f"{path}/{chunk_key(1)}"


def write_blob(backend: Backend, path: str, data: bytes, *, attributes: Mapping[str, Any]) -> None:
    """Write bytes, and after them their document."""
    key = document_key(path)
    backend.put(blob_key(path), blob_parts(data))
    backend.put(key, [encode_document(blob_document(data, attributes=attributes), key=key)])


def blob_document(data: bytes, *, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The document of the array that holds the bytes."""
    return array_document(
        shape=[len(data)],
        row=DTYPES["uint8"],
        inner_chunk=None,
        dimension_names=[f"byte_{len(data)}"],
        attributes=attributes,
    )


def blob_parts(data: bytes) -> list[bytes]:
    """What the object of that array holds."""
    return [data, _crc_bytes(data)]


def blob_nbytes(document: Mapping[str, Any]) -> int | None:
    """The size of that object, from the array's document; None where the document is not of such an array."""
    match document.get("shape"):
        case [int(length)]:
            return length + _CRC_NBYTES
    return None


def open_blob(backend: Backend, path: str) -> IO[bytes]:
    """The bytes at a path, as a file; large ones are read where they are looked into."""
    key = blob_key(path)
    place = f"{backend.url}/{key}"
    size = backend.size(key)
    if size is not None and size > WHOLE_NBYTES:
        return _Parts(backend, key, size=size - _CRC_NBYTES)
    data = None if size is None else backend.get(key, max_nbytes=WHOLE_NBYTES)
    return io.BytesIO(split_checksum(data, place=place))


def split_checksum(data: bytes | None, *, place: str) -> bytes:
    """The bytes in front of their checksum."""
    if data is None:
        raise DataError(f"{place} is committed, but missing: the run is damaged; see 'ranktape check'")
    content = data[:-_CRC_NBYTES]
    if len(data) < _CRC_NBYTES or data[-_CRC_NBYTES:] != _crc_bytes(content):
        raise DataError(f"{place} is not what was written: its checksum differs; see 'ranktape check'")
    return content


class _Parts(io.BufferedReader):
    """A large object as a file, of which no more memory is taken than it has bytes."""

    def __init__(self, backend: Backend, key: str, *, size: int) -> None:
        def fill(position: int, target: memoryview) -> int:
            data = backend.get_range(key, position, len(target))
            if not data:
                raise DataError(f"{backend.url}/{key} is committed, but missing: {_ASK}")
            target[: len(data)] = data
            return len(data)

        super().__init__(RangeFile(size, fill), buffer_size=_AHEAD_NBYTES)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self._size - self.tell())
        return super().read(rest if size is None or size < 0 else min(size, rest))


def split(values: np.ndarray[Any, Any], *, sample_dim: int | None) -> Iterator[np.ndarray[Any, Any]]:
    """The values in runs of `RUN` elements in C order; with samples, some of them, counted by the first dimension."""
    if not values.size:
        return
    if sample_dim is None:
        flat = np.ascontiguousarray(values).reshape(-1)
        for start in range(0, flat.size, RUN):
            yield flat[start : start + RUN]
        return
    samples = np.moveaxis(values, sample_dim, 0)
    step = max(1, RUN // math.prod(samples.shape[1:]))
    for start in range(0, len(samples), step):
        yield np.ascontiguousarray(samples[start : start + step])


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
