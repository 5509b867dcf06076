"""Writes and reads the `zarr.json` of groups and arrays, with their checksums, and packs chunks.

Documents are built here and not through `create_array`, which takes 2 ms of Python for each. They follow
the Zarr v3 specification, so every reader of Zarr walks a run. The first attribute of each is a checksum over
the document's key and its text (with the checksum's own digits as zeros): a document that was cut, changed or
put in another one's place is known for it.

Functions of storage that read raise a `DataError` for what is missing or is not what was written, and a
`RunFormatError` for what no writer of ours says. Whoever writes a run can write its checksums too: what is read is
compared with what it may be before it is counted with, allocated by or used as an index.
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
"""Of any number in a document or a catalogue."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
"""A whole number in a document that is not negative."""

MAX_WORLD_SIZE = 1 << 17
"""Ranks of an attempt: a document that says more is refused, as every rank costs time and memory when it is told of."""

MAX_DIMENSIONS = 64
"""Of a tensor: numpy and torch have no more."""

MAX_NESTING = 128
"""Lists and dictionaries inside of one another in a document: Python fails at some hundreds when it copies them."""

MAX_SAID_NESTING = 64
"""The same in what is said of a tensor, which is written inside of a document."""

_NESTED = (dict, list, tuple)

_MANY_NESTED = 1 << 12
"""Lists and dictionaries of one level among which those are sought that are the same."""

SHOWN = 60
"""Characters of a wrong value that are shown."""


_MAX_ITEMSIZE = max(row.itemsize for row in DTYPES.values())


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON says.

    Raises:
        ValueError: it is not JSON, or nested deeper than `MAX_NESTING`.
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
    """Make sure that a value can be written, copied and shown.

    Raises:
        ValueError: it is nested deeper than the limit.
    """
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(limit):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [one for values in inner for one in values if isinstance(one, _NESTED)]
        if len(level) > _MANY_NESTED:
            # One list may be in many others; JSON that was parsed has none.
            level = list({id(one): one for one in level}.values())
        if not level:
            return
    raise ValueError(f"lists and dictionaries nested deeper than {limit}")


def check_shape(shape: Sequence[Any], *, itemsize: int = _MAX_ITEMSIZE) -> None:
    """Make sure that a tensor with elements of so many bytes can have a shape.

    Raises:
        ValueError: none can.
    """
    if len(shape) > MAX_DIMENSIONS or not all(type(extent) is int and 0 <= extent <= MAX_INTEGER for extent in shape):
        raise ValueError(f"shape {str(list(shape[:MAX_DIMENSIONS]))[:SHOWN]}")
    # Also of a tensor without elements: numpy counts its other extents.
    if math.prod(max(1, extent) for extent in shape) * itemsize > MAX_INTEGER:
        raise ValueError(f"shape {str(list(shape))[:SHOWN]}, which no memory holds")


SCHEMA_VERSION = 1
"""Of the layout, the documents and the catalogue; readers refuse what is newer."""

SCHEMA_KEY = "ranktape_schema"
"""The attribute of a run's document that holds the schema version."""

CHECKSUM_KEY = "ranktape_checksum"
"""The first attribute of every document."""

_ALGORITHM = "crc32c:"
_BLANK = f"{_ALGORITHM}00000000"
_STAMP = re.compile(rb'"ranktape_checksum": ?"crc32c:([0-9a-f]{8})"')

_BYTES_CODEC = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC_CODEC = {"name": "crc32c"}
_ZSTD_CODEC = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}

BLOSC_LEVEL = 1
BLOSC_BLOCK_NBYTES = 1 << 20
"""Smaller blocks, which blosc takes by itself, leave a tenth more of bfloat16."""


def encode_document(document: Mapping[str, Any], *, key: str) -> bytes:
    """A document as JSON text, with its checksum.

    Args:
        document: As `group_document` and `array_document` make it.
        key: Where it will lie, below the run.

    Raises:
        ValueError: a NaN or an infinity is in it, which JSON cannot hold.
    """
    stamped = {**document, "attributes": {CHECKSUM_KEY: _BLANK, **document["attributes"]}}
    # Of arrays, which grow with what was captured; what is said of a tensor has been looked at (`check_form`).
    write = msgspec.json.encode if "shape" in document else _strict_json
    try:
        text = write(stamped)
    except (OverflowError, TypeError, UnicodeEncodeError):
        # Lone surrogates; and what the faster one does not take, such as a key that is no text.
        text = _strict_json(spelled(stamped))
    digits = text.index(_BLANK.encode()) + len(_ALGORITHM)
    return text[:digits] + b"%08x" % _document_crc(text, key=key) + text[digits + 8 :]


