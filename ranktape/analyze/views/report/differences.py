"""Gives how far apart several sources are, module by module: what the page of two trainings shows first."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.questions.compare import compare
from ranktape.analyze.table import Table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.storage import Records
    from ranktape.storage.records.records import SourcePart

MAX_ROWS = 10
"""Modules that are shown of each pair of sources: the worst."""

MAX_PAIRS = 8
"""Sources that are compared with the first one."""

_SHOWN = ("module", "layer_idx", "pairs", "differing", "relative_norm.worst", "relative_norm.median", "cosine.worst")
"""Columns of the answer that the page has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDifferences:
    """How far apart two sources are."""

    title: str
    """Which two."""
    said: str
    """Where they begin to differ, or why they cannot be compared."""
    heads: Sequence[str] = ()
    """Of the columns."""
    cells: Sequence[Sequence[str]] = ()
    """A row for each module, the worst first."""
    is_left: Sequence[bool] = ()
    """Of each column whether it holds words."""
    command: str = ""
    """What says all of it."""


def summary_of(table: Table) -> SourceDifferences:
    """A table as the page shows it: its title above it, its notes as sentences."""
    heads, cells, is_left = table.text_cells()
    said = " ".join(f"{note[:1].upper()}{note[1:]}." for note in table.notes)
    title = f"{table.title[:1].upper()}{table.title[1:]}"
    return SourceDifferences(title=title, said=printable(said), heads=heads, cells=cells, is_left=is_left)


def differences_of(records: Records, *, engine: Engine) -> Iterator[SourceDifferences]:
    """Each source against the first, where there are several; of values of both every one is read.

    Raises:
        DataError: bytes or parts of a tensor are missing, or damaged.
        StorageError: a store cannot be read.
    """
    parts = records.by_source()
    for other in parts[1 : MAX_PAIRS + 1]:
        yield _between(parts[0], other, engine=engine)


def _between(one: SourcePart, other: SourcePart, *, engine: Engine) -> SourceDifferences:
    title = printable(f"{other.name} against {one.name}")
    types = [sorted(set(part.records.column("quant_type").tolist())) for part in (one, other)]
    # Two captures of one model are told apart by what they computed in.
    is_pair = types[0] != types[1] and [len(names) for names in types] == [1, 1]
    pair = [f"quant_type={types[0][0]}:{types[1][0]}"] if is_pair else []
    urls = [shlex.quote(part.records.reader.url) for part in (one, other)]
    words = ["ranktape analyze compare", *urls, *(f"--pair {shlex.quote(text)}" for text in pair), "--allow-unmatched"]
    try:
        table = compare(
            one.records,
            other.records,
            pair=pair,
            allow_unmatched=True,
            distances=False,
            by=["module", "layer_idx"],
            engine=engine,
        )
    except (NoRecordsError, UsageError) as error:
        return SourceDifferences(title=title, said=f"They cannot be compared: {printable(str(error))}.")
    heads, cells, is_left = _brief(table).text_cells()
    said = f"{table.title[:1].upper()}{table.title[1:]}."
    return SourceDifferences(
        title=title,
        said=printable(said),
        heads=heads,
        cells=cells,
        is_left=is_left,
        command=printable(" ".join(words)),
    )


def _brief(table: Table) -> Table:
    names = [column.name for column in table.columns]
    kept = [names.index(name) for name in _SHOWN if name in names]
    return dataclasses.replace(
        table,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows[:MAX_ROWS]),
        notes=(),
    )
