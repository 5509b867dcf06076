"""The refusal of what somebody's document or catalogue says and none of ours would.

Whoever writes a run can write its checksums too, so that they say nothing about sense. Everything that is read is
compared with what it may be before it is counted with, allocated by or used as an index.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from ranktape.fields import FieldKind
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.record_info import TALLY_KINDS, Keep, Mode, Operation
from ranktape.storage.query.columns import ColumnSource, StringColumn

MAX_INTEGER = 2**63 - 1
"""Of any number in a document or a catalogue."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
"""A whole number in a document that is not negative."""

MAX_WORLD_SIZE = 1 << 17
"""Ranks of an attempt: a document that says more is refused, as every rank costs time and memory when it is told of."""

MAX_DIMENSIONS = 64
"""Of a tensor: numpy and torch have no more."""

MAX_NESTING = 128
"""Lists and dictionaries inside of one another in a document: Python fails at some hundreds when it copies them."""

MAX_SAID_NESTING = 64
"""The same in what is said of a tensor, which is written inside of a document."""

_NESTED = (dict, list, tuple)

_MANY_NESTED = 1 << 12
"""Lists and dictionaries of one level among which those are sought that are the same."""

_SHOWN = 60
"""Characters of a wrong value that are shown."""

WORDS = {
    "dtype": frozenset(DTYPES),
    "operation": frozenset(operation.value for operation in Operation),
    "keep": frozenset(keep.value for keep in Keep),
    "mode": frozenset(mode.value for mode in Mode),
}
"""What may stand in columns of closed vocabularies."""

_TALLIES = frozenset(TALLY_KINDS)
_MAX_ITEMSIZE = max(row.itemsize for row in DTYPES.values())


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON says.

    Raises:
        ValueError: it is not JSON, or nested deeper than `MAX_NESTING`.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"lists and dictionaries nested deeper than {MAX_NESTING}") from error
    num_opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if num_opened > MAX_NESTING:
        check_nesting(value)
    return value


def check_nesting(value: Any, *, limit: int = MAX_NESTING) -> None:
    """Make sure that a value can be written, copied and shown.

    Raises:
        ValueError: it is nested deeper than the limit.
    """
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(limit):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [one for values in inner for one in values if isinstance(one, _NESTED)]
        if len(level) > _MANY_NESTED:
            # One list may be in many others; JSON that was parsed has none.
            level = list({id(one): one for one in level}.values())
        if not level:
            return
    raise ValueError(f"lists and dictionaries nested deeper than {limit}")


def check_numbers(values: np.ndarray[Any, Any], kind: FieldKind, *, low: int = 0, high: int = MAX_INTEGER) -> None:
    """Make sure that a column holds what a field of that kind can; whole numbers lie between two.

    Raises:
        ValueError: it does not; its dtype or the number is in the text.
    """
    is_whole = kind in {FieldKind.INTEGER, FieldKind.CHECKSUM}
    if values.dtype.kind not in ("iu" if is_whole else "f"):
        raise ValueError(f"{values.dtype} instead of {'whole numbers' if is_whole else 'floats'}")
    if is_whole and len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
        raise ValueError(f"numbers from {values.min()} to {values.max()}, allowed are {low} to {high}")
    if kind is FieldKind.OPTIONAL_INTEGER:
        # As the widest: in 16 bits there is no number to compare with.
        present = values[~np.isnan(values)].astype(np.float64)
        if not ((present >= 0) & (present < 2.0**53) & (present == np.floor(present))).all():
            raise ValueError("numbers that are not whole, or negative, or too large")


def check_records(source: ColumnSource) -> None:
    """Make sure that records in columns say what records can, and that their fields fit together.

    Names of sites and stacks are written in ASCII, and none leads upwards. Columns of numbers have been looked at one
    by one; what is JSON in a column is left to `parse_column`.

    Raises:
        ValueError: one does not.
    """
    for name, words in WORDS.items():
        if unknown := used_texts(source, name) - words:
            raise ValueError(f"{name} {min(unknown)!r:.{_SHOWN}}")
    for name in ("site", "stack"):
        for path in used_texts(source, name) - ({""} if name == "stack" else set()):
            if not (path.isascii() and path.isprintable()) or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"the path {path!r:.{_SHOWN}}")
    shapes, sample_dim = _text(source, "shape"), source("sample_dim")
    assert not isinstance(sample_dim, StringColumn)
    used = set(np.unique(shapes.codes).tolist())
    num_dims = np.array(
        [len(parse_shape(text)) if code in used else 0 for code, text in enumerate(shapes.table)], dtype=np.float64
    )
    if (sample_dim >= num_dims[shapes.codes]).any():
        raise ValueError("a sample_dim that is none of the tensor's dimensions")


def _text(source: ColumnSource, name: str) -> StringColumn:
    column = source(name)
    assert isinstance(column, StringColumn)
    return column


def used_texts(source: ColumnSource, name: str) -> set[str]:
    """The texts that rows of a column have."""
    column = _text(source, name)
    return {str(column.table[code]) for code in np.unique(column.codes).tolist()}


@functools.lru_cache(maxsize=1 << 12)
def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of a tensor, from the JSON list in a catalogue.

    Raises:
        ValueError: no tensor has such a shape.
    """
    shape = parse_json(text)
    if not isinstance(shape, list):
        raise TypeError(f"shape {text[:_SHOWN]}")
    check_shape(shape)
    return tuple(shape)


def check_shape(shape: Sequence[Any], *, itemsize: int = _MAX_ITEMSIZE) -> None:
    """Make sure that a tensor with elements of so many bytes can have a shape.

    Raises:
        ValueError: none can.
    """
    if len(shape) > MAX_DIMENSIONS or not all(type(extent) is int and 0 <= extent <= MAX_INTEGER for extent in shape):
        raise ValueError(f"shape {str(list(shape[:MAX_DIMENSIONS]))[:_SHOWN]}")
    # Also of a tensor without elements: numpy counts its other extents.
    if math.prod(max(1, extent) for extent in shape) * itemsize > MAX_INTEGER:
        raise ValueError(f"shape {str(list(shape))[:_SHOWN]}, which no memory holds")


_JSON = {
    "sample_ids": list[int | str],
    "placement": dict[str, Any],
    "metadata": dict[str, Any],
    "overflow.per_sample": dict[str, list[Count]],
}
"""What JSON in a column says, where it does not say null."""


def parse_column(name: str, text: str) -> Any:
    """What JSON in a column of that name says, if a record can say it.

    Raises:
        TypeError, ValueError: it cannot.
    """
    if name == "shape":
        return parse_shape(text)
    value = None if text == "null" else msgspec.convert(parse_json(text), _JSON[name])
    if name == "overflow.per_sample" and value is not None and set(value) != _TALLIES:
        raise ValueError(f"counts of single samples of {', '.join(value)}, not of {', '.join(TALLY_KINDS)}")
    return value
