"""Reads and writes the `zarr.json` of groups and arrays, with checksums, and compresses chunks.

Documents are built here instead of with `create_array`, which takes 2 ms of Python for each. They follow the Zarr v3
specification, so that any Zarr library can read a run. The first attribute of each document is a checksum of its key
and its text, with the digits of the checksum as zeros. It reveals a document that was truncated, changed or moved.

Functions of `storage` that read raise `DataError` for data that is missing or was changed, and `RunFormatError` for
data that ranktape never writes. Checksums do not protect against a forged run, so that values are validated before
they are used as a count, a size or an index.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import google_crc32c
import msgspec
import numpy as np

from ranktape.errors import DataError, ObjectTooLargeError, RunFormatError
from ranktape.storage.format.dtypes import DTYPES, DtypeRow
from ranktape.storage.format.layout import document_key
from ranktape.storage.format.record_info import Compression, spelled
from ranktape.storage.places.backend import Backend

MAX_INTEGER = 2**63 - 1
"""The largest number in a document or a catalogue."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
"""A nonnegative integer in a document."""

MAX_WORLD_SIZE = 1 << 17
"""The largest number of ranks of an attempt. It bounds the time and memory that a forged document can cost."""

MAX_DIMENSIONS = 64
"""The largest number of dimensions of a tensor, as in numpy and torch."""

MAX_NESTING = 128
"""The deepest nesting of lists and dictionaries in a document. Python cannot copy values nested hundreds deep."""

MAX_WRITTEN_NESTING = 64
"""The deepest nesting in the metadata of a tensor, which is written as part of a document."""

_NESTED = (dict, list, tuple)

_MANY_NESTED = 1 << 12
"""The number of lists and dictionaries in one level above which duplicates are removed."""

SHOWN = 60
"""The number of characters of a wrong value that an error message shows."""


_MAX_ITEMSIZE = max(row.itemsize for row in DTYPES.values())


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested deeper than `MAX_NESTING`.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"lists and dictionaries nested deeper than {MAX_NESTING}") from error
    num_opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if num_opened > MAX_NESTING:
        check_nesting(value)
    return value


def check_nesting(value: Any, *, limit: int = MAX_NESTING) -> None:
    """Check that a value is not nested deeper than a limit.

    Raises:
        ValueError: it is.
    """
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(limit):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [value for values in inner for value in values if isinstance(value, _NESTED)]
        if len(level) > _MANY_NESTED:
            # One list may be an item of many others, though not in parsed JSON.
            level = list({id(value): value for value in level}.values())
        if not level:
            return
    raise ValueError(f"lists and dictionaries nested deeper than {limit}")


def check_shape(shape: Sequence[Any], *, itemsize: int = _MAX_ITEMSIZE) -> None:
    """Check that a shape is possible for a tensor whose elements have `itemsize` bytes.

    Raises:
        ValueError: it is not.
    """
    if len(shape) > MAX_DIMENSIONS or not all(type(extent) is int and 0 <= extent <= MAX_INTEGER for extent in shape):
        raise ValueError(f"shape {str(list(shape[:MAX_DIMENSIONS]))[:SHOWN]}")
    # numpy also limits the other extents of a tensor without elements.
    if math.prod(max(1, extent) for extent in shape) * itemsize > MAX_INTEGER:
        raise ValueError(f"shape {str(list(shape))[:SHOWN]}, which no memory holds")


SCHEMA_VERSION = 1
"""The version of the layout, the documents and the catalogue. Readers refuse a newer one."""

SCHEMA_KEY = "ranktape_schema"
"""The name of the schema version in a run's document."""

CHECKSUM_KEY = "ranktape_checksum"
"""The name of the checksum, which is the first attribute of every document."""

_ALGORITHM = "crc32c:"
_BLANK = f"{_ALGORITHM}00000000"
_STAMP = re.compile(rb'"ranktape_checksum": ?"crc32c:([0-9a-f]{8})"')

_BYTES_CODEC = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC_CODEC = {"name": "crc32c"}
_ZSTD_CODEC = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}

BLOSC_LEVEL = 1
BLOSC_BLOCK_NBYTES = 1 << 20
"""The block size of blosc. With its default, which is smaller, compressed bfloat16 is a tenth larger."""


