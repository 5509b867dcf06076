"""Which scale does each tensor of a selection need in a format, and what does it lose with it?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.advice.recommendation import DEFAULT_TARGET_SQNR
from ranktape.analyze.questions.sweep_tables import group_table, levels_table, records_table
from ranktape.analyze.questions.swept import answerable, grouped, parse_request, sweep_record, sweepable
from ranktape.analyze.values import View
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.questions.swept import SweepRequest, Swept
    from ranktape.analyze.sweeps.options import SweepOptions
    from ranktape.analyze.table import Table
    from ranktape.storage import Records


def sweep(
    records: Records,
    *,
    format: str | Sequence[str],  # noqa: A002 - the option's name
    by: Sequence[str] = (),
    view: View = View.COMPUTE,
    options: SweepOptions | None = None,
    with_levels: bool = False,
    target_sqnr: float = DEFAULT_TARGET_SQNR,
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """The recommended scale of every record and what is lost with it; with `by`, one row for each group.

    Several formats are answered from one reading of each record, with a row for each. Records are read one after
    the other; those of integers and bool are left out, and so are formats that kept histograms do not answer, which a
    note names, where others can be. A record without a finite number other than zero has a row without figures.
    `with_levels` gives one row for each record and level instead. A format is good enough with an SQNR of
    `target_sqnr` dB. With `by` and one scale for each tensor, records are read twice: for the scales of their own, and
    for the common one. `on_record` is called after each reading.

    Raises:
        UsageError: the format or an option is not allowed; no record holds floating-point numbers; `by` and
            `with_levels` exclude each other.
        UnknownFieldError: `by` names no field of a record.
    """
    asked = parse_request(format, options=options, view=view)
    check_shape(by=by, with_levels=with_levels, target_sqnr=target_sqnr)
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record holds floating-point numbers, and for integers and bool no scale is sought")
    request, left_out = answerable(asked, keeps=set(chosen.column("keep").tolist()))
    found = []
    for key, members in chosen.group_by(list(by)):
        for record in members:
            found.append(sweep_record(record, request, source="", key=key))
            on_record()
    table = table_of(found, request, by=by, with_levels=with_levels, target_sqnr=target_sqnr, on_record=on_record)
    return dataclasses.replace(table, notes=(*table.notes, left_out)) if left_out else table


def check_shape(*, by: Sequence[str], with_levels: bool, target_sqnr: float) -> None:
    """Refuse what no table has.

    Raises:
        UsageError: `by` and `with_levels` exclude each other; the target is NaN.
    """
    if by and with_levels:
        raise UsageError("--levels and --by exclude each other: give one")
    if math.isnan(target_sqnr):
        raise UsageError("--target-sqnr nan is not allowed: give a number of dB")


def table_of(
    swept: Sequence[Swept],
    request: SweepRequest,
    *,
    by: Sequence[str],
    with_levels: bool,
    target_sqnr: float,
    on_record: Callable[[], object],
) -> Table:
    """The table of at least one record's sweeps: a row for each record, group or level, and format.

    Raises:
        DataError: a record that is read again for a common scale is damaged now.
        StorageError: the store cannot be read.
    """
    if by:
        return group_table(grouped(swept, request, on_record=on_record), by=by, target_sqnr=target_sqnr)
    return levels_table(swept) if with_levels else records_table(swept, target_sqnr=target_sqnr)
