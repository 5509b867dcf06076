"""An answer, and its output as aligned text, JSON, CSV, a DataFrame, a plot, or in a notebook.

All commands use one class, `Table`, which stores columns and creates rows when they are accessed. Numbers are converted
to text only when they are printed, according to the kind of the column.
"""

from __future__ import annotations

import csv
import enum
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast, overload

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.console import MAX_TEXT_ROWS, Form, encodable, printable_lines
from ranktape.errors import UsageError, nearest
from ranktape.storage.places.backend import nbytes_text

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd  # type: ignore[import-untyped]  # it has no types
    from matplotlib.axes import Axes
    from rich.console import Group, RenderableType
    from rich.table import Table as RichTable

MAX_BRIEF_ROWS, MAX_BRIEF_LINE, MAX_BRIEF_NOTES = 20, 1000, 20
"""Limits for interpreters and notebooks: rows, characters of a line above or below the rows, and lines below."""


class Kind(enum.StrEnum):
    """The kind of values in a column, which determines their format in text."""

    TEXT = "text"
    """Text."""
    INTEGER = "integer"
    """Integers, such as counts and indices."""
    FLOAT = "float"
    """Real numbers, shown with five significant digits."""
    RATIO = "ratio"
    """A fraction from 0 to 1, shown in percent."""
    BAR = "bar"
    """A fraction of the largest value from 0 to 1, shown as a bar."""
    COSINE = "cosine"
    """Cosines, shown with seven decimals, because their distance from 1 matters."""
    NBYTES = "nbytes"
    """Numbers of bytes, shown with a unit."""
    LIST = "list"
    """Several values, shown with spaces between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    """The key in JSON and CSV."""
    kind: Kind
    """The kind of its values."""
    unit: str = ""
    """Unit of the numbers in JSON and CSV; empty for plain numbers."""
    head: str = ""
    """Heading in text; the name if empty."""
    is_key: bool = False
    """Whether it identifies what a row is about. If all rows have the same value, text shows it once, above the
    rows."""
    is_detail: bool = False
    """Whether text shows it only on request. JSON and CSV always have it."""


class Coded(NamedTuple):
    """The values of a column, in which each distinct value is stored once."""

    codes: NDArray[Any]
    """For each row, the index of its value in `table`."""
    table: Sequence[Any]
    """The values."""


Cells: TypeAlias = list[Any] | NDArray[Any] | Coded
"""The values of a column. In an array of floats, NaN is a missing value."""


def number_cells(column: NDArray[Any], *, kind: Kind) -> Cells:
    """A column of numbers in which NaN is a missing value. With the kind INTEGER, its numbers become integers."""
    if kind is not Kind.INTEGER or column.dtype.kind != "f":
        return column
    if not np.isnan(column).any():
        return column.astype(np.int64)
    known, codes = np.unique(column, return_inverse=True)
    return Coded(codes.reshape(-1), [None if value != value else int(value) for value in known.tolist()])  # noqa: PLR0124 - NaN


def values_of(cells: Cells) -> list[Any]:
    """The values of a column as Python objects, with None for missing values."""
    if isinstance(cells, Coded):
        return [cells.table[code] for code in cells.codes.tolist()]
    if isinstance(cells, list):
        return cells
    values: list[Any] = cells.tolist()
    if cells.dtype.kind == "f" and np.isnan(cells).any():
        return [None if value != value else value for value in values]  # noqa: PLR0124 - NaN
    return values


def take_cells(cells: Cells, rows: NDArray[np.int64] | slice) -> Cells:
    """Some rows of a column."""
    if isinstance(cells, Coded):
        return Coded(cells.codes[rows], cells.table)
    if isinstance(cells, list):
        return cells[rows] if isinstance(rows, slice) else [cells[row] for row in rows.tolist()]
    taken: NDArray[Any] = cells[rows]
    return taken


def alternate(columns: Sequence[Cells]) -> Cells:
    """The values of several columns, interleaved: the first of each, then the second of each."""
    if len(columns) == 1:
        return columns[0]
    arrays = [one for one in columns if isinstance(one, np.ndarray)]
    if len(arrays) == len(columns) and len({one.dtype.kind for one in arrays}) == 1:
        return np.stack(arrays, axis=1).reshape(-1)
    return [value for row in zip(*map(values_of, columns), strict=True) for value in row]


class TableRows(Sequence[tuple[Any, ...]]):
    """The rows of a table. They are stored as columns, and a row is created when it is accessed."""

    __slots__ = ("_size", "columns")

    def __init__(self, columns: Sequence[Cells], *, size: int | None = None) -> None:
        """Take the columns of the table, and the number of rows, which is that of the first column by default."""
        self.columns = tuple(columns)
        self._size = size if size is not None else _size_of(self.columns[0]) if self.columns else 0
        assert all(_size_of(one) == self._size for one in self.columns), "a column does not fit the others"

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]], *, width: int) -> TableRows:
        """The rows, which have `width` values each."""
        if isinstance(rows, TableRows):
            assert len(rows.columns) == width, "rows do not fit the columns"
            return rows
        several = tuple(rows)
        assert all(len(row) == width for row in several), "a row does not fit the columns"
        return cls([list(one) for one in zip(*several, strict=True)] or [[]] * width, size=len(several))

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> TableRows: ...

    def __getitem__(self, index: int | slice) -> tuple[Any, ...] | TableRows:
        if isinstance(index, slice):
            return self.take(index)
        place = range(self._size)[index]
        return tuple(values_of(take_cells(one, slice(place, place + 1)))[0] for one in self.columns)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if not self.columns:
            return iter([()] * self._size)
        return zip(*map(values_of, self.columns), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableRows | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # values may be lists

    def take(self, rows: Sequence[int] | NDArray[np.int64] | slice) -> TableRows:
        """Some of the rows, in the given order."""
        chosen = rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)
        size = len(range(self._size)[chosen]) if isinstance(chosen, slice) else len(chosen)
        return TableRows([take_cells(one, chosen) for one in self.columns], size=size)


def _size_of(cells: Cells) -> int:
    return len(cells.codes if isinstance(cells, Coded) else cells)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Table:
    """An answer: a title, columns, rows, and notes.

    A missing value is None: null in JSON, empty in CSV, "-" in text. JSON has no NaN and no infinities; they are the
    strings "nan", "inf" and "-inf" there. Interpreters and notebooks show the first rows and truncate long texts.
    """

    title: str
    """Title in one line; empty for none."""
    columns: tuple[Column, ...]
    """The columns, in order."""
    rows: Sequence[tuple[Any, ...]]
    """One value for each column. They are stored as `TableRows`."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, one line each."""
    worst_first: Callable[[Table], Table] | None = field(default=None, compare=False)
    """Sorts the rows by severity, for output that shows only some of them; None if no row is worse than another."""
    is_verdict: bool = False
    """Whether the title is the result, which text shows last."""
    is_whole: bool = False
    """Whether text shows all rows, because a part of them would be meaningless."""
    max_rows: ClassVar[int] = MAX_TEXT_ROWS
    """Maximum number of rows that a terminal shows by default."""

    def __post_init__(self) -> None:
        """Check that every row has one value for each column."""
        object.__setattr__(self, "rows", TableRows.of(self.rows, width=len(self.columns)))

    @property
    def cells(self) -> TableRows:
        """The rows as `TableRows`."""
        return cast("TableRows", self.rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column, from the first row to the last.

        Raises:
            UsageError: the table has no such column.
        """
        names = [column.name for column in self.columns]
        if name not in names:
            raise UsageError(f"the table has no column {name!r}: {nearest(name, names, otherwise='it has')}")
        return values_of(self.cells.columns[names.index(name)])

    def sorted_by(self, name: str) -> Table:
        """The table sorted by a column in descending order. Missing values are last, and equal values keep their order.

        The column may be named by its heading.

        Raises:
            UsageError: the table has no such column.
        """
        named = [column.name for column in self.columns if name == (column.head or column.name)]
        values = self.column(named[0] if named else name)
        known = [index for index, value in enumerate(values) if value is not None and value == value]  # noqa: PLR0124 - NaN
        ordered = sorted(known, key=values.__getitem__, reverse=True)
        rest = sorted(set(range(len(values))) - set(known))
        return replace(self, rows=self.cells.take([*ordered, *rest]))

    def check(self, expression: str) -> Table:
        """The rows for which an expression over the columns is false. The syntax is that of `where`.

        A comparison with a missing value or NaN is unknown. A row passes if the expression is unknown for it. The last
        note has the number of rows that fail and pass.

        Raises:
            UsageError: the expression cannot be parsed, names no column, or compares text with a number.
        """
        from ranktape.storage.query.where import parse_where

        where = parse_where(expression)
        kinds = {column.name: column.kind for column in self.columns}
        for name in where.names:
            if name not in kinds:
                raise UsageError(f"--check: the table has no column {name!r}: {nearest(name, kinds)}")
        truth = where.truth({name: _as_array(self.column(name), kinds[name]) for name in where.names})
        failed = self.cells.take(np.flatnonzero(truth < 0))
        unknown = int((truth == 0).sum())
        passed = f", {unknown} of them because a value is missing" if unknown else ""
        note = f"check {expression}: {len(failed)} of {len(self.rows)} rows fail, {len(self.rows) - len(failed)} pass"
        return replace(self, rows=failed, notes=(*self.notes, note + passed))

    def first(self, num_rows: int) -> Table:
        """The table with at most `num_rows` rows. If rows are left out, a note has their total number."""
        if len(self.rows) <= num_rows:
            return self
        note = f"the first {num_rows} of {len(self.rows)} rows"
        return replace(self, rows=self.rows[:num_rows], notes=(note, *self.notes))

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries with the names of the columns as keys."""
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

    def json_parts(self) -> Iterator[str]:
        """The document of `to_json` as text with an indentation of two spaces, a few thousand rows at a time."""
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or not names or not self.rows:
            yield json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
            return
        document = json.dumps(replace(self, rows=()).to_json(), indent=2, allow_nan=False) + "\n"
        # Within a string, the quotation marks before the colon would be escaped.
        before, after = document.split('"rows": []', 1)
        yield before + '"rows": ['
        for start in range(0, len(self.rows), _ROWS_AT_ONCE):
            yield ("," if start else "") + _rows_text(names, self.cells[start : start + _ROWS_AT_ONCE])
        yield "\n  ]" + after

    def to_csv(self) -> str:
        """The rows as CSV with a header. Lists are JSON within their field."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        for row in self.rows:
            writer.writerow([_csv_field(value) for value in row])
        return text.getvalue()

    def to_text(self, *, wide: bool = False) -> str:
        """The table as aligned lines of any width. Nothing is truncated."""
        return _text_table(self, wide=wide).aligned() + "\n"

    def print(self, *, wide: bool = False) -> None:
        """Print the table to stdout in colour, fitted to the width of the terminal unless `wide` is set."""
        _text_table(self, wide=wide).print(is_fitted=not wide)

    def to_pandas(self) -> pd.DataFrame:
        """The table as a DataFrame with all columns. Its `attrs` contain the units, the title and the notes.

        Integers become `Int64`, other numbers `float64` (with NaN for missing values), text `string`, and lists
        objects. A column with a value of another type has dtype object.

        Raises:
            UsageError: pandas is not installed.
        """
        from ranktape.storage.records.tables import Dtype, data_frame

        dtypes = {Kind.TEXT: Dtype.TEXT, Kind.LIST: Dtype.OBJECT}
        dtypes |= dict.fromkeys((Kind.INTEGER, Kind.NBYTES), Dtype.INTEGER)
        attributes = {
            "title": self.title,
            "notes": list(self.notes),
            "units": {column.name: column.unit for column in self.columns if column.unit},
        }
        columns = (
            (column.name, values_of(cells), dtypes.get(column.kind, Dtype.FLOAT))
            for column, cells in zip(self.columns, self.cells.columns, strict=True)
        )
        return data_frame(columns, attributes=attributes)

    def plot(self, *, x: str | None = None, y: str | Sequence[str] = (), axes: Axes | None = None) -> Axes:
        """Plot columns of numbers against another column, and return the axes.

        If `x` is numeric, such as the iteration, each column is a line, otherwise each row is a bar. By default, `x` is
        the first key column that differs between rows, and `y` is the first numeric column that is not a key (counts
        last). Missing values leave gaps. Without `axes`, a figure of pyplot is created.

        Raises:
            UsageError: there is no such column, it is not numeric, or there is nothing to plot.
        """
        numbers = (Kind.INTEGER, Kind.FLOAT, Kind.RATIO, Kind.BAR, Kind.COSINE, Kind.NBYTES)
        kinds = {column.name: column.kind for column in self.columns}
        keys = [one.name for one in self.columns if one.is_key or one.kind in {Kind.TEXT, Kind.LIST}]
        varied = [name for name in keys if not _are_same(self.column(name))]
        x_column = x or next(iter([*varied, *keys]), None)
        drawn = [y] if isinstance(y, str) else [*y]
        measured = (Kind.FLOAT, Kind.RATIO, Kind.COSINE)
        if not drawn:
            others = [one for one in self.columns if one.kind in numbers and one.name not in {x_column, *keys}]
            drawn = [one.name for one in sorted(others, key=lambda one: one.kind not in measured)][:1]
        if x_column is None or not drawn or not len(self.rows):
            raise UsageError("the table has nothing to plot: name the columns, such as plot(x='iteration', y='absmax')")
        columns = {name: self.column(name) for name in (x_column, *drawn)}
        if wrong := next((name for name in drawn if kinds[name] not in numbers), None):
            raise UsageError(f"column {wrong!r} contains {kinds[wrong].value} values, but y requires numbers")
        if axes is None:
            from matplotlib import pyplot as plt

            axes = plt.subplots(layout="constrained")[1]
        is_line = kinds[x_column] in numbers
        positions = columns[x_column] if is_line else range(len(self.rows))
        for name in drawn:
            heights = [math.nan if value is None else float(value) for value in columns[name]]
            if is_line:
                axes.plot(positions, heights, marker=".", label=name)
            else:
                axes.bar(positions, heights, label=name, alpha=1 / len(drawn) ** 0.5)
        if not is_line:
            axes.set_xticks(
                list(positions), [_cell(value, kinds[x_column]) for value in columns[x_column]], rotation=90
            )
        axes.set(xlabel=x_column, ylabel=drawn[0] if len(drawn) == 1 else "", title=self.title)
        if len(drawn) > 1:
            axes.legend()
        return axes

    def text_cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[bool]]:
        """The headings, the cells by row, and which columns are aligned left, to draw the table elsewhere."""
        shown = _text_table(self, wide=False)
        return shown.heads, shown.cells, shown.is_left

    def __repr__(self) -> str:
        return self._brief().aligned()

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(*self._brief().rich_parts())

    def _repr_html_(self) -> str:
        from ranktape.storage.records.tables import html_table

        shown = self._brief()
        return html_table(shown.heads, shown.cells, is_left=shown.is_left, heading=shown.heading, notes=shown.notes)

    def _brief(self) -> TextTable:
        """The first rows, with long texts truncated and without some of the notes if there are many."""
        from ranktape.storage.records.tables import clipped

        shown = _text_table(self.first(MAX_BRIEF_ROWS), wide=False)
        return replace(
            shown,
            heading=[clipped(line, MAX_BRIEF_LINE) for line in shown.heading],
            heads=[clipped(head) for head in shown.heads],
            cells=[[clipped(cell) for cell in row] for row in shown.cells],
            notes=[clipped(note, MAX_BRIEF_LINE) for note in (*shown.notes[:-1][:MAX_BRIEF_NOTES], *shown.notes[-1:])],
        )


def _as_array(values: Sequence[Any], kind: Kind) -> NDArray[Any]:
    """A column for an expression: numbers with NaN for missing values, or texts. Lists become JSON."""
    if kind in {Kind.TEXT, Kind.LIST} or any(isinstance(value, str) for value in values):
        plain = (json.dumps(json_value(one)) if isinstance(one, list | tuple) else one for one in values)
        return np.array([None if one is None else str(one) for one in plain], dtype=object)
    # Integers beyond 2**53 stay exact.
    is_whole = all(type(value) is int for value in values)
    numbers = [math.nan if value is None else value for value in values]
    return np.array(numbers, dtype=np.int64 if is_whole else np.float64)


def write_table(table: Table, *, form: Form = Form.TEXT, wide: bool = False, output: Path | None = None) -> None:
    """Write a table to a file or to stdout (in colour on a terminal). Raises the errors of `write_text`."""
    if form is Form.TEXT and output is None and sys.stdout.isatty():
        table.print(wide=wide)
        return
    if form is Form.JSON:
        write_text(table.json_parts(), output=output)
    else:
        write_text([table.to_csv() if form is Form.CSV else table.to_text(wide=wide)], output=output)


def write_text(parts: Iterable[str], *, output: Path | None) -> None:
    """Write text to a file, or to stdout if there is none.

    Raises:
        UsageError: the file cannot be written.
    """
    if output is None:
        # Text for other programs is not escaped.
        is_terminal = sys.stdout.isatty()
        for text in parts:
            sys.stdout.write(encodable(printable_lines(text) if is_terminal else text, sys.stdout))
        return
    try:
        with output.open("w", encoding="utf-8") as file:
            file.writelines(parts)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from error


def _text_table(table: Table, *, wide: bool) -> TextTable:
    """The table as text, without redundant columns.

    Keys that are the same in all rows are shown once above them. Columns without values are left out.
    """
    title_lines = [_plain(table.title)] if table.title else []
    heading = [] if table.is_verdict else [*title_lines]
    columns = [
        (column, values_of(cells))
        for column, cells in zip(table.columns, table.cells.columns, strict=True)
        if wide or not column.is_detail
    ]
    if not wide and table.rows:
        columns = [one for one in columns if any(value is not None and value != "" for value in one[1])]
        same = {column.name: values[0] for column, values in columns if column.is_key and _are_same(values)}
        if same:
            shared = (f"{_head(one)} {_cell(same[one.name], one.kind)}" for one, _ in columns if one.name in same)
            heading.append(f"all rows: {', '.join(shared)}")
        columns = [(column, values) for column, values in columns if column.name not in same]
    return TextTable(
        heading=heading,
        heads=[_head(column) for column, _ in columns],
        is_left=[column.kind in {Kind.TEXT, Kind.LIST, Kind.BAR} for column, _ in columns],
        cells=[[_cell(values[row], column.kind) for column, values in columns] for row in range(len(table.rows))],
        notes=[*map(_plain, table.notes), *(title_lines if table.is_verdict else [])],
        drop_order=_drop_order([column for column, _ in columns]),
    )


_LEAST_INFORMATIVE = ("dtype", "compute_dtype", "phase", "quant_type", "layer_type", "layer_idx")
"""Keys of records that a narrow terminal leaves out first, if the module is shown, which identifies the record."""

_LEAST_VALUES = ("overflow.upper.ratio", "overflow.lower.ratio", "elements")
"""Values that are left out next, because other columns imply them."""

_DROPPED_LAST = ("severity", "meets_target", "diverges", "outcome")
"""Columns with a verdict, which are left out last."""


def _drop_order(columns: Sequence[Column]) -> list[int]:
    """The indices of columns in the order in which a narrow terminal leaves them out. Other columns always stay.

    The least informative keys are first, then other columns from the right, verdicts last.
    """
    names = [column.name for column in columns]
    keys = [names.index(name) for name in _LEAST_INFORMATIVE if name in names and "module" in names]
    values = [index for index, column in enumerate(columns) if not column.is_key and index > 0][::-1]
    return [
        *keys,
        *sorted(values, key=lambda index: (names[index] in _DROPPED_LAST, names[index] not in _LEAST_VALUES)),
    ]


def _are_same(values: Sequence[Any]) -> bool:
    return len(values) > 1 and all(value == values[0] for value in values)


def _head(column: Column) -> str:
    named = column.head or column.name
    # Numbers of bytes are shown with their unit.
    return f"{named} {column.unit}" if column.unit and column.kind is not Kind.NBYTES else named


def _cell(value: Any, kind: Kind) -> str:
    if value is None:
        return "-"
    if kind in _CELLS and not isinstance(value, str):
        return _CELLS[kind](value)
    return _plain(str(value)) or "-"


def _plain(text: str) -> str:
    """The text in one line, with spaces for line breaks and control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _ratio_cell(value: float) -> str:
    """Percent with three digits. Only zero is shown as "0 %", and only 1 as "100 %"."""
    text = f"{value * 100:.3g} %"
    return "<100 %" if text == "100 %" and value < 1 else text


_BAR_LETTERS = 32
"""Length of the longest bar, in characters."""


def _bar_cell(value: float) -> str:
    """A bar of ASCII characters with a length in proportion to the value, at least one unless the value is zero."""
    return "#" * math.ceil(value * _BAR_LETTERS) or "."


_CELLS: Mapping[Kind, Callable[[Any], str]] = {
    Kind.FLOAT: "{:.5g}".format,
    Kind.RATIO: _ratio_cell,
    Kind.BAR: _bar_cell,
    Kind.COSINE: "{:.7f}".format,
    Kind.NBYTES: nbytes_text,
    Kind.LIST: lambda value: _plain(" ".join(map(str, value))) or "-",
}


def _csv_field(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(json_value(value)) if isinstance(value, list | tuple | dict) else value


_GAP = 2
"""Number of spaces between columns."""

_MIN_COLUMNS = 2
"""Minimum number of columns of a table. With fewer, each row becomes a block of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text, with `heading` above the rows and `notes` below them."""

    heading: Sequence[str]
    heads: Sequence[str]
    is_left: Sequence[bool]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str]
    drop_order: Sequence[int] = ()
    """Indices of columns in the order in which a narrow terminal leaves them out."""

    def fitted(self, width: int) -> TextTable:
        """The table without columns that do not fit, and a note with their names.

        If the remaining columns do not fit either, each row becomes a block of lines with all columns.
        """
        widths = [max(map(len, column)) for column in zip(self.heads, *self.cells, strict=True)]
        dropped: list[int] = []

        def needed() -> int:
            left = [one for index, one in enumerate(widths) if index not in dropped]
            return sum(left) + _GAP * (len(left) - 1)

        drop_order = iter(self.drop_order)
        while needed() > width and (index := next(drop_order, None)) is not None:
            dropped.append(index)
        if not dropped and needed() <= width:
            return self
        if needed() > width or len(widths) - len(dropped) < _MIN_COLUMNS:
            return self._as_blocks()
        remaining = [index for index in range(len(widths)) if index not in dropped]
        named = ", ".join(self.heads[index] for index in sorted(dropped))
        return replace(
            self,
            heads=[self.heads[index] for index in remaining],
            is_left=[self.is_left[index] for index in remaining],
            cells=[[row[index] for index in remaining] for row in self.cells],
            notes=[f"hidden columns (use --wide): {named}", *self.notes],
            drop_order=(),
        )

    def _as_blocks(self) -> TextTable:
        lines = [[*zip(self.heads, row, strict=True), ("", "")] for row in self.cells]
        cells = [list(pair) for block in lines for pair in block]
        return replace(self, heads=["", ""], is_left=[True, True], cells=cells[:-1], drop_order=())

    def aligned(self) -> str:
        """The table as lines, each column as wide as necessary."""
        widths = [max(map(len, column)) for column in zip(self.heads, *self.cells, strict=True)]

        def line(texts: Sequence[str]) -> str:
            padded = (
                text.ljust(width) if is_left else text.rjust(width)
                for text, width, is_left in zip(texts, widths, self.is_left, strict=True)
            )
            return "  ".join(padded).rstrip()

        body = [line(self.heads), *map(line, self.cells)] if self.heads else []
        return "\n".join([*self.heading, *body, *self.notes])

    def rich_parts(self) -> list[RenderableType]:
        """All parts of the table, in colour."""
        from rich.text import Text

        above, below = (
            [Text(encodable(line, sys.stdout), style=style) for line in lines]
            for lines, style in ((self.heading, "italic"), (self.notes, "dim"))
        )
        return [*above, self.rich_table(), *below]

    def print(self, *, is_fitted: bool) -> None:
        """Print the table to stdout in colour, with the columns that fit or with all of them."""
        from rich.console import Console, Group

        # A terminal that is too narrow wraps lines, which is better than truncated numbers. (The given width is used
        # for a dumb terminal only if the height is given, too.)
        size = Console(file=sys.stdout).size
        shown = self.fitted(size.width) if is_fitted else self
        needed = Console(width=100_000, height=size.height).measure(shown.rich_table()).maximum
        console = Console(file=sys.stdout, highlight=False, width=max(needed, size.width), height=size.height)
        console.print(Group(*shown.rich_parts()))

    def rich_table(self) -> RichTable:
        """The rows without heading and notes."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table: RichTable = RichTable(box=None, pad_edge=False, header_style="bold")
        for head, is_left in zip(self.heads, self.is_left, strict=True):
            text = Text(encodable(head, sys.stdout))
            table.add_column(text, justify="left" if is_left else "right", no_wrap=True)
        for row in self.cells:
            table.add_row(*(Text(encodable(cell, sys.stdout)) for cell in row))
        return table


_ROWS_AT_ONCE = 1 << 13
"""Number of rows that are converted to JSON at once."""

_MAX_TEXTS = 256
"""Adjacent columns with at most this many distinct texts each are combined."""


def _rows_text(names: Sequence[str], rows: TableRows) -> str:
    """Rows as `json.dumps` writes them in a list in a dictionary, with an indentation of two spaces.

    Each distinct text is created once, also for combinations of adjacent columns. This is ten times as fast as one row
    after another.
    """
    parts = [_Texts(np.zeros(len(rows), dtype=np.int64), ["\n    {"])]
    for index, (name, cells) in enumerate(zip(names, rows.columns, strict=True)):
        texts = _texts(cells, key=f"{',' if index else ''}\n      {json.dumps(name)}: ")
        combined = parts[-1].combined_with(texts)
        parts[-1:] = [parts[-1], texts] if combined is None else [combined]
    columns = [
        one.texts if one.codes is None else np.array(one.texts, dtype=object)[one.codes].tolist() for one in parts
    ]
    return "\n    },".join(map("".join, zip(*columns, strict=True))) + "\n    }"


class _Texts(NamedTuple):
    """The texts of rows: `texts[codes]`, or one for each row if `codes` is None."""

    codes: NDArray[np.int64] | None
    texts: list[str]

    def combined_with(self, other: _Texts) -> _Texts | None:
        """The concatenated texts of both columns; None if too many of them are distinct."""
        if self.codes is None or other.codes is None or max(len(self.texts), len(other.texts)) > _MAX_TEXTS:
            return None
        if len(other.texts) == 1:
            return _Texts(self.codes, [text + other.texts[0] for text in self.texts])
        used, codes = np.unique(self.codes * len(other.texts) + other.codes, return_inverse=True)
        if len(used) > max(1, len(codes) // 4):
            return None
        pairs = (divmod(pair, len(other.texts)) for pair in used.tolist())
        return _Texts(codes.reshape(-1), [self.texts[first] + other.texts[second] for first, second in pairs])


def _texts(cells: Cells, *, key: str) -> _Texts:
    """The key and the JSON of each value of a column."""
    if isinstance(cells, Coded):
        used, codes = np.unique(cells.codes, return_inverse=True)
        return _Texts(codes.reshape(-1), [key + _json(cells.table[code]) for code in used.tolist()])
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        # Both zeros are equal but are written differently.
        bits = cells if cells.dtype.kind != "f" else cells.astype(np.float64, copy=False).view(np.int64)
        if np.unique(bits[: 2 * _MAX_TEXTS]).size <= _MAX_TEXTS:
            known, codes = np.unique(bits, return_inverse=True)
            return _Texts(codes.reshape(-1), _number_texts(known if bits is cells else known.view(np.float64), key=key))
        return _Texts(None, _number_texts(cells, key=key))
    values = values_of(cells)
    kinds = set(map(type, values))
    if kinds <= {int, float, bool, type(None)}:
        # One call is much faster than one for each value.
        texts = json.dumps(values)[1:-1].split(", ")
        return _Texts(None, [key + _NOT_JSON.get(text, text) for text in texts])
    known_texts: dict[Any, int] = {}
    names = values if kinds == {str} else [*map(repr, values)]
    codes = np.fromiter((known_texts.setdefault(name, len(known_texts)) for name in names), np.int64, len(values))
    firsts = np.unique(codes, return_index=True)[1].tolist()
    return _Texts(codes, [key + _json(values[first]) for first in firsts])


_NOT_JSON = {"NaN": '"nan"', "Infinity": '"inf"', "-Infinity": '"-inf"'}
"""The output of `json_value` for numbers that JSON lacks."""

_EXPONENTS = {f"e-{digit},": f"e-0{digit}," for digit in "6789"} | {f"e{digit}": f"e+{digit}" for digit in "123456789"}
"""Exponents as written by msgspec and by json."""

_PLAIN_IN_MSGSPEC = (1e-5, 1e-4)
"""In this range, msgspec writes no exponent, but json does."""


def _number_texts(values: NDArray[Any], *, key: str) -> list[str]:
    """The key and the JSON of each of several numbers, as json writes them. NaN is a missing value.

    msgspec takes a fifth of the time for the same digits, but writes exponents differently.
    """
    from msgspec.json import encode

    text = encode(values.tolist()).decode()[1:-1] + ","
    if "e" in text:
        for theirs, ours in _EXPONENTS.items():
            text = text.replace(theirs, ours)
    texts = (key + text[:-1].replace(",", "\0" + key)).split("\0")
    if values.dtype.kind == "f":
        magnitudes = np.abs(values)
        first, last = _PLAIN_IN_MSGSPEC
        for index in np.flatnonzero((magnitudes >= first) & (magnitudes < last)).tolist():
            texts[index] = key + repr(float(values[index]))
        for index in np.flatnonzero(np.isinf(values)).tolist():
            texts[index] = key + _json(float(values[index]))
    return texts


def _json(value: Any) -> str:
    return json.dumps(json_value(value), indent=2, allow_nan=False).replace("\n", "\n      ")


def json_value(value: Any) -> Any:
    """A value that JSON can represent. Scalars of numpy are converted."""
    if hasattr(value, "item") and not isinstance(value, str):
        return json_value(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value
