"""Gives the commands that answer with more than a table: `plot`, `report` and `sweep`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.console import say
from ranktape.analyze.options import (
    FORMAT_HELP,
    SWEEP_MODES,
    NamedPath,
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    say_what_is_left_out,
    selection_options,
    sources_options,
    view_option,
)
from ranktape.analyze.views.plots.table import FOLDERS, PLOTS
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.formats import Format
    from ranktape.analyze.table import Table
    from ranktape.analyze.views.plots.plot import Plot

DEFAULT_FOLDER = Path("draw")
"""Where many plots go: the place that the legacy tool used."""


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


@click.command(epilog=_epilog())
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
def plot(
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
    is_one = len(wanted) == 1 and not is_all
    path = output or (Path(f"{wanted[0].name}.png") if is_one else DEFAULT_FOLDER)
    from ranktape.analyze.views.plots.write import README, form_of, plot_overflow, write_one, write_plots

    if is_one and path.is_dir():
        raise UsageError(f"--output {path} is a folder: give the name of a file for one plot")
    if not is_one and path.exists() and not path.is_dir():
        raise UsageError(f"--output {path} is a file: several plots need a folder")
    if is_one:
        form_of(path)
    target = _parse_target(format_name)
    records = selection.records()
    if is_one and wanted[0].name == "overflow":
        _say_if_nothing(plot_overflow(records, path=path, format=format_name, view=view, engine=engine))
    elif is_one:
        write_one(wanted[0], records, path=path, format=target, view=view, engine=engine)
    else:
        written = write_plots(
            records,
            folder=path,
            kinds=None if is_all else wanted,
            format=target,
            view=view,
            engine=engine,
            source=selection.run,
            on_plot=lambda path: say(str(path)),
        )
        rest = f", {len(written.left_out)} left out" if written.left_out else ""
        say(f"{len(written.drawn)} plots{rest}: see {path / README}", err=True)
    if is_one:
        say(str(path))


def _say_if_nothing(table: Table) -> None:
    """Say on stderr that nothing is lost, and what else may be drawn."""
    from ranktape.analyze.views.plots.overflow_layers import MANY_ZEROS, zeros_of

    if not any(table.column("overflow.total")) and not any(table.column("overflow.underflow.count")):
        zeros = zeros_of(table)
        but = f", but of one layer {zeros:.3g} of the elements are zeros" if zeros >= MANY_ZEROS else ""
        say(f"nothing overflows or underflows{but}; --format NAME draws against another format", err=True)


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


@click.command()
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
def report(*, selection: Selection, formats: tuple[str, ...], view: View | None, engine: Engine, output: Path) -> None:
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


@click.command()
@sources_options
@click.option(
    "--format",
    "--elem-format",
    "formats",
    multiple=True,
    metavar="NAME",
    default=("fp8_e4m3",),
    show_default=True,
    help="mxfp8_e4m3, mxfp4_e2m1, nvfp4, fp8_e4m3, fp8_e5m2, int8, hif8, ...; several with commas between.",
)
@click.option(
    "--sweep-mode",
    type=click.Choice(SWEEP_MODES),
    help="What a level is; mx for formats with blocks, tensor for others, unless given.",
)
@click.option(
    "--scale-rule",
    type=click.Choice(["floor", "ceil", "even", "rceil"]),
    help="How a block's scale follows from its largest value; floor unless given. Not of nvfp4.",
)
@click.option(
    "--rounding",
    type=click.Choice(["even", "away", "floor", "stochastic", "hybrid"]),
    help="Which neighbour a value becomes; by default the format's own: away for hif8, even for others.",
)
@click.option("--block-size", type=int, metavar="N", help="Elements that share a scale; 32, for nvfp4 16.")
@click.option("--axis", type=int, default=-1, show_default=True, help="Where blocks lie, or channels are told apart.")
@click.option("--scale-bits", type=int, metavar="N", help="Width of the exponent of a block's scale; 8 unless given.")
@click.option("--num-levels", type=int, metavar="N", help="Scales that are tried; 21 by default.")
@click.option(
    "--max-scale-exp",
    type=float,
    metavar="E",
    help="First exponent; where the largest value is aligned by default. In mx mode first offset, +10.",
)
@click.option(
    "--min-scale-exp",
    type=float,
    metavar="E",
    help="Last exponent; where the smallest value is aligned by default. In mx mode last offset, -10.",
)
@click.option("--levels", "with_levels", is_flag=True, help="One row for each level instead of the recommended one.")
@click.option(
    "--target-sqnr",
    type=float,
    metavar="DB",
    default=25.0,
    show_default=True,
    help="What the best format has to keep of each tensor; narrower ones are preferred.",
)
@click.option(
    "--output-dir",
    type=NamedPath(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write figures, plots and a log into DIR/TENSOR/; for .pt files draw/scaling_analysis by default.",
)
@click.option("--no-plots", is_flag=True, help="Draw no plots.")
@view_option
@by_option
@engine_options
@output_options
def sweep(
    *,
    selections: tuple[Selection, ...],
    formats: tuple[str, ...],
    view: View | None,
    by: tuple[str, ...],
    with_levels: bool,
    target_sqnr: float,
    output_dir: Path | None,
    no_plots: bool,
    engine: Engine,
    output: Output,
    **levels: Any,
) -> None:
    """Find the scale with which each tensor loses least in a format.

    SOURCE is a run, a folder of .pt files under any name, or one such file. Values are divided by a scale, rounded to
    the format and multiplied again. In mx mode blocks have scales of their own and a level is an offset to the
    exponents of all; in tensor mode a level is the exponent of the one scale; legacy computes as the legacy tool.
    The recommended level has the best score: 30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error.

    The answer is a table. Of .pt files, and with --output-dir of anything, it is a directory for each tensor instead,
    unless --by, --levels, --json, --csv or --output asks for the table too.
    """
    from ranktape.analyze.questions.sweep_command import answer_sweep

    answer_sweep(
        selections,
        formats=formats,
        levels=levels,
        view=view,
        by=by,
        with_levels=with_levels,
        target_sqnr=target_sqnr,
        output_dir=output_dir,
        with_plots=not no_plots,
        output=output,
        engine=engine,
    )
