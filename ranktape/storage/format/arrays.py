"""Encodes tensors as Zarr arrays (a document and an object each), and decodes them.

A large tensor is one object. If it has samples, the object is a shard with one sample in each inner chunk, so that one
sample is one read. Small tensors of one dtype and shape share an array, a stack, whose shard has one tensor in each
inner chunk. Shards are written by hand according to the specification of `sharding_indexed`: the chunks, then their
offsets and sizes, then a checksum of these. Other bytes (catalogues) are stored as an array of bytes in one chunk.

Values are decoded from bytes that exist, and each chunk is compared with its checksum. Sizes in documents are not
trusted: zarr returns zeros for missing chunks, in any size that a document declares.
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
    MAX_WRITTEN_NESTING,
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
"""The smallest sample with a chunk of its own, in bytes. Smaller ones would spend much on the shard's index."""

_COMBINED_NBYTES = 1 << 18
"""The smallest sample whose checksums are combined, in bytes. Below this, a second pass over the bytes is faster."""

_SUMMED_NBYTES = 1 << 19
"""The number of bytes that are checksummed and then written at a time. They fit into the cache of one core."""

_INDEX_ENTRY_NBYTES = 16
_CRC_NBYTES = 4

_PIECE_NBYTES = 64 << 20
_NUM_THREADS = 4
"""The number of pieces that are fetched concurrently."""

_AT_ONCE_NBYTES = 4 << 20
"""The largest size of slices that are fetched together, in bytes. They stay in the processor's cache."""

_MAX_SPREAD = 4
"""The largest number of slices that are fetched for each wanted one when slices are fetched together."""

WHOLE_NBYTES = 4 << 20
"""The largest size that is read with one request and compared with its checksum, in bytes. More is read in parts."""

_AHEAD_NBYTES = 1 << 18

_ASK = "see 'ranktape check'"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedArray:
    """An array to write: first its object, then its document."""

    document: dict[str, Any]
    """Its `zarr.json`, without the checksum of the text. Checksums of values are set when `parts` has been iterated."""
    parts: Iterable[Buffer] | None
    """The contents of its object in parts, iterable repeatedly; None for an empty tensor, which has no object."""


def checksum(values: np.ndarray[Any, Any] | bytes) -> str:
    """The CRC-32C of bytes, or of values as little-endian bytes in C order, in the form of records and documents."""
    return crc_text(_crc(values if isinstance(values, bytes) else _raw(values)))


def crc_text(crc: int) -> str:
    """A CRC-32C in the form of records."""
    return f"crc32c:{crc:08x}"


def can_hold(info: RecordInfo, *, shape: Sequence[int], dtype: str) -> bool:
    """Whether the stored part of a record (values, statistics, or a histogram) has that shape and dtype."""
    if info.keep == Keep.STATISTICS:
        return (tuple(shape), dtype) == ((len(STATISTICS),), "float64")
    if info.keep == Keep.HISTOGRAM:
        return dtype in _WORDS and len(shape) == 1 and shape[0] * DTYPES[dtype].itemsize == info.nbytes
    return (tuple(shape), dtype) == (info.shape, info.dtype)


_WORDS = frozenset({"uint32", "uint64"})
"""The dtypes of the words of a histogram, whose meaning is defined by `analyze`."""


def encode_array(
    array: np.ndarray[Any, Any], *, info: RecordInfo, compression: Compression = Compression.NONE
) -> EncodedArray:
    """The document and the object of a tensor with the metadata `info`.

    Checksums are computed while the parts of the object are iterated, and are then set in the document, so that each
    part is still in the processor's cache when it is written. Only samples that are not contiguous are copied.
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
    """The parts of the object of a tensor. Each iteration sets its checksums in `attributes`."""

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
            # A sample is read without the others, so that the document must have its checksum.
            self._attributes["sample_checksums"] = [crc_text(crc) for crc in crcs]
            if is_combined:
                whole = combine(crcs, part_nbytes=part_nbytes)
            elif axis:
                whole = _crc(_raw(array))
        self._attributes["checksum"] = crc_text(whole)


def encode_stack(
    arrays: Sequence[np.ndarray[Any, Any]], *, infos: Sequence[RecordInfo], compression: Compression = Compression.NONE
) -> EncodedArray:
    """The document and the object of a stack: nonempty tensors of one dtype, shape and layout.

    `infos` is their metadata, with checksums. Fields that all of them share are in the attribute `common`, the others
    in `captures`, in the order of the tensors.
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
    # Most words of a histogram are zero or small, so that compression to a tenth takes little time.
    return Compression.ZSTD if info.keep == Keep.HISTOGRAM else compression


