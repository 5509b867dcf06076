"""How figures change over the iterations: the command `ranktape analyze trend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.options import (
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    selection_options,
    view_option,
)

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="trend")
@selection_options
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="NAME",
    help="What is followed: absmax, std, p99.9, overflow.ratio; repeatable; absmax by default.",
)
@click.option("--summary", "is_summary", is_flag=True, help="One row for each group: first, last, slope, largest jump.")
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    figures: tuple[str, ...],
    is_summary: bool,
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Follow figures over the iterations, for each place of the model or for each group of --by.

    Ranks, microbatches and calls are taken together, unless --by names them.
    """
    from ranktape.analyze.questions.trend import trend

    names = tuple(name.strip() for text in figures for name in text.split(","))
    found = trend(selection.records(), figures=names or ("absmax",), by=by, view=view, engine=engine)
    output.write(found.summary if is_summary else found.course)
