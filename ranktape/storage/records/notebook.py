"""Tables in HTML, as a notebook shows a run, its records and one record.

A run comes from a stranger: every string of it is escaped. Nothing is shown at full length: a field that is long is
cut off, and so are many rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ranktape.storage.places.failures import printable

MAX_SHOWN_ROWS = 20
"""Rows of a table that a notebook or an interpreter shows."""

MAX_SHOWN_LETTERS = 200
"""Letters of one field that are shown."""

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
    is_unfolded: bool = True,
) -> str:
    """A table with lines above it and below; all is text, and is escaped here.

    It folds into the first line above it, if there is one.
    """

    def cells(texts: Sequence[str], *, tag: str) -> str:
        styled = zip(texts, is_left, strict=True)
        return "".join(f'<{tag} style="{_LEFT if left else _RIGHT}">{escape(text)}</{tag}>' for text, left in styled)

    head = f"<thead><tr>{cells(heads, tag='th')}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{cells(row, tag='td')}</tr>" for row in rows)
    above = "".join(f"<div>{escape(text)}</div>" for text in heading[1:])
    below = "".join(f"<div><i>{escape(text)}</i></div>" for text in notes)
    shown = f"{above}<table>{head}<tbody>{body}</tbody></table>{below}"
    if not heading:
        return f"<div>{shown}</div>"
    is_open = " open" if is_unfolded else ""
    return f"<details{is_open}><summary><b>{escape(heading[0])}</b></summary>{shown}</details>"


def spans(iterations: Sequence[int]) -> str:
    """Iterations as words: each, or of many the first, the last and how many."""
    if not iterations:
        return "none"
    if len(iterations) <= _MAX_NAMED:
        return ", ".join(map(str, iterations))
    return f"{iterations[0]} to {iterations[-1]} ({len(iterations)} of them)"


def fields_html(title: str, fields: dict[str, Any], *, is_unfolded: bool = True) -> str:
    """A table of named values, which folds into its title; those that are missing or empty are left out."""
    known = {name: value for name, value in fields.items() if value is not None and value != ""}
    rows = [
        (clipped(str(name)), clipped(value if isinstance(value, str) else json.dumps(value)))
        for name, value in known.items()
    ]
    return html_table(("", ""), rows, is_left=(True, True), heading=[title], is_unfolded=is_unfolded)
