"""What is known of the records in some rows of a catalogue?"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.errors import RunFormatError
from ranktape.storage.catalogue import INT_FIELDS, JSON_FIELDS, OPTIONAL_INT_FIELDS, STRING_FIELDS
from ranktape.storage.record import EXTREMES, TALLY_KINDS, Overflow, RecordInfo, Tally
from ranktape.storage.selection.columns import StringColumn
from ranktape.storage.validation import check_info, check_key

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.catalogue import RecordTable

_COUNTS = tuple(f"overflow.{kind}.count" for kind in TALLY_KINDS)
_EXTREMES = tuple(f"overflow.{name}" for name in EXTREMES)
_OTHERS = ("numel", "timestamp", "checksum", "overflow.per_sample", "site", "stack", "index")
_GROUPS = (INT_FIELDS, OPTIONAL_INT_FIELDS, STRING_FIELDS, JSON_FIELDS, _COUNTS, _EXTREMES, _OTHERS)
"""The columns that a record is made of, in groups that are treated alike."""

_NAMES = tuple(itertools.chain.from_iterable(_GROUPS))

_SLICES = tuple(
    slice(sum(map(len, _GROUPS[:number])), sum(map(len, _GROUPS[: number + 1]))) for number in range(len(_GROUPS))
)
"""Where each group is in the values of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record of a catalogue."""

    info: RecordInfo
    """Its identity."""
    site: str
    """The path of the tensor below its rank's iteration."""
    stack: str
    """The array that holds it with others; empty where it has one of its own."""
    index: int
    """Its place in that array; -1 where it has one of its own."""


def read_rows(table: RecordTable, rows: np.ndarray[Any, Any], *, place: str) -> Iterator[Row]:
    """The records in some rows of a catalogue; `place` names it in messages.

    Raises:
        RunFormatError: a column is damaged, or a row says what no record does.
        StorageError: the store cannot be read.
    """
    columns = [_values(table, name, rows) for name in _NAMES]
    for row, values in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
        try:
            yield _row(values)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise RunFormatError(
                f"record {row} of a catalogue of {place} is damaged: {error}: see 'ranktape check'"
            ) from error


def _values(table: RecordTable, name: str, rows: np.ndarray[Any, Any]) -> list[Any]:
    """Of one column, as Python's own: a column is asked once for all of its rows."""
    column = table.column(name)
    if isinstance(column, StringColumn):
        return [column.table[code] for code in column.codes[rows].tolist()]
    values: list[Any] = column[rows].tolist()
    return values


def _row(values: tuple[Any, ...]) -> Row:
    integers, optionals, texts, documents, counts, extremes, others = (values[part] for part in _SLICES)
    numel, timestamp, checksum, per_sample, site, stack, index = others
    # By their places: a name for each of the forty values of a row would take longer than the rest.
    fields: dict[str, Any] = dict(zip(INT_FIELDS, map(int, integers), strict=True))
    fields.update(zip(OPTIONAL_INT_FIELDS, map(_optional_int, optionals), strict=True))
    fields.update(zip(STRING_FIELDS, texts, strict=True))
    shape, *rest = documents
    fields.update(zip(JSON_FIELDS, (_shape(shape), *map(_document, rest)), strict=True))
    overflow: dict[str, Any] = dict(zip(EXTREMES, map(_optional, extremes), strict=True))
    for kind, count in zip(TALLY_KINDS, map(int, counts), strict=True):
        overflow[kind] = Tally(count=count, ratio=count / numel if numel else 0.0)
    info = RecordInfo(
        **fields,
        overflow=Overflow(**overflow, per_sample=_document(per_sample)),
        timestamp=float(timestamp),
        checksum=f"crc32c:{int(checksum):08x}",
    )
    check_info(info)
    return Row(info=info, site=check_key(site), stack=stack and check_key(stack), index=int(index))


def _optional(number: Any) -> float | None:
    value = float(number)
    return None if math.isnan(value) else value


def _optional_int(number: Any) -> int | None:
    value = _optional(number)
    return None if value is None else int(value)


def _document(text: str) -> Any:
    # Made anew for each record: whoever changes what one of them says changes no other.
    return None if text == "null" else json.loads(text)


@functools.lru_cache(maxsize=1 << 12)
def _shape(text: str) -> tuple[int, ...]:
    shape = json.loads(text)
    if not isinstance(shape, list):
        raise TypeError(f"shape {text[:60]}")
    return tuple(shape)
