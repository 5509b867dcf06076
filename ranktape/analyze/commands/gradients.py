"""What gradients do: the command `ranktape analyze gradients`."""

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

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="gradients")
@selection_options
@click.option(
    "--show",
    type=click.Choice(["ranges", "weights", "passes"]),
    default="ranges",
    show_default=True,
    help="Underflow and range; norms beside those of the weights; the forward pass beside the backward pass.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help=FORMAT_HELP + " Repeatable; fp16 and both fp8 by default.",
)
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    show: str,
    formats: tuple[str, ...],
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Underflow and range of gradients, their norms beside the weights', and the backward pass beside the forward.

    Groups are layer types by default, modules beside weights.
    """
    from ranktape.analyze.questions.gradients import FORMATS, gradients

    names = tuple(name.strip() for text in formats for name in text.split(","))
    found = gradients(selection.records(), by=by, formats=names or FORMATS, view=view, engine=engine)
    output.write({"ranges": found.ranges, "weights": found.weights, "passes": found.passes}[show])
