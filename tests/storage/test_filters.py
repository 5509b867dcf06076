"""Does a filter of a field select what a slow and obvious reading of it selects, row by row?"""

from __future__ import annotations

import fnmatch
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.errors import UnknownFieldError, UsageError
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.query.filters import check_fields, parse_filter
from ranktape.storage.query.where import parse_where
from tests.storage.test_where import FLOATS, INTS, ROWS, TEXTS, Row, source, texts


def selected(field: str, value: Any, *, rows: list[Row] | None = None, encoded: bool = True) -> list[int]:
    table = ROWS if rows is None else rows
    mask = parse_filter(field, value).mask(source(table, encoded=encoded), len(table))
    return [int(row) for row in np.flatnonzero(mask)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, [1]),
        (np.int64(1), [1]),
        (1.0, [1]),
        (1.5, []),
        ("1", [1]),
        (" 1 ", [1]),
        ("1.0", [1]),
        ([0, 2], [0, 2]),
        ((0, 2), [0, 2]),
        ({0, 2}, [0, 2]),
        (np.array([0, 2]), [0, 2]),
        ([], []),
        ("0-1", [0, 1]),
        ("0:2", [0, 1]),
        ("0:2:1", [0, 1]),
        ("0:3:2", [0, 2]),
        ("1:", [1, 2]),
        (":1", [0]),
        (":", [0, 1, 2]),
        ("::2", [0, 2]),
        ("1::2", [1]),
        ("0,2", [0, 2]),
        ("0-0, 2", [0, 2]),
        (["0-1", 2], [0, 1, 2]),
        (range(2), [0, 1]),
        (range(2, 0, -2), [2]),
        (range(0), []),
        (slice(1, None), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([range(1), "2"], [0, 2]),
        (None, []),
        ("none", []),
        (2**70, []),
        (1e300, []),
        (-(2**63), []),
    ],
)
def test_filters_of_integers(value: Any, expected: list[int]) -> None:
    assert selected("rank", value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0]),
        (math.nan, [0]),
        ("none", [0]),
        ("None,1", [0, 2]),
        ([None, 0], [0, 1]),
        ("0-1", [1, 2]),
        ("0::2", [1]),
        (0, [1]),
    ],
)
def test_filters_of_numbers_that_may_be_missing(value: Any, expected: list[int]) -> None:
    assert selected("sample_dim", value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("-1", [0]), ("-1-0", [0, 1]), ("-1:1", [0, 1]), ("-3--1", [0]), (-1, [0]), ("-1::2", [0, 2]), ("+1", [2])],
)
def test_negative_numbers_are_meant_as_they_stand(value: Any, expected: list[int]) -> None:
    assert selected("layer_idx", value) == expected


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("layers.0.attn", [0]),
        ("layers.*", [0, 1]),
        ("layers.?.*", [0]),
        ("layers.[0-9].attn", [0]),
        ("layers.[!0]*", [1]),
        (["*.attn", "*.mlp"], [0, 1]),
        ("*", [0, 1]),
        ("", []),
        (None, [2]),
        (["layers.0.attn", None], [0, 2]),
        ("layers.0.attn,layers.10.mlp", [0, 1]),
        ("*.attn, *.mlp", [0, 1]),
        (["layers.1.*,*.mlp", None], [1, 2]),
        ("layers.[0,2].attn,x", [0]),
        ("LAYERS.*", []),
        ([], []),
    ],
)
def test_filters_of_text(value: Any, expected: list[int], *, encoded: bool) -> None:
    assert selected("module", value, encoded=encoded) == expected


def test_a_text_with_brackets_matches_itself() -> None:
    rows = [row | {"module": module} for row, module in zip(ROWS, ["x[0]", "x0", "a,b"], strict=True)]
    assert selected("module", "x[0]", rows=rows) == [0, 1]
    assert selected("module", "x[[]0]", rows=rows) == [0]
    assert selected("module", "a,b", rows=rows) == [2]
    assert selected("module", "a[,]b", rows=rows) == [2]
    assert selected("module", "a[,]b,x0", rows=rows) == [1, 2]


@pytest.mark.parametrize("shape", ["[2,3]", "[2,3],[7]"])
def test_a_comma_in_brackets_separates_nothing(shape: str) -> None:
    rows = [row | {"module": module} for row, module in zip(ROWS, ["[2,3]", "[2", "3]"], strict=True)]
    assert selected("module", shape, rows=rows) == [0]


@settings(max_examples=300)
@given(
    values=st.lists(st.integers(-30, 30), max_size=30),
    start=st.none() | st.integers(-20, 20),
    stop=st.none() | st.integers(-20, 20),
    step=st.none() | st.integers(1, 7),
    dtype=st.sampled_from(["int64", "int8", "float64", "uint32"]),
)
def test_spans_are_pythons_ranges(
    values: list[int], start: int | None, stop: int | None, step: int | None, dtype: str
) -> None:
    kept = [abs(value) for value in values] if dtype == "uint32" else values
    column = np.array(kept, dtype=dtype)
    first = start if start is not None else -(step or 1) * 1000
    meant = range(first, 1000 if stop is None else stop, step or 1)
    expected = [value in meant for value in kept]
    text = ":".join("" if part is None else str(part) for part in (start, stop, step))
    forms: list[Any] = [slice(start, stop, step), text]
    if start is not None and stop is not None:
        forms.append(range(start, stop, step or 1))
    for form in forms:
        assert parse_filter("rank", form).mask(lambda _: column, len(kept)).tolist() == expected


