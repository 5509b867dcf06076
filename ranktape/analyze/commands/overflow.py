"""What overflows and underflows: the command `ranktape analyze overflow`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.options import (
    FORMAT_HELP,
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    selection_options,
    view_option,
)
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="overflow")
@selection_options
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help=FORMAT_HELP + " And in blocks: mxfp8, mxfp4, ... Several with commas between. The captured dtype by default.",
)
@click.option(
    "--scaling",
    "scalings",
    multiple=True,
    metavar="KIND",
    help="Scales before values meet a format: none, tensor (a power of two for each, its largest value aligned) or "
    "block (those of the format); several with commas between. Unless given, block for formats with blocks, none for "
    "others.",
)
@click.option("--first", "is_first", is_flag=True, help="Where it begins: iteration, layer in execution order, rank.")
@click.option("--per-sample", is_flag=True, help="One row for each sample of each record; --by sample groups them.")
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    formats: tuple[str, ...],
    scalings: tuple[str, ...],
    is_first: bool,
    per_sample: bool,
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Count what is beyond the limits, NaN, Inf, zeros and subnormals.

    Without --format against the limits of the dtype, as counted when the run was written: no value is read.
    With --format every value is read once; what autocast rounded is rounded first (see --as). The severity of a row is
    high where more than 1 % overflow or underflow or anything is NaN or Inf, and moderate where more than 0.1 % do.
    """
    from ranktape.analyze.questions.overflow import overflow, worst_first
    from ranktape.analyze.questions.overflow_begins import overflow_begins

    if per_sample and by:
        raise UsageError("--per-sample and --by exclude each other: --by sample makes a row for each sample")
    question = overflow_begins if is_first else overflow
    table = question(
        selection.records(),
        by=by,
        format=formats or None,
        scaling=scalings or None,
        per_sample=per_sample,
        view=view,
        engine=engine,
    )
    output.write(table, worst_first=None if is_first else worst_first)
