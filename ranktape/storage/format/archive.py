"""Packs columns into an npz archive, and refuses what somebody else packed otherwise.

An npz archive as numpy writes it: an array for a column of numbers; for one of text the codes and their table, which
is a JSON list. A member is unpacked when it is asked for, and takes no more memory than an archive of its size can
need.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import IO, Any

import numpy as np

from ranktape.fields import FieldKind
from ranktape.storage.format.validation import check_numbers
from ranktape.storage.query.columns import Column, StringColumn, narrowed

MAX_COLUMN_NBYTES = 1 << 30
"""A column that says it is larger is not unpacked, whoever wrote it."""

ARCHIVE_DAMAGE = (
    *(EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
"""What reading an archive that is damaged, or that somebody made up, raises."""

_SPARE_NBYTES = 64 << 20
_MAX_RATIO = 256
"""All members of an archive take no more, unpacked, than this many times its bytes and some to spare: each row has
a time and a checksum, which hardly pack."""

_SPARE_ROWS = 1 << 22
"""And there are no more rows than this and one for each byte of the archive."""

_REFUSED_FLAGS = 0x1 | 0x20 | 0x40
"""Of a member: encrypted, or patched data."""

_PACKING_LEVEL = 1
"""Of zlib: more takes far longer and gains little."""

_MAGIC = np.lib.format.magic(1, 0)
_HEADER = re.compile(rb"\{'descr': '([<|][iuf][1248])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n")
"""Of an npy file of ours, after its length; numpy would evaluate what else is there."""

_DECODER = json.JSONDecoder()

_CODES = "codes:"
_TABLE = "table:"


def pack_columns(columns: Iterable[tuple[str, Column]]) -> bytes:
    """The archive that holds the columns under their names, in the fewest bytes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=_PACKING_LEVEL) as members:
        for name, wide in columns:
            column = narrowed(wide)
            arrays = {name: column}
            if isinstance(column, StringColumn):
                table = np.frombuffer(json.dumps(column.table).encode(), dtype=np.uint8)
                arrays = {_CODES + name: column.codes, _TABLE + name: table}
            for member, array in arrays.items():
                with members.open(f"{member}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    return archive.getvalue()


class ColumnArchive:
    """The columns of an archive. Every method raises one of `ARCHIVE_DAMAGE` for what is not as we write it."""

    def __init__(self, file: IO[bytes]) -> None:
        nbytes = file.seek(0, io.SEEK_END)
        self._archive = zipfile.ZipFile(file)
        self._members = _checked_members(self._archive.infolist(), nbytes=nbytes)
        self._max_rows = _SPARE_ROWS + nbytes
        self._num_rows: int | None = None

    def expect_rows(self, num_rows: int) -> None:
        """Refuse columns of any other length from now on."""
        self._num_rows = num_rows

    def numbers(self, name: str) -> np.ndarray[Any, Any]:
        """A column of numbers."""
        column = self._array(name)
        expected = len(column) if self._num_rows is None else self._num_rows
        if len(column) != expected or len(column) > self._max_rows:
            raise ValueError(f"{len(column)} rows; {min(expected, self._max_rows)} are expected")
        return column

    def text(self, name: str) -> StringColumn:
        """A column of text."""
        codes = self.numbers(_CODES + name)
        table = _parse_table(self._array(_TABLE + name).tobytes(), max_texts=len(codes))
        check_numbers(codes, FieldKind.INTEGER, high=len(table) - 1)
        return StringColumn(codes=codes, table=table)

    def _array(self, member: str) -> np.ndarray[Any, Any]:
        """An array whose size has been compared with what it says of itself."""
        info = self._members[f"{member}.npy"]
        with self._archive.open(info) as packed:
            # No more than it says: what unpacks to more than that takes no memory for it.
            data = packed.read(info.file_size)
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"format {data[: len(_MAGIC)]!r}")
        start = len(_MAGIC) + 2 + int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 2], "little")
        num_values, dtype = _parse_header(data[len(_MAGIC) + 2 : start])
        if num_values * dtype.itemsize != len(data) - start or len(data) != info.file_size:
            raise ValueError(f"an array of {dtype}[{num_values}] in {len(data)} bytes")
        return np.frombuffer(data, dtype=dtype, offset=start)


def _checked_members(members: Sequence[zipfile.ZipInfo], *, nbytes: int) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive of `nbytes` bytes by their names, if they are as we write them."""
    for member in members:
        if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} or member.flag_bits & _REFUSED_FLAGS:
            raise ValueError(f"{member.filename!r:.60} is encrypted, or packed in another way")
        if member.file_size > MAX_COLUMN_NBYTES:
            raise ValueError(
                f"{member.filename!r:.60} says that it has {member.file_size} bytes, at most {MAX_COLUMN_NBYTES} are "
                f"read"
            )
    total = sum(member.file_size for member in members)
    if total > _SPARE_NBYTES + _MAX_RATIO * nbytes:
        raise ValueError(f"it has {nbytes} bytes and says that they unpack to {total}")
    found = {member.filename: member for member in members}
    if len(found) < len(members):
        raise ValueError("it has two columns of one name")
    return found


@functools.lru_cache(maxsize=1 << 12)
def _parse_header(header: bytes) -> tuple[int, np.dtype[Any]]:
    """Length and dtype in the header of an npy file; most are alike."""
    match = _HEADER.fullmatch(header)
    if match is None:
        raise ValueError(f"the header {header[:60]!r}")
    return int(match[2]), np.dtype(match[1].decode())


def _parse_table(data: bytes, *, max_texts: int) -> list[str]:
    """The texts in a JSON list; what has more of them than rows, or holds anything else, is not read to its end."""
    text = data.decode()
    table: list[str] = []
    position = 1
    while text.startswith('"', position):
        if len(table) == max_texts:
            raise ValueError(f"more than {max_texts} texts")
        # One after the other: a list of lists or of numbers takes many times the memory of its text.
        one, position = _DECODER.raw_decode(text, position)
        table.append(one)
        if text.startswith(",", position):
            position += 2 if text.startswith(" ", position + 1) else 1
    if text[:1] != "[" or text[position:] != "]":
        raise ValueError("no list of texts")
    return table
