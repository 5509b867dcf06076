"""Asks a question of each of several sources, and puts the answers below one another."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import RanktapeError
from ranktape.storage import Records
from ranktape.storage.records.records import SOURCE

SOURCE_COLUMN = Column(name=SOURCE, kind=Kind.TEXT, is_key=True)
"""Which source a row is of."""


def ask_each(records: Records, ask: Callable[[Records], Table], *, title: str) -> Table:
    """The answers about each source as one table under a title; those of their own are its last notes.

    A column that the answer about one source lacks is missing there.

    Raises:
        RanktapeError: what `ask` raises; it begins with the name of the source.
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
