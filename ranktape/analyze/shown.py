"""Shows an answer to people: a table of text, with lines above and below; aligned, in colour, or as HTML."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.console import encodable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

MAX_LINE_LENGTH = 100_000
"""Characters of a line on a terminal, before it wraps."""


MAX_CLIPPED_LINE = 1000
"""Letters of a line above or below, where what is long is cut off."""

MAX_CLIPPED_NOTES = 20
"""Lines below, as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """An answer as text, field by field."""

    heading: Sequence[str]
    """Lines above the table."""
    heads: Sequence[str]
    """Above each column."""
    is_left: Sequence[bool]
    """For each column whether its text begins at its left."""
    cells: Sequence[Sequence[str]]
    """For each row one for each column."""
    notes: Sequence[str]
    """Lines below the table."""

    def clipped(self) -> TextTable:
        """The same with each field cut off where it is long, and without the notes where there are many."""
        from ranktape.storage.records.notebook import clipped

        return TextTable(
            heading=[clipped(line, MAX_CLIPPED_LINE) for line in self.heading],
            heads=[clipped(head) for head in self.heads],
            is_left=self.is_left,
            cells=[[clipped(cell) for cell in row] for row in self.cells],
            notes=[clipped(note, MAX_CLIPPED_LINE) for note in self.notes[:MAX_CLIPPED_NOTES]],
        )

    def aligned(self) -> str:
        """Lines, each column as wide as it needs to be."""
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
        """The lines above the table, the table, and the lines below it, in colour."""
        from rich.text import Text

        return [
            *(Text(encodable(line, sys.stdout), style="italic") for line in self.heading),
            self._rich_table(),
            *(Text(encodable(note, sys.stdout), style="dim") for note in self.notes),
        ]

    def html(self) -> str:
        """A table for a notebook; every text is escaped."""
        from ranktape.storage.records.notebook import html_table

        return html_table(self.heads, self.cells, is_left=self.is_left, heading=self.heading, notes=self.notes)

    def print(self) -> None:
        """Write all of it to stdout, in colour."""
        from rich.console import Console, Group

        # A terminal that is too narrow wraps the lines: better than numbers cut off.
        # (A simple terminal is taken at its word only if the height is given too.)
        size = Console(file=sys.stdout).size
        needed = Console(width=MAX_LINE_LENGTH, height=size.height).measure(self._rich_table()).maximum
        console = Console(file=sys.stdout, highlight=False, width=max(needed, size.width), height=size.height)
        console.print(Group(*self.rich_parts()))

    def _rich_table(self) -> RichTable:
        from rich.table import Table as RichTable
        from rich.text import Text

        table: RichTable = RichTable(box=None, pad_edge=False, header_style="bold")
        for head, is_left in zip(self.heads, self.is_left, strict=True):
            text = Text(encodable(head, sys.stdout))
            table.add_column(text, justify="left" if is_left else "right", no_wrap=True)
        for row in self.cells:
            table.add_row(*(Text(encodable(cell, sys.stdout)) for cell in row))
        return table
