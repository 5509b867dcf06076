"""Are columns that are kept in few bytes the same numbers, for filters and for sums too?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.storage.format.catalogue import Catalogue, CatalogueEntry, encode_catalogue, merge_catalogues
from ranktape.storage.format.record_info import ElementTally, RecordInfo
from ranktape.storage.query.columns import StringColumn, narrowed, widened
from tests.runs import describe, write_run

FLOAT32 = st.floats(width=32)


@given(st.lists(st.one_of(st.integers(-128, 127), st.integers(-(2**31), 2**31), st.integers(-(2**63), 2**63 - 1))))
def test_integers_are_the_same_in_fewer_bytes(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    small = narrowed(column)
    assert isinstance(small, np.ndarray)
    assert small.tolist() == values
    assert not values or small.dtype.itemsize == next(
        size for size in (1, 2, 4, 8) if -(2 ** (8 * size - 1)) <= min(values) and max(values) < 2 ** (8 * size - 1)
    )
    wide = widened(small)
    assert isinstance(wide, np.ndarray)
    assert wide.dtype == np.int64
    assert wide.tolist() == values


@given(st.lists(st.one_of(FLOAT32, st.floats())))
def test_floats_are_the_same_in_fewer_bytes(values: list[float]) -> None:
    column = np.array(values, dtype=np.float64)
    wide = widened(narrowed(column))
    assert isinstance(wide, np.ndarray)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, column)
    np.testing.assert_array_equal(np.signbit(wide[wide == 0]), np.signbit(column[column == 0]))


def test_floats_of_16_bits_take_32() -> None:
    small = narrowed(np.array([np.nan, np.inf, -0.0, 2.5]))
    assert isinstance(small, np.ndarray)
    assert small.dtype == np.float32


@pytest.mark.parametrize(("num_texts", "itemsize"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_codes_take_what_their_table_needs(num_texts: int, itemsize: int) -> None:
    table = [str(number) for number in range(num_texts)]
    small = narrowed(StringColumn(codes=np.array([0, num_texts - 1], dtype=np.uint32), table=table))
    assert isinstance(small, StringColumn)
    assert small.codes.dtype.itemsize == itemsize
    assert [table[code] for code in small.codes] == [table[0], table[-1]]


def test_unsigned_integers_stay_what_they_are() -> None:
    column = np.array([1, 2], dtype=np.uint32)
    assert narrowed(column) is column
    assert widened(column) is column


def catalogue_of(info: RecordInfo) -> Catalogue:
    """A catalogue of one record."""
    entry = CatalogueEntry(site="s", stack="", index=-1, info=dataclasses.replace(info, checksum="crc32c:00"))
    return Catalogue.from_bytes(encode_catalogue([entry]), place="test", attempt="a")


def test_sums_of_small_columns_do_not_overflow() -> None:
    info = describe(np.zeros(300, dtype=np.float32))
    hundred = ElementTally(count=100, ratio=1 / 3)
    overflow = dataclasses.replace(info.overflow, upper=hundred, lower=hundred)
    catalogue = catalogue_of(dataclasses.replace(info, overflow=overflow))
    counts = catalogue.column("overflow.upper.count")
    assert isinstance(counts, np.ndarray)
    assert counts.dtype == np.int8
    total: Any = catalogue.column("overflow.total")
    assert total.tolist() == [200]


def test_a_merge_keeps_no_column_of_its_parts() -> None:
    parts = [catalogue_of(describe(np.arange(3, dtype=np.float32))) for _ in range(2)]
    merged = Catalogue.from_bytes(merge_catalogues([part.load for part in parts]), place="test", attempt="a")
    assert merged.num_rows == 2
    assert {name for part in parts for name in part._columns} == {"iteration"}


def test_filters_compare_without_rounding(tmp_path: Path) -> None:
    # As a float32 it is a little more than 0.1, as which numpy would take the other side too.
    array = np.array([0.1], dtype=np.float32)
    records = write_run(tmp_path / "run", {0: [[(array, describe(array))]]}).select()
    assert len(records.where("overflow.absmax > 0.1")) == 1
    assert len(records.where("overflow.absmax == 0.1")) == 0
    assert len(records.select(overflow__absmax=0.1)) == 0
    assert len(records.where("nbytes < 1000000")) == 1
    assert records.column("nbytes").dtype == np.int64
    assert records.column("overflow.absmax").dtype == np.float64