def _strict_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def decode_document(data: bytes, *, place: str, key: str | None = None, wanted: bytes | None = None) -> dict[str, Any]:
    """The document in JSON text; compared with its checksum, where it has one and the key is given.

    `wanted` is the part of the text that is parsed; all of it unless given.
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
    """Whether the text of a document is the one that was written under the key; None where it has no checksum."""
    match = _STAMP.search(data)
    if match is None:
        return None
    start, end = match.span(1)
    blank = data[:start] + b"00000000" + data[end:]
    return int(match[1], 16) == _document_crc(blank, key=key)


def document_checksum(data: bytes) -> str | None:
    """The checksum that the text of a document carries; None where it has none."""
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
    """The document of an array that lies in one object; with `inner_chunk` the object is a shard of such chunks.

    An extent of zero gives a chunk of one, as Zarr has no empty chunks; such an array has no object.
    """
    chunk = [max(1, extent) for extent in shape]
    # The bytes codec of one-byte types has no endianness.
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
            # Of one byte a shuffle would leave more of them.
            "shuffle": "bitshuffle" if itemsize > 1 else "noshuffle",
            "typesize": itemsize,
            "blocksize": BLOSC_BLOCK_NBYTES,
        },
    }


def chunk_key(num_dims: int) -> str:
    """The key, below an array, of the one object that holds it."""
    return ".".join(["c", *["0"] * num_dims])


MAX_PACKED_NBYTES = 1 << 30
"""Tensors larger than this are not compressed: readers unpack no more, whoever wrote it."""

_BLOSC_HEADER_NBYTES = 16
_BLOSC_ZSTD = 4
"""The number of Zstandard in a blosc frame."""


def pack(raw: np.ndarray[Any, Any], compression: Compression, *, itemsize: int) -> bytes:
    """Bytes as a chunk of a compressed array holds them; `itemsize` is that of the values."""
    from numcodecs import blosc, zstd

    if compression is Compression.ZSTD:
        return bytes(zstd.compress(raw, 1))
    shuffle = blosc.BITSHUFFLE if itemsize > 1 else blosc.NOSHUFFLE
    return bytes(blosc.compress(raw, b"zstd", BLOSC_LEVEL, shuffle, BLOSC_BLOCK_NBYTES, itemsize))


def unpack(content: memoryview, compression: Compression, *, nbytes: int) -> memoryview:
    """The bytes that a chunk holds, `nbytes` as its document says.

    Raises:
        ValueError: it holds something else.
    """
    if compression is Compression.NONE:
        return content
    from numcodecs import blosc, zstd

    if nbytes > MAX_PACKED_NBYTES:
        raise ValueError(f"it says that it unpacks to {nbytes} bytes, at most {MAX_PACKED_NBYTES} are written")
    # Zeros take no memory before they are written over: a document that lies about the size costs nothing.
    target = np.zeros(nbytes, dtype=np.uint8)
    try:
        if compression is Compression.ZSTD:
            return memoryview(zstd.decompress(content, target)).cast("B")
        # The library believes what a frame says of its own size, and would read beyond its end.
        if len(content) < _BLOSC_HEADER_NBYTES:
            raise ValueError(f"a blosc frame of {len(content)} bytes")
        unpacked, _, packed = struct.unpack_from("<3I", content, 4)
        if (unpacked, packed) != (nbytes, len(content)) or content[2] >> 5 != _BLOSC_ZSTD:
            said = f"{packed} bytes for {unpacked}: it has {len(content)} for {nbytes}"
            raise ValueError(f"a blosc frame that says {said}")
        return memoryview(blosc.decompress(content, target)).cast("B")
    except RuntimeError as error:
        raise ValueError(str(error)) from error


MAX_DOCUMENT_NBYTES = 16 << 20
"""Of the document of a run, an attempt and what else is one of a kind."""

MAX_COMMIT_NBYTES = 128 << 20
"""Of those that grow with what was captured: arrays, commits, and markers, which name what was not captured."""

_NUM_REQUESTS = 16
"""In flight where nobody says otherwise."""

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


def for_each(
    answer: Callable[[_Asked], _Answer], asked: Iterable[_Asked], *, at_once: int = _NUM_REQUESTS
) -> list[_Answer]:
    """What a function answers for each of some things, several at once; the first failure ends it."""
    known = list(asked)
    if len(known) <= 1:
        return [answer(one) for one in known]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, known))


def write_group(backend: Backend, path: str, attributes: Mapping[str, Any]) -> bytes:
    """Write the document of the group at a path, and return it as it was written."""
    key = document_key(path)
    document = encode_document(group_document(attributes), key=key)
    backend.put(key, [document])
    return document


def read_document(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> bytes | None:
    """The text of the document of the group or array at a path; None where there is none."""
    try:
        return backend.get(document_key(path), max_nbytes=max_nbytes)
    except ObjectTooLargeError as error:
        raise RunFormatError(str(error)) from error


def read_attributes(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> dict[str, Any] | None:
    """What the document of the group or array at a path says, by name; None where there is none."""
    data = read_document(backend, path, max_nbytes=max_nbytes)
    key = document_key(path)
    return None if data is None else dict(decode_document(data, place=f"{backend.url}/{key}", key=key)["attributes"])


def read_as(
    backend: Backend, path: str, kind: type[_Answer], /, *, max_nbytes: int = MAX_DOCUMENT_NBYTES, **known: Any
) -> _Answer | None:
    """The same as a dataclass, whose declaration says what each attribute may be; `known` are fields beside them."""
    attributes = read_attributes(backend, path, max_nbytes=max_nbytes)
    place = f"{backend.url}/{document_key(path)}"
    return None if attributes is None else converted({**attributes, **known}, kind, place=place)


_known: set[type] = set()
"""The classes that msgspec has looked at: it crashes where a second thread uses one while a first one looks at it."""

_learning: dict[int, threading.Lock] = {}
"""By process: a forked one could inherit a lock that is held."""


def converted(attributes: Mapping[str, Any], kind: type[_Answer], *, place: str) -> _Answer:
    """The attributes of a document as a dataclass; those that it does not declare are of other versions."""
    if kind not in _known:
        with _learning.setdefault(os.getpid(), threading.Lock()):
            msgspec.json.Decoder(kind)
        _known.add(kind)
    try:
        return msgspec.convert(attributes, kind, str_keys=True)
    except msgspec.ValidationError as error:
        what = str(error).replace("`$", "`attributes")
        raise RunFormatError(f"{place} is damaged: {what}; see 'ranktape check'") from error
