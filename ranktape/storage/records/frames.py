"""Columns of values as a pandas DataFrame, and the catalogue as an Arrow table.

Types do not depend on what is missing.
"""

from __future__ import annotations

import enum
import json
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import RunFormatError, UsageError
from ranktape.fields import FieldKind
from ranktape.storage.format.arrays import crc_text
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.format.record_info import EXTREMES, FIELDS, TALLY_KINDS

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # it has no types
    import pyarrow as pa

    from ranktape.storage.records.labelled import RecordColumns


_INT64 = np.iinfo(np.int64)


class Dtype(enum.StrEnum):
    """What a column of a frame holds, in pandas' words."""

    INTEGER = "Int64"
    """Whole numbers; a missing one is `pandas.NA`."""
    FLOAT = "float64"
    """Real numbers; a missing one is NaN."""
    TEXT = "string"
    """Words; a missing one is `pandas.NA`."""
    OBJECT = "object"
    """Lists and dictionaries, as they are; a missing one is None."""


def data_frame(
    columns: Iterable[tuple[str, Sequence[Any] | np.ndarray[Any, Any], Dtype]], *, attributes: Mapping[str, Any]
) -> pd.DataFrame:
    """A frame of columns, each with its name, its values (None where one is missing) and its type; with attributes.

    Values may be an array of such a type as well: numbers, NaN where one is missing, or texts.

    A column with a value that its type cannot hold is of objects.

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
            # Its type is said: pandas 3 looks for text in objects, and makes None NaN there.
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
    # One by one: numpy takes lists of one length for a further dimension.
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array


UNITS = {"nbytes": "bytes", "timestamp": "seconds since the epoch"}
"""What the numbers of a column count, where its name does not say."""

_DTYPES = {
    FieldKind.INTEGER: Dtype.INTEGER,
    FieldKind.OPTIONAL_INTEGER: Dtype.INTEGER,
    FieldKind.REAL: Dtype.FLOAT,
    FieldKind.OPTIONAL_REAL: Dtype.FLOAT,
    FieldKind.TEXT: Dtype.TEXT,
    FieldKind.CHECKSUM: Dtype.TEXT,
    FieldKind.JSON: Dtype.TEXT,
}
"""The types of columns; shapes are lists of whole numbers."""


def records_frame(records: RecordColumns) -> pd.DataFrame:
    """One row for each record, one column for each field; `overflow` is a column for each of its numbers.

    Raises:
        RunFormatError: a field is damaged.
        StorageError: a catalogue cannot be read.
        UsageError: pandas is not installed.
    """
    return data_frame(_columns(records), attributes={"title": "", "units": dict(UNITS)})


def records_table(records: RecordColumns) -> pa.Table:
    """The columns of `records_frame` as an Arrow table; units are metadata of the columns.

    Raises:
        RunFormatError: a field is damaged.
        StorageError: a catalogue cannot be read.
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
        # A missing number is NaN in the column, which of whole ones is then one of floats.
        is_missing = name not in COLUMNS or COLUMNS[name] is not FieldKind.REAL
        arrays.append(pa.array(values, from_pandas=is_missing).cast(types[dtype]))
        fields.append(pa.field(name, types[dtype], metadata={"unit": UNITS[name]} if name in UNITS else None))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def frame_columns() -> list[str]:
    """The columns of a frame or a table of records: the fields, `overflow` as one for each of its numbers."""
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
    """The texts as UTF-8 can hold them: half of a character, which a stranger's name may hold, becomes an escape."""
    known = {
        text: None if text is None or text == missing else text.encode("utf-8", "backslashreplace").decode()
        for text in set(texts)
    }
    return [known[text] for text in texts]


def _shapes(records: RecordColumns, texts: Sequence[str]) -> list[list[int]]:
    try:
        # Each anew: whoever changes what one row says changes no other.
        return [list(json.loads(text)) for text in texts]
    except (RecursionError, TypeError, ValueError) as error:
        raise RunFormatError(f"the shapes of {records!r} are damaged: {error}: see 'ranktape check'") from error
