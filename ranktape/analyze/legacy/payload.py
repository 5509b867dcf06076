"""Finds where in a `.pt` file the values of its tensor are, and what the file says of it.

Both forms that torch writes: the archive, and the older one of pickles and bytes one after the other, which the saver
before us used. Values are read when somebody looks at them, into memory of our own: a file that is cut or written
anew while it is mapped would end the process, or change under its reader. No memory is taken for what a file declares:
every extent is compared with the size of the file first.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.legacy.pickles import MAX_NBYTES, Pairs, Storage, TensorData, plain, read_pickle
from ranktape.errors import DataError, StorageError
from ranktape.storage.format.dtypes import dtype_row

MAX_FOLDER_CHARACTERS = 1 << 20
"""Length of a description of a folder, which every record of it repeats."""

MAX_LISTED = 1 << 14
"""Elements of a tensor among the words about a folder: the tokens of a prompt."""

MAX_EXTENT = 2**62
"""Elements that a shape may have, were its empty dimensions not empty."""

_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ARCHIVE_MAGIC = b"PK\x03\x04"
_HEAD_NBYTES = 1 << 16
"""What is read at once of a file of the older form, whose description comes first."""

_PART_NBYTES = 1 << 22
"""Values that are read at once: their checksum is taken while they are in the cache."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """What is known of the tensor in a file, without its values."""

    dtype: str
    """In torch's words."""
    shape: tuple[int, ...]
    """In elements."""
    metadata: Any
    """What the file says of it under `metadata`, as JSON has it; None where it says nothing."""
    tensor_info: Any
    """What the file says of it under `tensor_info`, as JSON has it; None where it says nothing."""
    strides: tuple[int, ...]
    """Bytes from one element to the next along each dimension."""
    position: int
    """Of the first element, in bytes from the start of the file."""
    extent: _Extent
    """Where the bytes lie that hold the tensor and perhaps others."""

    @property
    def num_elements(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its values, without gaps."""
        return self.num_elements * dtype_row(self.dtype).itemsize

    @property
    def span_nbytes(self) -> int:
        """From its first element to behind its last one, gaps included; of a tensor with elements."""
        steps = sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True))
        return steps + dtype_row(self.dtype).itemsize

    def without_words(self) -> TensorFile:
        """The same without what the file says of it, which many files say at length."""
        return dataclasses.replace(self, metadata=None, tensor_info=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """A run of bytes of the file."""

    position: int
    """Where it begins."""
    nbytes: int
    """How long it is."""
    crc: int
    """Its CRC-32; 0 where none was written."""


def read_header(path: Path, *, is_first_enough: bool = False) -> TensorFile:
    """What is known of the one tensor in a file; its values are not read.

    The file holds a tensor, a list of one, or a dictionary with one under `tensor`; with `is_first_enough` a list
    of several things, of which the first is a tensor, will do.

    Raises:
        DataError: it holds something else, is damaged, or declares more than it holds.
        StorageError: it cannot be read.
    """
    with _opened(path) as file:
        payload, extents = _contents(file, place=str(path))
        tensor = _tensor_of(payload, place=str(path), is_first_enough=is_first_enough)
        described = payload if isinstance(payload, Pairs) else Pairs([])
        return _located(
            tensor,
            extents,
            place=str(path),
            metadata=plain(described.get("metadata"), place=str(path)),
            tensor_info=plain(described.get("tensor_info"), place=str(path)),
        )


def read_plain(path: Path) -> Any:
    """What a file of plain data says, as JSON has it.

    A tensor of at most `MAX_LISTED` real numbers is `{"tensor": dtype, "shape": [...], "values": [...]}`, NaN and
    infinities as texts; another one is named by its type and shape.

    Raises:
        DataError: it holds something else, or is damaged.
        StorageError: it cannot be read.
    """

    def listed(tensor: TensorData) -> dict[str, Any] | None:
        if math.prod(tensor.shape) > MAX_LISTED or dtype_row(tensor.dtype).is_complex:
            return None
        header = _located(tensor, extents, place=str(path), metadata=None, tensor_info=None)
        values = read_values(path, header).reshape(-1)
        numbers = (values.astype(np.float64) if dtype_row(tensor.dtype).is_floating else values).tolist()
        finite = [number if math.isfinite(number) else str(number) for number in numbers]
        return {"tensor": tensor.dtype, "shape": list(tensor.shape), "values": finite}

    with _opened(path) as file:
        payload, extents = _contents(file, place=str(path))
    return plain(payload, place=str(path), max_characters=MAX_FOLDER_CHARACTERS, listed=listed)


def read_values(path: Path, header: TensorFile) -> NDArray[Any]:
    """The values of the tensor that `header` describes, read-only.

    Raises:
        DataError: the file has changed since its header was read, or its bytes are not what its checksum says.
        StorageError: it cannot be read, or memory has no room for it.
    """
    dtype = dtype_row(header.dtype).numpy_dtype
    if not header.num_elements:
        return np.empty(header.shape, dtype=dtype)
    extent = header.extent
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size < extent.position + extent.nbytes:
            raise DataError(_shorter(path))
        try:
            raw = np.empty(header.span_nbytes, dtype=np.uint8)
        except MemoryError as error:
            raise StorageError(f"{path} cannot be read: memory has no {header.span_nbytes} bytes for it") from error
        crc = _read_extent(file.fileno(), header, raw.data, path=path)
    if extent.crc and crc != extent.crc:
        raise DataError(f"the values in {path} are damaged: they are not what the archive's checksum says")
    values = np.ndarray(header.shape, dtype=dtype, buffer=raw, strides=header.strides)
    values.flags.writeable = False
    return values


def _read_extent(descriptor: int, header: TensorFile, raw: memoryview, *, path: Path) -> int:
    """Fill `raw` with the bytes of the tensor; the CRC-32 of all that lie with them, where one was written."""
    extent, start, end = header.extent, header.position, header.position + raw.nbytes
    ranges: list[tuple[int, int, memoryview | None]] = [(start, end, raw)]
    if extent.crc:
        ranges = [(extent.position, start, None), *ranges, (end, extent.position + extent.nbytes, None)]
    scratch, crc = memoryview(b""), 0
    for first, behind, target in ranges:
        for position in range(first, behind, _PART_NBYTES):
            nbytes = min(_PART_NBYTES, behind - position)
            if target is None and scratch.nbytes < nbytes:
                scratch = memoryview(bytearray(nbytes))
            part = scratch[:nbytes] if target is None else target[position - first :][:nbytes]
            _fill(descriptor, part, position=position, path=path)
            crc = zlib.crc32(part, crc) if extent.crc else 0
    return crc


def _fill(descriptor: int, part: memoryview, *, position: int, path: Path) -> None:
    filled = 0
    while filled < part.nbytes:
        count = os.preadv(descriptor, [part[filled:]], position + filled)
        if not count:
            raise DataError(_shorter(path))
        filled += count


def _shorter(path: Path) -> str:
    return f"{path} is shorter than when it was listed: it is still written, or was replaced"


class _Bounded(io.BufferedReader):
    """A file of which no single read takes more than a description of a tensor is long."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `MAX_NBYTES` bytes."""
        return super().read(MAX_NBYTES if size is None or size < 0 else min(size, MAX_NBYTES))


@contextmanager
def _opened(path: Path) -> Iterator[_Bounded]:
    try:
        # A pipe by that name would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with _Bounded(io.FileIO(descriptor)) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DataError(f"{path} is not a file")
            yield file
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _contents(file: _Bounded, *, place: str) -> tuple[Any, dict[str, _Extent]]:
    """What the file's pickle says, and where each of its storages lies."""
    head = file.read(len(_LEGACY_MAGIC))
    if head.startswith(_ARCHIVE_MAGIC):
        return _archive_contents(file, place=place)
    if head == _LEGACY_MAGIC:
        return _legacy_contents(file, place=place)
    what = "is empty" if not head else "was not written by torch.save"
    raise DataError(f"{place} {what}: it begins with {head[:8]!r}")


def _archive_contents(file: _Bounded, *, place: str) -> tuple[Any, dict[str, _Extent]]:
    size = os.fstat(file.fileno()).st_size
    try:
        # Only the list of members is read here, and never with a decompressor.
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # EINVAL: it names a place before the file's first byte
        raise DataError(
            f"{place} is damaged or cut off: it begins as an archive of torch.save does, and does not end as one"
        ) from error
    by_name = {member.filename: member for member in members}
    prefixes = [
        name.removesuffix("data.pkl") for name in by_name if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(by_name) != len(members) or len(prefixes) != 1:
        raise DataError(f"{place} is an archive, but not one of torch.save")
    extents = {
        name.removeprefix(prefixes[0]): _member_extent(file, member, size=size, place=place)
        for name, member in by_name.items()
        if name.startswith(prefixes[0])
    }
    order = _bytes_of(file, extents["byteorder"]) if "byteorder" in extents else b"little"
    if order != b"little":
        raise DataError(f"{place} holds its values in the byte order {order[:16]!r}: save it again on this machine")
    storages: dict[str, Storage] = {}
    if extents["data.pkl"].nbytes > MAX_NBYTES:
        raise DataError(f"{place} is not read: its pickle is longer than {MAX_NBYTES} bytes")
    payload = read_pickle(io.BytesIO(_bytes_of(file, extents["data.pkl"])), place=place, storages=storages)
    return payload, {key: extents[f"data/{key}"] for key in storages if f"data/{key}" in extents}


def _member_extent(file: _Bounded, member: zipfile.ZipInfo, *, size: int, place: str) -> _Extent:
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
        raise DataError(f"{place} is not read: {member.filename[:100]!r} in it is compressed, as torch never writes it")
    # A damaged list of members may name places that no file has.
    file.seek(member.header_offset if 0 <= member.header_offset < size else size)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) == _LOCAL_HEADER.size:
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        position = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if magic == _ARCHIVE_MAGIC and position + member.file_size <= size:
            return _Extent(position=position, nbytes=member.file_size, crc=member.CRC)
    raise DataError(f"{place} is damaged or cut off: {member.filename[:100]!r} in it is not where it should be")


def _bytes_of(file: _Bounded, extent: _Extent) -> bytes:
    file.seek(extent.position)
    return file.read(extent.nbytes)


def _legacy_contents(file: _Bounded, *, place: str) -> tuple[Any, dict[str, _Extent]]:
    size = os.fstat(file.fileno()).st_size
    source = io.BytesIO(file.read(_HEAD_NBYTES))
    try:
        payload, keys, storages = _legacy_pickles(source, place=place)
    except DataError:
        if size <= len(_LEGACY_MAGIC) + _HEAD_NBYTES:
            raise
        # Its words may be longer than those of most files.
        file.seek(len(_LEGACY_MAGIC))
        source = io.BytesIO(file.read(MAX_NBYTES))
        payload, keys, storages = _legacy_pickles(source, place=place)
    position = len(_LEGACY_MAGIC) + source.tell()
    extents: dict[str, _Extent] = {}
    for key in keys:
        file.seek(position)
        (stated,) = struct.unpack("<q", file.read(8).ljust(8, b"\xff"))
        nbytes = storages[key].num_elements * dtype_row(storages[key].dtype).itemsize
        if stated != storages[key].num_elements or position + 8 + nbytes > size:
            raise DataError(f"{place} is damaged or cut off: it holds fewer values than it declares")
        extents[key] = _Extent(position=position + 8, nbytes=nbytes, crc=0)
        position += 8 + nbytes
    return payload, extents


def _legacy_pickles(source: io.BytesIO, *, place: str) -> tuple[Any, list[str], dict[str, Storage]]:
    """What the file holds, the order of its storages, and what is known of each."""
    storages: dict[str, Storage] = {}
    read_pickle(source, place=place)  # the version of the form, of which there is one
    system = read_pickle(source, place=place)
    if not isinstance(system, Pairs) or system.get("little_endian") is not True:
        raise DataError(f"{place} holds its values in another byte order: save it again on this machine")
    payload = read_pickle(source, place=place, storages=storages)
    keys = read_pickle(source, place=place)
    is_named = isinstance(keys, list) and all(type(key) in {str, int} for key in keys)
    if not is_named or sorted(map(str, keys)) != sorted(storages):
        raise DataError(f"{place} is damaged: it does not hold the storages that its tensors name")
    return payload, [str(key) for key in keys], storages


def _tensor_of(payload: Any, *, place: str, is_first_enough: bool) -> TensorData:
    is_list = isinstance(payload, list | tuple) and not isinstance(payload, TensorData)
    found = payload.get("tensor") if isinstance(payload, Pairs) else payload
    if is_list and (len(payload) == 1 or (is_first_enough and payload)):
        found = payload[0]
    if isinstance(found, TensorData):
        return found
    what = f"{len(payload)} values" if is_list else f"a {type(payload).__name__}"
    if isinstance(payload, Pairs):
        named = ", ".join(name[:40] for name in payload.names()[:8])
        what = f"a dictionary of {named or 'nothing'}, without a tensor under 'tensor'"
    raise DataError(f"{place} holds {what}: give files that hold one tensor each")


def _located(
    tensor: TensorData, extents: dict[str, _Extent], *, place: str, metadata: Any, tensor_info: Any
) -> TensorFile:
    """The tensor in bytes of the file, once it is sure that the file has them."""
    itemsize = dtype_row(tensor.dtype).itemsize
    shape, num_elements = tensor.shape, math.prod(tensor.shape)
    extent = extents.get(tensor.storage.key)
    declared = tensor.storage.num_elements * dtype_row(tensor.storage.dtype).itemsize
    if num_elements and (extent is None or extent.nbytes != declared):
        raise DataError(f"{place} is damaged or cut off: it holds fewer values than it declares")
    if math.prod(max(1, count) for count in shape) > MAX_EXTENT:
        raise DataError(f"{place} declares {len(shape)} dimensions with {max(shape)} elements in one of them")
    located = extent or _Extent(position=0, nbytes=0, crc=0)
    last = tensor.offset + sum((count - 1) * stride for count, stride in zip(shape, tensor.strides, strict=True))
    if num_elements and max(last + 1, num_elements) * itemsize > located.nbytes:
        raise DataError(
            f"{place} declares {num_elements} elements of {tensor.dtype} and holds {located.nbytes} bytes: "
            f"save tensor.contiguous(), or the file is damaged"
        )
    return TensorFile(
        dtype=tensor.dtype,
        shape=shape,
        metadata=metadata,
        tensor_info=tensor_info,
        strides=tuple(stride * itemsize for stride in tensor.strides),
        position=located.position + tensor.offset * itemsize,
        extent=located,
    )
