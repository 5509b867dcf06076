"""The plots of a selection: the command `ranktape analyze plot`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say
from ranktape.analyze.options import (
    FORMAT_HELP,
    NamedPath,
    Selection,
    engine_options,
    selection_options,
    view_option,
)
from ranktape.analyze.views.plots.table import FOLDERS, PLOTS
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.formats import Format
    from ranktape.analyze.views.plots.table import Plot

DEFAULT_FOLDER = Path("draw")
"""Where many plots go: the place that the older tool used."""


def parse_kinds(texts: Sequence[str]) -> list[Plot]:
    """The plots that texts name: their own names, names with * and ?, folders; each once, in the order of `PLOTS`.

    Raises:
        UsageError: a text names none; the message has the nearest names.
    """
    found: set[str] = set()
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        wanted = text.replace("-", "_").rstrip("/")
        named = [
            one.name
            for one in PLOTS.values()
            if fnmatch.fnmatchcase(one.name, wanted) or wanted in {one.folder, one.path}
        ]
        if not named:
            near = difflib.get_close_matches(wanted, [*PLOTS, *FOLDERS], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PLOTS)}"
            raise UsageError(f"--kind {text!r} names no plot: {hint}")
        found.update(named)
    return [one for one in PLOTS.values() if one.name in found]


def _epilog() -> str:
    """The plots by folder, as the end of the help."""
    lines = [
        f"{folder}: " + ", ".join(kind.name for kind in PLOTS.values() if kind.folder == folder) for folder in FOLDERS
    ]
    return "\n\n".join(["Plots, by the folder that they go to with --all or several kinds:", *lines])


@click.command(name="plot", epilog=_epilog())
@selection_options
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="NAME",
    help="Which plot: a name below, one with * and ?, or a folder; repeatable. overflow by default.",
)
@click.option("--all", "is_all", is_flag=True, help="Every plot that the selection has something for.")
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help=FORMAT_HELP + " fp8_e4m3 by default; for the plot overflow alone, the captured dtype.",
)
@view_option
@click.option(
    "--output",
    "-o",
    type=NamedPath(path_type=Path),
    metavar="PATH",
    help="Where one plot goes, as .png, .svg or .pdf (NAME.png by default), or the folder of several (draw).",
)
@engine_options
def command(
    *,
    selection: Selection,
    kinds: tuple[str, ...],
    is_all: bool,
    format_name: str | None,
    view: View | None,
    output: Path | None,
    engine: Engine,
) -> None:
    """Draw plots, and print the path of each.

    By default one: overflow and underflow of each layer. --all draws all, into one folder for each kind of analysis,
    with a README.txt that says what each shows, and which were left out and why.
    """
    if is_all and kinds:
        raise UsageError("--all and --kind exclude each other: --all is every kind")
    if output is not None and str(output) == "-":
        raise UsageError("--output - is no name: give that of a file, such as overflow.png, or /dev/stdout")
    wanted = list(PLOTS.values()) if is_all else parse_kinds(kinds or ("overflow",))
    if len(wanted) == 1 and not is_all:
        _draw_one(wanted[0], selection, format_name=format_name, view=view, output=output, engine=engine)
    else:
        _draw_many(
            None if is_all else wanted,
            selection,
            format_name=format_name,
            view=view,
            folder=output or DEFAULT_FOLDER,
            engine=engine,
        )


def _parse_target(name: str | None) -> Format | None:
    """The format whose limits count; None for those of the captured dtype.

    Raises:
        UsageError: it is not known, has no limits without a scale, or there are several.
    """
    from ranktape.analyze.metrics.target import one_target
    from ranktape.analyze.numerics.quantization.schemes import Scaling, parse_scheme

    if name is not None and "," not in name:
        scheme = parse_scheme(name)
        if scheme.scaling is Scaling.BLOCK and scheme.element.name != scheme.name:
            raise UsageError(
                f"--format {name} is one of blocks with scales, of elements of {scheme.element.name}: give --format "
                f"{scheme.element.name}, or ask 'ranktape analyze overflow --format {name} --scaling block'"
            )
    target = one_target(name, None if name is None else "none")
    return None if target is None else target.element


def _draw_one(
    kind: Plot,
    selection: Selection,
    *,
    format_name: str | None,
    view: View | None,
    output: Path | None,
    engine: Engine,
) -> None:
    from ranktape.analyze.views.plots.write import form_of, write_plot

    path = output or Path(f"{kind.name}.png")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: give the name of a file for one plot")
    form_of(path)
    target = _parse_target(format_name)
    records = selection.records()
    if kind.name == "overflow":
        from ranktape.analyze.views.plots.overflow_layers import MANY_ZEROS, zeros_of
        from ranktape.analyze.views.plots.write import plot_overflow

        table = plot_overflow(records, path=path, format=format_name, view=view, engine=engine)
        if not any(table.column("overflow.total")) and not any(table.column("overflow.underflow.count")):
            zeros = zeros_of(table)
            but = f", but of one layer {zeros:.3g} of the elements are zeros" if zeros >= MANY_ZEROS else ""
            say(f"nothing overflows or underflows{but}; --format NAME draws against another format", err=True)
    else:
        from ranktape.analyze.views.plots.data import PlotData, default_target

        data = PlotData(records, target=target or default_target(records), view=view, engine=engine)
        reason = kind.missing(data)
        if reason:
            raise UsageError(f"--kind {kind.name} cannot be drawn: {reason}")
        write_plot(kind.draw(data), path)
    say(str(path))


def _draw_many(
    kinds: list[Plot] | None,
    selection: Selection,
    *,
    format_name: str | None,
    view: View | None,
    folder: Path,
    engine: Engine,
) -> None:
    from ranktape.analyze.views.plots.write import README, write_plots

    target = _parse_target(format_name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder} is a file: several plots need a folder")
    written = write_plots(
        selection.records(),
        folder=folder,
        kinds=kinds,
        format=target,
        view=view,
        engine=engine,
        source=selection.run,
        on_plot=lambda path: say(str(path)),
    )
    rest = f", {len(written.left_out)} left out" if written.left_out else ""
    say(f"{len(written.drawn)} plots{rest}: see {folder / README}", err=True)