@settings(max_examples=200)
@given(first=st.integers(-9, 9), length=st.integers(0, 9), values=st.lists(st.integers(-20, 20), max_size=20))
def test_a_dash_includes_both_ends(first: int, length: int, values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    found = parse_filter("rank", f"{first}-{first + length}").mask(lambda _: column, len(values))
    assert found.tolist() == [first <= value <= first + length for value in values]


@settings(max_examples=200)
@given(patterns=st.lists(texts, max_size=4), values=st.lists(st.none() | texts, max_size=10))
def test_text_filters_select_what_fnmatch_selects(patterns: list[str], values: list[str | None]) -> None:
    column = np.array(values, dtype=object)
    found = parse_filter("module", patterns).mask(lambda _: column, len(values))
    assert found.tolist() == [
        value is not None and any(value == pattern or fnmatch.fnmatchcase(value, pattern) for pattern in patterns)
        for value in values
    ]


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("rank", "a", "rank holds numbers and 'a' is not one: give a number, a range such as 0-3 or 10:20:2"),
        ("rank", "", "rank holds numbers and '' is not one"),
        ("rank", "1,,2", "rank holds numbers and '' is not one"),
        ("rank", "0-3-5", "rank holds numbers and '0-3-5' is not one"),
        ("rank", "3-0", "rank has the range '3-0', which ends before it begins: write 0-3"),
        ("rank", "1:2:0", "rank has a range with step 0: give a step of 1 or more"),
        ("rank", "1:2:-1", "rank holds numbers and '1:2:-1' is not one"),
        ("rank", f"0-{10**20}", "rank has a range beyond 64 bits"),
        ("rank", "9" * 5000, "'9{20}'... is too long to be one"),
        ("rank", slice(0, 3, -1), "rank has a range with step -1: give a step of 1 or more"),
        ("rank", slice("a", "b"), "is not a slice of integers"),
        ("rank", slice(0.5, None), "is not a slice of integers"),
        ("rank", {"a": 1}, "is not something a field can hold"),
        ("rank", b"1", "is not something a field can hold"),
        ("rank", [[1]], "is not something a field can hold"),
        ("rank", np.zeros((2, 2)), "is not something a field can hold"),
        ("rank", 1j, "is not something a field can hold"),
        ("module", 3, "module holds text, not numbers: give it in quotes, such as module='0'"),
        ("module", range(3), "module holds text, not numbers"),
        ("module", "a" * 10_001, "module is compared with 10001 characters"),
    ],
)
def test_a_value_that_the_field_cannot_hold_is_refused(field: str, value: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        selected(field, value)


def test_true_and_false_are_1_and_0() -> None:
    column = np.array([True, False])
    assert parse_filter("is_good", True).mask(lambda _: column, 2).tolist() == [True, False]  # noqa: FBT003
    assert parse_filter("is_good", [2]).mask(lambda _: column, 2).tolist() == [False, False]
    assert parse_where("is_good == false").mask({"is_good": column}).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("layertype", "records have no field 'layertype': did you mean layer_type"),
        ("upper", "did you mean overflow.upper.count"),
        ("zzz", "use one of layer_idx, layer_type, module"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(name: str, match: str) -> None:
    known = {*INTS, *FLOATS, *TEXTS}
    for refuse in (
        lambda: check_fields(["rank", name], known=known),
        lambda: parse_filter(name, 1, known=known),
        lambda: check_fields(parse_where(f"{name} == 1").names, known=known),
    ):
        with pytest.raises(UnknownFieldError, match=match):
            refuse()


def test_ten_million_rows_take_about_a_second() -> None:
    num_rows = 10_000_000
    random = np.random.default_rng(0)
    codes = random.integers(0, 1000, num_rows, dtype=np.uint32)
    columns: dict[str, Column] = {
        "module": StringColumn(codes=codes, table=[f"layers.{layer}.attn" for layer in range(1000)]),
        "rank": random.integers(0, 1000, num_rows),
        "overflow.ratio": random.random(num_rows),
    }
    where = parse_where("like(module, 'layers.1*.attn') and rank in [0, 3, 5] or overflow.ratio > 0.5 and rank < 100")
    # CPU time: other work on the machine is none of its business. The bound is loose for slow machines.
    start = time.process_time()
    found = where.mask(columns)
    found &= parse_filter("rank", "0-500").mask(columns.__getitem__, num_rows)
    assert time.process_time() - start < 5
    assert 0.04 < found.mean() < 0.06
