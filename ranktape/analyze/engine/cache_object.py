"""Gives what is measured of one record, and packs it of many into one object; a damaged one is refused.

A head with a checksum, an index and the arrays, both packed with Zstandard. The index is JSON: the keys of the records,
the forms that payloads have (names, types and dimensions of their arrays), and the shapes. Behind it, form by form and
name by name, the numbers of all records one after the other. Nothing in it is executed, and no memory is taken because
it says so.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Record

Payload = dict[str, "NDArray[Any]"]
"""What was measured, as named arrays of numbers: what workers send and the cache keeps."""


class Measure(Protocol):
    """Something that is measured of one record; it can be pickled."""

    @property
    def name(self) -> str:
        """What the cache knows it by: two measures of one name have the same payload of the same record.

        It therefore holds every parameter, in letters that a key of an object may have; of versions `cache.VERSION`
        tells.
        """
        ...

    def __call__(self, record: Record) -> Payload:
        """Read the record and measure it, with no more of it in memory than one chunk.

        Raises:
            DataError: the record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: what was kept of the record does not answer the question.
        """
        ...


MAX_OBJECT_NBYTES = 256 << 20
"""A larger object is not read, whoever wrote it."""

MAX_UNPACKED_NBYTES = 1 << 31
"""One that says that it unpacks to more is not unpacked."""

MAX_RECORDS = 1 << 16
"""One that says that it has more records is not read."""

_MAGIC = b"rtcount1"
_HEAD = struct.Struct("<8sIIIQ")
"""Magic, CRC-32C of all that follows it, bytes of the index packed and unpacked, bytes of the arrays unpacked."""

_CHECKED_FROM = 12
_MAX_INDEX_NBYTES = 8 << 20
_MAX_DIMENSIONS = 8
_DTYPE = re.compile(r"[<|]([biuf][1248]|c8|c16)")
_LEVEL = 1
"""Of Zstandard: more takes far longer and gains little."""

Form = tuple[tuple[str, str, int], ...]
"""The arrays of a payload: name, type and number of dimensions of each."""


class DamagedObjectError(Exception):
    """An object is not one that `pack` made; it is counted again without a word."""


def pack(keys: Sequence[str], payloads: Sequence[Payload]) -> bytes:
    """The object that holds a payload for each key."""
    forms: dict[Form, list[int]] = {}
    for place, payload in enumerate(payloads):
        form = tuple((name, _stored(array).dtype.str, array.ndim) for name, array in payload.items())
        assert all(_DTYPE.fullmatch(dtype) for _, dtype, _ in form), form
        forms.setdefault(form, []).append(place)
    index = {
        "keys": [keys[place] for places in forms.values() for place in places],
        "forms": [
            {
                "arrays": [list(array) for array in form],
                "shapes": [[list(payloads[place][name].shape) for name, _, _ in form] for place in places],
            }
            for form, places in forms.items()
        ],
    }
    arrays = b"".join(
        _stored(payloads[place][name]).tobytes()
        for form, places in forms.items()
        for name, _, _ in form
        for place in places
    )
    from numcodecs import zstd

    text = json.dumps(index, separators=(",", ":")).encode()
    packed_index, packed_arrays = zstd.compress(text, _LEVEL), zstd.compress(arrays, _LEVEL) if arrays else b""
    head = _HEAD.pack(_MAGIC, 0, len(packed_index), len(text), len(arrays))
    body = head[_CHECKED_FROM:] + packed_index + packed_arrays
    return b"".join((_MAGIC, struct.pack("<I", google_crc32c.value(body)), body))


class CacheObject:
    """The payloads in an object; the arrays are unpacked when one is first asked for."""

    def __init__(self, data: bytes) -> None:
        """Read the index.

        Raises:
            DamagedObjectError: it is no such object.
        """
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
            raise DamagedObjectError("no object of payloads")
        _, crc, packed_nbytes, index_nbytes, self._arrays_nbytes = _HEAD.unpack_from(data)
        if google_crc32c.value(data[_CHECKED_FROM:]) != crc:
            raise DamagedObjectError("its checksum differs")
        if index_nbytes > _MAX_INDEX_NBYTES or self._arrays_nbytes > MAX_UNPACKED_NBYTES:
            raise DamagedObjectError("it says that it is larger than it can be")
        text = _unpacked(data[_HEAD.size : _HEAD.size + packed_nbytes], index_nbytes)
        self._packed = data[_HEAD.size + packed_nbytes :]
        self._arrays: memoryview | None = None
        self._places: dict[str, tuple[Form, list[tuple[int, tuple[int, ...]]]]] = {}
        try:
            self._read_index(json.loads(bytes(text)))
        except (AttributeError, KeyError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DamagedObjectError(f"its index is damaged: {error!r}") from error

    @property
    def keys(self) -> list[str]:
        """Of the records whose payloads it holds."""
        return list(self._places)

    def payload(self, key: str) -> Payload:
        """The payload of a record, which cannot be written to.

        Raises:
            DamagedObjectError: the arrays cannot be unpacked.
        """
        if self._arrays is None:
            self._arrays = _unpacked(self._packed, self._arrays_nbytes)
            self._packed = b""
        form, places = self._places[key]
        payload: Payload = {}
        for (name, dtype, _), (start, shape) in zip(form, places, strict=True):
            kind = np.dtype(dtype)
            values = np.frombuffer(self._arrays, dtype=kind, count=math.prod(shape), offset=start)
            payload[name] = values.reshape(shape)
            payload[name].flags.writeable = False
        return payload

    def _read_index(self, index: Any) -> None:
        keys = index["keys"]
        if not isinstance(keys, list) or len(keys) > MAX_RECORDS or not all(type(key) is str for key in keys):
            raise ValueError("keys")
        position, taken = 0, 0
        for described in index["forms"]:
            form = _form(described["arrays"])
            shapes = [[_shape(shape) for shape in record] for record in described["shapes"]]
            own = keys[taken : taken + len(shapes)]
            taken += len(shapes)
            places: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in shapes]
            for number, (_, dtype, num_dimensions) in enumerate(form):
                itemsize = np.dtype(dtype).itemsize
                for record, found in zip(shapes, places, strict=True):
                    if len(record) != len(form) or len(record[number]) != num_dimensions:
                        raise ValueError("shapes")
                    found.append((position, record[number]))
                    position += math.prod(record[number]) * itemsize
            self._places.update(zip(own, ((form, found) for found in places), strict=True))
        if taken != len(keys) or position != self._arrays_nbytes:
            raise ValueError("sizes")


def _stored(array: Any) -> Any:
    """The array in little-endian order."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)


def _form(arrays: Any) -> Form:
    found = tuple((name, dtype, num_dimensions) for name, dtype, num_dimensions in arrays)
    for name, dtype, num_dimensions in found:
        is_known = type(name) is str and _DTYPE.fullmatch(dtype) and type(num_dimensions) is int
        if not (is_known and 0 <= num_dimensions <= _MAX_DIMENSIONS):
            raise ValueError("arrays")
        np.dtype(dtype)
    return found


def _shape(extents: Any) -> tuple[int, ...]:
    if not all(type(extent) is int and 0 <= extent <= MAX_UNPACKED_NBYTES for extent in extents):
        raise ValueError("extents")
    return tuple(extents)


def _unpacked(data: bytes, nbytes: int) -> memoryview:
    from numcodecs import zstd

    if not nbytes:
        return memoryview(b"")
    try:
        # Zeros take no memory before they are written over: an object that lies about its size costs nothing.
        unpacked = np.zeros(nbytes, dtype=np.uint8)
        zstd.decompress(data, unpacked)
    except (RuntimeError, ValueError) as error:
        raise DamagedObjectError(f"it cannot be unpacked: {error}") from error
    return unpacked.data
