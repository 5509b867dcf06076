"""Records as tables: in HTML for notebooks, as a pandas DataFrame, and as an Arrow table.

The type of a column does not depend on missing values. Runs are not trusted: in HTML, all strings are escaped, and long
ones are truncated.
"""

from __future__ import annotations

import enum
import json
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import RunFormatError, UsageError
from ranktape.fields import FieldKind
from ranktape.storage.format.arrays import crc_text
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.format.record_info import EXTREMES, FIELDS, TALLY_KINDS
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # it has no types
    import pyarrow as pa

    from ranktape.storage.records.labelled import RecordColumns


MAX_SHOWN_ROWS = 20
"""The number of rows that a notebook or an interpreter shows."""

MAX_SHOWN_LETTERS = 200
"""The number of characters that are shown of one field."""

_MAX_NAMED = 8
"""The number of iterations that are named one by one."""

_LEFT = "text-align: left"
_RIGHT = "text-align: right"


def clipped(text: str, max_letters: int = MAX_SHOWN_LETTERS) -> str:
    """The text on one line, truncated to `max_letters` characters."""
    shown = printable(text[: max_letters + 1])
    return shown if len(shown) <= max_letters else shown[: max_letters - 3] + "..."


def html_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    is_left: Sequence[bool],
    heading: Sequence[str] = (),
    notes: Sequence[str] = (),
    is_unfolded: bool = True,
) -> str:
    """An HTML table with lines of text above and below it. All text is escaped.

    If there is a line above, the table folds into the first one.
    """

    def cells(texts: Sequence[str], *, tag: str) -> str:
        styled = zip(texts, is_left, strict=True)
        return "".join(f'<{tag} style="{_LEFT if left else _RIGHT}">{escape(text)}</{tag}>' for text, left in styled)

    head = f"<thead><tr>{cells(heads, tag='th')}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{cells(row, tag='td')}</tr>" for row in rows)
    above = "".join(f"<div>{escape(text)}</div>" for text in heading[1:])
    below = "".join(f"<div><i>{escape(text)}</i></div>" for text in notes)
    shown = f"{above}<table>{head}<tbody>{body}</tbody></table>{below}"
    if not heading:
        return f"<div>{shown}</div>"
    is_open = " open" if is_unfolded else ""
    return f"<details{is_open}><summary><b>{escape(heading[0])}</b></summary>{shown}</details>"


def spans(iterations: Sequence[int]) -> str:
    """A text that names iterations: each of them, or the first, the last and the number of many."""
    if not iterations:
        return "none"
    if len(iterations) <= _MAX_NAMED:
        return ", ".join(map(str, iterations))
    return f"{iterations[0]} to {iterations[-1]} ({len(iterations)} of them)"


def fields_html(title: str, fields: dict[str, Any], *, is_unfolded: bool = True) -> str:
    """An HTML table of named values that folds into its title. Missing and empty values are omitted."""
    known = {name: value for name, value in fields.items() if value is not None and value != ""}
    rows = [
        (clipped(str(name)), clipped(value if isinstance(value, str) else json.dumps(value)))
        for name, value in known.items()
    ]
    return html_table(("", ""), rows, is_left=(True, True), heading=[title], is_unfolded=is_unfolded)


_INT64 = np.iinfo(np.int64)


class Dtype(enum.StrEnum):
    """The dtype of a column of a frame, as named by pandas."""

    INTEGER = "Int64"
    """Integers; missing values are `pandas.NA`."""
    FLOAT = "float64"
    """Real numbers; missing values are NaN."""
    TEXT = "string"
    """Strings; missing values are `pandas.NA`."""
    OBJECT = "object"
    """Lists and dictionaries; missing values are None."""


