"""Does a filter select what a slow and obvious reading of it selects, row by row?"""

from __future__ import annotations

import fnmatch
import math
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.errors import UnknownFieldError, UsageError
from ranktape.storage.selection.columns import Column, StringColumn
from ranktape.storage.selection.filters import check_fields, filter_from_text, parse_filter, parse_where
from tests.strategies import terms

Row = dict[str, Any]

INTS = ("rank", "overflow.upper.count", "layer_idx")
FLOATS = ("sample_dim", "overflow.maximum")
TEXTS = ("layer_type", "module")

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

whole_numbers = st.one_of(st.integers(-3, 6), st.sampled_from([2**53 + 1, -(2**63), 2**63 - 1]))
fractions = st.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.0, 2.5, 1e-4, 1e300, math.inf, -math.inf])
texts = st.one_of(st.sampled_from(["a", "b", "ab", "layers.0.attn", "layers.10.attn", "x[0]", "*"]), terms())


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Rows as people think of them: missing values are None."""
    kinds: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(INTS, whole_numbers)
    kinds |= {name: st.one_of(st.none(), fractions) for name in FLOATS}
    kinds |= {name: st.one_of(st.none(), texts) for name in TEXTS}
    return draw(st.lists(st.fixed_dictionaries(kinds), max_size=12))


def source(rows: list[Row], *, encoded: bool) -> Callable[[str], Column]:
    """The same rows as columns."""

    def column(name: str) -> Column:
        values = [row[name] for row in rows]
        if name in INTS:
            return np.array(values, dtype=np.int64)
        if name in FLOATS:
            return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
        if not encoded:
            return np.array(values, dtype=object)
        # Texts that no row has, and one text twice, as a table may hold them.
        table = ["unused", *dict.fromkeys(values), *dict.fromkeys(values)]
        codes = [len(table) - 1 - table[::-1].index(value) for value in values]
        return StringColumn(codes=np.array(codes, dtype=np.uint32), table=table)

    return column


# The slow twin of expressions: a tree of tuples, written out as text, and evaluated for one row at a time.


def value_of(side: Any, row: Row) -> Any:
    return row[side[1]] if isinstance(side, tuple) else side


def holds(tree: Any, row: Row) -> bool:  # noqa: PLR0911 - one for each kind of node
    match tree:
        case ("not", inner):
            return not holds(inner, row)
        case ("and", *parts):
            return all(holds(part, row) for part in parts)
        case ("or", *parts):
            return any(holds(part, row) for part in parts)
        case ("in", name, values):
            return bool(row[name] in values)
        case ("like", name, pattern):
            return row[name] is not None and bool(row[name] == pattern or fnmatch.fnmatchcase(row[name], pattern))
        case ("none", name, _):
            return bool(row[name] is None)
        case ("compare", left, sign, right):
            one, other = value_of(left, row), value_of(right, row)
            if one is None or other is None:
                return bool(sign == "!=")
            return bool(COMPARISONS[sign](one, other))
    raise AssertionError(tree)


def quoted(value: Any) -> str:
    if isinstance(value, tuple):
        return str(value[1])
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\")
        return "'" + escaped.replace("'", "\\'") + "'" if "'" not in value or '"' in value else f'"{escaped}"'
    return "None" if value is None else repr(value)


def written(tree: Any) -> str:
    match tree:
        case ("not", inner):
            return f"not ({written(inner)})"
        case ("and" | "or" as word, *parts):
            return f" {word} ".join(f"({written(part)})" for part in parts)
        case ("in", name, values):
            return f"{name} in [{', '.join(map(quoted, values))}]"
        case ("like", name, pattern):
            return f"{name} like {quoted(pattern)}"
        case ("none", name, text):
            return f"{name} {text}"
        case ("compare", left, sign, right):
            return f"{quoted(left)} {sign} {quoted(right)}"
    raise AssertionError(tree)


def conditions() -> st.SearchStrategy[Any]:
    numbers = st.sampled_from([*INTS, *FLOATS])
    words = st.sampled_from(TEXTS)
    signs = st.sampled_from(list(COMPARISONS))
    # An exact comparison of fractions with integers beyond 2**53 is Python's alone.
    small = st.integers(-3, 6)
    literals = st.one_of(small, fractions)
    number_fields = numbers.map(lambda name: ("field", name))
    word_fields = words.map(lambda name: ("field", name))
    patterns = st.one_of(st.sampled_from(["*", "layers.*.attn", "layers.?.attn", "x[0]", "[!a]*", "", "[z-a]"]), texts)
    return st.one_of(
        st.tuples(st.just("compare"), number_fields, signs, st.one_of(literals, number_fields)),
        st.tuples(st.just("compare"), literals, signs, number_fields),
        st.tuples(st.just("compare"), st.sampled_from(INTS).map(lambda name: ("field", name)), signs, whole_numbers),
        st.tuples(st.just("compare"), word_fields, signs, st.one_of(texts, word_fields)),
        st.tuples(st.just("compare"), texts, signs, word_fields),
        st.tuples(st.just("in"), numbers, st.lists(st.one_of(st.none(), literals), max_size=4)),
        st.tuples(st.just("in"), words, st.lists(st.one_of(st.none(), texts), max_size=4)),
        st.tuples(st.just("like"), words, patterns),
        st.tuples(st.just("none"), st.one_of(numbers, words), st.sampled_from(["== None", "is None", "is none"])),
    )


trees = st.recursive(
    conditions(),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=400)
@given(rows=tables(), tree=trees, encoded=st.booleans())
def test_an_expression_selects_what_its_slow_twin_selects(rows: list[Row], tree: Any, *, encoded: bool) -> None:
    text = written(tree)
    where = parse_where(text)
    mask = where.mask(source(rows, encoded=encoded), len(rows))
    assert mask.dtype == np.bool_
    assert mask.tolist() == [holds(tree, row) for row in rows], text
    assert set(where.names) == set(names_in(tree))


def names_in(tree: Any) -> Iterator[str]:
    match tree:
        case ("not" | "and" | "or", *parts):
            for part in parts:
                yield from names_in(part)
        case ("compare", left, _, right):
            yield from (side[1] for side in (left, right) if isinstance(side, tuple))
        case (_, name, _):
            yield name


ROWS: list[Row] = [
    {"rank": 0, "overflow.upper.count": 0, "layer_idx": -1, "sample_dim": None, "overflow.maximum": math.inf}
    | {"layer_type": "attention", "module": "layers.0.attn"},
    {"rank": 1, "overflow.upper.count": 5, "layer_idx": 0, "sample_dim": 0.0, "overflow.maximum": 1.5}
    | {"layer_type": "linear", "module": "layers.10.mlp"},
    {"rank": 2, "overflow.upper.count": 7, "layer_idx": 1, "sample_dim": 1.0, "overflow.maximum": None}
    | {"layer_type": "it's", "module": None},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer_type == 'attention' and overflow.upper.count == 0", [0]),
        ("layer_type == 'attention' or overflow.upper.count > 5", [0, 2]),
        ("not layer_type == 'attention' and rank < 2", [1]),
        ("not (layer_type == 'attention' and rank < 2)", [1, 2]),
        ("rank == 2 or rank == 0 and layer_idx == 0", [2]),
        ("0 <= layer_idx < 1", [1]),
        ("0<=layer_idx<1", [1]),
        ("layer_idx>-1", [1, 2]),
        ("layer_idx == -1", [0]),
        ("rank in [0, 2]", [0, 2]),
        ("rank in (0, 2,)", [0, 2]),
        ("rank not in [0, 2]", [1]),
        ("rank in []", []),
        ("sample_dim in [None, 1]", [0, 2]),
        ("sample_dim == None", [0]),
        ("sample_dim != None", [1, 2]),
        ("sample_dim is not None", [1, 2]),
        ("None == sample_dim", [0]),
        ("sample_dim != 1", [0, 1]),
        ("module is None", [2]),
        ("module != 'layers.0.attn'", [1, 2]),
        ("module like 'layers.*.mlp'", [1]),
        ("module not like 'layers.*'", [2]),
        ('module LIKE "layers.?.*" OR rank IN [2]', [0, 2]),
        ("overflow.maximum == inf", [0]),
        ("overflow.maximum > 1e-4", [0, 1]),
        ("overflow.maximum < .5e1", [1]),
        ("overflow.maximum > -inf", [0, 1]),
        ("overflow.upper.count == true", []),
        ("rank == True", [1]),
        ("rank == false", [0]),
        (r"layer_type == 'it\'s'", [2]),
        ('layer_type == "it\'s"', [2]),
        ("rank > sample_dim", [1, 2]),
        ("module == module", [0, 1]),
        ("module != module", [2]),
        ("module >= layer_type", [0]),
        ("sample_dim != sample_dim", [0]),
        ("rank > 99999999999999999999999", []),
        ("rank > -1e300", [0, 1, 2]),
        ("overflow.maximum < 99999999999999999999999", [1]),
        ("  rank  ==\n1\t", [1]),
        ("((((rank))) == 1)", None),
    ],
)
def test_expressions_by_example(text: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="expected"):
            parse_where(text)
        return
    for encoded in (False, True):
        mask = parse_where(text).mask(source(ROWS, encoded=encoded), len(ROWS))
        assert np.flatnonzero(mask).tolist() == expected


def test_names_are_those_of_fields_in_their_order() -> None:
    where = parse_where("overflow.upper.count > rank and 'rank2' != layer_type and rank in [1] and inf > rank")
    assert where.names == ("overflow.upper.count", "rank", "layer_type")
    assert where.text.startswith("overflow.upper.count")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "expected a field, such as layer_type at character 1, found the end, in ''"),
        ("rank", "expected ==, !=, <, <=, >, >=, 'in', 'like' or 'is' at character 5, found the end"),
        ("rank = 1", r"at character 6, found '=' \(write '=='\)"),
        ("rank == 1 & layer_idx == 0", r"expected 'and', 'or' or the end at character 11, found '&' \(write 'and'\)"),
        ("rank == 1 || layer_idx == 0", r"found '\|\|' \(write 'or'\)"),
        ("module ~ 'a*'", r"found '~' \(write 'like'\)"),
        ("!rank", r"found '!rank' \(write 'not'\)"),
        ("rank == 'a", 'expected a field, a number or a text in quotes at character 9, found "\'a"'),
        ("(rank == 1", r"expected '\)' at character 11, found the end"),
        ("rank == 1)", "expected 'and', 'or' or the end at character 10"),
        ("1 == 1", "expected a field on one side of the comparison at character 6"),
        ("rank < None", "expected a number or a text, as only == and != compare with None at character 8"),
        ("rank in 3", r"expected a list, such as \[0, 1\] at character 9"),
        ("rank in [1 2]", r"expected ',' or '\]' at character 12"),
        ("rank in [layer_idx]", "expected a number or a text in quotes at character 10"),
        ("rank in [1", r"expected ',' or '\]' at character 11, found the end"),
        ("rank in [,]", "expected a number, a text in quotes"),
        ("rank not 3", "expected 'in' or 'like' at character 10"),
        ("module like a", r"expected a pattern in quotes, such as 'layers.\*.attn' at character 13"),
        ("rank is 3", "expected None at character 9"),
        ("rank == 1.2.3", "at character 9, found '1.2.3'"),
        ("rank == 0x10", "at character 9, found '0x10'"),
        ("rank == 1 + 1", r"at character 11, found '\+'"),
        ("rank == __import__('os')", "expected 'and', 'or' or the end at character 19"),
        ("rank == " + "9" * 41, "expected a number of at most 40 characters"),
        ("rank == 1 rank == 2", "expected 'and', 'or' or the end at character 11, found 'rank'"),
        ("(" * 60 + "rank == 1" + ")" * 60, "expected at most 50 parentheses and 'not's within one another"),
        ("not " * 2000 + "rank == 1", "expected at most 50 parentheses and 'not's within one another"),
        ("a" * 10_001, "the expression has 10001 characters: give at most 10000"),
        ("x." + "[" * 9_000, "expected"),
    ],
)
def test_a_mistake_is_shown_with_its_place(text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        parse_where(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=500)
@given(
    text=st.one_of(
        st.text(max_size=30),
        st.lists(
            st.sampled_from(
                [
                    "rank",
                    "a.b",
                    "==",
                    "<",
                    "in",
                    "not",
                    "like",
                    "is",
                    "(",
                    ")",
                    "[",
                    "]",
                    ",",
                    "1",
                    "'x'",
                    "None",
                    "and",
                ]
            ),
            max_size=12,
        ).map(" ".join),
    )
)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        where = parse_where(text)
    except UsageError:
        return
    assert where.names


def test_the_longest_expressions_are_read_quickly() -> None:
    start = time.perf_counter()
    many = " or ".join(["rank == 1"] * 700)
    assert parse_where(many).mask(source(ROWS, encoded=True), 3).tolist() == [False, True, False]
    for hostile in (
        "'" + "\\" * 9_998,
        "rank == '" + "\\'" * 4_900,
        "1" * 9_999,
        "a." * 4_999,
        " " * 9_999,
        "<" * 9_999,
    ):
        with pytest.raises(UsageError, match="expected"):
            parse_where(hostile)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("layer_type > 3", "layer_type holds text and 3 is a number: put it in quotes"),
        ("rank == '3'", "rank holds numbers and '3' is text: leave out the quotes"),
        ("rank in ['3']", "rank holds numbers and '3' is text"),
        ("layer_type in [3]", "layer_type holds text and 3 is a number"),
        ("rank like '3'", "rank holds numbers and 'like' compares text"),
        ("rank == layer_type", "rank holds numbers and layer_type holds text: compare fields of one kind"),
    ],
)
@pytest.mark.parametrize("rows", [ROWS, []])
def test_text_and_numbers_do_not_mix(text: str, match: str, rows: list[Row]) -> None:
    with pytest.raises(UsageError, match=match):
        parse_where(text).mask(source(rows, encoded=True), len(rows))


# Filters by field.


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
        ("layers.0.attn,layers.10.mlp", []),
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


def test_on_the_command_line_commas_separate_texts_as_well() -> None:
    columns = source(ROWS, encoded=True)
    assert filter_from_text("module", "layers.0.*, layers.10.mlp").mask(columns, 3).tolist() == [True, True, False]
    assert filter_from_text("rank", "0,2").mask(columns, 3).tolist() == [True, False, True]


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
    for form in (
        slice(start, stop, step),
        ":".join("" if part is None else str(part) for part in (start, stop, step)),
    ):
        assert parse_filter("rank", form).mask(lambda _: column, len(kept)).tolist() == expected
    if start is not None and stop is not None:
        assert (
            parse_filter("rank", range(start, stop, step or 1)).mask(lambda _: column, len(kept)).tolist() == expected
        )


@settings(max_examples=200)
@given(first=st.integers(-9, 9), length=st.integers(0, 9), values=st.lists(st.integers(-20, 20), max_size=20))
def test_a_dash_includes_both_ends(first: int, length: int, values: list[int]) -> None:
    found = parse_filter("rank", f"{first}-{first + length}").mask(
        lambda _: np.array(values, dtype=np.int64), len(values)
    )
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
    assert parse_where("is_good == false").mask(lambda _: column, 2).tolist() == [False, True]


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
        lambda: filter_from_text(name, "1", known=known),
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
    where = parse_where("module like 'layers.1*.attn' and rank in [0, 3, 5] or overflow.ratio > 0.5 and rank < 100")
    # CPU time: other work on the machine is none of its business. The bound is loose for slow machines.
    start = time.process_time()
    found = where.mask(columns.__getitem__, num_rows)
    found &= parse_filter("rank", "0-500").mask(columns.__getitem__, num_rows)
    assert time.process_time() - start < 5
    assert 0.04 < found.mean() < 0.06
