"""The catalogue as an Arrow table, which databases and frames of other libraries read in place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ranktape.errors import RunFormatError, UsageError
from ranktape.fields import FieldKind
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.records.frames import UNITS, frame_columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from ranktape.storage.records.labelled import RecordColumns


def records_table(records: RecordColumns) -> pa.Table:
    """One row for each record, one column for each field; `overflow` is a column for each of its numbers.

    Raises:
        RunFormatError: a field is damaged.
        StorageError: a catalogue cannot be read.
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UsageError(f"to_arrow() needs pyarrow ({error}): pip install 'ranktape[parquet]'") from error
    names = frame_columns()
    arrays = [_array(records, name) for name in names]
    fields = [
        pa.field(name, array.type, metadata={"unit": UNITS[name]} if name in UNITS else None)
        for name, array in zip(names, arrays, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _array(records: RecordColumns, name: str) -> pa.Array:
    import pyarrow as pa

    column = records.column(name)
    match COLUMNS[name]:
        case FieldKind.INTEGER:
            return pa.array(column, pa.int64())
        case FieldKind.OPTIONAL_INTEGER:
            # A missing number is NaN in the column, which is then one of floats.
            return pa.array(column, from_pandas=True).cast(pa.int64())
        case FieldKind.REAL | FieldKind.OPTIONAL_REAL as kind:
            return pa.array(column.astype("float64"), from_pandas=kind is FieldKind.OPTIONAL_REAL)
        case FieldKind.CHECKSUM:
            return pa.array([f"crc32c:{value:08x}" for value in column.tolist()], pa.string())
        case FieldKind.TEXT:
            return pa.array(_texts(column), pa.string())
        case FieldKind.JSON:
            return _shapes(records, column) if name == "shape" else pa.array(_texts(column, "null"), pa.string())


def _texts(column: np.ndarray[Any, Any], missing: str | None = None) -> list[str | None]:
    """The texts as UTF-8 can hold them: half of a character, which a stranger's name may hold, becomes an escape."""
    known = {
        text: None if text in {None, missing} else text.encode("utf-8", "backslashreplace").decode()
        for text in set(column.tolist())
    }
    return [known[text] for text in column.tolist()]


def _shapes(records: RecordColumns, column: np.ndarray[Any, Any]) -> pa.Array:
    import pyarrow as pa

    try:
        parsed = {text: json.loads(text) for text in set(column.tolist())}
        return pa.array([parsed[text] for text in column.tolist()], pa.list_(pa.int64()))
    except (RecursionError, ValueError) as error:
        raise RunFormatError(f"the shapes of {records!r} are damaged: {error}: see 'ranktape check'") from error