def encode_document(document: Mapping[str, Any], *, key: str) -> bytes:
    """A document as JSON text with its checksum.

    Args:
        document: The result of `group_document` or `array_document`.
        key: The key of the document below the run.

    Raises:
        ValueError: the document contains a NaN or an infinity, which JSON cannot represent.
    """
    stamped = {**document, "attributes": {CHECKSUM_KEY: _BLANK, **document["attributes"]}}
    # The faster encoder is for arrays, whose documents are large; their metadata has been checked (`check_form`).
    write = msgspec.json.encode if "shape" in document else _strict_json
    try:
        text = write(stamped)
    except (OverflowError, TypeError, UnicodeEncodeError):
        # The text has lone surrogates, or a value that the faster encoder refuses, such as a key that is not a string.
        text = _strict_json(spelled(stamped))
    digits = text.index(_BLANK.encode()) + len(_ALGORITHM)
    return text[:digits] + b"%08x" % _document_crc(text, key=key) + text[digits + 8 :]


def _strict_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def decode_document(data: bytes, *, place: str, key: str | None = None, wanted: bytes | None = None) -> dict[str, Any]:
    """The document in a JSON text. If `key` is given, a checksum in the document is compared.

    `wanted` is the part of the text that is parsed; by default all of it.
    """
    try:
        document = parse_json(data if wanted is None else wanted)
    except ValueError as error:
        raise RunFormatError(
            f"{place} is not JSON that can be read ({error}): the store is damaged or is not a run"
        ) from error
    is_zarr = isinstance(document, dict) and document.get("zarr_format") == 3  # noqa: PLR2004
    if not is_zarr or "node_type" not in document or not isinstance(document.setdefault("attributes", {}), dict):
        raise RunFormatError(f"{place} is not a Zarr v3 document: the store is damaged or is not a run")
    if key is not None and is_document_intact(data, key=key) is False:
        raise DataError(f"{place} is not what was written there: its checksum differs; see 'ranktape check'")
    return dict(document)


def is_document_intact(data: bytes, *, key: str) -> bool | None:
    """Whether a document has the text that was written under the key; None if it has no checksum."""
    match = _STAMP.search(data)
    if match is None:
        return None
    start, end = match.span(1)
    blank = data[:start] + b"00000000" + data[end:]
    return int(match[1], 16) == _document_crc(blank, key=key)


def document_checksum(data: bytes) -> str | None:
    """The checksum in the text of a document; None if it has none."""
    match = _STAMP.search(data)
    return None if match is None else f"{_ALGORITHM}{match[1].decode()}"


def _document_crc(text: bytes, *, key: str) -> int:
    return int(google_crc32c.extend(google_crc32c.value(f"{key}\n".encode(errors="surrogatepass")), text))


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def array_document(
    *,
    shape: Sequence[int],
    row: DtypeRow,
    inner_chunk: Sequence[int] | None,
    dimension_names: Sequence[str],
    attributes: Mapping[str, Any],
    compression: Compression = Compression.NONE,
) -> dict[str, Any]:
    """The document of an array that is stored in one object; with `inner_chunk`, the object is a shard of such chunks.

    An extent of zero has a chunk of one, because Zarr has no empty chunks. An empty array has no object.
    """
    chunk = [max(1, extent) for extent in shape]
    # For types of one byte, the bytes codec has no endianness.
    to_bytes = {"name": "bytes"} if row.itemsize == 1 else _BYTES_CODEC
    packed = {Compression.NONE: [], Compression.ZSTD: [_ZSTD_CODEC], Compression.BLOSC: [_blosc_codec(row.itemsize)]}
    codecs: list[Mapping[str, Any]] = [to_bytes, *packed[compression], _CRC_CODEC]
    if inner_chunk is not None:
        sharding = {
            "chunk_shape": list(inner_chunk),
            "codecs": codecs,
            "index_codecs": [_BYTES_CODEC, _CRC_CODEC],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": row.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": row.fill_value,
        "codecs": codecs,
        "attributes": dict(attributes),
        "dimension_names": list(dimension_names),
        "storage_transformers": [],
    }


def _blosc_codec(itemsize: int) -> dict[str, Any]:
    return {
        "name": "blosc",
        "configuration": {
            "cname": "zstd",
            "clevel": BLOSC_LEVEL,
            # A shuffle makes compressed values of one byte larger.
            "shuffle": "bitshuffle" if itemsize > 1 else "noshuffle",
            "typesize": itemsize,
            "blocksize": BLOSC_BLOCK_NBYTES,
        },
    }


def chunk_key(num_dims: int) -> str:
    """The key, below an array, of the one object that holds its values."""
    return ".".join(["c", *["0"] * num_dims])


MAX_PACKED_NBYTES = 1 << 30
"""The largest tensor that is compressed, in bytes. Readers refuse to decompress more."""

_BLOSC_HEADER_NBYTES = 16
_BLOSC_ZSTD = 4
"""The number of Zstandard in a blosc frame."""


