"""The columns that identify the record or group of a row, and the names of samples, layers and stacks."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.table import Cells, Coded, Column, Kind, Table, TableRows, number_cells
from ranktape.errors import RanktapeError
from ranktape.fields import INT_FIELDS, OPTIONAL_INT_FIELDS, SAMPLE, field_names
from ranktape.storage.format.record_info import is_one_sample
from ranktape.storage.query.columns import StringColumn, equal_rows
from ranktape.storage.query.filters import expect_list
from ranktape.storage.records.records import SOURCE

if TYPE_CHECKING:
    from ranktape.storage import Records


SampleName = int | str
"""The user's identifier, or the index along the dimension of samples if none were given."""


def sample_names(records: Records) -> list[list[SampleName]]:
    """For each record, the names of its samples in order; none if its samples cannot be distinguished.

    A record without a dimension of samples that has one identifier is that sample, unless it is a parameter.
    """
    columns = (records.column(name).tolist() for name in ("sample_dim", "sample_ids", "shape", "tensor_name"))
    rows = [(-1 if math.isnan(dim) else int(dim), *rest) for dim, *rest in zip(*columns, strict=True)]
    known = {row: _sample_names(*row) for row in set(rows)}
    return [known[row] for row in rows]


def _sample_names(dim: int, given: str, shape: str, tensor_name: str) -> list[SampleName]:
    names = json.loads(given)
    if dim < 0:
        return names if is_one_sample(names, tensor_name=tensor_name) else []
    count = json.loads(shape)[dim]
    return names if isinstance(names, list) and len(names) == count else list(range(count))


IDENTITY = field_names(lambda field: field.is_identity)
"""The fields that identify a record, in the order of tables."""

NUMBER_FIELDS = (*INT_FIELDS, *OPTIONAL_INT_FIELDS)
"""The fields with integer values."""

SAMPLE_COLUMN = Column(name=SAMPLE, kind=Kind.TEXT, is_key=True)
"""The name of a sample, in a table with one row for each."""

FILE_COLUMN = Column(name="file", kind=Kind.TEXT, is_key=True, is_detail=True)
"""The name of a record's file, in tables about files."""

_DETAILS = ("mode", "layer_stack", "component", "compute_dtype", "shape")
"""Fields that text shows only on request."""


def words(texts: str | Sequence[str] | None) -> tuple[str, ...]:
    """The distinct names in one or several comma-separated texts."""
    several = [] if texts is None else [texts] if isinstance(texts, str) else texts
    return tuple(dict.fromkeys(word.strip() for text in several for word in text.split(",")))


def are_files(records: Records) -> bool:
    """Whether each of the records is a file with its own name."""
    return bool(getattr(records, "files", ()))


def source_fields(records: Records) -> tuple[str, ...]:
    """The field with the source of each record, if there are several sources."""
    return (SOURCE,) if len(records.sources) > 1 else ()


def quant_types(records: Records) -> np.ndarray[Any, Any]:
    """The quant type of each record, by which plots compare, prefixed with the source if several sources share one.

    If all sources have the same one and no other, it is replaced by the source.
    """
    types = records.column("quant_type")
    if len(records.sources) <= 1:
        return types
    pairs = list(zip(records.column(SOURCE).tolist(), types.tolist(), strict=True))
    known = set(pairs)
    if len({quant_type for _, quant_type in known}) == len(known):
        return types
    is_alike = len({quant_type for _, quant_type in known}) == 1
    return np.array([name if is_alike else f"{name} {quant_type}" for name, quant_type in pairs], dtype=object)


def identity_fields(records: Records) -> tuple[str, ...]:
    """The fields that identify a record: the source if there are several, `IDENTITY`, and the file of files."""
    return (*source_fields(records), *IDENTITY, *((FILE_COLUMN.name,) if are_files(records) else ()))


def identity_columns(records: Records) -> tuple[Column, ...]:
    """The columns that identify the records of a table with one row for each."""
    named = (*source_fields(records), *IDENTITY)
    fields = tuple(key_column(field, is_detail=field in _DETAILS) for field in named)
    return (*fields, FILE_COLUMN) if are_files(records) else fields


def identity_cells(records: Records) -> list[Cells]:
    """The values of `identity_columns`, from the catalogue alone."""
    # The site of a file is its name.
    return [cells_of_field(records, "site" if name == FILE_COLUMN.name else name) for name in identity_fields(records)]


def identity_rows(records: Records) -> list[tuple[Any, ...]]:
    """The values of `identity_columns`, by row."""
    return list(TableRows(identity_cells(records), size=len(records)))


