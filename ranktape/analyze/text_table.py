"""Gives the text of a table field by field, and writes it as wide as there is room."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ranktape.analyze.console import encodable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

_GAP = 2
"""Spaces between columns."""

_MIN_COLUMNS = 2
"""Fewer do not make a table: each row is a block of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """An answer as text, field by field; `heading` above the table, `notes` below it."""

    heading: Sequence[str]
    heads: Sequence[str]
    is_left: Sequence[bool]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str]
    turns: Sequence[int] = ()
    """Places of columns in the order in which a narrow terminal does without them."""

    def fitted(self, width: int) -> TextTable:
        """The same without columns for which there is no room, and a note that names them.

        Where the others have none either, all of it as one block for each row.
        """
        widths = [max(map(len, column)) for column in zip(self.heads, *self.cells, strict=True)]
        gone: list[int] = []

        def needed() -> int:
            left = [one for place, one in enumerate(widths) if place not in gone]
            return sum(left) + _GAP * (len(left) - 1)

        turns = iter(self.turns)
        while needed() > width and (place := next(turns, None)) is not None:
            gone.append(place)
        if not gone and needed() <= width:
            return self
        if needed() > width or len(widths) - len(gone) < _MIN_COLUMNS:
            return self._as_blocks()
        kept = [place for place in range(len(widths)) if place not in gone]
        named = ", ".join(self.heads[place] for place in sorted(gone))
        return replace(
            self,
            heads=[self.heads[place] for place in kept],
            is_left=[self.is_left[place] for place in kept],
            cells=[[row[place] for place in kept] for row in self.cells],
            notes=[f"not shown for want of room: {named}; --wide shows all", *self.notes],
            turns=(),
        )

    def _as_blocks(self) -> TextTable:
        lines = [[*zip(self.heads, row, strict=True), ("", "")] for row in self.cells]
        cells = [list(pair) for block in lines for pair in block]
        return replace(self, heads=["", ""], is_left=[True, True], cells=cells[:-1], turns=())

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
        """All of it, in colour."""
        from rich.text import Text

        above, below = (
            [Text(encodable(line, sys.stdout), style=style) for line in lines]
            for lines, style in ((self.heading, "italic"), (self.notes, "dim"))
        )
        return [*above, self.rich_table(), *below]

    def print(self, *, is_fitted: bool) -> None:
        """Write it to stdout, in colour: what there is room for, or all of it."""
        from rich.console import Console, Group

        # A terminal that is too narrow wraps the lines: better than numbers cut off.
        # (A simple terminal is taken at its word only if the height is given too.)
        size = Console(file=sys.stdout).size
        shown = self.fitted(size.width) if is_fitted else self
        needed = Console(width=100_000, height=size.height).measure(shown.rich_table()).maximum
        console = Console(file=sys.stdout, highlight=False, width=max(needed, size.width), height=size.height)
        console.print(Group(*shown.rich_parts()))

    def rich_table(self) -> RichTable:
        """The rows alone."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table: RichTable = RichTable(box=None, pad_edge=False, header_style="bold")
        for head, is_left in zip(self.heads, self.is_left, strict=True):
            text = Text(encodable(head, sys.stdout))
            table.add_column(text, justify="left" if is_left else "right", no_wrap=True)
        for row in self.cells:
            table.add_row(*(Text(encodable(cell, sys.stdout)) for cell in row))
        return table
