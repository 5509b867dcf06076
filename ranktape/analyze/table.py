"""Holds an answer, and writes it as aligned text, as one JSON document, as CSV, as a DataFrame, in a notebook.

One `Table` for every command. Numbers stay numbers until they are printed; a column says what they are.
"""

from __future__ import annotations

import csv
import enum
import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import encodable, printable_lines
from ranktape.analyze.shown import TextTable
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd  # type: ignore[import-untyped]  # it has no types
    from rich.console import Group


MAX_BRIEF_ROWS = 20
"""Rows that an interpreter or a notebook shows."""


class Kind(enum.StrEnum):
    """What the values of a column are, and so how text shows them."""

    TEXT = "text"
    """Words, shown as they are."""
    INTEGER = "integer"
    """Whole numbers: counts, indices."""
    FLOAT = "float"
    """Real numbers, shown with five significant digits."""
    RATIO = "ratio"
    """A part of a whole from 0 to 1, shown in percent."""
    COSINE = "cosine"
    """Cosines, shown with seven decimals: what matters is how far below 1 they are."""
    NBYTES = "nbytes"
    """Bytes, shown with a unit."""
    LIST = "list"
    """Several values, shown with spaces in between."""


class Form(enum.StrEnum):
    """What an answer is written as."""

    TEXT = "text"
    """Aligned columns for people."""
    JSON = "json"
    """One document for programs."""
    CSV = "csv"
    """One line for each row, the names of the columns first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    """The key in JSON and CSV."""
    kind: Kind
    """What its values are."""
    unit: str = ""
    """Unit of the numbers as they are in JSON and CSV; empty for plain numbers."""
    head: str = ""
    """What text writes above the column; the name if empty."""
    is_key: bool = False
    """Whether it says which thing a row is about: text names such a column once if all rows agree."""
    is_detail: bool = False
    """Whether text leaves it out unless everything is asked for; JSON and CSV always hold it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Table:
    """An answer: columns, rows, and a few words.

    A missing value is None: null in JSON, empty in CSV, "-" in text. JSON has no NaN and no infinity:
    they are the strings "nan", "inf" and "-inf" there. An interpreter and a notebook show the first rows, with what
    is long cut off.
    """

    title: str
    """What is shown, in one line; empty for none."""
    columns: tuple[Column, ...]
    """The columns, in order."""
    rows: tuple[tuple[Any, ...], ...]
    """One value for each column."""
    notes: tuple[str, ...] = ()
    """What a reader must know, one line each."""
    worst_first: Callable[[Table], Table] | None = field(default=None, compare=False)
    """Its rows by how bad they are, for whoever shows some of them; None where no row is worse than another."""
    is_whole: bool = False
    """Whether half of the rows say nothing, so that text shows them all."""

    def __post_init__(self) -> None:
        """Every row has one value for each column."""
        assert all(len(row) == len(self.columns) for row in self.rows), "a row does not fit the columns"

    def column(self, name: str) -> list[Any]:
        """The values of one column, from the first row to the last.

        Raises:
            UsageError: the table has no such column.
        """
        names = [column.name for column in self.columns]
        if name not in names:
            raise UsageError(f"the table has no column {name!r}: it has {', '.join(names)}")
        index = names.index(name)
        return [row[index] for row in self.rows]

    def sorted_by(self, name: str) -> Table:
        """The same table with the largest values of a column first; missing ones last, equal ones as they were.

        The column may be named by its head.

        Raises:
            UsageError: the table has no such column.
        """
        named = [column.name for column in self.columns if name == column.head]
        values = self.column(named[0] if named else name)
        known = [index for index, value in enumerate(values) if value is not None and value == value]  # noqa: PLR0124 - NaN
        ordered = sorted(known, key=values.__getitem__, reverse=True)
        rest = sorted(set(range(len(values))) - set(known))
        return replace(self, rows=tuple(self.rows[index] for index in (*ordered, *rest)))

    def first(self, num_rows: int) -> Table:
        """The same table with so many rows at most; a note says how many there were."""
        if len(self.rows) <= num_rows:
            return self
        note = f"the first {num_rows} of {len(self.rows)} rows"
        return replace(self, rows=self.rows[:num_rows], notes=(*self.notes, note))

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, one key for each column."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        """The table as one document for `json.dumps`."""
        return {
            "title": self.title,
            "columns": [
                {"name": column.name, "kind": column.kind.value, "unit": column.unit} for column in self.columns
            ],
            "rows": [{name: json_value(value) for name, value in row.items()} for row in self.records()],
            "notes": list(self.notes),
        }

    def to_csv(self) -> str:
        """The rows as CSV with a head; lists are JSON within their field."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        for row in self.rows:
            writer.writerow([_csv_field(value) for value in row])
        return text.getvalue()

    def to_text(self, *, wide: bool = False) -> str:
        """The table as aligned lines, as wide as they need to be: nothing is cut off."""
        return _shown(self, wide=wide).aligned() + "\n"

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a frame, all columns of them; units are in `attrs`, beside the title and the notes.

        Whole numbers are `Int64`, ratios and other real numbers `float64` (NaN where one is missing), text is
        `string`, lists are objects. A column with a value of another kind is of objects.

        Raises:
            UsageError: pandas is not installed.
        """
        from ranktape.storage.records.frames import Dtype, data_frame

        attributes = {
            "title": self.title,
            "notes": list(self.notes),
            "units": {column.name: column.unit for column in self.columns if column.unit},
        }
        return data_frame(
            (
                (column.name, [row[index] for row in self.rows], Dtype[_DTYPES[column.kind]])
                for index, column in enumerate(self.columns)
            ),
            attributes=attributes,
        )

    def __repr__(self) -> str:
        return self._brief().aligned()

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(*self._brief().rich_parts())

    def _repr_html_(self) -> str:
        return self._brief().html()

    def _brief(self) -> TextTable:
        """The first rows, with what is long cut off."""
        return _shown(self.first(MAX_BRIEF_ROWS), wide=False).clipped()


def write_table(table: Table, *, form: Form = Form.TEXT, wide: bool = False, output: Path | None = None) -> None:
    """Write a table to a file, or to stdout: in colour on a terminal, as plain text elsewhere.

    Raises:
        UsageError: the file cannot be written.
    """
    if form is Form.TEXT and output is None and sys.stdout.isatty():
        _shown(table, wide=wide).print()
        return
    write_text(_as_text(table, form=form, wide=wide), output=output)


def write_text(text: str, *, output: Path | None) -> None:
    """Write text to a file, or to stdout if there is none.

    Raises:
        UsageError: the file cannot be written.
    """
    if output is None:
        # What programs read stays as it is.
        is_terminal = sys.stdout.isatty()
        sys.stdout.write(encodable(printable_lines(text) if is_terminal else text, sys.stdout))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from error


def _as_text(table: Table, *, form: Form, wide: bool) -> str:
    if form is Form.JSON:
        return json.dumps(table.to_json(), indent=2, allow_nan=False) + "\n"
    return table.to_csv() if form is Form.CSV else table.to_text(wide=wide)


def _shown(table: Table, *, wide: bool) -> TextTable:
    """What people see of a table, without what says nothing.

    Left out are keys that are the same in all rows (a line above says them once) and columns without a value.
    """
    heading = [_plain(table.title)] if table.title else []
    columns = list(zip(table.columns, range(len(table.columns)), strict=True))
    if wide or not table.rows:
        chosen = [item for item in columns if wide or not item[0].is_detail]
    else:
        first = table.rows[0]
        filled = [
            (column, index)
            for column, index in columns
            if not column.is_detail and any(row[index] is not None and row[index] != "" for row in table.rows)
        ]
        same = [
            (column, index)
            for column, index in filled
            if len(table.rows) > 1 and column.is_key and all(row[index] == first[index] for row in table.rows)
        ]
        if same:
            said = (f"{_head(column)} {_cell(first[index], column.kind)}" for column, index in same)
            heading.append("all rows: " + ", ".join(said))
        chosen = [item for item in filled if item not in same]
    return TextTable(
        heading=heading,
        heads=[_head(column) for column, _ in chosen],
        is_left=[column.kind in {Kind.TEXT, Kind.LIST} for column, _ in chosen],
        cells=[[_cell(row[index], column.kind) for column, index in chosen] for row in table.rows],
        notes=[_plain(note) for note in table.notes],
    )


def _head(column: Column) -> str:
    named = column.head or column.name
    # Bytes are shown with their unit.
    return f"{named} {column.unit}" if column.unit and column.kind is not Kind.NBYTES else named


def _cell(value: Any, kind: Kind) -> str:
    if value is None:
        return "-"
    if kind in _CELLS and not isinstance(value, str):
        return _CELLS[kind](value)
    return _plain(str(value)) or "-"


def _plain(text: str) -> str:
    """One line: what others wrote may hold a line break or a terminal's control code."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _float_cell(value: float) -> str:
    return f"{value:.5g}"


