"""Which commands ask questions of a run?

`ranktape analyze` and `python -m ranktape.analyze` are this group. Everything heavy is imported inside the
commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.group import RanktapeGroup
from ranktape.analyze.options import (
    Output,
    Selection,
    by_option,
    output_options,
    selection_options,
    view_option,
)

if TYPE_CHECKING:
    from ranktape.analyze.values import View

FORMAT_HELP = "Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, bf16, fp16."


@click.group(name="analyze", cls=RanktapeGroup, context_settings={"max_content_width": 100})
def cli() -> None:
    """Ask a recorded run what its numbers do.

    RUN is a URL or a path; a folder of .pt files that the tools before us wrote, or one such file, will do as well.
    Filters are the names of a record's fields; a value may be a text with * and ?, a number, a range (0-3, 10:20:2)
    or alternatives (0,2,5), and an option may be repeated.
    """


@cli.command(name="ls")
@selection_options
@by_option
@output_options
def ls_command(*, selection: Selection, by: tuple[str, ...], output: Output) -> None:
    """List the records of RUN, or count them by the values of fields."""
    from ranktape.analyze.questions.listing import listing

    output.write(listing(selection.records(), by=by))


@cli.command(name="overflow")
@selection_options
@click.option("--format", "format_name", metavar="NAME", help=FORMAT_HELP + " The captured dtype by default.")
@view_option
@by_option
@output_options
def overflow_command(
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


@cli.command(name="sweep")
@selection_options
@click.option("--format", "format_name", metavar="NAME", default="fp8_e4m3", show_default=True, help=FORMAT_HELP)
@click.option("--num-levels", type=int, default=21, show_default=True, help="Scales that are tried.")
@click.option("--max-scale-exp", type=float, help="First exponent; where the largest value is aligned by default.")
@click.option("--min-scale-exp", type=float, help="Last exponent; where the smallest value is aligned by default.")
@click.option("--levels", "with_levels", is_flag=True, help="One row for each level instead of the recommended one.")
@view_option
@by_option
@output_options
def sweep_command(
    *,
    selection: Selection,
    format_name: str,
    view: View | None,
    by: tuple[str, ...],
    with_levels: bool,
    output: Output,
    **levels: Any,
) -> None:
    """Find the scale with which each tensor loses least in a format.

    A scale is 2**exponent, one for each tensor: values are divided by it, rounded to the nearest value of the
    format (ties to even, saturating) and multiplied again. The recommended level has the best score: 30 % MSE,
    30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error.
    """
    from ranktape.analyze.progress import progress
    from ranktape.analyze.questions.sweep import sweep
    from ranktape.analyze.scale_sweep import SweepOptions
    from ranktape.analyze.values import View

    options = SweepOptions(**levels)
    records = selection.records()
    with progress(len(records), description="sweeping") as on_record:
        table = sweep(
            records,
            format=format_name,
            by=by,
            view=view or View.COMPUTE,
            options=options,
            with_levels=with_levels,
            on_record=on_record,
        )
    output.write(table)


@cli.command(name="plot")
@selection_options
@click.option("--format", "format_name", metavar="NAME", help=FORMAT_HELP + " The captured dtype by default.")
@view_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("overflow.png"),
    show_default=True,
    metavar="FILE",
    help="Where the PNG goes.",
)
def plot_command(*, selection: Selection, format_name: str | None, view: View | None, output: Path) -> None:
    """Draw overflow and underflow of each layer, and print the path of the PNG."""
    from ranktape.analyze.plot import plot_overflow
    from ranktape.analyze.progress import progress

    records = selection.records()
    with progress(len(records), description="counting") as on_record:
        table = plot_overflow(records, path=output, format=format_name, view=view, on_record=on_record)
    if not any(table.column("overflow.total")) and not any(table.column("overflow.underflow.count")):
        click.echo("nothing overflows or underflows; --format NAME draws against another format", err=True)
    click.echo(output)
