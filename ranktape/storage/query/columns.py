"""Finds the rows of a column that hold what is asked for.

A column is an array with one element for each row: numbers, where NaN stands for a missing value, or text. Text
comes as codes into a table, so that a question is asked once for each different text and not once for each row,
or as an array of strings, where None stands for a missing value.

Missing values are equal to nothing, neither below nor above anything, and different from everything.
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
    """A column of text, each different text written once."""

    codes: np.ndarray[Any, Any]
    """For each row the index of its text in `table`."""
    table: Sequence[str | None]
    """The texts; None where the value is missing."""

    @classmethod
    def of(cls, values: Iterable[str | None]) -> StringColumn:
        """The column that holds one text for each row."""
        texts = list(values)
        if texts and texts.count(texts[0]) == len(texts):  # as most are, in a tenth of the time
            return cls(codes=np.zeros(len(texts), dtype=np.uint32), table=texts[:1])
        codes: dict[str | None, int] = {}
        rows = [codes.setdefault(text, len(codes)) for text in texts]
        return cls(codes=np.array(rows, dtype=np.uint32), table=list(codes))

    def __len__(self) -> int:
        """Rows."""
        return len(self.codes)


Column: TypeAlias = np.ndarray[Any, Any] | StringColumn
"""One value for each row."""

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
"""For each row whether it is meant."""

Number: TypeAlias = int | float

_WIDE_DTYPES: dict[str, type[np.generic]] = {"i": np.int64, "f": np.float64}
"""By the kind of a dtype."""


class ColumnSource(Protocol):
    """Gives the column of a name; `Catalogue.column` is one."""

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
"""How two values are compared, by the sign that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """Numbers from one to another, both included; every so manieth one where there is a step."""

    first: Number | None = None
    """The lowest; None for no lower limit."""
    last: Number | None = None
    """The highest; None for no upper limit."""
    step: int = 1
    """Only `first`, `first` + `step`, ... are meant; counted from 0 where there is no `first`; 1 means everything
    in between, fractions too."""


def narrowed(column: Column) -> Column:
    """The same values in the fewest bytes: most integers are small, and most floats were 16-bit values.

    Unsigned integers, NaN and infinities stay what they are.
    """
    if isinstance(column, StringColumn):
        dtype = np.min_scalar_type(max(0, len(column.table) - 1))
        return StringColumn(codes=column.codes.astype(dtype, copy=False), table=column.table)
    if column.dtype.kind == "i" and len(column):
        # The type that holds ~x holds x, if it is negative.
        low, high = int(column.min()), int(column.max())
        return column.astype(np.min_scalar_type(min(low, ~high, -1)), copy=False)
    if column.dtype == np.float64:
        with np.errstate(over="ignore"):
            small = column.astype(np.float32)
        return small if np.array_equal(small, column, equal_nan=True) else column
    return column


def widened(column: Column) -> Column:
    """The same values in the types that are computed with: 64 bits for signed integers and floats."""
    if isinstance(column, StringColumn) or column.dtype.kind not in _WIDE_DTYPES:
        return column
    return column.astype(_WIDE_DTYPES[column.dtype.kind], copy=False)


def rows_of(column: Column, rows: np.ndarray[Any, Any]) -> Column:
    """Some rows of a column, in the types that are computed with."""
    if isinstance(column, StringColumn):
        return StringColumn(codes=column.codes[rows], table=column.table)
    return widened(column[rows])


def values_of(column: Column) -> list[Any]:
    """The values of all rows as Python's own."""
    if isinstance(column, StringColumn):
        return [column.table[code] for code in column.codes.tolist()]
    return list(column.tolist())


def is_text(column: Column) -> bool:
    """Whether the column holds text; otherwise it holds numbers."""
    return isinstance(column, StringColumn) or column.dtype.kind in "OUT"


def encode(column: Column) -> StringColumn:
    """The column of text as codes; missing ones keep a code of their own."""
    return column if isinstance(column, StringColumn) else StringColumn.of(column.tolist())


def matching(column: StringColumn, predicate: Callable[[str], bool]) -> Mask:
    """The rows whose text the predicate accepts; it is asked once for each text, and never for a missing one."""
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
    """The rows whose value compares so with one value; `sign` is one of `COMPARISONS`.

    NaN and missing rows are different from everything, and nothing else. Texts are ordered by code point.

    Raises:
        UsageError: text against a number.
    """
    numbers = _numbers(column, [value], name=name)
    if numbers is not None:
        return _as_mask(COMPARISONS[sign](numbers, _fit(value, numbers)))
    found = matching(encode(column), lambda entry: bool(COMPARISONS[sign](entry, value)))
    return found | missing(column) if sign == "!=" else found


