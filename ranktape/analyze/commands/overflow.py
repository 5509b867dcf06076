"""What overflows and underflows: the command `ranktape analyze overflow`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.options import (
    FORMAT_HELP,
    Output,
    Selection,
    by_option,
    output_options,
    selection_options,
    view_option,
)

if TYPE_CHECKING:
    from ranktape.analyze.values import View


@click.command(name="overflow")
@selection_options
@click.option("--format", "format_name", metavar="NAME", help=FORMAT_HELP + " The captured dtype by default.")
@view_option
@by_option
@output_options
def command(
    *, selection: Selection, format_name: str | None, view: View | None, by: tuple[str, ...], output: Output
) -> None:
    """Count what is beyond the limits, NaN, Inf, zeros and subnormals.

    Without --format against the limits of the dtype, as counted when the run was written: no value is read.
    With --format every value is read once; what autocast rounded is rounded first (see --as).
    """
    from ranktape.analyze.progress import progress
    from ranktape.analyze.questions.overflow import overflow

    records = selection.records()
    with progress(len(records), description="counting") as on_record:
        table = overflow(records, by=by, format=format_name, view=view, on_record=on_record)
    output.write(table)
