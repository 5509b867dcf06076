"""Lists the tensors of several sources, those among them that cannot be read, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ranktape.analyze.console import say
from ranktape.analyze.engine.target import is_sweepable, sweepable
from ranktape.analyze.legacy.open import RecordSource
from ranktape.analyze.legacy.write import titles_of
from ranktape.analyze.options import Selection, say_what_is_left_out
from ranktape.analyze.questions.swept import with_samples
from ranktape.analyze.sources import Sources, short_names
from ranktape.errors import DataError, NoRecordsError, RanktapeError, RunNotFoundError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.places.failures import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """One tensor that is to be swept, or the reason why it cannot be."""

    title: str
    """What people call it."""
    source: str
    """The source that it is of, by its short name; as it was given where it cannot be read."""
    folder_name: str = ""
    """What its directory is called, as far as a file system allows."""
    records: Records | None = None
    """A selection that holds its record."""
    index: int = 0
    """Where in that selection."""
    path: Path | None = None
    """Where the file is that it is, if it is one."""
    keep: str = ""
    """What was kept of it; empty where there is no record."""
    error: RanktapeError | None = None
    """Why there is no record."""


def selections_of(tensors: Sequence[ListedTensor]) -> list[Records]:
    """The selections that tensors are of, each once."""
    return list({id(one.records): one.records for one in tensors if one.records is not None}.values())


def list_tensors(selections: Sequence[Selection], *, by: Sequence[str]) -> list[ListedTensor]:
    """Every tensor of the sources; a source or a file that cannot be read is one that failed.

    Of several sources those in which nothing matches the filters are named on stderr, and left out. So are records of
    integers and bool.
    """
    tensors: list[ListedTensor] = []
    unmatched: list[RanktapeError] = []
    for selection, called in zip(selections, short_names([one.run for one in selections]), strict=True):
        source, unreadable = None, dict[str, str]()
        try:
            if is_file(selection.run) and not Path(selection.run).exists():
                raise RunNotFoundError(f"there is no file at {printable(selection.run)}: check the path")
            source = selection.source()
            say_what_is_left_out(source, with_unreadable=selection.skip_unreadable)
            # The files of a folder that failed already, unless they are to be left out.
            unreadable = {} if selection.skip_unreadable else getattr(source, "unreadable", {})
            for name, why in unreadable.items():
                tensors.append(ListedTensor(title=name, source=selection.run, error=DataError(why)))
            tensors += _tensors(selection, source, name=called, by=by)
        except RanktapeError as error:
            if source is not None and isinstance(error, UsageError):
                raise
            is_empty = source is not None and isinstance(error, NoRecordsError)
            if is_empty and source is not None and source.iterations:
                unmatched.append(error)
            elif not (is_empty and unreadable):
                tensors.append(ListedTensor(title=selection.run, source=selection.run, error=error))
    if unmatched and not tensors:
        raise unmatched[0]
    for reason in unmatched:
        say(f"left out: {reason}", err=True)
    # Files of one name have folders before it in their titles.
    titles = iter(titles_of([tensor.path for tensor in tensors if tensor.path is not None]))
    return [tensor if tensor.path is None else dataclasses.replace(tensor, title=next(titles)) for tensor in tensors]


def is_file(source: str) -> bool:
    """Whether a source is one file, or a `.pt` file that is not there; everything else may be of many tensors."""
    try:
        return "://" not in source and (
            Path(source).is_file() or (source.endswith(".pt") and not Path(source).is_dir())
        )
    except (OSError, ValueError):  # no file system has such a path: opening it says so
        return False


def _tensors(selection: Selection, source: RecordSource, *, name: str, by: Sequence[str]) -> list[ListedTensor]:
    """One for each record of the selection, in its order; `name` is what the source is called beside the others."""
    chosen = selection.chosen(Sources({name: source}))
    for field in by:
        if field != SAMPLE:
            chosen.column(field)  # refuses what is no field before anything is read
    others = Counter(dtype for dtype in chosen.column("dtype").tolist() if not is_sweepable(dtype))
    members = sweepable(chosen)
    counts = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(others.items()))
    what = f"records of integers or bool, for which no scale is sought: {counts}"
    if not len(members):
        raise NoRecordsError(f"{printable(selection.run)} has only {what}")
    if others:
        say(f"left out: {what}", err=True)
    if SAMPLE in by:
        members, left_out = with_samples(members)
        if left_out:
            say(left_out, err=True)
    paths = {file.site: file.path for file in getattr(source, "files", ())}
    columns = (members.column(name).tolist() for name in ("site", "attempt", "iteration", "rank", "keep"))
    tensors = []
    for index, (site, attempt, iteration, rank, keep) in enumerate(zip(*columns, strict=True)):
        path = paths.get(site)
        # No two records of a run are called the same.
        title = f"{f'attempt{attempt}_' if attempt else ''}iter{iteration:03d}_rank{rank:02d}_{site}"
        tensors.append(
            ListedTensor(
                title=title if path is None else path.name,
                source=name,
                folder_name=title if path is None else path.stem,
                path=path,
                records=members,
                index=index,
                keep=keep,
            )
        )
    return tensors