def cells_of_field(records: Records, field: str) -> Cells:
    """A field of all records as the values of a column."""
    column = records.stored(field)
    if isinstance(column, StringColumn):
        return Coded(
            column.codes, [json.loads(text or "null") for text in column.table] if field == "shape" else column.table
        )
    if column.dtype == object or column.dtype.kind == "U":
        return [_value(value, field) for value in column.tolist()]
    return number_cells(column, kind=Kind.INTEGER if field in NUMBER_FIELDS else Kind.FLOAT)


def group_columns(by: Sequence[str]) -> tuple[Column, ...]:
    """The columns of a table with one row for each group, with the number of records last."""
    fields = dict.fromkeys(by)  # the keys of groups have each once
    return (*(key_column(field, is_detail=False) for field in fields), Column(name="records", kind=Kind.INTEGER))


def group_row(key: dict[str, Any], *, num_records: int) -> tuple[Any, ...]:
    """The values of `group_columns` for one group of `Records.group_by`."""
    return (*(_value(value, field) for field, value in key.items()), num_records)


def key_column(field: str, *, is_detail: bool) -> Column:
    """The key column for a field."""
    kind = Kind.INTEGER if field in NUMBER_FIELDS else Kind.LIST if field == "shape" else Kind.TEXT
    return Column(name=field, kind=kind, is_key=True, is_detail=is_detail)


def _value(value: Any, field: str) -> Any:
    """A value in a table: integers as int, missing values as None, shapes as lists, samples as text."""
    if field == "shape":
        return json.loads(value)
    if field == SAMPLE and value is not None:
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value


def stacks_of(records: Records) -> tuple[str, ...]:
    """The known stacks of layers of the records, in the order of the records."""
    return tuple(stack for stack in dict.fromkeys(records.column("layer_stack").tolist()) if stack)


