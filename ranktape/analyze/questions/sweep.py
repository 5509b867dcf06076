"""Which scale does each tensor of a selection need in a format, and what does it lose with it?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.advice.recommendation import DEFAULT_TARGET_SQNR
from ranktape.analyze.engine.values import View
from ranktape.analyze.layer_stacks import with_stacks
from ranktape.analyze.questions.sweep_tables import group_table, levels_table, records_table
from ranktape.analyze.questions.swept import answerable, parse_request, sweep_selection, sweepable
from ranktape.analyze.questions.swept_groups import grouped
from ranktape.analyze.sample_names import SAMPLE, sample_names
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.sweeps.options import SweepOptions
    from ranktape.analyze.questions.swept import SweepRequest, Swept
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
    engine: Engine | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """The recommended scale of every record and what is lost with it; with `by`, one row for each group.

    Several formats have a row each. Values of at most 16 bits are counted once, and the counts kept: a further format
    reads nothing; wider ones, and those for NVFP4 and channels, are read every time. `by` may name `sample`: then each
    sample of a record is swept for itself. Records of integers and bool are left out, and so are formats that kept
    histograms do not answer, which a note names, where others can be. A record without a finite number other than zero
    has a row without figures. `with_levels` gives one row for each record and level instead. A format is good enough
    with an SQNR of `target_sqnr` dB. With `by` and one scale for each tensor, records are looked at twice: for the
    scales of their own, and for the common one. `on_record` is called each time.

    Raises:
        UsageError: the format or an option is not allowed; no record holds floating-point numbers, or has samples
            where these are asked for; `by` and `with_levels` exclude each other.
        UnknownFieldError: `by` names no field of a record.
    """
    asked = parse_request(format, options=options, view=view)
    check_shape(by=by, with_levels=with_levels, target_sqnr=target_sqnr)
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record holds floating-point numbers, and for integers and bool no scale is sought")
    notes = []
    if SAMPLE in by:
        chosen, said = with_samples(chosen)
        notes.append(said)
    request, left_out = answerable(asked, keeps=set(chosen.column("keep").tolist()))
    notes.append(left_out)
    fields = with_stacks(by, chosen)
    found = []
    for swept in sweep_selection(chosen, request, by=fields, engine=engine):
        if isinstance(swept, RanktapeError):
            raise swept
        found += swept
        on_record()
    table = table_of(
        found,
        request,
        by=fields,
        with_levels=with_levels,
        target_sqnr=target_sqnr,
        engine=engine,
        on_record=on_record,
    )
    return dataclasses.replace(table, notes=(*table.notes, *filter(None, notes)))


def with_samples(records: Records) -> tuple[Records, str]:
    """The records whose samples can be told apart, and a sentence on the others.

    Raises:
        UsageError: there is none.
    """
    with_values = records.where(f"keep == '{Keep.VALUES}' and numel > 0")
    chosen = with_values.take([place for place, names in enumerate(sample_names(with_values)) if names])
    left_out = len(records) - len(chosen)
    if not len(chosen):
        raise UsageError(
            f"none of {len(records)} records has samples that can be told apart, and values: leave sample out of --by"
        )
    return chosen, f"{left_out} of {len(records)} records have no samples, and are left out" if left_out else ""


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
    engine: Engine | None = None,
) -> Table:
    """The table of at least one record's sweeps: a row for each record, group or level, and format.

    Raises:
        DataError: a record that is read again for a common scale is damaged now.
        StorageError: the store cannot be read.
    """
    if by:
        return group_table(grouped(swept, request, engine=engine, on_record=on_record), by=by, target_sqnr=target_sqnr)
    return levels_table(swept) if with_levels else records_table(swept, target_sqnr=target_sqnr)
