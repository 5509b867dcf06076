"""What stands out from its peers: the command `ranktape analyze outliers`."""

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


@click.command(name="outliers")
@selection_options
@click.option("--across", multiple=True, metavar="WHAT", help="Only these: rank, layer, sample, channel; repeatable.")
@click.option(
    "--figure",
    "figure_name",
    metavar="NAME",
    help="Compare ranks and layers by this: std, overflow.ratio; absmax and rms by default.",
)
@click.option(
    "--threshold",
    type=float,
    default=3.5,
    show_default=True,
    metavar="Z",
    help="Robust z, (x - median) / (1.4826 MAD), from which on something stands out.",
)
@view_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    across: tuple[str, ...],
    figure_name: str | None,
    threshold: float,
    view: View | None,
    engine: Engine,
    output: Output,
) -> None:
    """Name the ranks, layers, samples and channels of RUN that stand out from their peers.

    Each cause is followed by what follows from it: what is later in execution order, on the same ranks or in the same
    sample. Copies that differ between ranks are told by their checksums.
    """
    from ranktape.analyze.questions.outliers import outliers

    chosen = tuple(one.strip() for text in across for one in text.split(","))
    table = outliers(
        selection.records(), across=chosen, figure_name=figure_name, threshold=threshold, view=view, engine=engine
    )
    output.write(table)
