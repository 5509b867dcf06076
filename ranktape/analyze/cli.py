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
    NamedPath,
    Output,
    Selection,
    by_option,
    output_options,
    selection_options,
    sources_options,
    view_option,
)
from ranktape.analyze.sweep_arguments import sweep_options

if TYPE_CHECKING:
    from ranktape.analyze.values import View

FORMAT_HELP = "Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, int8, hif8, nvfp4, bf16, fp16."


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
    """List the records of RUN, or count them by the values of fields. Sizes are before compression."""
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
@sources_options
@sweep_options
@click.option("--levels", "with_levels", is_flag=True, help="One row for each level instead of the recommended one.")
@click.option(
    "--target-sqnr",
    type=float,
    metavar="DB",
    default=25.0,
    show_default=True,
    help="What the best format has to keep of each tensor; narrower ones are preferred.",
)
@click.option(
    "--output-dir",
    type=NamedPath(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write figures, pictures and a log into DIR/TENSOR/; for .pt files draw/scaling_analysis by default.",
)
@click.option("--no-plots", is_flag=True, help="Draw no pictures.")
@view_option
@by_option
@output_options
def sweep_command(
    *,
    selections: tuple[Selection, ...],
    formats: tuple[str, ...],
    view: View | None,
    by: tuple[str, ...],
    with_levels: bool,
    target_sqnr: float,
    output_dir: Path | None,
    no_plots: bool,
    output: Output,
    **levels: Any,
) -> None:
    """Find the scale with which each tensor loses least in a format.

    SOURCE is a run, a folder of .pt files under any name, or one such file. Values are divided by a scale, rounded to
    the format and multiplied again. In mx mode blocks have scales of their own and a level is an offset to the
    exponents of all; in tensor mode a level is the exponent of the one scale; legacy computes as the tool before us.
    The recommended level has the best score: 30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error.

    The answer is a table. Of .pt files, and with --output-dir of anything, it is a directory for each tensor instead,
    unless --by, --levels, --json, --csv or --output asks for the table too.
    """
    from ranktape.analyze.questions.sweep_command import SweepQuestion, answer_sweep

    question = SweepQuestion(
        formats=formats,
        levels=levels,
        view=view,
        by=by,
        with_levels=with_levels,
        target_sqnr=target_sqnr,
        output_dir=output_dir,
        with_plots=not no_plots,
        output=output,
    )
    answer_sweep(selections, question)


@cli.command(name="plot")
@selection_options
@click.option("--format", "format_name", metavar="NAME", help=FORMAT_HELP + " The captured dtype by default.")
@view_option
@click.option(
    "--output",
    "-o",
    type=NamedPath(path_type=Path, dir_okay=False),
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
