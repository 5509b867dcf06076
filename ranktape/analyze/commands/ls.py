"""Which records are there: the command `ranktape analyze ls`."""

from __future__ import annotations

import click

from ranktape.analyze.options import Output, Selection, by_option, output_options, selection_options


@click.command(name="ls")
@selection_options
@by_option
@output_options
def command(*, selection: Selection, by: tuple[str, ...], output: Output) -> None:
    """List the records of RUN, or count them by the values of fields. Sizes are before compression."""
    from ranktape.analyze.questions.ls import listing

    output.write(listing(selection.records(), by=by))
