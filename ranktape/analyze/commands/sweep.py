"""Which scale loses least: the command `ranktape analyze sweep`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.options import (
    SWEEP_MODES,
    NamedPath,
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    sources_options,
    view_option,
)

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


SWEEP_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--format", "--elem-format", "formats"),
        {
            "multiple": True,
            "metavar": "NAME",
            "default": ("fp8_e4m3",),
            "show_default": True,
            "help": "mxfp8_e4m3, mxfp4_e2m1, nvfp4, fp8_e4m3, fp8_e5m2, int8, hif8, ...; several with commas between.",
        },
    ),
    (
        ("--sweep-mode",),
        {
            "type": click.Choice(SWEEP_MODES),
            "help": "What a level is; mx for formats with blocks, tensor for others, unless given.",
        },
    ),
    (
        ("--scale-rule",),
        {
            "type": click.Choice(["floor", "ceil", "even", "rceil"]),
            "help": "How a block's scale follows from its largest value; floor unless given. Not of nvfp4.",
        },
    ),
    (
        ("--rounding",),
        {
            "type": click.Choice(["even", "away", "floor", "stochastic", "hybrid"]),
            "help": "Which neighbour a value becomes; by default the format's own: away for hif8, even for others.",
        },
    ),
    (("--block-size",), {"type": int, "metavar": "N", "help": "Elements that share a scale; 32, for nvfp4 16."}),
    (
        ("--axis",),
        {
            "type": int,
            "default": -1,
            "show_default": True,
            "help": "Where blocks lie, or channels are told apart.",
        },
    ),
    (
        ("--scale-bits",),
        {"type": int, "metavar": "N", "help": "Width of the exponent of a block's scale; 8 unless given."},
    ),
    (("--num-levels",), {"type": int, "metavar": "N", "help": "Scales that are tried; 21 by default."}),
    (
        ("--max-scale-exp",),
        {
            "type": float,
            "metavar": "E",
            "help": "First exponent; where the largest value is aligned by default. In mx mode first offset, +10.",
        },
    ),
    (
        ("--min-scale-exp",),
        {
            "type": float,
            "metavar": "E",
            "help": "Last exponent; where the smallest value is aligned by default. In mx mode last offset, -10.",
        },
    ),
)
"""The options that say which formats and scales are tried, and how."""


def sweep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `SWEEP_OPTIONS`; the command gets `formats`, and the rest by the names of fields of `SweepOptions`."""
    decorated = command
    for names, settings in reversed(SWEEP_OPTIONS):
        decorated = click.option(*names, **settings)(decorated)
    return decorated


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
    from ranktape.analyze.questions.sweep_command import answer_sweep

    answer_sweep(
        selections,
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
