"""What is known of the records in some rows of a catalogue, one value for each of them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ranktape.errors import RunFormatError
from ranktape.fields import INT_FIELDS, JSON_FIELDS, OPTIONAL_INT_FIELDS, STRING_FIELDS
from ranktape.storage.format.catalogue import CatalogueEntry
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS, ElementTally, Overflow, RecordInfo
from ranktape.storage.format.validation import check_document, check_records, parse_shape
from ranktape.storage.query.columns import Column, rows_of, values_of

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.format.catalogue import RecordTable

_COUNTS = tuple(f"overflow.{kind}.count" for kind in TALLY_KINDS)
_EXTREMES = tuple(f"overflow.{name}" for name in EXTREMES)
_OTHERS = ("numel", "timestamp", "checksum", "overflow.per_sample", "site", "stack", "index")
_NAMES = (*INT_FIELDS, *OPTIONAL_INT_FIELDS, *STRING_FIELDS, *JSON_FIELDS, *_COUNTS, *_EXTREMES, *_OTHERS)
"""The columns that a record is made of."""

_NO_TALLY = ElementTally(count=0, ratio=0.0)
"""Of most kinds, in most tensors."""


def read_rows(table: RecordTable, rows: np.ndarray[Any, Any], *, place: str) -> Iterator[CatalogueEntry]:
    """The records in some rows of a catalogue; `place` names it in messages.

    Raises:
        RunFormatError: a column is damaged, or a row says what no record does.
    """
    columns = {name: rows_of(table.column(name), rows) for name in _NAMES}
    try:
        check_records(columns.__getitem__)
        infos = _infos(columns, len(rows))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise RunFormatError(f"a catalogue of {place} is damaged: {error}: see 'ranktape check'") from error
    sites, stacks, indices = (values_of(columns[name]) for name in ("site", "stack", "index"))
    for info, site, stack, index in zip(infos, sites, stacks, indices, strict=True):
        yield CatalogueEntry(info=info, site=site, stack=stack, index=index)


def _infos(columns: dict[str, Column], num_rows: int) -> list[RecordInfo]:
    """The identities, made field by field: record by record takes several times as long."""
    infos = [object.__new__(RecordInfo) for _ in range(num_rows)]
    for name in (*INT_FIELDS, *STRING_FIELDS, "timestamp"):
        _set(infos, name, values_of(columns[name]))
    for name in OPTIONAL_INT_FIELDS:
        _set(infos, name, (None if math.isnan(value) else int(value) for value in values_of(columns[name])))
    _set(infos, "shape", map(parse_shape, values_of(columns["shape"])))
    for name in JSON_FIELDS:
        if name != "shape":
            _set(infos, name, _documents(name, columns[name]))
    _set(infos, "overflow", _overflows(columns, num_rows))
    _set(infos, "checksum", (f"crc32c:{value:08x}" for value in values_of(columns["checksum"])))
    return infos


def _overflows(columns: dict[str, Column], num_rows: int) -> list[Overflow]:
    overflows = [object.__new__(Overflow) for _ in range(num_rows)]
    sizes = values_of(columns["numel"])
    for kind in TALLY_KINDS:
        counts = values_of(columns[f"overflow.{kind}.count"])
        _set(overflows, kind, map(_tally, counts, sizes))
    for name in EXTREMES:
        values = values_of(columns[f"overflow.{name}"])
        _set(overflows, name, (None if math.isnan(value) else value for value in values))
    _set(overflows, "per_sample", _documents("overflow.per_sample", columns["overflow.per_sample"]))
    return overflows


def _tally(count: int, size: int) -> ElementTally:
    return ElementTally(count=count, ratio=count / size if size else 0.0) if count else _NO_TALLY


def _set(items: list[Any], name: str, values: Iterable[Any]) -> None:
    """Give each of some frozen values its own of one field."""
    if items:
        deque(map(getattr(type(items[0]), name).__set__, items, values), maxlen=0)


def _documents(name: str, column: Column) -> Iterator[Any]:
    # Made anew for each record: whoever changes what one of them says changes no other.
    return (None if text == "null" else check_document(name, json.loads(text)) for text in values_of(column))