def _ratio_cell(value: float) -> str:
    """Percent with three digits; only a true zero is "0 %", and only a true whole is "100 %"."""
    text = f"{value * 100:.3g} %"
    return "<100 %" if text == "100 %" and value < 1 else text


def nbytes_text(value: int) -> str:
    """A size for people, in units of 1,000 bytes."""
    size = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:  # noqa: PLR2004 - SI units
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def _list_cell(value: Sequence[Any]) -> str:
    return _plain(" ".join(map(str, value))) or "-"


_CELLS: Mapping[Kind, Callable[[Any], str]] = {
    Kind.FLOAT: _float_cell,
    Kind.RATIO: _ratio_cell,
    Kind.COSINE: "{:.7f}".format,
    Kind.NBYTES: nbytes_text,
    Kind.LIST: _list_cell,
}


_DTYPES: Mapping[Kind, str] = {
    Kind.TEXT: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "FLOAT",
    Kind.RATIO: "FLOAT",
    Kind.COSINE: "FLOAT",
    Kind.NBYTES: "INTEGER",
    Kind.LIST: "OBJECT",
}
"""The member of `storage.frames.Dtype` for each kind."""


def json_value(value: Any) -> Any:
    """A value that JSON has, numpy scalars included."""
    if hasattr(value, "item") and not isinstance(value, str):
        return json_value(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def _csv_field(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(json_value(value)) if isinstance(value, list | tuple | dict) else value
