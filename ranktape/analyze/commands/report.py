"""What is wrong and where, on one page: the command `ranktape analyze report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say
from ranktape.analyze.options import (
    NamedPath,
    Selection,
    engine_options,
    say_what_is_left_out,
    selection_options,
    view_option,
)

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


@click.command(name="report")
@selection_options
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help="Formats that are tried on every record; repeatable.  [default: mxfp8_e4m3, mxfp4_e2m1, fp8_e4m3, hif8]",
)
@view_option
@engine_options
@click.option(
    "--output",
    "-o",
    type=NamedPath(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="Where the page goes.",
)
def command(*, selection: Selection, formats: tuple[str, ...], view: View | None, engine: Engine, output: Path) -> None:
    """Write a page that says what is wrong in RUN and where, and print its path.

    One HTML file with everything in it: findings, heat maps, tables, distributions, sweeps, filters. It opens from
    disk, loads nothing, and can be sent to a colleague or printed.
    """
    from ranktape.analyze.views.report.page import FORMATS, write_report
    from ranktape.storage.records.run import Run

    source = selection.source()
    say_what_is_left_out(source)
    records = selection.chosen(source)
    attributes = source.attributes if isinstance(source, Run) else {}
    write_report(
        records,
        output=output,
        view=view,
        formats=formats or FORMATS,
        url=source.url,
        scope=_scope(selection),
        environment=attributes.get("environment") or {},
        engine=engine,
    )
    say(str(output))


def _scope(selection: Selection) -> str:
    """Which records were chosen, as the command line has it; empty for all."""
    chosen = [f"{field} {','.join(values)}" for field, values in selection.filters.items()]
    return " and ".join([*chosen, *([selection.where] if selection.where else [])])
