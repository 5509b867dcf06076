"""What can be drawn: the command `ranktape analyze plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktape.analyze.options import FORMAT_HELP, NamedPath, Selection, selection_options, view_option

if TYPE_CHECKING:
    from ranktape.analyze.values import View


@click.command(name="plot")
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
def command(*, selection: Selection, format_name: str | None, view: View | None, output: Path) -> None:
    """Draw overflow and underflow of each layer, and print the path of the PNG."""
    from ranktape.analyze.plot import plot_overflow
    from ranktape.analyze.progress import progress

    records = selection.records()
    with progress(len(records), description="counting") as on_record:
        table = plot_overflow(records, path=output, format=format_name, view=view, on_record=on_record)
    if not any(table.column("overflow.total")) and not any(table.column("overflow.underflow.count")):
        click.echo("nothing overflows or underflows; --format NAME draws against another format", err=True)
    click.echo(output)
