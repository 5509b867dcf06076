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


@given(st.lists(record_infos(), max_size=5))
def test_every_record_comes_back(infos: list[RecordInfo]) -> None:
    entries = [CatalogueEntry(site=f"s{index}", stack="x", index=index, info=info) for index, info in enumerate(infos)]
    catalogue = Catalogue.from_bytes(encode_catalogue(entries), place="test", attempt="a")
    assert catalogue.num_rows == len(infos)
    rows = list(read_rows(catalogue, np.arange(len(infos)), place="test"))
    for row, info in enumerate(infos):
        assert rows[row] == CatalogueEntry(info=info, site=f"s{row}", stack="x", index=row)
        assert catalogue.group_of(row) == f"a/rank_{info.rank:05d}/iter_{info.iteration:08d}"


@given(record_infos())
def test_a_record_comes_back_from_json(info: RecordInfo) -> None:
    assert RecordInfo.from_json(info.to_json()) == info


def test_every_field_of_a_record_is_a_column() -> None:
    for field in FIELDS:
        assert field == "overflow" or field in COLUMNS
    for name in ("upper.count", "upper.ratio", "total", "ratio", "absmax"):
        assert f"overflow.{name}" in COLUMNS


@given(st.lists(record_infos(), min_size=1, max_size=4), st.integers(0, 4))
def test_catalogues_can_be_joined(infos: list[RecordInfo], cut: int) -> None:
    parts = [
        Catalogue.from_bytes(
            encode_catalogue([CatalogueEntry(site="p", stack="", index=-1, info=info) for info in part]),
            place="test",
            attempt="a",
        )
        for part in (infos[:cut], infos[cut:])
    ]
    merged = Catalogue.from_bytes(merge_catalogues([part.column for part in parts]), place="test", attempt="a")
    assert [row.info for row in read_rows(merged, np.arange(len(infos)), place="test")] == infos
    for name in ("module", "rank", "overflow.ratio"):
        joined = concatenate(part.column(name) for part in parts)
        rows = [value(part, name, row=row) for part in parts for row in range(part.num_rows)]
        if isinstance(joined, StringColumn):
            assert [joined.table[code] for code in joined.codes] == rows
        else:
            np.testing.assert_array_equal(joined, rows)


def test_an_empty_catalogue_has_every_column() -> None:
    catalogue = Catalogue.from_bytes(encode_catalogue([]), place="test", attempt="a")
    assert [len(catalogue.column(name)) for name in COLUMNS] == [0] * len(COLUMNS)


def test_damage_is_named() -> None:
    data = encode_catalogue([])
    with pytest.raises(RunFormatError, match="the catalogue x is damaged"):
        Catalogue.from_bytes(data[: len(data) // 2], place="x", attempt="a")
    with pytest.raises(RunFormatError, match="the catalogue x is damaged"):
        Catalogue.from_bytes(b"", place="x", attempt="a")


@given(record_infos())
def test_fields_of_later_versions_are_passed_over(info: RecordInfo) -> None:
    assert RecordInfo.from_json(info.to_json() | {"of_a_later_version": 1}) == info
