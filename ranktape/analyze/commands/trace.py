"""What becomes of a sample on its way through the model: the command `ranktape analyze trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.options import (
    Output,
    Selection,
    engine_options,
    output_options,
    selection_options,
    view_option,
)

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="trace")
@selection_options
@click.option("--sample", metavar="ID", help="Follow one sample: its identifier, or its index where there are none.")
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="NAME",
    help="What is shown of each step: std, overflow.ratio; repeatable; mean, std, absmax and norm by default.",
)
@view_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    sample: str | None,
    figures: tuple[str, ...],
    view: View | None,
    engine: Engine,
    output: Output,
) -> None:
    """Follow a sample, a --call or a --microbatch through the model, in the order of execution.

    Each rank and iteration is a way of its own; --rank and --iteration choose one.
    """
    from ranktape.analyze.questions.trace import trace

    names = tuple(name.strip() for text in figures for name in text.split(","))
    output.write(trace(selection.records(), sample=sample, figures=names, view=view, engine=engine))