def data_frame(
    columns: Iterable[tuple[str, Sequence[Any] | np.ndarray[Any, Any], Dtype]], *, attributes: Mapping[str, Any]
) -> pd.DataFrame:
    """A data frame with attributes, from columns of a name, values (None if missing) and a dtype.

    Values may also be an array: numbers, with NaN for missing values, or strings.

    A column with a value that its dtype cannot represent has dtype object.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError(f"to_pandas() needs pandas ({error}): pip install 'ranktape[notebook]'") from error
    arrays: dict[str, Any] = {}
    for name, values, dtype in columns:
        if isinstance(values, np.ndarray):
            arrays[name] = values if dtype is Dtype.FLOAT else pd.array(values, dtype=dtype.value)
        elif dtype is Dtype.OBJECT or not all(value is None or _fits(value, dtype) for value in values):
            # With dtype=object, because pandas 3 would infer strings and turn None into NaN.
            arrays[name] = pd.Series(_objects(values), dtype=object)
        elif dtype is Dtype.FLOAT:
            arrays[name] = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
        else:
            arrays[name] = pd.array(list(values), dtype=dtype.value)
    frame = pd.DataFrame(arrays)
    frame.attrs.update(attributes)
    return frame


def _fits(value: Any, dtype: Dtype) -> bool:
    match dtype:
        case Dtype.INTEGER:
            return isinstance(value, numbers.Integral) and _INT64.min <= int(value) <= _INT64.max
        case Dtype.FLOAT:
            return isinstance(value, numbers.Real)
        case Dtype.TEXT:
            return isinstance(value, str)
        case Dtype.OBJECT:
            return True


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    # Filled one by one, because numpy takes lists of equal length for another dimension.
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array


UNITS = {"nbytes": "bytes", "timestamp": "seconds since the epoch"}
"""The units of columns whose names do not give them."""

_DTYPES = {
    FieldKind.INTEGER: Dtype.INTEGER,
    FieldKind.OPTIONAL_INTEGER: Dtype.INTEGER,
    FieldKind.REAL: Dtype.FLOAT,
    FieldKind.OPTIONAL_REAL: Dtype.FLOAT,
    FieldKind.TEXT: Dtype.TEXT,
    FieldKind.CHECKSUM: Dtype.TEXT,
    FieldKind.JSON: Dtype.TEXT,
}
"""The dtypes of columns. Shapes are lists of integers."""


def records_frame(records: RecordColumns) -> pd.DataFrame:
    """A data frame with a row for each record and a column for each field and each number of `overflow`.

    Raises:
        UsageError: pandas is not installed.
    """
    return data_frame(_columns(records), attributes={"title": "", "units": dict(UNITS)})


def records_table(records: RecordColumns) -> pa.Table:
    """The columns of `records_frame` as an Arrow table, with units as metadata of the columns.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UsageError(f"to_arrow() needs pyarrow ({error}): pip install 'ranktape[parquet]'") from error
    types = {
        Dtype.INTEGER: pa.int64(),
        Dtype.FLOAT: pa.float64(),
        Dtype.TEXT: pa.string(),
        Dtype.OBJECT: pa.list_(pa.int64()),
    }
    arrays, fields = [], []
    for name, values, dtype in _columns(records):
        # Missing numbers are NaN, so that optional integers are floats in the column.
        is_missing = name not in COLUMNS or COLUMNS[name] is not FieldKind.REAL
        arrays.append(pa.array(values, from_pandas=is_missing).cast(types[dtype]))
        fields.append(pa.field(name, types[dtype], metadata={"unit": UNITS[name]} if name in UNITS else None))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def frame_columns() -> list[str]:
    """The columns of a frame or a table of records: the fields, with one column for each number of `overflow`."""
    kinds = [f"overflow.{kind}.{what}" for kind in TALLY_KINDS for what in ("count", "ratio")]
    counts = [*kinds, "overflow.total", "overflow.ratio", *(f"overflow.{name}" for name in EXTREMES)]
    return [name for field in FIELDS for name in (counts if field == "overflow" else [field])]


def _columns(records: RecordColumns) -> Iterator[tuple[str, Sequence[Any] | np.ndarray[Any, Any], Dtype]]:
    if records.files:
        yield "file", [file.site for file in records.files], Dtype.TEXT
    for name in frame_columns():
        column, kind = records.column(name), COLUMNS[name]
        if name == "shape":
            yield name, _shapes(records, column.tolist()), Dtype.OBJECT
        elif kind is FieldKind.CHECKSUM:
            yield name, [crc_text(crc) for crc in column.tolist()], Dtype.TEXT
        elif _DTYPES[kind] is Dtype.TEXT:
            yield name, _texts(column.tolist(), missing="null" if kind is FieldKind.JSON else None), Dtype.TEXT
        else:
            yield name, column, _DTYPES[kind]


def _texts(texts: Sequence[str | None], *, missing: str | None) -> list[str | None]:
    """The texts in valid UTF-8: lone surrogates become escapes."""
    known = {
        text: None if text is None or text == missing else text.encode("utf-8", "backslashreplace").decode()
        for text in set(texts)
    }
    return [known[text] for text in texts]


def _shapes(records: RecordColumns, texts: Sequence[str]) -> list[list[int]]:
    try:
        # Parsed for each row, so that a change to one row's value does not affect others.
        return [list(json.loads(text)) for text in texts]
    except (RecursionError, TypeError, ValueError) as error:
        raise RunFormatError(f"the shapes of {records!r} are damaged: {error}: see 'ranktape check'") from error
