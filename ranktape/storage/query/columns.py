"""Columns of records, and the rows of a column that match a condition.

A column has one element for each row: numbers, with NaN for missing values, or text. Text is stored as codes into a
table, so that a condition is evaluated once for each distinct text, or as an array of strings, with None for missing
values.

A missing value compares as not equal to everything, and neither below nor above anything.
"""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from ranktape.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StringColumn:
    """A column of text as codes into a table of distinct texts."""

    codes: np.ndarray[Any, Any]
    """Index into `table` for each row."""
    table: Sequence[str | None]
    """The distinct texts; None for missing values."""

    @classmethod
    def of(cls, values: Iterable[str | None]) -> StringColumn:
        """A column from one text for each row."""
        texts = list(values)
        if texts and texts.count(texts[0]) == len(texts):  # a common case, ten times as fast
            return cls(codes=np.zeros(len(texts), dtype=np.uint32), table=texts[:1])
        codes: dict[str | None, int] = {}
        rows = [codes.setdefault(text, len(codes)) for text in texts]
        return cls(codes=np.array(rows, dtype=np.uint32), table=list(codes))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.codes)


Column: TypeAlias = np.ndarray[Any, Any] | StringColumn
"""One value for each row."""

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
"""Whether each row is selected."""

Number: TypeAlias = int | float

_WIDE_DTYPES: dict[str, type[np.generic]] = {"i": np.int64, "f": np.float64}
"""The dtype for arithmetic, by the kind of the stored dtype."""


class ColumnSource(Protocol):
    """A function from a name to a column, such as `Catalogue.column`."""

    def __call__(self, name: str, /) -> Column:
        """The column, with one element for each row."""
        ...


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""The comparison functions, by operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """The numbers from `first` to `last`, both included, in steps of `step`."""

    first: Number | None = None
    """The lowest number; None for no lower limit."""
    last: Number | None = None
    """The highest number; None for no upper limit."""
    step: int = 1
    """The range has `first`, `first` + `step`, and so on, starting at 0 if `first` is None. With 1, it also has all
    fractions in between."""


def narrowed(column: Column) -> Column:
    """The column in the narrowest dtype: most integers are small, and most floats were 16-bit values.

    Values do not change, including NaN and infinities. Unsigned integers keep their dtype.
    """
    if isinstance(column, StringColumn):
        dtype = np.min_scalar_type(max(0, len(column.table) - 1))
        return StringColumn(codes=column.codes.astype(dtype, copy=False), table=column.table)
    if column.dtype.kind == "i" and len(column):
        # A dtype that can represent ~x can represent a negative x.
        low, high = int(column.min()), int(column.max())
        return column.astype(np.min_scalar_type(min(low, ~high, -1)), copy=False)
    if column.dtype == np.float64:
        with np.errstate(over="ignore"):
            small = column.astype(np.float32)
        return small if np.array_equal(small, column, equal_nan=True) else column
    return column


def widened(column: Column) -> Column:
    """The column in a dtype for arithmetic: 64 bits for signed integers and floats."""
    if isinstance(column, StringColumn) or column.dtype.kind not in _WIDE_DTYPES:
        return column
    return column.astype(_WIDE_DTYPES[column.dtype.kind], copy=False)


def rows_of(column: Column, rows: np.ndarray[Any, Any]) -> Column:
    """Some rows of a column, in a dtype for arithmetic."""
    if isinstance(column, StringColumn):
        return StringColumn(codes=column.codes[rows], table=column.table)
    return widened(column[rows])


def values_of(column: Column) -> list[Any]:
    """The values of all rows as Python objects."""
    if isinstance(column, StringColumn):
        return [column.table[code] for code in column.codes.tolist()]
    return list(column.tolist())


def is_text(column: Column) -> bool:
    """Whether the column has text; otherwise it has numbers."""
    return isinstance(column, StringColumn) or column.dtype.kind in "OUT"


def encode(column: Column) -> StringColumn:
    """A column of text as codes. Missing values have their own code."""
    return column if isinstance(column, StringColumn) else StringColumn.of(column.tolist())


def matching(column: StringColumn, predicate: Callable[[str], bool]) -> Mask:
    """The rows whose text satisfies a predicate, which is called once for each distinct text; never missing values."""
    accepted = np.array([text is not None and predicate(text) for text in column.table], dtype=np.bool_)
    return _as_mask(accepted[column.codes])


def missing(column: Column) -> Mask:
    """The rows without a value."""
    if is_text(column):
        text = encode(column)
        return _as_mask(np.array([entry is None for entry in text.table], dtype=np.bool_)[text.codes])
    assert not isinstance(column, StringColumn)
    return np.isnan(column) if column.dtype.kind == "f" else np.zeros(len(column), dtype=np.bool_)


def compare(column: Column, sign: str, value: str | Number, *, name: str) -> Mask:
    """The rows for which a comparison with one value is true; `sign` is a key of `COMPARISONS`.

    For NaN and missing values only `!=` is true. Text is ordered by code point.

    Raises:
        UsageError: text is compared with a number.
    """
    numbers = _numbers(column, [value], name=name)
    if numbers is not None:
        return _as_mask(COMPARISONS[sign](numbers, _fit(value, numbers)))
    mask = matching(encode(column), lambda entry: bool(COMPARISONS[sign](entry, value)))
    return mask | missing(column) if sign == "!=" else mask


