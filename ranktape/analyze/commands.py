"""The commands that write files: `plot` and `report`."""

from __future__ import annotations

import difflib
import fnmatch
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import say
from ranktape.analyze.options import Selection, field_words, say_what_is_left_out
from ranktape.analyze.views.plots.table import DEFAULT_RECIPES, FOLDERS, PLOTS, REPLAYED
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.target import Target
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.views.plots.table import Plot

DEFAULT_FOLDER = Path("draw")
"""Default folder of several plots, which is that of the legacy tool."""


def parse_kinds(texts: Sequence[str]) -> list[Plot]:
    """The plots with these names, patterns (with * and ?) or folders, without duplicates, in the order of `PLOTS`.

    Raises:
        UsageError: a text matches no plot. The message has the nearest names.
    """
    matching: set[str] = set()
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        pattern = text.replace("-", "_").rstrip("/")
        matches = [
            one.name
            for one in PLOTS.values()
            if fnmatch.fnmatchcase(one.name, pattern) or pattern in {one.folder, one.path}
        ]
        if not matches:
            near = difflib.get_close_matches(pattern, [*PLOTS, *FOLDERS], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PLOTS)}"
            raise UsageError(f"--kind {text!r} names no plot: {hint}")
        matching.update(matches)
    return [one for one in PLOTS.values() if one.name in matching]


def kinds_text() -> str:
    """The plots by folder, for the end of the help."""
    lines = ["Plots by folder (--all and several kinds create these folders):"]
    for folder in FOLDERS:
        names = ", ".join(one.name for one in PLOTS.values() if one.folder == folder)
        lines += textwrap.wrap(f"{folder}: {names}", _HELP_WIDTH, subsequent_indent="  ")
    # click does not wrap text after this mark.
    return "\n".join(["\b", *lines])


_HELP_WIDTH = 76
"""Width of the list of plots, in characters: that of help without indentation."""


def plot(
    selection: Selection,
    *,
    kind: Sequence[str] = (),
    all: bool = False,  # noqa: A002 - the option's name
    format: str | None = None,  # noqa: A002 - the option's name
    recipe: Sequence[str] = (),
    by: Sequence[str] = (),
    output: Path | None = None,
    view: View | None = None,
    engine: Engine | None = None,
) -> None:
    """Draw plots, and print the path of each.

    The default is one plot, of overflow and underflow by layer. `all` draws all plots, into one folder for each kind of
    analysis; a README.txt there describes each plot, or gives the reason why it was left out.

    Args:
        kind (NAME): Name of a plot, a pattern or a folder [overflow].
        all: Draw every plot for which the selection has data.
        format (NAME): Format whose limits count: fp8_e5m2, nvfp4, ... [fp8_e4m3].
        recipe (NAME): Recipes of replay_analysis: names or files; repeatable. With `all`, these plots need a recipe to
            be given [mxfp8,mxfp4,nvfp4].
        by (FIELD): Field whose values define the groups of the plots that --kind names, or the columns of a heat map;
            repeatable.
        output (PATH): File of one plot, as .png, .svg or .pdf [NAME.png], or folder of several plots [draw].
    """
    if all and kind:
        raise UsageError("--all and --kind exclude each other: --all draws every kind")
    plots = list(PLOTS.values()) if all else parse_kinds(kind or ("overflow",))
    if by and all:
        raise UsageError("--by and --all exclude each other: name the plots to group with --kind")
    fields = field_words(by)
    plots = [one.grouped_by(fields) for one in plots] if by else plots
    names_folder = any(part.strip().rstrip("/") in FOLDERS for text in kind for part in text.split(","))
    is_one = len(plots) == 1 and not all and not names_folder
    path = _path_of(output, name=plots[0].name if is_one else None)
    from ranktape.analyze.views.plots import write

    target, recipes = _parse_target(format), _parse_recipes(recipe, plots, is_all=all)
    records = selection.records()
    common: dict[str, Any] = {"view": view, "engine": engine}
    if not is_one:
        kinds = None if all else plots
        source = " and ".join((selection.run, *selection.more))
        written = write.write_plots(
            records,
            folder=path,
            kinds=kinds,
            target=target,
            recipes=recipes,
            source=source,
            on_plot=lambda written_path: say(str(written_path)),
            **common,
        )
        rest = f", {len(written.left_out)} left out" if written.left_out else ""
        say(f"{len(written.drawn)} plots{rest}: see {path / write.README}", err=True)
        return
    write.write_one(plots[0], records, path=path, target=target, recipes=recipes, **common)
    say(str(path))