def with_stacks(by: Sequence[str], *selections: Records) -> tuple[str, ...]:
    """The fields to group by, so that records of several sources or of several stacks of layers are not mixed.

    `source` is added before the first field, and `layer_stack` before `layer_idx`.
    """
    expect_list(by)
    is_several = any(len(records.sources) > 1 for records in selections)
    sources = (SOURCE,) if by and is_several and SOURCE not in by else ()
    if "layer_idx" not in by or "layer_stack" in by:
        return (*sources, *by)
    place = list(by).index("layer_idx")
    has_stacks = len({stack for records in selections for stack in stacks_of(records)}) > 1
    return (*sources, *by[:place], *(["layer_stack"] if has_stacks else []), *by[place:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Records grouped by the values of some fields and sorted by these, or each record as a group."""

    fields: tuple[str, ...] = ()
    """The fields by which records are grouped."""
    columns: tuple[Column, ...] = ()
    """The columns that identify the group or record of a row."""
    heads: TableRows = field(default_factory=lambda: TableRows([]))
    """The values of these columns, for each group."""
    keys: tuple[dict[str, Any], ...]
    """The values of the fields, for each group."""
    sizes: tuple[int, ...]
    """Number of records in each group."""
    numbers: NDArray[np.int64]
    """For each record, the index of its group in `keys`."""


def group_records(records: Records, *, by: Sequence[str]) -> Groups:
    """The groups of a selection, in the order of `Records.group_by`. Without fields, one group of all records.

    If records have several stacks, `layer_stack` is added before `layer_idx`.
    """
    fields = with_stacks(by, records)
    keys: tuple[dict[str, Any], ...] = ({},)
    sizes: tuple[int, ...] = (len(records),)
    numbers = np.zeros(len(records), dtype=np.int64)
    if fields:
        for name in fields:
            records.column(name)  # raises an error if the field is unknown
        groups = equal_rows([records.stored(name) for name in fields])
        for number, (_, rows) in enumerate(groups):
            numbers[rows] = number
        keys = tuple(dict(zip(fields, key, strict=True)) for key, _ in groups)
        sizes = tuple(len(rows) for _, rows in groups)
    columns = group_columns(fields)
    heads = [group_row(key, num_records=size) for key, size in zip(keys, sizes, strict=True)]
    return Groups(
        fields=fields,
        columns=columns,
        heads=TableRows.of(heads, width=len(columns)),
        keys=keys,
        sizes=sizes,
        numbers=numbers,
    )


def row_groups(records: Records, *, by: Sequence[str]) -> Groups:
    """The groups of `group_records`. Without fields, each record is a group."""
    if by:
        return group_records(records, by=by)
    count = len(records)
    return Groups(
        columns=identity_columns(records),
        heads=TableRows(identity_cells(records), size=count),
        keys=({},) * count,
        sizes=(1,) * count,
        numbers=np.arange(count),
    )


def short_names(stacks: Sequence[str]) -> dict[str, str]:
    """A short name for each of several stacks: its path without the start and the end that all of them share.

    For example, `encoder` for `model.encoder.layers` beside `model.decoder.layers`. If a name would be empty, all are
    whole paths.
    """
    paths = [stack.split(".") for stack in stacks]
    head, tail = _num_alike(paths), _num_alike([path[::-1] for path in paths])
    short = [".".join(path[head : len(path) - tail]) for path in paths]
    return dict(zip(stacks, short if all(short) else stacks, strict=True))


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key with which layers.8 comes before layers.73."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"([0-9]+)", text)]


def role_of(module: str, layer_idx: int) -> str:
    """The path of a module with a star instead of the layer's number, or unchanged outside a stack.

    The number is the one that equals the layer's index, otherwise the first one, because pipeline stages may count
    their own layers.
    """
    words = module.split(".")
    numbers = [place for place, word in enumerate(words) if re.fullmatch(r"\d+", word, re.ASCII)]
    if layer_idx < 0 or not numbers:
        return module
    same = [place for place in numbers if words[place].lstrip("0") in {str(layer_idx), "" if not layer_idx else "-"}]
    words[(same or numbers)[0]] = "*"
    return ".".join(words)


def _num_alike(paths: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


class LayerPosition(int):
    """The position of a layer: its number, or its position among several stacks that are shown one after another.

    Its text is the name of the layer. `stack` is the short name of its stack, empty if there is only one.
    """

    stack: str
    number: int

    @classmethod
    def of(cls, place: int, *, stack: str, number: int) -> LayerPosition:
        """The position of the layer with that number in its stack."""
        found = cls(place)
        found.stack, found.number = stack, number
        return found

    def __str__(self) -> str:
        return f"{self.stack} {self.number}".strip()


def layer_positions(stacks: Sequence[str], layers: Sequence[int]) -> list[LayerPosition]:
    """The position of the layer of each record, given its stack and its layer.

    There is a gap between two stacks. A layer outside of stacks (-1) and a `LayerPosition` do not change.
    """
    pairs = list(zip(stacks, layers, strict=True))
    numbers: dict[str, set[int]] = {}
    for stack, layer in pairs:
        if layer >= 0:
            numbers.setdefault(stack, set()).add(layer)
    named = list(filter(None, numbers))
    if len(named) <= 1:
        numbers = {}
    names = {"": "", **short_names(named)} if numbers else {}
    places: dict[tuple[str, int], LayerPosition] = {}
    start = 0
    for stack, known in numbers.items():
        first = min(known)
        for number in known:
            places[stack, number] = LayerPosition.of(start + number - first, stack=names[stack], number=number)
        start += max(known) - first + 2
    for stack, layer in set(pairs) - places.keys():
        if not isinstance(layer, LayerPosition):
            places[stack, layer] = LayerPosition.of(layer, stack="", number=layer)
        else:
            places[stack, layer] = layer
    return [places[pair] for pair in pairs]


def places_of(records: Records) -> list[LayerPosition]:
    """The position of the layer of each record."""
    return layer_positions(records.column("layer_stack").tolist(), records.column("layer_idx").tolist())


SOURCE_COLUMN = Column(name=SOURCE, kind=Kind.TEXT, is_key=True)
"""The source of a row."""


def answer_by_source(records: Records, ask: Callable[[Records], Table], *, title: str) -> Table:
    """The answers about each source in one table. The titles of the separate answers become its last notes.

    The table has the columns of all answers, with missing values where an answer lacks a column.

    Raises:
        RanktapeError: what `ask` raises, with the name of the source first.
    """
    tables: dict[str, Table] = {}
    for part in records.by_source():
        try:
            tables[part.name] = ask(part.records)
        except RanktapeError as error:
            raise type(error)(f"{part.name}: {error}") from error
    columns = {column.name: column for table in tables.values() for column in table.columns}
    notes = {name: table.notes for name, table in tables.items()}
    shared = [
        note for note in dict.fromkeys(itertools.chain(*notes.values())) if all(note in own for own in notes.values())
    ]
    return Table(
        title=title,
        columns=(SOURCE_COLUMN, *columns.values()),
        rows=tuple(
            (name, *(row.get(column) for column in columns))
            for name, table in tables.items()
            for row in table.records()
        ),
        notes=(
            *shared,
            *(f"{name}: {note}" for name, own in notes.items() for note in own if note not in shared),
            *(f"{name}: {table.title}" for name, table in tables.items()),
        ),
        worst_first=next(iter(tables.values())).worst_first,
    )