def _shared_attributes(infos: Sequence[RecordInfo]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The attributes that all records share, and the other attributes of each record."""
    common: dict[str, Any] = {}
    own: dict[str, list[Any]] = {}
    for name, values in zip(FIELDS, zip(*map(fields_of, infos), strict=True), strict=True):
        first = values[0]
        is_shared = values[-1] == first and values.count(first) == len(values)
        if is_shared and name in _FREE_FIELDS and first is not None:
            # 1, 1.0 and True are equal in Python but differ in JSON.
            is_shared = len({json.dumps(value) for value in values}) == 1
        if is_shared:
            common[name] = attribute_of(first)
        else:
            own[name] = list(map(attribute_of, values)) if name in {"shape", "overflow"} else list(values)
    return common, [dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True)] or [{} for _ in infos]


_FREE_FIELDS = frozenset({"metadata", "placement", "sample_ids"})
"""The fields that may have any JSON value."""


def dimension_names(info: RecordInfo, *, shape: Sequence[int]) -> list[str]:
    """The dimension names of a record's array, such as `B_4`: the letter of the layout and the extent.

    xarray reads the arrays of a group as one dataset, in which a name has one extent. With the extent in the name,
    tensors of different shapes fit into one group.
    """
    if info.keep != Keep.VALUES:
        labels = ["statistic" if info.keep == Keep.STATISTICS else "word"]
    else:
        labels = list(info.layout) if len(info.layout) == len(shape) else [f"dim{dim}" for dim in range(len(shape))]
    return [f"{label}_{extent}" for label, extent in zip(labels, shape, strict=True)]


def check_form(array: np.ndarray[Any, Any], *, info: RecordInfo) -> None:
    """Check that an array agrees with its metadata, and that the metadata can be written as JSON.

    Raises:
        UsageError: the metadata cannot be written as JSON.
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
        check_nesting(free, limit=MAX_WRITTEN_NESTING)
        json.dumps(free, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"what is said of a tensor has no form in JSON ({error}): give text and finite numbers"
        ) from error


def crc_of(text: str) -> int:
    """The number in a checksum in the form of records."""
    return int(text.partition(":")[2], 16)


def _shard(
    chunks: Iterable[tuple[np.ndarray[Any, Any], int | None]], *, packing: Compression, itemsize: int
) -> Generator[Buffer, None, list[int]]:
    """The parts of a shard of chunks, each with the checksum of its values or None; returns all checksums."""
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
    """The parts of one chunk; returns the checksum of its values (`known`, if given) and its size in bytes."""
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
    """The checksum that the codec `crc32c` appends to a chunk."""
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
    """Shape of the array."""
    row: DtypeRow
    """Its dtype."""
    inner_chunk: tuple[int, ...] | None
    """Shape of the chunks of its shard; None if the object is one chunk."""
    cut_axis: int | None
    """The axis along which its shard is cut into slices of extent 1; None if the object is one chunk."""
    compression: Compression
    """Compression of the chunks."""
    attributes: Mapping[str, Any]
    """Attributes of the document."""
    sample_checksums: tuple[str, ...] | None
    """Checksum of the values of each sample; None if samples have no chunks of their own."""

    @property
    def key(self) -> str:
        """Key of the object."""
        return f"{self.path}/{chunk_key(len(self.shape))}"

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the object."""
        return 1 if self.cut_axis is None else self.shape[self.cut_axis]

    @property
    def chunk_nbytes(self) -> int:
        """Size of the values in one chunk, in bytes, before compression."""
        return self.row.itemsize * math.prod(self.shape if self.inner_chunk is None else self.inner_chunk)

    def object_nbytes(self) -> int | None:
        """The exact size of the object, in bytes; None if chunks are compressed."""
        if self.compression is not Compression.NONE:
            return None
        chunk = self.chunk_nbytes + _CRC_NBYTES
        return chunk if self.inner_chunk is None else self.num_chunks * (chunk + _INDEX_ENTRY_NBYTES) + _CRC_NBYTES


def parse_array(document: Mapping[str, Any], *, path: str, place: str) -> StoredArray:
    """The array that a document describes, if it is an array that ranktape writes."""
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
    """The array at a path, from its document. With `without_records`, the records of a stack are not parsed."""
    key = document_key(path)
    place = f"{backend.url}/{key}"
    data = read_document(backend, path, max_nbytes=MAX_COMMIT_NBYTES)
    if data is None:
        raise DataError(f"{place} is committed, but missing: {_ASK}")
    document = decode_document(data, place=place, key=key, wanted=_without_captures(data) if without_records else None)
    return parse_array(document, path=path, place=place)


def _without_captures(data: bytes) -> bytes:
    """The text of an array's document without its records, whose parsing takes longer than reading their values."""
    # If the text is damaged, the parser of the whole document reports the error.
    with contextlib.suppress(msgspec.DecodeError, RecursionError, KeyError):
        named = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "captures" in msgspec.json.decode(named["attributes"], type=dict[str, msgspec.Raw]):
            return msgspec.json.encode({**named, "attributes": {"captures": []}})
    return data


def read_stored(
    backend: Backend, stored: StoredArray, *, index: int | None = None, axis: int = 0
) -> np.ndarray[Any, Any]:
    """The values of an array; with `index`, those at one index along an axis, without that axis.

    One index takes two small requests if the chunks are cut along the axis; otherwise the whole array is read.
    """
    if index is not None and axis == stored.cut_axis:
        [(values, _)] = _slices(_ranges(backend, stored), stored, slice(index, index + 1))
        return values.copy()
    if not math.prod(stored.shape):
        values = np.empty(stored.shape, dtype=stored.row.numpy_dtype)
    elif stored.cut_axis is None:
        nbytes = _expect_size(backend, stored)
        content, _ = _unpack(memoryview(_fetched(backend, stored, nbytes)(0, nbytes)), stored)
        # A bytearray, because callers may write into the result.
        values = np.frombuffer(bytearray(content), dtype=stored.row.numpy_dtype).reshape(stored.shape)
    else:
        get = _fetched(backend, stored, _expect_size(backend, stored))
        values = np.stack([one for one, _ in _slices(get, stored)], axis=stored.cut_axis)
    return values if index is None else np.ascontiguousarray(np.take(values, index, axis=axis))


def read_slices(backend: Backend, stored: StoredArray) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """The slices of an array along its `cut_axis`, without that axis, each with the CRC-32C of its values.

    At most one slice, or a few small ones, are in memory at a time. They are read-only.
    """
    exact = stored.object_nbytes()
    get = _ranges(backend, stored) if exact is None or exact > _AT_ONCE_NBYTES else _fetched(backend, stored, exact)
    yield from _slices(get, stored)


def read_rows(backend: Backend, stored: StoredArray, indices: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """The slices of an array at some indices of its first axis, fetched together. Checksums are not compared.

    None if the chunks are compressed or not cut along that axis, or if the indices are too far apart.
    """
    first, last = min(indices), max(indices)
    is_plain = stored.cut_axis == 0 and stored.compression is Compression.NONE and stored.chunk_nbytes
    if not is_plain or last - first >= _MAX_SPREAD * len(indices):
        return None
    get, step = _ranges(backend, stored), stored.chunk_nbytes + _CRC_NBYTES
    _read_index(get, stored)  # checks that the chunks are contiguous
    data = get(first * step, (last + 1 - first) * step)
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, step)[np.asarray(indices) - first, : stored.chunk_nbytes]
    values = np.ascontiguousarray(rows).view(stored.row.numpy_dtype)
    return values.reshape(len(indices), *stored.shape[1:])


def read_runs(
    backend: Backend, stored: StoredArray, *, num_elements: int
) -> Generator[np.ndarray[Any, Any], None, int]:
    """The values of an array of one uncompressed chunk, in runs of `num_elements` elements in C order.

    The runs are read-only. The CRC-32C of the array is compared after the last run and returned.
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
    """An object of `nbytes` bytes. A large one is fetched in pieces, each with the timeout of a request."""
    if nbytes <= _PIECE_NBYTES:
        return backend.get(key, max_nbytes=nbytes)
    expect_memory(2 * nbytes, place=f"{backend.url}/{key}")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        starts = range(0, nbytes, _PIECE_NBYTES)
        pieces = pool.map(lambda start: backend.get_range(key, start, min(_PIECE_NBYTES, nbytes - start)), starts)
        return b"".join(piece or b"" for piece in pieces)


_Get: TypeAlias = Callable[[int, int], Any]
"""Gets some bytes of an object, given the start and the number. A negative start counts from the end."""


def _ranges(backend: Backend, stored: StoredArray) -> _Get:
    """Gets bytes from the store, with one request for each call."""

    def get(start: int, nbytes: int) -> bytes:
        data = backend.get_range(stored.key, start, nbytes)
        if data is None or (start >= 0 and len(data) != nbytes):
            raise _wrong_size(stored, None if data is None else start + len(data), expected=start + nbytes)
        return data

    return get


def _fetched(backend: Backend, stored: StoredArray, nbytes: int) -> _Get:
    """Gets bytes from the whole object of `nbytes` bytes, which is fetched once."""
    data = fetch_object(backend, stored.key, nbytes)
    if data is None or len(data) != nbytes:
        raise _wrong_size(stored, None if data is None else len(data), expected=nbytes)
    return lambda start, nbytes: memoryview(data)[start:][:nbytes]


def _expect_size(backend: Backend, stored: StoredArray) -> int:
    """The size of the object, after a comparison with the size that its document implies."""
    size, exact = backend.size(stored.key), stored.object_nbytes()
    if size is None or size != (size if exact is None else exact):
        raise _wrong_size(stored, size, expected=exact)
    return size


def _slices(get: _Get, stored: StoredArray, chosen: slice = slice(None)) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """Slices of an array along its `cut_axis`, each with the checksum of its values. Small ones share a request."""
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
    """The offset and the size of each chunk. The chunks are contiguous."""
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
    """The bytes of the values in a chunk, and the checksum of the chunk."""
    content = chunk[:-_CRC_NBYTES]
    # The library accepts arrays but not memoryviews.
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
    """The axis along which a shard is cut into slices of extent 1."""
    cut = [axis for axis, (extent, chunk) in enumerate(zip(shape, inner, strict=True)) if extent != chunk]
    if len(cut) != 1 or inner[cut[0]] != 1:
        raise ValueError(f"chunks of {list(inner)} in {list(shape)}")
    return cut[0]


def blob_key(path: str) -> str:
    """The key of the object with the bytes at a path."""
    return f"{path}/{chunk_key(1)}"


def write_blob(backend: Backend, path: str, data: bytes, *, attributes: Mapping[str, Any]) -> None:
    """Write bytes, then their document."""
    key = document_key(path)
    backend.put(blob_key(path), blob_parts(data))
    backend.put(key, [encode_document(blob_document(data, attributes=attributes), key=key)])


def blob_document(data: bytes, *, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The document of an array of these bytes."""
    return array_document(
        shape=[len(data)],
        row=DTYPES["uint8"],
        inner_chunk=None,
        dimension_names=[f"byte_{len(data)}"],
        attributes=attributes,
    )


def blob_parts(data: bytes) -> list[bytes]:
    """The contents of the object of that array, in parts."""
    return [data, _crc_bytes(data)]


def blob_nbytes(document: Mapping[str, Any]) -> int | None:
    """The size of that object, in bytes, from the array's document; None if it is the document of another array."""
    match document.get("shape"):
        case [int(length)]:
            return length + _CRC_NBYTES
    return None


def open_blob(backend: Backend, path: str) -> IO[bytes]:
    """The bytes at a path as a file. If there are many, parts are read on demand."""
    key = blob_key(path)
    place = f"{backend.url}/{key}"
    size = backend.size(key)
    if size is not None and size > WHOLE_NBYTES:
        return _Parts(backend, key, size=size - _CRC_NBYTES)
    data = None if size is None else backend.get(key, max_nbytes=WHOLE_NBYTES)
    return io.BytesIO(split_checksum(data, place=place))


def split_checksum(data: bytes | None, *, place: str) -> bytes:
    """The bytes without the checksum at their end, after it has been compared."""
    if data is None:
        raise DataError(f"{place} is committed, but missing: the run is damaged; see 'ranktape check'")
    content = data[:-_CRC_NBYTES]
    if len(data) < _CRC_NBYTES or data[-_CRC_NBYTES:] != _crc_bytes(content):
        raise DataError(f"{place} is not what was written: its checksum differs; see 'ranktape check'")
    return content


class _Parts(io.BufferedReader):
    """A large object as a file. A read takes no more memory than the object has bytes."""

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
    """The values in runs of `RUN` elements in C order; with samples, in runs of samples along dimension 0."""
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
"""The polynomial of CRC-32C (Castagnoli), with its bits reversed."""

_NUM_BITS = 32

Matrix = tuple[int, ...]
"""A linear map of checksums: the image of each bit."""


def combine(crcs: Sequence[int], *, part_nbytes: int) -> int:
    """The checksum of concatenated parts of equal size from their checksums, of which there is at least one."""
    zeros = _zeros(part_nbytes)
    whole = crcs[0]
    for crc in crcs[1:]:
        whole = _apply(zeros, whole) ^ crc
    return whole


@functools.lru_cache(maxsize=64)
def _zeros(nbytes: int) -> Matrix:
    """The map from the checksum of a message to that of the message followed by `nbytes` zero bytes."""
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
