"""Do columns say of each record what its document said?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.errors import RunFormatError
from ranktape.storage.format.catalogue import (
    COLUMNS,
    Catalogue,
    CatalogueEntry,
    concatenate,
    encode_catalogue,
    merge_catalogues,
    read_rows,
)
from ranktape.storage.format.record_info import FIELDS, RecordInfo
from ranktape.storage.query.columns import StringColumn
from tests.strategies import record_infos


def value(catalogue: Catalogue, name: str, *, row: int) -> object:
    column = catalogue.column(name)
    return column.table[column.codes[row]] if isinstance(column, StringColumn) else column[row].item()


def encoded(infos: list[RecordInfo]) -> Catalogue:
    """A catalogue of records in one stack."""
    entries = [CatalogueEntry(site=f"s{index}", stack="x", index=index, info=info) for index, info in enumerate(infos)]
    return Catalogue.from_bytes(encode_catalogue(entries), place="test", attempt="a")


@given(st.lists(record_infos(), max_size=5), st.integers(0, 4))
def test_every_record_comes_back_alone_and_joined(infos: list[RecordInfo], cut: int) -> None:
    parts = [(encoded(part), part) for part in (infos[:cut], infos[cut:])]
    for catalogue, part in parts:
        assert catalogue.num_rows == len(part)
        rows = list(read_rows(catalogue, np.arange(len(part)), place="test"))
        for row, info in enumerate(part):
            assert rows[row] == CatalogueEntry(info=info, site=f"s{row}", stack="x", index=row)
            assert catalogue.group_of(row) == f"a/rank_{info.rank:05d}/iter_{info.iteration:08d}"
    data = merge_catalogues([catalogue.column for catalogue, _ in parts])
    merged = Catalogue.from_bytes(data, place="test", attempt="a")
    assert [row.info for row in read_rows(merged, np.arange(len(infos)), place="test")] == infos
    for name in ("module", "rank", "overflow.ratio"):
        joined = concatenate(catalogue.column(name) for catalogue, _ in parts)
        rows_of_all = [value(catalogue, name, row=row) for catalogue, part in parts for row in range(len(part))]
        found = [joined.table[code] for code in joined.codes] if isinstance(joined, StringColumn) else joined
        np.testing.assert_array_equal(found, rows_of_all)


@given(record_infos())
def test_a_record_comes_back_from_json_whatever_later_versions_add(info: RecordInfo) -> None:
    assert RecordInfo.from_json(info.to_json()) == info
    assert RecordInfo.from_json(info.to_json() | {"of_a_later_version": 1}) == info


def test_every_field_of_a_record_is_a_column() -> None:
    for field in FIELDS:
        assert field == "overflow" or field in COLUMNS
    for name in ("upper.count", "upper.ratio", "total", "ratio", "absmax"):
        assert f"overflow.{name}" in COLUMNS


def test_an_empty_catalogue_has_every_column() -> None:
    catalogue = encoded([])
    assert [len(catalogue.column(name)) for name in COLUMNS] == [0] * len(COLUMNS)


def test_damage_is_named() -> None:
    data = encode_catalogue([])
    for damaged in (data[: len(data) // 2], b""):
        with pytest.raises(RunFormatError, match="the catalogue x is damaged"):
            Catalogue.from_bytes(damaged, place="x", attempt="a")
