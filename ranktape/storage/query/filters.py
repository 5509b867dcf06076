"""Parses filters such as `rank="0-3"`, `module="layers.*.attn"` or `--iteration 10:20:2`.

A filter is a field and its allowed values:

    a number, a string, None    this value; None is a missing value
    a list, tuple or set        any of its items
    "0-3"                       numeric fields: 0, 1, 2 and 3, both ends included
    "10:20:2"                   numeric fields: as Python's slices, 10, 12, ... below 20; also ":20" and "10:"
    "0,2,5-7"                   numeric fields: any of these
    range(4), slice(10, 20)     as in Python; a missing bound is no limit
    "layers.*.attn"             text fields: `*` any text, `?` one character, `[...]` one of these; dots are ordinary
                                characters, and a string with brackets also matches itself
    "grad_*,output"             text fields: any of these; a comma in brackets does not separate, and a string with
                                commas also matches itself

A string has the same meaning on the command line, in a file and in Python, alone or in a list. Negative numbers are not
counted from the end: layer_idx -1 is outside the stack. `ranktape.storage.query.where` has the grammar of expressions.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ranktape.errors import UnknownFieldError, UsageError
from ranktape.storage.query import columns
from ranktape.storage.query.columns import ColumnSource, Mask, Number, NumberRange, StringColumn

MAX_TEXT_LENGTH = 10_000
"""The longest alternative, in characters."""

Alternative: TypeAlias = "str | Number | NumberRange | None"
"""One allowed value, or a range of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A field and its allowed values."""

    field: str
    """Dotted name of the field."""
    alternatives: tuple[Alternative, ...]
    """The alternatives as they were given. A string is parsed when the kind of the field is known."""

    @property
    def parts(self) -> tuple[Alternative, ...]:
        """The alternatives, with strings split at commas."""
        return split_texts(self.alternatives)

    def mask(self, source: ColumnSource, num_rows: int) -> Mask:
        """The rows whose value is one of the alternatives; no rows without alternatives.

        Raises:
            UsageError: the field cannot have an alternative.
        """
        column = source(self.field)
        assert len(column) == num_rows, f"column {self.field} has {len(column)} rows, not {num_rows}"
        if columns.is_text(column):
            return self._find_text(columns.encode(column))
        numbers = [_read_number(part, field=self.field) if isinstance(part, str) else part for part in self.parts]
        spans = [part for part in numbers if isinstance(part, NumberRange)]
        mask = columns.one_of(column, [part for part in numbers if not isinstance(part, NumberRange)], name=self.field)
        for span in spans:
            mask |= columns.within(column, span, name=self.field)
        return mask

    def _find_text(self, column: StringColumn) -> Mask:
        texts = [text for text in self.parts if isinstance(text, str)]
        if not all(isinstance(alternative, str | None) for alternative in self.alternatives):
            raise UsageError(f"{self.field} holds text, not numbers: give it in quotes, such as {self.field}='0'")
        globs = [columns.glob(text) for text in texts if _GLOB.search(text)]
        literal_texts = frozenset((*texts, *self.alternatives))
        mask = columns.matching(column, lambda text: text in literal_texts or any(matches(text) for matches in globs))
        return mask | columns.missing(column) if None in self.alternatives else mask


_COMMA = re.compile(r",(?![^\[\]]*\])")
_GLOB = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf")
_DASH = re.compile(r"([+-]?\d+)-([+-]?\d+)")
_SLICE = re.compile(r"([+-]?\d+)?:([+-]?\d+)?(?::(\+?\d+)?)?")
_MAX_MAGNITUDE = 2**63
_EXPECTED = "give a number, a range such as 0-3 or 10:20:2, a list such as 0,2,5, or none for missing values"


def parse_filter(field: str, value: Any, *, known: Collection[str] | None = None) -> Filter:
    """Parse a filter from a value or several alternatives, in the syntax of this module.

    NaN is a missing value, like None. An empty list selects nothing.

    Raises:
        UnknownFieldError: the field is not one of `known`.
        UsageError: no field can have the value.
    """
    if known is not None:
        check_fields([field], known=known)
    several = isinstance(value, list | tuple | set | frozenset) or (isinstance(value, np.ndarray) and value.ndim == 1)
    values = value if several else [value]
    return Filter(field=field, alternatives=tuple(_alternative(entry, field=field) for entry in values))


def split_texts(values: Iterable[Any]) -> tuple[Any, ...]:
    """The alternatives, with strings split at commas outside brackets."""
    return tuple(part for value in values for part in (_split(value) if isinstance(value, str) else (value,)))


@functools.lru_cache(maxsize=1 << 10)
def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in _COMMA.split(text))


def expect_list(names: Iterable[str]) -> None:
    """Raise `UsageError` for one name in place of a list of names, which would be read as a list of letters."""
    if isinstance(names, str):
        raise UsageError(f"{names!r:.60} is a text, not a list of fields: give [{names!r:.60}]")


def check_fields(names: Iterable[str], *, known: Collection[str]) -> None:
    """Check that names are fields.

    Raises:
        UnknownFieldError: a name is not. The message lists fields with similar names.
        UsageError: `names` is one name.
    """
    expect_list(names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            near += [field for field in sorted(known) if name in field.split(".") and field not in near]
            hint = f"did you mean {' or '.join(near[:3])}?" if near else f"use one of {', '.join(sorted(known))}"
            raise UnknownFieldError(f"records have no field {name!r}: {hint}")


def _alternative(value: Any, *, field: str) -> Alternative:
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, str):
        if len(plain) > MAX_TEXT_LENGTH:
            raise UsageError(f"{field} is compared with {len(plain)} characters: give at most {MAX_TEXT_LENGTH}")
        return str(plain)
    if plain is None or (isinstance(plain, float) and math.isnan(plain)):
        return None
    if isinstance(plain, range):
        upwards = plain if plain.step > 0 else plain[::-1]
        return _span(upwards.start, upwards.stop, upwards.step, field=field)
    if isinstance(plain, slice):
        parts = (plain.start, plain.stop, plain.step)
        if any(part is not None and not isinstance(part, int | np.integer) for part in parts):
            raise UsageError(f"{field}={plain!r} is not a slice of integers: write slice(10, 20, 2)")
        return _span(*(None if part is None else int(part) for part in parts), field=field)
    if isinstance(plain, int | float):
        return plain
    raise UsageError(
        f"{field}={plain!r} is not something a field can hold: give a number, a text, None, a range, or a list of these"
    )


def _span(start: int | None, stop: int | None, step: int | None, *, field: str) -> NumberRange:
    if step is not None and step < 1:
        raise UsageError(f"{field} has a range with step {step}: give a step of 1 or more")
    if any(number is not None and abs(number) >= _MAX_MAGNITUDE for number in (start, stop, step)):
        raise UsageError(f"{field} has a range beyond 64 bits: give smaller numbers")
    return NumberRange(first=start, last=None if stop is None else stop - 1, step=step or 1)


def _read_number(text: str, *, field: str) -> Number | NumberRange | None:
    if text.lower() in {"none", "null"}:
        return None
    if len(text) > 3 * len(str(_MAX_MAGNITUDE)):
        raise UsageError(f"{field} holds numbers and {text[:20]!r}... is too long to be one: {_EXPECTED}")
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eEf]", text) else int(text)
    dash = _DASH.fullmatch(text)
    if dash:
        first, last = int(dash[1]), int(dash[2])
        if first > last:
            raise UsageError(f"{field} has the range {text!r}, which ends before it begins: write {last}-{first}")
        return _span(first, last + 1, None, field=field)
    colons = _SLICE.fullmatch(text)
    if colons:
        return _span(*(int(part) if part else None for part in colons.groups()), field=field)
    raise UsageError(f"{field} holds numbers and {text!r} is not one: {_EXPECTED}")


_WORDS = re.compile(
    r"""'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | (?<![\w.])(?P<where>where)(?![\w.])""", re.VERBOSE | re.IGNORECASE
)


def split_rule(text: str) -> tuple[str, str | None]:
    """Split a rule into its condition and the expression that selects its records; None for all records.

    Raises:
        UsageError: the rule has several selections.
    """
    places = [found for found in _WORDS.finditer(text) if found["where"]]
    if len(places) > 1:
        raise UsageError(f"rule {text!r} has 'where' {len(places)} times: give it once, and 'and'")
    if not places:
        return text.strip(), None
    return text[: places[0].start()].strip(), text[places[0].end() :].strip()
