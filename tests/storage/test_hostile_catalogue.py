"""Is a catalogue that a stranger packed refused by name, and without the memory that it asks for?"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranktape.errors import RunFormatError
from ranktape.fields import FieldKind
from ranktape.storage.format.catalogue import COLUMNS, Catalogue, CatalogueEntry, encode_catalogue
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import Column
from ranktape.storage.records.records import Records
from ranktape.storage.records.run import RunReader
from tests.runs import describe


def entries(count: int = 2) -> list[CatalogueEntry]:
    """Records of small tensors with samples."""
    array = np.zeros((4, 8), np.float32)
    info = describe(array, sample_dim=0, sample_ids=[1, 2, 3, 4], checksum="crc32c:00000000")
    infos = [dataclasses.replace(info, call=call, counter=call) for call in range(count)]
    return [CatalogueEntry(site=f"s{call}", stack="x", index=call, info=info) for call, info in enumerate(infos)]


def members() -> dict[str, bytes]:
    """What is in a catalogue of two records."""
    archive = zipfile.ZipFile(io.BytesIO(encode_catalogue(entries())))
    return {name: archive.read(name) for name in archive.namelist()}


def packed(content: dict[str, bytes], *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An archive of members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return file.getvalue()


def npy(values: Any) -> bytes:
    """An array as numpy writes it."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(values))
    return file.getvalue()


def table(*texts: str) -> bytes:
    """The table of a column of text."""
    return npy(np.frombuffer(json.dumps(list(texts)).encode(), np.uint8))


def read_all(data: bytes) -> int:
    """Ask everything that can be asked of the records in an archive; how many they are."""
    catalogue = Catalogue.from_bytes(data, place="x", attempt="a")
    records = Records.of(RunReader(open_backend("memory://nothing")), [catalogue])
    for name in COLUMNS:
        records.column(name)
    return len([json.dumps(record.info.to_json()) for record in records])


def header(text: str) -> bytes:
    """An npy file with this for a header."""
    return b"\x93NUMPY\x01\x00\x76\x00" + text.encode().ljust(117) + b"\n" + bytes(16)


NUMBERS: list[Any] = [
    [-2, -2],
    np.array([2**64 - 1] * 2, np.uint64),
    [np.nan, np.nan],
    [np.inf, np.inf],
    np.array([1.5, 1.5], np.float16),
    np.array([1, 1], np.longdouble),
    np.array([1, 1], ">i4"),
]
HEADERS = [
    header("{'descr': '<i8', 'fortran_order': False, 'shape': (((("),
    header("{'descr': 'O', 'fortran_order': False, 'shape': (2,)}"),
    header("{'descr': [1], 'fortran_order': False, 'shape': (2,)}"),
    b"",
]
WRONG_TABLES = (b"{}", b"null", b"[1]", b"[null]", b"[" * 10_000, b'["a"', b'["a"]x', b"\xff", b'["a", []]', b"")
DEEP = ["[" * depth + "]" * depth for depth in (200, 100_000)]
DEEP_IN_A_DICTIONARY = [f'{{"a": {text}}}' for text in DEEP]
WRONG_TEXTS = {
    "shape": [*DEEP, '"x"', "5", "null", "{}", "[-1]", "[1e400]", '["a"]', str([1] * 65), str([2**62, 9])],
    "sample_ids": ["{}", "[1.5]", "[true]", "[NaN]", "5", *DEEP],
    "placement": ["[]", "5", *DEEP_IN_A_DICTIONARY],
    "metadata": ["[]", '"a"', *DEEP, *DEEP_IN_A_DICTIONARY, "1" * 5000, "x", ""],
    "overflow.per_sample": ['{"upper": "x"}', "[]", "{}", *DEEP_IN_A_DICTIONARY],
    "dtype": ["", "float5", "\ud800"],
    "keep": ["x"],
    "operation": ["x"],
    "site": ["", "..", "/a", "a/../../b", "\x00", "\ud800", "a//b"],
    "stack": ["../x", "\n"],
}
CASES: list[tuple[str, list[bytes]]] = [
    *((f"{name}.npy", [npy(values) for values in NUMBERS]) for name in ("rank", "nbytes", "index")),
    ("sample_dim.npy", [npy(values) for values in ([-1.0] * 2, [np.inf] * 2, [0.5] * 2, [2.0] * 2, [0, 0])]),
    ("checksum.npy", [npy(values) for values in ([-1, -1], [2**33, 2**33], [0.0, 0.0])]),
    ("codes:module.npy", [npy(values) for values in ([-1, 0], [0, 9], [0.5, 0.5], [np.nan] * 2, [0])]),
    ("counter.npy", HEADERS),
    ("table:module.npy", [*HEADERS, *(npy(np.frombuffer(text, np.uint8)) for text in WRONG_TABLES)]),
    *((f"table:{name}.npy", [table(text) for text in texts]) for name, texts in WRONG_TEXTS.items()),
]


