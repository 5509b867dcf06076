"""Bytes that are no tensor in a run, so that plain Zarr can read them and a part of them is one request.

They lie as an array of bytes in one chunk, behind which their checksum stands, as the codec `crc32c` has it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import IO, Any

import google_crc32c

from ranktape.errors import DataError
from ranktape.storage.format.documents import array_document, chunk_key, encode_document
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.layout import document_key
from ranktape.storage.places.backend import Backend, RangeFile

WHOLE_NBYTES = 4 << 20
"""Up to this size bytes are read with one request and compared with their checksum, and in parts above it."""

MAX_PART_NBYTES = 1 << 30
"""A reader that asks for more at once was told to by an archive that lies."""

_CRC_NBYTES = 4
_AHEAD_NBYTES = 1 << 18


def blob_key(path: str) -> str:
    """The key of the object that holds the bytes at a path."""
    return f"{path}/{chunk_key(1)}"


def write_blob(backend: Backend, path: str, data: bytes, *, attributes: Mapping[str, Any]) -> None:
    """Write bytes, and after them their document."""
    key = document_key(path)
    backend.put(blob_key(path), blob_parts(data))
    backend.put(key, [encode_document(blob_document(data, attributes=attributes), key=key)])


def blob_checksum(data: bytes) -> str:
    """The checksum of the bytes, as documents carry it."""
    return f"crc32c:{google_crc32c.value(data):08x}"


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
    return [data, _crc(data)]


def blob_nbytes(document: Mapping[str, Any]) -> int | None:
    """The size of that object, from the array's document; None where the document is not of such an array."""
    match document.get("shape"):
        case [int(length)]:
            return length + _CRC_NBYTES
    return None


def open_blob(backend: Backend, path: str) -> IO[bytes]:
    """The bytes at a path, as a file; large ones are read where they are looked into.

    Raises:
        DataError: they are missing, or (where they are read as a whole) not what was written.
    """
    key = blob_key(path)
    place = f"{backend.url}/{key}"
    size = backend.size(key)
    if size is not None and size > WHOLE_NBYTES:
        return _Parts(backend, key, size=size - _CRC_NBYTES)
    data = None if size is None else backend.get(key, max_nbytes=WHOLE_NBYTES)
    return io.BytesIO(split_checksum(data, place=place))


def split_checksum(data: bytes | None, *, place: str) -> bytes:
    """The bytes in front of their checksum.

    Raises:
        DataError: they are missing or not what was written.
    """
    if data is None:
        raise DataError(f"{place} is committed, but missing: the run is damaged; see 'ranktape check'")
    content = data[:-_CRC_NBYTES]
    if len(data) < _CRC_NBYTES or data[-_CRC_NBYTES:] != _crc(content):
        raise DataError(f"{place} is not what was written: its checksum differs; see 'ranktape check'")
    return content


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CRC_NBYTES, "little")


class _Parts(io.BufferedReader):
    """A large object as a file; the memory for what is read is taken at once, whatever the object holds."""

    def __init__(self, backend: Backend, key: str, *, size: int) -> None:
        def fill(position: int, target: memoryview) -> int:
            data = backend.get_range(key, position, len(target))
            if not data:
                raise DataError(f"{backend.url}/{key} is committed, but missing: see 'ranktape check'")
            target[: len(data)] = data
            return len(data)

        super().__init__(RangeFile(size, fill), buffer_size=_AHEAD_NBYTES)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self._size - self.tell())
        wanted = rest if size is None or size < 0 else min(size, rest)
        if wanted > MAX_PART_NBYTES:
            raise ValueError(f"{wanted} bytes of it are asked for at once, at most {MAX_PART_NBYTES} are read")
        return super().read(wanted)
