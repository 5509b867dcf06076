"""Many plots of a selection, written into their folders with an index."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.views.plots.files import write_error, write_plot, write_whole
from ranktape.analyze.views.plots.gallery import content, draw, missing
from ranktape.analyze.views.plots.kinds import FOLDERS, KINDS
from ranktape.analyze.views.plots.subject import subject_line
from ranktape.analyze.views.plots.survey import Survey, default_target
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.formats import Format
    from ranktape.analyze.views.plots.kinds import Plot
    from ranktape.storage import Records

INDEX, README = "index.json", "README.txt"
"""What lists the plots, for programs and for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of the plots that were asked for."""

    drawn: tuple[Plot, ...]
    """Those that were written, in order."""
    left_out: tuple[tuple[Plot, str], ...]
    """Those that were not, and why."""
    notes: tuple[str, ...] = ()
    """What else a reader must know."""


def write_plots(
    records: Records,
    *,
    folder: Path,
    kinds: Sequence[Plot] | None = None,
    format: Format | None = None,  # noqa: A002 - the option's name
    view: View | None = None,
    engine: Engine | None = None,
    source: str = "",
    on_plot: Callable[[Path], object] = lambda _: None,
) -> Written:
    """Draw plots, all of them by default, into the folders of the seeds under `folder`, with an index.

    Every record is read once; a few once more, whose values are drawn one against the other or swept. A plot that
    the selection has nothing for, or that shows the same as another one, is left out, and one of an earlier time under
    its name is removed; others are replaced. Without a format, overflow and underflow are those of fp8_e4m3, and the
    plots say so. Each file appears whole or not at all. `on_plot` is called with the path of each plot that
    was written.

    Raises:
        NoRecordsError: no record holds floating-point or complex numbers.
        StorageError: the store cannot be read, or a file cannot be written; the kind says why.
        DataError: a record's bytes are missing or damaged.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as seen.
    """
    survey = Survey(records, target=format or default_target(records), view=view, engine=engine)
    wanted = list(KINDS.values()) if kinds is None else list(kinds)
    for name in FOLDERS if kinds is None else sorted({kind.folder for kind in wanted}):
        make_folder(folder / name)
    drawn: list[Plot] = []
    left_out: list[tuple[Plot, str]] = []
    reasons = {kind.name: missing(kind.name, survey) for kind in wanted}
    # Of several that show the same the last: the later folders have the more special names.
    shown = {content(name, survey): name for name, reason in reasons.items() if not reason}
    for kind in wanted:
        path = folder / kind.path
        reason, same = reasons[kind.name], content(kind.name, survey)
        if not reason and same is not None and shown[same] != kind.name:
            reason = f"it shows the same groups as {shown[same]}"
        if reason:
            left_out.append((kind, reason))
            remove(path)
            continue
        write_plot(draw(kind.name, survey), path)
        drawn.append(kind)
        on_plot(path)
    written = Written(drawn=tuple(drawn), left_out=tuple(left_out), notes=_notes(survey, is_named=format is not None))
    write_index(written, folder, source=source or records_source(records), subject=subject_line(survey))
    return written


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        StorageError: it cannot be made; the kind says why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(error, folder) from error


def remove(path: Path) -> None:
    """Remove a plot of an earlier time, if there is one.

    Raises:
        StorageError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, path) from error


def write_index(written: Written, folder: Path, *, source: str, subject: str) -> None:
    """Write which plots are there and what each shows, and which were left out and why; for programs and for people.

    Raises:
        StorageError: it cannot be written; the kind says why.
    """
    document: dict[str, Any] = {
        "source": source,
        "subject": _unescaped(subject),
        "plots": [
            {"kind": kind.name, "path": kind.path, "title": kind.title, "shows": kind.sentence}
            for kind in written.drawn
        ],
        "left_out": [
            {"kind": kind.name, "path": kind.path, "title": kind.title, "why": _unescaped(reason)}
            for kind, reason in written.left_out
        ],
        "notes": list(written.notes),
    }
    write_whole(folder / INDEX, (json.dumps(document, indent=2, ensure_ascii=True) + "\n").encode())
    write_whole(folder / README, _readme(written, source=source, subject=_unescaped(subject)).encode(errors="replace"))


def _readme(written: Written, *, source: str, subject: str) -> str:
    lines = [f"Plots of {printable(source)}", *textwrap.wrap(subject, 100), ""]
    for folder in FOLDERS:
        rows = [kind for kind in written.drawn if kind.folder == folder]
        if rows:
            lines += [f"{folder}/", *(line for kind in rows for line in _entry(f"{kind.name}.png", kind.sentence)), ""]
    if written.left_out:
        lines.append("Left out")
        lines += [line for kind, reason in written.left_out for line in _entry(kind.path, _unescaped(reason))]
        lines.append("")
    return "\n".join([*lines, *written.notes]).rstrip() + "\n"


def _entry(name: str, text: str) -> list[str]:
    return [f"  {name}", *textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")]


def _unescaped(text: str) -> str:
    # Words of plots have a mark before each $.
    return text.replace(r"\$", "$")


def records_source(records: Records) -> str:
    """The run's place, as records know it."""
    return str(records[0].path).split("/attempt_", maxsplit=1)[0]


def _notes(survey: Survey, *, is_named: bool) -> tuple[str, ...]:
    notes = []
    if survey.target is not None and not is_named:
        notes.append(f"No format was named: overflow and underflow are those of {survey.target.name} without a scale.")
    if survey.num_left_out:
        notes.append(f"{survey.num_left_out:,} records of integers or bool are in no plot.")
    if survey.has_passed and survey.passed.num_without_values:
        count = survey.passed.num_without_values
        notes.append(f"Of {count:,} records statistics alone were kept: they are in no distribution.")
    if survey.has_passed and survey.passed.num_rounded:
        count = survey.passed.num_rounded
        notes.append(f"Of {count:,} records of wider types distributions are drawn of quantile summaries.")
    return tuple(notes)