def compare_columns(left: Column, sign: str, right: Column, *, names: tuple[str, str]) -> Mask:
    """The rows in which the value of one column compares so with that of another; missing ones as in `compare`.

    Raises:
        UsageError: one column holds text, the other numbers.
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
    order: dict[str | None, int] = {text: place for place, text in enumerate(known)}
    first, second = (
        np.array([order.get(text, -1) for text in side.table], dtype=np.int64)[side.codes] for side in texts
    )
    unknown = (first < 0) | (second < 0)
    found = _as_mask(COMPARISONS[sign](first, second))
    return _as_mask(found | unknown if sign == "!=" else found & ~unknown)


def one_of(column: Column, values: Sequence[str | Number | None], *, name: str) -> Mask:
    """The rows that hold one of the values; None stands for the missing ones.

    Raises:
        UsageError: text for a column of numbers, or the other way round.
    """
    known = [value for value in values if value is not None]
    numbers = _numbers(column, known, name=name)
    if numbers is None:
        found = matching(encode(column), set(known).__contains__)
    else:
        wanted = [_fit(value, numbers) for value in known]
        if numbers.dtype.kind in "iu":
            # In the column's own type, or numpy would compare large integers as rounded floats.
            limits = np.iinfo(numbers.dtype)
            wanted = [one for one in wanted if isinstance(one, int) and limits.min <= one <= limits.max]
        found = np.isin(numbers, np.array(wanted, dtype=numbers.dtype))
    return found | missing(column) if None in values else found


def within(column: Column, span: NumberRange, *, name: str) -> Mask:
    """The rows whose number lies in the span; never the missing ones.

    Raises:
        UsageError: the column holds text.
    """
    numbers = _numbers(column, [0], name=name)
    assert numbers is not None
    found: Any = ~missing(numbers)
    if span.first is not None:
        found &= numbers >= _fit(span.first, numbers)
    if span.last is not None:
        found &= numbers <= _fit(span.last, numbers)
    if span.step != 1:
        # Remainders of both, as the difference could leave the column's type; in 64 bits, which hold any step.
        wide = numbers.astype(np.int64) if numbers.dtype.kind in "iu" and numbers.dtype.itemsize < _WIDE else numbers
        found &= np.mod(wide, wide.dtype.type(span.step)) == (span.first or 0) % span.step
    return _as_mask(found)


_WIDE = 8
"""Bytes of an integer that any step fits into."""


def _numbers(column: Column, values: Sequence[str | Number], *, name: str) -> np.ndarray[Any, Any] | None:
    """The column, if it holds numbers, and the values too; None if all are text. True and false are 1 and 0."""
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
    """Whether a text matches the pattern: `*` any text, `?` one character, `[...]` one of these.

    Dots and slashes are characters as any other, case counts, and the pattern itself always matches, so that a
    name with brackets can be written as it is.
    """
    matches = re.compile(fnmatch.translate(pattern)).match
    return lambda text: text == pattern or matches(text) is not None


def _fit(value: Any, column: np.ndarray[Any, Any]) -> Number:
    """The value as numpy compares it with the column without rounding either."""
    if column.dtype.kind in "iu":
        return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _as_mask(found: Any) -> Mask:
    return np.asarray(found, dtype=np.bool_)


Key = tuple[Any, ...]
"""The values of a group, one for each column; None for a missing one."""


def equal_rows(columns: Sequence[Column | Sequence[Any]]) -> list[tuple[Key, np.ndarray[Any, Any]]]:
    """For each group of rows with equal values, sorted by these, the values and the rows that hold them, ascending.

    A missing value (None or NaN) is None, and after all others; text comes after numbers. At least one column.
    """
    known = [_coded(column) for column in columns]
    codes = np.zeros(len(known[0][0]), dtype=np.int64)
    for own, table in known:
        _, codes = np.unique(codes * max(1, len(table)) + own, return_inverse=True)
        codes = codes.reshape(-1)
    order = np.argsort(codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    found = [(tuple(table[int(own[rows[0]])] for own, table in known), rows) for rows in groups]
    return sorted(found, key=lambda item: [_order(value) for value in item[0]])


def _coded(column: Column | Sequence[Any]) -> tuple[np.ndarray[Any, Any], Sequence[Any]]:
    """For each row the index of its value, and the values, of which each missing one is None."""
    if isinstance(column, StringColumn):
        return column.codes.astype(np.int64), column.table
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        values, codes = np.unique(column, return_inverse=True)
        return codes.reshape(-1), [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN
    found: dict[Any, int] = {}
    values_of_rows = column.tolist() if isinstance(column, np.ndarray) else column
    plain = (None if value != value else value for value in values_of_rows)  # noqa: PLR0124 - NaN
    codes = np.fromiter((found.setdefault(value, len(found)) for value in plain), np.int64, len(column))
    return codes, list(found)


def _order(value: Any) -> tuple[bool, bool, Any]:
    return value is None, isinstance(value, str), 0 if value is None else value