def compare_columns(left: Column, sign: str, right: Column, *, names: tuple[str, str]) -> Mask:
    """The rows for which a comparison of two columns is true. For missing values see `compare`.

    Raises:
        UsageError: one column has text and the other numbers.
    """
    if is_text(left) != is_text(right):
        kinds = {True: "text", False: "numbers"}
        raise UsageError(
            f"{names[0]} holds {kinds[is_text(left)]} and {names[1]} holds {kinds[is_text(right)]}: "
            "compare fields of one kind"
        )
    if not is_text(left):
        return _as_mask(COMPARISONS[sign](left, right))
    texts = (encode(left), encode(right))
    known = sorted({text for side in texts for text in side.table if text is not None})
    order: dict[str | None, int] = {text: index for index, text in enumerate(known)}
    first, second = (
        np.array([order.get(text, -1) for text in side.table], dtype=np.int64)[side.codes] for side in texts
    )
    unknown = (first < 0) | (second < 0)
    mask = _as_mask(COMPARISONS[sign](first, second))
    return _as_mask(mask | unknown if sign == "!=" else mask & ~unknown)


def one_of(column: Column, values: Sequence[str | Number | None], *, name: str) -> Mask:
    """The rows whose value is one of `values`; None matches missing values.

    Raises:
        UsageError: a value is text and the column has numbers, or the reverse.
    """
    known = [value for value in values if value is not None]
    numbers = _numbers(column, known, name=name)
    if numbers is None:
        mask = matching(encode(column), set(known).__contains__)
    else:
        wanted = [_fit(value, numbers) for value in known]
        if numbers.dtype.kind in "iu":
            # In the column's dtype, because numpy would otherwise compare large integers as rounded floats.
            limits = np.iinfo(numbers.dtype)
            wanted = [number for number in wanted if isinstance(number, int) and limits.min <= number <= limits.max]
        mask = np.isin(numbers, np.array(wanted, dtype=numbers.dtype))
    return mask | missing(column) if None in values else mask


def within(column: Column, span: NumberRange, *, name: str) -> Mask:
    """The rows whose number is in a range. Missing values are not.

    Raises:
        UsageError: the column has text.
    """
    numbers = _numbers(column, [0], name=name)
    assert numbers is not None
    mask: Any = ~missing(numbers)
    if span.first is not None:
        mask &= numbers >= _fit(span.first, numbers)
    if span.last is not None:
        mask &= numbers <= _fit(span.last, numbers)
    if span.step != 1:
        # Remainders are compared because a difference could overflow; in 64 bits, which can represent any step.
        wide = numbers.astype(np.int64) if numbers.dtype.kind in "iu" and numbers.dtype.itemsize < _WIDE else numbers
        mask &= np.mod(wide, wide.dtype.type(span.step)) == (span.first or 0) % span.step
    return _as_mask(mask)


_WIDE = 8
"""The size of an integer that can represent any step, in bytes."""


def _numbers(column: Column, values: Sequence[str | Number], *, name: str) -> np.ndarray[Any, Any] | None:
    """The column if it and the values are numbers; None if all are text. True and False are 1 and 0."""
    if is_text(column):
        if other := [value for value in values if not isinstance(value, str)]:
            raise UsageError(
                f"{name} holds text and {other[0]!r} is a number: put it in quotes, {name} == '{other[0]}'"
            )
        return None
    if texts := [value for value in values if isinstance(value, str)]:
        raise UsageError(
            f"{name} holds numbers and {min(texts)!r} is text: leave out the quotes, or name another field"
        )
    assert not isinstance(column, StringColumn)
    return column.view(np.int8) if column.dtype.kind == "b" else column


def glob(pattern: str) -> Callable[[str], bool]:
    """A function that tests whether a text matches a pattern: `*` any text, `?` one character, `[...]` one of these.

    Dots and slashes are ordinary characters, and matching is case-sensitive. The text of the pattern always matches
    itself, so that a name with brackets needs no escape.
    """
    matches = re.compile(fnmatch.translate(pattern)).match
    return lambda text: text == pattern or matches(text) is not None


def _fit(value: Any, column: np.ndarray[Any, Any]) -> Number:
    """The value in a type that numpy compares with the column without rounding."""
    if column.dtype.kind in "iu":
        return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _as_mask(values: Any) -> Mask:
    return np.asarray(values, dtype=np.bool_)


Key = tuple[Any, ...]
"""The values of a group, one for each column; None for missing values."""


def equal_rows(columns: Sequence[Column | Sequence[Any]]) -> list[tuple[Key, np.ndarray[Any, Any]]]:
    """The groups of rows with equal values, sorted by the values: the values and the rows in ascending order.

    A missing value (None or NaN) is None and sorts last; text sorts after numbers. At least one column is required.
    """
    known = [_coded(column) for column in columns]
    codes = np.zeros(len(known[0][0]), dtype=np.int64)
    for codes_of, table in known:
        _, codes = np.unique(codes * max(1, len(table)) + codes_of, return_inverse=True)
        codes = codes.reshape(-1)
    order = np.argsort(codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    keyed_rows = [(tuple(table[int(codes_of[rows[0]])] for codes_of, table in known), rows) for rows in groups]
    return sorted(keyed_rows, key=lambda item: [_order(value) for value in item[0]])


def _coded(column: Column | Sequence[Any]) -> tuple[np.ndarray[Any, Any], Sequence[Any]]:
    """For each row the index of its value, and the values, of which each missing one is None."""
    if isinstance(column, StringColumn):
        return column.codes.astype(np.int64), column.table
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        values, codes = np.unique(column, return_inverse=True)
        return codes.reshape(-1), [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN
    indices: dict[Any, int] = {}
    values_of_rows = column.tolist() if isinstance(column, np.ndarray) else column
    plain = (None if value != value else value for value in values_of_rows)  # noqa: PLR0124 - NaN
    codes = np.fromiter((indices.setdefault(value, len(indices)) for value in plain), np.int64, len(column))
    return codes, list(indices)


def _order(value: Any) -> tuple[bool, bool, Any]:
    return value is None, isinstance(value, str), 0 if value is None else value
