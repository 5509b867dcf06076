"""How far apart are two runs, or two kinds of tensors of one: the command `ranktape analyze compare`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

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


@click.command(name="compare")
@selection_options
@click.argument("other", metavar="[OTHER]", required=False)
@click.option(
    "--pair",
    multiple=True,
    metavar="FIELD=LEFT:RIGHT",
    help="In which field the sides differ: quant_type=hifp8:mxfp8, operation=forward:backward, phase=pre:post, "
    "rank=0:1, iteration=20:40; repeatable.",
)
@click.option("--neighbours", is_flag=True, help="Compare each layer with the next.")
@click.option("--noise", metavar="RUN", help="A second equal run: what differs between it and RUN is the noise floor.")
@click.option(
    "--figure",
    metavar="NAME",
    default="relative_norm",
    show_default=True,
    help="What a divergence is judged by: relative_norm, max_abs, mean_abs, max_rel, mean_rel, ulp_max, "
    "differing.ratio.",
)
@click.option(
    "--tolerance", type=float, default=0.0, show_default=True, metavar="X", help="How large the figure may be."
)
@click.option(
    "--margin",
    type=float,
    default=3.0,
    show_default=True,
    metavar="X",
    help="How many times the noise floor it may be.",
)
@click.option("--allow-unmatched", is_flag=True, help="Leave out, and count, records without a counterpart.")
@click.option("--no-distances", is_flag=True, help="Do not compare distributions: values are read once.")
@click.option("--in-order", is_flag=True, help="Rows in the order of execution instead of the worst first.")
@click.option(
    "--map",
    "as_map",
    is_flag=True,
    help="Of a single pair: the differences by token and channel; --output FILE.npz saves arrays.",
)
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    other: str | None,
    pair: tuple[str, ...],
    neighbours: bool,
    noise: str | None,
    figure: str,
    tolerance: float,
    margin: float,
    allow_unmatched: bool,
    no_distances: bool,
    in_order: bool,
    as_map: bool,
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Compare RUN with OTHER, or tensors of RUN with each other.

    The first line names the first tensor that differs, in the order of execution; the rows follow, the worst first.
    RUN is the reference. Filters hold for both sides. Tensors belong together that agree in every field of their
    identity but those of --pair; where ranks hold other parts of them, they are put together first. What has no
    counterpart is an error unless --allow-unmatched is given, or two kinds of layers are compared.
    """
    from ranktape.analyze.questions.compare import compare, compare_map

    records = selection.records()
    others = None if other is None else dataclasses.replace(selection, run=other).records()
    sides: dict[str, Any] = {"pair": pair, "neighbours": neighbours, "allow_unmatched": allow_unmatched, "view": view}
    if as_map:
        found = compare_map(records, others, **sides)
        if output.output is not None and output.output.suffix.lower() == ".npz":
            found.save(output.output)
        else:
            output.write(found.to_table())
        return
    table = compare(
        records,
        others,
        **sides,
        noise=None if noise is None else dataclasses.replace(selection, run=noise).records(),
        figure=figure,
        tolerance=tolerance,
        margin=margin,
        with_distances=not no_distances,
        in_order=in_order,
        by=by,
        engine=engine,
    )
    output.write(table)