def pack(raw: np.ndarray[Any, Any], compression: Compression, *, itemsize: int) -> bytes:
    """Bytes in compressed form; `itemsize` is that of the values."""
    from numcodecs import blosc, zstd

    if compression is Compression.ZSTD:
        return bytes(zstd.compress(raw, 1))
    shuffle = blosc.BITSHUFFLE if itemsize > 1 else blosc.NOSHUFFLE
    return bytes(blosc.compress(raw, b"zstd", BLOSC_LEVEL, shuffle, BLOSC_BLOCK_NBYTES, itemsize))


def unpack(content: memoryview, compression: Compression, *, nbytes: int) -> memoryview:
    """The bytes of a chunk, which must be `nbytes` bytes when decompressed.

    Raises:
        ValueError: the chunk is damaged or has another size.
    """
    if compression is Compression.NONE:
        return content
    from numcodecs import blosc, zstd

    if nbytes > MAX_PACKED_NBYTES:
        raise ValueError(f"it says that it unpacks to {nbytes} bytes, at most {MAX_PACKED_NBYTES} are written")
    # Zeros take no memory until they are overwritten, so that a wrong size in a document costs nothing.
    target = np.zeros(nbytes, dtype=np.uint8)
    try:
        if compression is Compression.ZSTD:
            return memoryview(zstd.decompress(content, target)).cast("B")
        # The library trusts the size in a frame and would read beyond its end.
        if len(content) < _BLOSC_HEADER_NBYTES:
            raise ValueError(f"a blosc frame of {len(content)} bytes")
        unpacked, _, packed = struct.unpack_from("<3I", content, 4)
        if (unpacked, packed) != (nbytes, len(content)) or content[2] >> 5 != _BLOSC_ZSTD:
            sizes = f"{packed} bytes for {unpacked}: it has {len(content)} for {nbytes}"
            raise ValueError(f"a blosc frame that says {sizes}")
        return memoryview(blosc.decompress(content, target)).cast("B")
    except RuntimeError as error:
        raise ValueError(str(error)) from error


MAX_DOCUMENT_NBYTES = 16 << 20
"""The largest document that does not grow with the number of records, in bytes."""

MAX_COMMIT_NBYTES = 128 << 20
"""The largest document that grows with the number of records (an array, a commit or a marker), in bytes."""

_NUM_REQUESTS = 16
"""The default number of concurrent requests."""

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


def for_each(
    answer: Callable[[_Asked], _Answer], items: Iterable[_Asked], *, at_once: int = _NUM_REQUESTS
) -> list[_Answer]:
    """The results of a function for each item, computed by several threads. The first error is raised."""
    known = list(items)
    if len(known) <= 1:
        return [answer(item) for item in known]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, known))


def write_group(backend: Backend, path: str, attributes: Mapping[str, Any]) -> bytes:
    """Write the document of the group at a path, and return its text."""
    key = document_key(path)
    document = encode_document(group_document(attributes), key=key)
    backend.put(key, [document])
    return document


def read_document(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> bytes | None:
    """The text of the document of the group or array at a path; None if there is none."""
    try:
        return backend.get(document_key(path), max_nbytes=max_nbytes)
    except ObjectTooLargeError as error:
        raise RunFormatError(str(error)) from error


def read_attributes(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> dict[str, Any] | None:
    """The attributes of the group or array at a path; None if it has no document."""
    data = read_document(backend, path, max_nbytes=max_nbytes)
    key = document_key(path)
    return None if data is None else dict(decode_document(data, place=f"{backend.url}/{key}", key=key)["attributes"])


def read_as(
    backend: Backend, path: str, kind: type[_Answer], /, *, max_nbytes: int = MAX_DOCUMENT_NBYTES, **known: Any
) -> _Answer | None:
    """The attributes of the group or array at a path as a dataclass; None if it has no document.

    The dataclass declares the type of each attribute. `known` are further fields.
    """
    attributes = read_attributes(backend, path, max_nbytes=max_nbytes)
    place = f"{backend.url}/{document_key(path)}"
    return None if attributes is None else converted({**attributes, **known}, kind, place=place)


_known: set[type] = set()
"""The classes that msgspec has analysed. It crashes if a thread uses a class that another thread is analysing."""

_learning: dict[int, threading.Lock] = {}
"""One lock for each process, because a forked process could inherit a lock that is held."""


def converted(attributes: Mapping[str, Any], kind: type[_Answer], *, place: str) -> _Answer:
    """The attributes of a document as a dataclass. Attributes that it does not declare are ignored."""
    if kind not in _known:
        with _learning.setdefault(os.getpid(), threading.Lock()):
            msgspec.json.Decoder(kind)
        _known.add(kind)
    try:
        return msgspec.convert(attributes, kind, str_keys=True)
    except msgspec.ValidationError as error:
        what = str(error).replace("`$", "`attributes")
        raise RunFormatError(f"{place} is damaged: {what}; see 'ranktape check'") from error
