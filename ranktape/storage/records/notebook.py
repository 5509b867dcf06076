"""How do a run, its records and one record look in a notebook?

A run comes from a stranger: every string of it is escaped. Nothing is shown at full length: a field that is long is
cut off, and so are many rows.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.storage.records.record import Record
    from ranktape.storage.records.records import Records
    from ranktape.storage.records.run import Run

MAX_SHOWN_ROWS = 20
"""Rows of a table that a notebook or an interpreter shows."""

MAX_SHOWN_LETTERS = 200
"""Letters of one field that are shown."""

_LISTED = ("iteration", "rank", "microbatch", "module", "operation", "phase", "tensor_name", "dtype", "shape", "nbytes")
"""Fields of the records of a selection that are shown."""

_MAX_NAMED = 8
"""Iterations that are named one by one."""

_LEFT = "text-align: left"
_RIGHT = "text-align: right"


def clipped(text: str, max_letters: int = MAX_SHOWN_LETTERS) -> str:
    """The text on one line, cut off where it is long."""
    shown = printable(text[: max_letters + 1])
    return shown if len(shown) <= max_letters else shown[: max_letters - 3] + "..."


def html_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    is_left: Sequence[bool],
    heading: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """A table with lines above and below it; all that is given is text, and is escaped here."""

    def cells(texts: Sequence[str], *, tag: str) -> str:
        styled = zip(texts, is_left, strict=True)
        return "".join(f'<{tag} style="{_LEFT if left else _RIGHT}">{_escaped(text)}</{tag}>' for text, left in styled)

    head = f"<thead><tr>{cells(heads, tag='th')}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{cells(row, tag='td')}</tr>" for row in rows)
    above = "".join(f"<div><b>{_escaped(text)}</b></div>" for text in heading)
    below = "".join(f"<div><i>{_escaped(text)}</i></div>" for text in notes)
    return f"<div>{above}<table>{head}<tbody>{body}</tbody></table>{below}</div>"


def run_html(run: Run) -> str:
    """Where a run is, what made it, and which of its iterations are complete; nothing is read."""
    environment, options = (run.attributes.get(name) for name in ("environment", "options"))
    told = {
        "url": run.url,
        "complete iterations": spans(run.iterations),
        "schema": run.attributes.get("ranktape_schema"),
        "quant_type": options.get("quant_type") if isinstance(options, dict) else None,
        **(environment if isinstance(environment, dict) else {}),
    }
    return _fields_html("Run", told)


def records_html(records: Records, *, url: str) -> str:
    """The first records of a selection and how many there are; of a run the catalogue is read, and no value."""
    first = records[:MAX_SHOWN_ROWS]
    rows = list(zip(*([str(value) for value in first.column(name).tolist()] for name in _LISTED), strict=True))
    rest = len(records) - len(rows)
    return html_table(
        _LISTED,
        [[clipped(text) for text in row] for row in rows],
        is_left=[name not in {"iteration", "rank", "microbatch", "nbytes"} for name in _LISTED],
        heading=[f"Records: {len(records)} in {clipped(url)}"],
        notes=[f"the first {len(rows)} of {len(records)}"] if rest else [],
    )


def record_html(record: Record) -> str:
    """Every field of a record that is known; no value is read."""
    document = record.info.to_json()
    overflow = document.pop("overflow")
    overflow.pop("per_sample")
    counts = {
        f"overflow.{name}": value["count"] if isinstance(value, dict) else value for name, value in overflow.items()
    }
    return _fields_html("Record", {"path": record.path, **document, **counts})


def spans(iterations: Sequence[int]) -> str:
    """Iterations as words: each, or of many the first, the last and how many."""
    if not iterations:
        return "none"
    if len(iterations) <= _MAX_NAMED:
        return ", ".join(map(str, iterations))
    return f"{iterations[0]} to {iterations[-1]} ({len(iterations)} of them)"


def _fields_html(title: str, fields: dict[str, Any]) -> str:
    known = {name: value for name, value in fields.items() if value is not None and value != ""}
    rows = [
        (clipped(str(name)), clipped(value if isinstance(value, str) else json.dumps(value)))
        for name, value in known.items()
    ]
    return html_table(("", ""), rows, is_left=(True, True), heading=[title])


def _escaped(text: str) -> str:
    return html.escape(text)