@pytest.mark.parametrize(("member", "wrong"), CASES, ids=[member for member, _ in CASES])
def test_a_catalogue_is_what_it_can_be(member: str, wrong: list[bytes]) -> None:
    content = members()
    assert member in content
    if member.startswith("table:"):
        content[member.replace("table:", "codes:")] = npy(np.zeros(2, np.uint8))
    for data in wrong:
        with pytest.raises(RunFormatError, match="is damaged: "):
            read_all(packed(content | {member: data}))
    assert read_all(packed(members())) == 2


@pytest.mark.parametrize("name", [name for name, kind in COLUMNS.items() if kind is FieldKind.JSON])
def test_what_json_in_a_column_says_is_looked_at_when_the_column_is_asked_for(name: str) -> None:
    for text in WRONG_TEXTS[name]:
        content = members() | {f"codes:{name}.npy": npy(np.zeros(2, np.uint8)), f"table:{name}.npy": table(text)}
        with pytest.raises(RunFormatError, match=f"column {name} of the catalogue x is damaged: "):
            Catalogue.from_bytes(packed(content), place="x", attempt="a").column(name)


def flagged(data: bytes, *, flag: int = 0, compression: int = 0, size: int | None = None) -> bytes:
    """An archive whose first member says something else of itself."""
    changed = bytearray(data)
    entry = changed.index(b"PK\1\2")
    for place in (6, entry + 8):
        changed[place] |= flag
    if compression:
        for place in (8, entry + 10):
            changed[place : place + 2] = compression.to_bytes(2, "little")
    if size is not None:
        changed[entry + 24 : entry + 28] = size.to_bytes(4, "little")
    return bytes(changed)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "of another kind": lambda: flagged(packed(members()), compression=99),
    "encrypted": lambda: flagged(packed(members()), flag=1),
    "patched": lambda: flagged(packed(members()), flag=0x20),
    "that unpacks to gigabytes": lambda: packed(members() | {f"{n}": bytes(50 << 20) for n in range(4)}),
    "with a column larger than it says": lambda: flagged(packed(members()), size=100),
    "with a column of gigabytes": lambda: flagged(packed(members()), size=(1 << 30) + 1),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_is_packed_as_ours_are(kind: str) -> None:
    with pytest.raises(RunFormatError, match="is damaged: "):
        Catalogue.from_bytes(ARCHIVES[kind](), place="x", attempt="a")


def test_walking_through_records_asks_for_a_column_once() -> None:
    asked: list[str] = []

    class Counting(Catalogue):
        def column(self, name: str) -> Column:
            asked.append(name)
            return super().column(name)

    counting = Counting(io.BytesIO(encode_catalogue(entries(600))), place="x", attempt="a")
    catalogues = [counting, Catalogue.from_bytes(encode_catalogue(entries(3)), place="x", attempt="b")]
    records = Records.of(RunReader(open_backend("memory://nothing")), catalogues)
    asked.clear()
    infos = [record.info for record in records]
    assert len([name for name in asked if name not in {"rank", "iteration"}]) < 2 * len(COLUMNS)
    backwards = records[::-1]
    assert [record.info for record in backwards] == infos[::-1]
    assert [record.path for record in records] == [records[position].path for position in range(-603, 0)]
    infos[0].sample_ids.clear()  # type: ignore[union-attr]  # they are there
    assert infos[1].sample_ids == [1, 2, 3, 4]
