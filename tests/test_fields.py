"""The table of a record's fields says the same as the record itself."""

from __future__ import annotations

import dataclasses

from ranktape.fields import RECORD_FIELDS, FieldKind
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.format.record_info import RecordInfo

KINDS = {
    "int": FieldKind.INTEGER,
    "int | None": FieldKind.OPTIONAL_INTEGER,
    "float": FieldKind.REAL,
    "str": FieldKind.TEXT,
    "list[int | str] | None": FieldKind.JSON,
    "dict[str, Any] | None": FieldKind.JSON,
    "tuple[int, ...]": FieldKind.JSON,
}


def test_the_table_has_the_fields_of_a_record() -> None:
    expected = {
        field.name: KINDS[str(field.type)] for field in dataclasses.fields(RecordInfo) if field.name != "overflow"
    }
    assert {field.name: field.kind for field in RECORD_FIELDS} == expected | {"checksum": FieldKind.CHECKSUM}
    assert len(RECORD_FIELDS) == len(expected)


def test_a_record_has_them_as_columns() -> None:
    assert {field.name for field in RECORD_FIELDS} <= set(COLUMNS)
