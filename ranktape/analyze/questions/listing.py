"""Which records are in a selection, and how many of each kind?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.identity import are_files, group_columns, group_row, identity_columns, identity_rows, with_stacks
from ranktape.analyze.table import Column, Kind, Table, nbytes_text

if TYPE_CHECKING:
    from ranktape.storage import Records


def listing(records: Records, *, by: Sequence[str] = ()) -> Table:
    """One row for each record with its size, or with `by` one for each group with the sizes added up.

    The catalogue answers; no value is read.

    Raises:
        UnknownFieldError: `by` names no field of a record.
    """
    sizes = records.column("nbytes").tolist()
    note = f"{len(records)} records, {nbytes_text(sum(sizes))}"
    fields = with_stacks(by, records)
    if fields:
        rows = tuple(
            (*group_row(key, num_records=len(members)), sum(members.column("nbytes").tolist()))
            for key, members in records.group_by(fields)
        )
        columns = (*group_columns(fields), Column(name="nbytes", kind=Kind.NBYTES, unit="bytes", head="size"))
        return Table(title="", columns=columns, rows=rows, notes=(note,))
    if are_files(records):
        note += "; --wide names the file of each"
    columns = (
        *identity_columns(records),
        Column(name="nbytes", kind=Kind.NBYTES, unit="bytes", head="size"),
        Column(name="timestamp", kind=Kind.FLOAT, unit="seconds since the epoch", is_detail=True),
    )
    times = records.column("timestamp").tolist()
    rows = tuple((*identity, *own) for identity, *own in zip(identity_rows(records), sizes, times, strict=True))
    return Table(title="", columns=columns, rows=rows, notes=(note,))
