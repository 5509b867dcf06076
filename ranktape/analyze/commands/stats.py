"""What the statistics are: the command `ranktape analyze stats`."""

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
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="stats")
@selection_options
@click.option(
    "--figure", "figures", multiple=True, metavar="NAME", help="Only these: std, p99.9, overflow.ratio; repeatable."
)
@click.option("--neighbours", "with_neighbours", is_flag=True, help="Each layer beside the next: ratios, distances.")
@click.option("--per-sample", is_flag=True, help="One row for each sample; with --by over the records of a group.")
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    figures: tuple[str, ...],
    with_neighbours: bool,
    per_sample: bool,
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Mean, deviation, extremes, moments, percentiles and counts of each record, or of each group.

    Text shows the important figures, --wide, JSON and CSV all of them. --by sample is --per-sample over all records.
    """
    from ranktape.analyze.questions.neighbours import neighbours
    from ranktape.analyze.questions.samples import sample_stats
    from ranktape.analyze.questions.stats import stats
    from ranktape.analyze.sample_names import SAMPLE

    names = tuple(dict.fromkeys(name.strip() for text in figures for name in text.split(",")))
    has_samples = per_sample or SAMPLE in by
    if with_neighbours and has_samples:
        raise UsageError("--neighbours and --per-sample exclude each other: samples are not compared between layers")
    if with_neighbours and names:
        raise UsageError("--neighbours has figures of its own: leave out --figure")
    records = selection.records()
    if with_neighbours:
        output.write(neighbours(records, by=by, view=view, engine=engine))
    elif has_samples:
        output.write(sample_stats(records, by=by, figures=names, view=view, engine=engine))
    else:
        output.write(stats(records, by=by, figures=names, view=view, engine=engine))
