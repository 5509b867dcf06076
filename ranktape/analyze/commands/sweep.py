"""Which scale loses least: the command `ranktape analyze sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.options import (
    NamedPath,
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    sources_options,
    view_option,
)
from ranktape.analyze.sweep_arguments import sweep_options

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="sweep")
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
    help="Write figures, plots and a log into DIR/TENSOR/; for .pt files draw/scaling_analysis by default.",
)
@click.option("--no-plots", is_flag=True, help="Draw no plots.")
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selections: tuple[Selection, ...],
    formats: tuple[str, ...],
    view: View | None,
    by: tuple[str, ...],
    with_levels: bool,
    target_sqnr: float,
    output_dir: Path | None,
    no_plots: bool,
    engine: Engine,
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
        engine=engine,
    )
    answer_sweep(selections, question)
