"""Shows what is wrong in a run and where, the worst first, like the first part of the report."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ranktape.analyze.console import encodable
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import KINDS, Finding, Severity, headline
from ranktape.analyze.findings.replicas import unread_note
from ranktape.analyze.identity import words
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import UsageError, nearest
from ranktape.storage import Records
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from rich.text import Text

NUM_FIRST = 5
"""Number of findings that a terminal shows by default, which fit on a screen."""

MAX_FOLLOWING = 3
"""Maximum number of consequences and of similar findings that text shows by default."""

_COLORS = {Severity.HIGH: "bold red", Severity.MEDIUM: "bold yellow", Severity.LOW: "bold blue"}

_INDENT = 10
"""Indentation of the text of a finding."""

_MIN_WIDTH = 40
"""Minimum width of lines. Narrower lines would have single words."""

_FIELDS = ("layer_stack", "layer_idx", "layer_type", "module", "operation", "tensor_name", "sample", "channel")
"""The fields of a finding's location that have their own column, besides the iteration and the ranks."""

_COLUMNS = (
    Column(name="severity", kind=Kind.TEXT),
    Column(name="kind", kind=Kind.TEXT),
    Column(name="where", kind=Kind.TEXT),
    Column(name="source", kind=Kind.TEXT, is_detail=True),
    Column(name="iteration", kind=Kind.INTEGER, is_detail=True),
    Column(name="ranks", kind=Kind.LIST, is_detail=True),
    *(
        Column(name=name, kind=Kind.INTEGER if name in {"layer_idx", "channel"} else Kind.TEXT, is_detail=True)
        for name in _FIELDS
    ),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="metric", kind=Kind.TEXT),
    Column(name="value", kind=Kind.FLOAT),
    Column(name="expected", kind=Kind.FLOAT, head="median of peers"),
    Column(name="deviation", kind=Kind.FLOAT, head="robust z"),
    Column(name="binades", kind=Kind.FLOAT),
    Column(name="evidence", kind=Kind.TEXT, is_detail=True),
    Column(name="title", kind=Kind.TEXT, is_detail=True),
    Column(name="reason", kind=Kind.TEXT, is_detail=True),
    Column(name="consequences", kind=Kind.LIST, is_detail=True),
    Column(name="alike", kind=Kind.LIST, is_detail=True),
    Column(name="command", kind=Kind.TEXT, is_detail=True),
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FindingsTable(Table):
    """A table with one row for each finding. As text, each has a few lines, and the verdict is last."""

    max_rows: ClassVar[int] = NUM_FIRST

    def to_text(self, *, wide: bool = False) -> str:
        """The findings as text, a few lines for each. With `wide`, all consequences are listed."""
        lines = (f"{head:{_INDENT}}{text}".rstrip() for head, text, _ in self._lines(wide=wide))
        return "\n".join([*lines, *map(printable, (*self.notes, self.title))]) + "\n"

    def print(self, *, wide: bool = False) -> None:
        """Print the findings to stdout in colour, wrapped to the width of the terminal."""
        from rich.console import Console

        console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        width = max(_MIN_WIDTH, console.width)
        for one in self._lines(wide=wide):
            for line in _wrapped(*one, width=width):
                console.print(line)
        for note in (*self.notes, self.title):
            console.print(_text(note, "bold" if note is self.title else "dim"))

    def _lines(self, *, wide: bool) -> Iterator[tuple[str, str, str]]:
        """The label, the text and the style of each line. An empty line follows each finding."""
        for row in self.records():
            yield row["severity"], printable(row["title"]), _COLORS[Severity(row["severity"])]
            yield "", printable(row["evidence"]), ""
            for head, titles in (("similar", row["alike"]), ("leads to", row["consequences"])):
                shown = titles if wide else titles[:MAX_FOLLOWING]
                for number, text in enumerate(shown):
                    yield head if not number else "", printable(text), "dim"
                if len(titles) > len(shown):
                    yield "", f"and {len(titles) - len(shown)} more: --wide lists them", "dim"
            if row["command"]:
                # Commands are not wrapped, so that they can be copied.
                yield "next", row["command"], "cyan"
            yield "", "", ""


def _wrapped(head: str, text: str, style: str, *, width: int) -> Iterator[Text]:
    is_whole = head == "next"
    lines = [text] if is_whole else textwrap.wrap(text, width - _INDENT, break_long_words=False) or [""]
    for number, line in enumerate(lines):
        yield _text(f"{head if not number else '':{_INDENT}}{line}", style)


def _text(line: str, style: str) -> Text:
    from rich.text import Text

    return Text(encodable(line, sys.stdout).rstrip(), style=style)


def findings(
    records: Records,
    *,
    severity: str | None = None,
    kind: str | Sequence[str] = (),
    channels: bool = False,
    view: View | None = None,
    engine: Engine | None = None,
) -> FindingsTable:
    """Find what is wrong in a run, and where.

    There is one finding for each cause, the worst first, with its severity, its location, its numbers next to those of
    its peers, similar findings, its consequences, and a command that shows more. A terminal shows the first 5. Peers
    are other records of the selection, so filters also restrict the peers. To exit with an error if there is a finding
    of high severity, use `--check "severity != 'high'"`.

    Args:
        severity (LEVEL): Show only findings of at least this severity: high, medium or low.
        kind (KIND): Show only findings of this kind: triggered, nan, inf, overflow, gradient_underflow, sample_outlier,
            rank_differs, replica_differs, layer_differs, channel_outlier, zero; repeatable.
        channels: Also look for outlier channels, which reads all values again.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a severity or a kind is not known.
    """
    least, kinds = _severity(severity), _kinds(kind)
    found = find(records, view=view, engine=engine, with_channels=channels)
    chosen = [one for one in found if one.severity.order <= least.order and (not kinds or one.kind in kinds)]
    rest = len(found) - len(chosen)
    table = findings_table(chosen, num_records=len(records), url=records.reader.url)
    more = f"{rest} other findings are less severe or of other kinds" if rest else ""
    return dataclasses.replace(table, notes=tuple(filter(None, (*table.notes, unread_note(records), more))))


def findings_table(found: Sequence[Finding], *, num_records: int, url: str) -> FindingsTable:
    """The table of findings about `num_records` records. Commands refer to the run at `url`."""
    return FindingsTable(
        title=headline(found, num_records=num_records), columns=_COLUMNS, rows=tuple(_row(one, url) for one in found)
    )


def _row(one: Finding, url: str) -> tuple[Any, ...]:
    where = one.where
    return (
        one.severity.value,
        one.kind,
        one.place,
        where.get("source"),
        where.get("iteration"),
        where.get("ranks", [where["rank"]] if "rank" in where else []),
        *(where.get(name) for name in _FIELDS),
        len(one.places),
        one.metric or None,
        one.value,
        one.expected,
        one.deviation,
        one.binades,
        one.evidence,
        one.title,
        one.reason,
        list(one.consequences),
        list(one.alike),
        one.command_in(url) if one.command else None,
    )


def _severity(name: str | None) -> Severity:
    if name is None:
        return Severity.LOW
    if name not in set(Severity):
        raise UsageError(f"severity {name!r} is not allowed: {nearest(name, tuple(Severity), otherwise='use')}")
    return Severity(name)


def _kinds(names: str | Sequence[str]) -> tuple[str, ...]:
    wanted = tuple(one.replace("-", "_") for one in words(names))
    for one in wanted:
        if one not in KINDS:
            raise UsageError(f"kind {one!r} is not allowed: {nearest(one, KINDS, otherwise='use')}")
    return wanted
