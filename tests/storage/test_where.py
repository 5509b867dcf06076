"""Does an expression select what a slow and obvious reading of it selects, row by row?"""

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

from ranktape.errors import UsageError
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.query.where import parse_where
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
            return f"like({name}, {quoted(pattern)})"
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
    mask = where.mask(source(rows, encoded=encoded))
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
        ("like(module, 'layers.*.mlp')", [1]),
        ("not like(module, 'layers.*')", [2]),
        ('like(module, "layers.?.*") or rank in {2}', [0, 2]),
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
        ("((((rank))) == 1)", [1]),
        ("rank == 0x1", [1]),
    ],
)
def test_expressions_by_example(text: str, expected: list[int]) -> None:
    for encoded in (False, True):
        mask = parse_where(text).mask(source(ROWS, encoded=encoded))
        assert np.flatnonzero(mask).tolist() == expected


def test_names_are_those_of_fields_in_their_order() -> None:
    where = parse_where("overflow.upper.count > rank and 'rank2' != layer_type and rank in [1] and inf > rank")
    assert where.names == ("overflow.upper.count", "rank", "layer_type")
    assert where.text.startswith("overflow.upper.count")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "invalid syntax at character 1, found the end, in ''"),
        ("rank", r"expected a comparison such as rank == 0, or like\(field, 'pattern'\) at character 1, found 'rank'"),
        ("rank = 1", r"invalid syntax at character 6, found '=' \(write ==\)"),
        (r"rank == 1 and like(module, 'a\.b')", r"invalid escape sequence.* at character \d+, found"),
        ("rank == 1 & layer_idx == 0", r"at character 9, found '1 & layer_idx' \(write and\)"),
        ("rank == 1 || layer_idx == 0", r"at character 12, found '\|' \(write or\)"),
        ("rank == 1 OR layer_idx == 0", r"at character 11, found 'OR' \(write or\)"),
        ("module ~ 'a*'", r"at character 8, found '~' \(write like\(field, 'pattern'\)\)"),
        ("module like 'a*'", r"at character 8, found 'like' \(write like\(field, 'pattern'\)\)"),
        ("module not like 'a*'", r"at character 12, found 'like' \(write like\(field, 'pattern'\)\)"),
        ("!rank", r"at character 1, found '!rank' \(write not\)"),
        ("rank == 'a", 'unterminated string literal at character 9, found "\'a"'),
        ("rank == 1 or\n(rank == 2", r"'\(' was never closed at character 14"),
        ("rank == 1)", r"unmatched '\)' at character 10"),
        ("1 == 1", "expected a field on one side of the comparison at character 6"),
        ("rank < None", "expected a number or a text, as only == and != compare with None, at character 8"),
        ("rank in 3", r"expected a list, such as \[0, 1\] at character 9"),
        ("rank in [1 2]", "invalid syntax at character 10"),
        ("rank in [layer_idx]", "expected a number or a text in quotes at character 10"),
        ("3 in [rank]", "expected a field, such as layer_type, at character 1"),
        ("rank in [1", r"'\[' was never closed at character 9"),
        ("rank not 3", "invalid syntax at character 10"),
        (
            "like(module, a)",
            r"such as like\(module, 'layers.\*.attn'\), at character 1",
        ),
        ("like(module)", r"expected like\(field, 'pattern'\)"),
        ("like(module, 'a') == 1", "expected a field, a number or a text in quotes at character 1, found .like"),
        ("rank is 3", "expected None at character 9"),
        ("rank == 1.2.3", "at character 12, found '.3'"),
        ("rank == b'a'", "a number or a text in quotes at character 9, found \"b'a'\""),
        ("rank == 2j", "a number or a text in quotes at character 9"),
        ("rank == -'a'", "a number or a text in quotes at character 9"),
        ("'é' == module and rank == 1 + 1", r"at character 27, found '1 \+ 1'"),
        ("  rank == 1 + 1", r"at character 11, found '1 \+ 1'"),
        ("rank == __import__('os')", "a number or a text in quotes at character 9, found .__import__"),
        ("().__class__ == 1", "a number or a text in quotes at character 1"),
        ("rank[0] == 1", r"a number or a text in quotes at character 1, found 'rank\[0\]'"),
        ("[x for x in rank]", "expected a comparison"),
        ("rank == 1 if rank else rank == 2", "expected a comparison"),
        ("rank == " + "9" * 41, "expected a number of at most 40 digits"),
        ("rank == '\ud800'", "text that is not Unicode"),
        ("rank == 1 rank == 2", "invalid syntax at character 11, found 'rank'"),
        ("(" * 300 + "rank == 1" + ")" * 300, "too many nested parentheses"),
        ("not " * 60 + "rank == 1", "expected at most 50 levels of and, or and not"),
        ("a" * 10_001, "the expression has 10001 characters: give at most 10000"),
        ("x." + "[" * 9_000, "too many nested"),
    ],
)
def test_a_mistake_is_shown_with_its_place(text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        parse_where(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


WORDS = ["rank", "a.b", "==", "<", "in", "not", "like(", "is", "(", ")", "[", "]", ",", "1", "'x'", "None", "and"]


@settings(max_examples=500)
@given(st.text(max_size=30) | st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        where = parse_where(text)
    except UsageError:
        return
    assert where.names


def test_the_longest_expressions_are_read_quickly() -> None:
    start = time.perf_counter()
    many = " or ".join(["rank == 1"] * 700)
    assert parse_where(many).mask(source(ROWS, encoded=True)).tolist() == [False, True, False]
    nested = ("not " * 2_000, "-" * 9_000, "a." * 4_990, "a()" + "()" * 4_900, "a**" * 3_000, "lambda:" * 1_400)
    repeated = ("1" * 9_999, " " * 9_999, "<" * 9_999, "a.", "'" + "\\" * 9_998, "rank == '" + "\\'" * 4_900)
    for hostile in (*repeated, *(text + "a" for text in nested)):
        with pytest.raises(UsageError):
            parse_where(hostile)
    assert time.perf_counter() - start < 5


def test_what_depends_on_a_missing_value_is_neither_true_nor_false() -> None:
    columns = {"a": np.array([0.0, 1.0, np.nan]), "b": np.array([np.nan, 1.0, np.nan])}
    for text, holds, fails in (
        ("a == 0 and b == 1", [], [1]),
        ("a == 1 and b == 1", [1], [0]),
        ("a == 0 or b == 1", [0, 1], []),
        ("not (a == 0 or b == 1)", [], [0, 1]),
        ("a == b", [1], []),
        ("a in [0, None]", [0, 2], [1]),
        ("0 <= a < 1", [0], [1]),
    ):
        truth = parse_where(text).truth(columns)
        assert (np.flatnonzero(truth == 1).tolist(), np.flatnonzero(truth == -1).tolist()) == (holds, fails), text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("layer_type > 3", "layer_type holds text and 3 is a number: put it in quotes"),
        ("rank == '3'", "rank holds numbers and '3' is text: leave out the quotes"),
        ("rank in ['3']", "rank holds numbers and '3' is text"),
        ("layer_type in [3]", "layer_type holds text and 3 is a number"),
        ("like(rank, '3')", "rank holds numbers and 'like' compares text"),
        ("rank == layer_type", "rank holds numbers and layer_type holds text: compare fields of one kind"),
    ],
)
@pytest.mark.parametrize("rows", [ROWS, []])
def test_text_and_numbers_do_not_mix(text: str, match: str, rows: list[Row]) -> None:
    with pytest.raises(UsageError, match=match):
        parse_where(text).mask(source(rows, encoded=True))