def _path_of(output: Path | None, *, name: str | None) -> Path:
    """The path of the plot with this name, or of the folder of plots if there is no name."""
    if output is not None and str(output) == "-":
        raise UsageError("--output - is not a file name: give one, such as overflow.png, or /dev/stdout")
    path = output or (DEFAULT_FOLDER if name is None else Path(f"{name}.png"))
    if name is None:
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output {path} is a file: several plots need a folder")
        return path
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: give the name of a file for one plot")
    from ranktape.analyze.views.plots.write import form_of

    form_of(path)
    return path


def _parse_recipes(texts: Sequence[str], wanted: Sequence[Plot], *, is_all: bool) -> list[Recipe]:
    """The recipes that were named, or the default ones of a replay plot that was requested by name."""
    is_needed = any(one.folder == REPLAYED for one in wanted)
    if texts and not is_needed:
        raise UsageError(f"--recipe is only for plots of recipes: add --kind {REPLAYED} or --all")
    from ranktape.analyze.numerics.recipes.words import parse_recipes

    named = texts or ([] if is_all or not is_needed else [DEFAULT_RECIPES])
    return parse_recipes(named) if named else []


def _parse_target(name: str | None) -> Target | None:
    """The format whose limits apply, with its scale; None for the limits of the captured dtype."""
    from ranktape.analyze.engine.target import parse_target
    from ranktape.analyze.numerics.quantization.schemes import Scaling, parse_scheme

    if name is not None and "," not in name:
        scheme = parse_scheme(name)
        if scheme.scaling is Scaling.BLOCK and scheme.element.name != scheme.name:
            raise UsageError(
                f"--format {name} has block scales, which plots do not support: give --format "
                f"{scheme.element.name}, or run 'ranktape analyze overflow --format {name} --scaling block'"
            )
    return parse_target(name)


def report(
    selection: Selection,
    *,
    format: Sequence[str] = (),  # noqa: A002 - the option's name
    recipe: Sequence[str] = (),
    output: Path | None = None,
    view: View | None = None,
    engine: Engine | None = None,
) -> None:
    """Write an HTML page that shows what is wrong in RUN and where, and print its path.

    The page is one file with findings, heat maps, tables, distributions, sweeps and filters. It opens from disk, loads
    nothing, and can be sent or printed. For several sources, it starts with a comparison of each with the first.

    Args:
        format (NAME): Format to try on up to 2,000 records; repeatable.  [default: mxfp8_e4m3, mxfp4_e2m1, fp8_e4m3,
            hif8]
        recipe (NAME): Recipes in which the products of layers are computed again: names or files, separated by commas;
            repeatable. None by default, because it takes as long as these products.
        output (FILE): Path of the page.  [default: report.html]
    """
    from ranktape.analyze.views.report.page import FORMATS, write_report
    from ranktape.storage.records.run import Run

    source = selection.source()
    say_what_is_left_out(source)
    chosen = [f"{field} {','.join(values)}" for field, values in selection.filters.items()]
    path = output or Path("report.html")
    write_report(
        selection.chosen(source),
        output=path,
        view=view,
        format=format or FORMATS,
        recipe=recipe,
        url=source.url,
        scope=" and ".join([*chosen, *([selection.where] if selection.where else [])]),
        environment=source.environment() if isinstance(source, Run) else {},
        engine=engine,
    )
    say(str(path))
