"""Lists the records of a selection, or counts them by fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ranktape.analyze.identity import are_files, group_columns, group_row, identity_cells, identity_columns, with_stacks
from ranktape.analyze.table import Column, Kind, Table, TableRows
from ranktape.storage import Records
from ranktape.storage.places.backend import nbytes_text
from ranktape.storage.places.failures import printable

_MAX_BRIEF = 60
"""Maximum length of a value of a folder's metadata in the note, in characters."""


def ls(records: Records, *, by: Sequence[str] = ()) -> Table:
    """List the records of a run, or count them by the values of fields.

    Only the catalogue is read, not the values. Sizes are those before compression.

    Raises:
        UnknownFieldError: `by` names no field of a record.
    """
    sizes = records.column("nbytes")
    note = f"{len(records)} records, {nbytes_text(int(sizes.sum()))}"
    fields = with_stacks(by, records)
    if fields:
        counted = [
            (*group_row(key, num_records=len(members)), int(members.column("nbytes").sum()))
            for key, members in records.group_by(fields)
        ]
        columns = (*group_columns(fields), Column(name="nbytes", kind=Kind.NBYTES, unit="bytes", head="size"))
        return Table(title="", columns=columns, rows=counted, notes=(note,))
    notes = [f"{note}; --wide shows the file of each", *_folder_notes(records)] if are_files(records) else [note]
    columns = (
        *identity_columns(records),
        Column(name="nbytes", kind=Kind.NBYTES, unit="bytes", head="size"),
        Column(name="timestamp", kind=Kind.FLOAT, unit="seconds since the epoch", is_detail=True),
    )
    rows = TableRows([*identity_cells(records), sizes, records.column("timestamp")])
    return Table(title="", columns=columns, rows=rows, notes=tuple(notes))


def _folder_notes(records: Records) -> list[str]:
    """The metadata of a folder of layer outputs in one line. Each record's metadata has all of it."""
    metadata = json.loads(records[:1].column("metadata").tolist()[0] or "null") if len(records) else None
    entries = ((metadata or {}).get("folder") or {}).get("metadata")
    if not isinstance(entries, dict) or not entries:
        return []
    return ["metadata.pt: " + printable(", ".join(f"{name} {_brief(entry)}" for name, entry in entries.items()))]


def _brief(entry: Any) -> str:
    if isinstance(entry, dict) and entry.keys() == {"tensor", "shape", "values"}:
        return f"{entry['tensor']}{entry['shape']}"
    if isinstance(entry, dict | list):
        return f"{len(entry)} entries"
    text = str(entry)
    return text if len(text) <= _MAX_BRIEF else text[:_MAX_BRIEF] + "..."
