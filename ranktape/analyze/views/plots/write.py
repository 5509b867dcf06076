"""Writes one plot into a file, or all plots of a selection into folders with an index."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.analyze.console import write_whole, writing
from ranktape.analyze.engine.engine import step_line, steps
from ranktape.analyze.views.plots.data import PlotData, default_target
from ranktape.analyze.views.plots.groups import subject_line
from ranktape.analyze.views.plots.style import FORMS, plot_bytes
from ranktape.analyze.views.plots.table import FOLDERS, PLOTS
from ranktape.errors import UsageError, WorkersError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.target import Target
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.views.plots.table import Plot
    from ranktape.storage import Records

INDEX, README = "index.json", "README.txt"
"""The files that list the plots, for programs and for people."""

OLDER = "; the existing file of that name shows an earlier selection"
"""The text in the index for a plot that is left out, if a file with its name exists."""

MAX_PROCESSES, MIN_SHARE = 4, 3
"""The largest number of processes that draw plots, and the smallest number of plots for each."""

OTHER_FORMS = ("jpg", "jpeg", "gif", "bmp", "tif", "tiff", "webp", "eps", "ps")
"""The suffixes of image formats that are not supported."""


def form_of(path: Path) -> str:
    """The file format for a path: from its suffix .svg or .pdf, otherwise png.

    Raises:
        UsageError: the suffix is that of an image format that is not supported.
    """
    end = path.suffix.lower().lstrip(".")
    if end in OTHER_FORMS:
        raise UsageError(f"--output {printable(str(path))}: plots cannot be written as .{end}; use .png, .svg or .pdf")
    return end if end in FORMS else "png"


def write_one(
    kind: Plot,
    records: Records,
    *,
    path: Path,
    target: Target | None = None,
    view: View | None = None,
    recipes: Sequence[Recipe] = (),
    engine: Engine | None = None,
) -> None:
    """Draw one plot into a file, by default against fp8_e4m3.

    Raises:
        NoRecordsError: no record has floating-point or complex numbers.
        UsageError: the plot cannot be drawn for the selection, or its file format is not supported.
        StorageError: the store cannot be read, or the file cannot be written.
    """
    data = PlotData(records, target=target or default_target(records), view=view, recipes=recipes, engine=engine)
    reason = kind.missing(data)
    if reason:
        raise UsageError(f"--kind {kind.name} cannot be drawn: {reason}")
    write_whole(path, plot_bytes(kind.draw(data), form=form_of(path)))


class Written(NamedTuple):
    """The result of writing plots."""

    drawn: tuple[Plot, ...]
    """The plots that were written, in order."""
    left_out: tuple[tuple[Plot, str], ...]
    """The plots that were not written, each with the reason."""
    notes: tuple[str, ...]
    """Notes for the reader."""


def write_plots(
    records: Records,
    *,
    folder: Path,
    kinds: Sequence[Plot] | None = None,
    target: Target | None = None,
    view: View | None = None,
    recipes: Sequence[Recipe] = (),
    engine: Engine | None = None,
    source: str = "",
    on_plot: Callable[[Path], object] = lambda _: None,
) -> Written:
    """Draw plots, all of them by default, into the folders of the legacy tool under `folder`, with an index.

    Every record is read once. A few are read again to compare or sweep their values; for plots of `recipes`, operands
    are read once for each product that they are used in. A plot is left out if it cannot be drawn for the selection or
    shows the same as another one. Existing files of drawn plots are replaced, and no other plot is changed; the index
    notes older files of plots that are left out. If `target` is None, overflow and underflow are those of fp8_e4m3, as
    the plots say. Each file appears only once it is complete. `on_plot` is called with the path of each written plot.

    Raises:
        NoRecordsError: no record has floating-point or complex numbers.
        StorageError: the store cannot be read, or a file cannot be written; the subclass gives the reason.
        DataError: a record's bytes are missing or damaged.
        UsageError: the view is of values as captured, but a record stores values that are already rounded.
    """
    data = PlotData(records, target=target or default_target(records), view=view, recipes=recipes, engine=engine)
    plots = list(PLOTS.values()) if kinds is None else list(kinds)
    for name in FOLDERS if kinds is None else sorted({kind.folder for kind in plots}):
        with writing(folder / name):
            (folder / name).mkdir(parents=True, exist_ok=True)
    reasons = _reasons(plots, data)
    drawn = tuple(kind for kind in plots if not reasons[kind.name])
    left_out = tuple(
        (kind, why + (OLDER if (folder / kind.path).exists() else "")) for kind in plots if (why := reasons[kind.name])
    )
    is_shown = engine is not None and engine.show_progress
    with steps(len(drawn)), _drawing(data, drawn, folder=folder) as draw:
        for kind in drawn:
            with step_line(f"drawing {kind.name}", is_shown=is_shown):
                draw(kind)
            on_plot(folder / kind.path)
    written = Written(drawn=drawn, left_out=left_out, notes=_notes(data, is_named=target is not None))
    location = source or str(records[0].path).split("/attempt_", maxsplit=1)[0]
    _write_index(written, folder, source=location, subject=subject_line(data))
    return written


@contextlib.contextmanager
def _drawing(data: PlotData, kinds: Sequence[Plot], *, folder: Path) -> Iterator[Callable[[Plot], object]]:
    """Yield a function that draws a plot, or waits until another process has drawn it.

    The processes are forks that inherit the data. Plots that read values are drawn in this process, since forks do not
    inherit its connections and threads.

    Raises:
        WorkersError: a process was killed.
    """
    forkable = [kind for kind in kinds if not kind.reads_values]
    num_processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(forkable) // MIN_SHARE)
    if num_processes < 2:  # noqa: PLR2004 - one process is this one
        yield lambda kind: _draw(data, kind, folder)
        return
    _ = data.passed  # computed before the fork, for all processes
    _forked.update({kind.name: functools.partial(_draw, data, kind, folder) for kind in forkable})
    with warnings.catch_warnings():
        # Python 3.12 warns about threads, but they belong to libraries that the forks do not use.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = ProcessPoolExecutor(
            num_processes,
            mp_context=multiprocessing.get_context("fork"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),  # the parent handles Ctrl-C
        )
        try:
            waiting = {kind.name: pool.submit(_draw_forked, kind.name) for kind in forkable}
            yield lambda kind: waiting[kind.name].result() if kind.name in waiting else _draw(data, kind, folder)
        except BrokenProcessPool as error:
            raise WorkersError("a process that draws plots was killed, or there was not enough memory") from error
        finally:
            pool.shutdown(cancel_futures=True)
            _forked.clear()


_forked: dict[str, Callable[[], None]] = {}
"""The functions that draw each plot, which forked processes inherit."""


def _draw_forked(name: str) -> None:
    _forked[name]()


def _draw(data: PlotData, kind: Plot, folder: Path) -> None:
    write_whole(folder / kind.path, plot_bytes(kind.draw(data)))


def _reasons(plots: Sequence[Plot], data: PlotData) -> dict[str, str]:
    """The reason why each plot is left out, by name; empty for plots to draw."""
    reasons = {kind.name: kind.missing(data) for kind in plots}
    # Draws the last of several plots that show the same, because later folders have more specific names.
    contents = {kind.name: kind.content(data) for kind in plots if not reasons[kind.name]}
    shown = {content: name for name, content in contents.items()}
    for name, content in contents.items():
        if content is not None and shown[content] != name:
            reasons[name] = f"it shows the same groups as {shown[content]}"
    return reasons


def _write_index(written: Written, folder: Path, *, source: str, subject: str) -> None:
    """Write the index files: the plots with what they show, and those left out with the reasons."""
    # In texts for plots, each $ is escaped.
    subject = subject.replace(r"\$", "$")
    left_out = [(kind, reason.replace(r"\$", "$")) for kind, reason in written.left_out]

    def entry(kind: Plot, **more: str) -> dict[str, str]:
        return {"kind": kind.name, "path": kind.path, "title": kind.title, **more}

    def entry_lines(name: str, text: str) -> list[str]:
        return [f"  {name}", *textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")]

    document: dict[str, Any] = {
        "source": source,
        "subject": subject,
        "plots": [entry(kind, shows=kind.sentence) for kind in written.drawn],
        "left_out": [entry(kind, why=reason) for kind, reason in left_out],
        "notes": list(written.notes),
    }
    write_whole(folder / INDEX, (json.dumps(document, indent=2, ensure_ascii=True) + "\n").encode())
    lines = [f"Plots of {printable(source)}", *textwrap.wrap(subject, 100), ""]
    for name in FOLDERS:
        drawn = [kind for kind in written.drawn if kind.folder == name]
        if drawn:
            lines += [
                f"{name}/",
                *(line for kind in drawn for line in entry_lines(f"{kind.name}.png", kind.sentence)),
                "",
            ]
    if left_out:
        lines += ["Left out", *(line for kind, reason in left_out for line in entry_lines(kind.path, reason)), ""]
    text = "\n".join([*lines, *written.notes]).rstrip() + "\n"
    write_whole(folder / README, text.encode(errors="replace"))


def _notes(data: PlotData, *, is_named: bool) -> tuple[str, ...]:
    notes = []
    if data.target is not None and not is_named:
        notes.append(f"No format was given: overflow and underflow refer to {data.target.title}.")
    if data.num_left_out:
        notes.append(f"{data.num_left_out:,} records of integers or bool are in no plot.")
    # Uses the results of the pass over values only if a plot has needed them.
    results = vars(data).get("passed")
    if results is not None and results.num_without_values:
        count = f"{results.num_without_values:,}"
        notes.append(f"{count} records store only statistics: they are in no distribution.")
    if results is not None and results.num_rounded:
        notes.append(
            f"Distributions of {results.num_rounded:,} records of wider types are drawn from quantile summaries."
        )
    return tuple(notes)
