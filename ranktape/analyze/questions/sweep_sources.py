"""What does each tensor of several sources lose, where a source or a tensor may fail without ending the others?

A source is a run, a folder of `.pt` files, or one such file. Tensors are swept one after the other; files are written
of each, if they are asked for, before the next is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import say
from ranktape.analyze.options import say_what_is_left_out
from ranktape.analyze.questions.swept import is_sweepable, sweep_record
from ranktape.analyze.scaling_outputs.files import FolderNames, titles_of
from ranktape.analyze.scaling_outputs.text import DOUBLE, Subject
from ranktape.analyze.scaling_outputs.write import Stopwatch, TensorReport
from ranktape.analyze.sweeps.options import resolve
from ranktape.analyze.values import viewed_dtype
from ranktape.errors import DataError, NoRecordsError, RanktapeError, RunNotFoundError, UsageError
from ranktape.storage.backends.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.files.open import Source
    from ranktape.analyze.options import Selection
    from ranktape.analyze.questions.swept import SweepRequest, Swept
    from ranktape.analyze.scaling_outputs.write import OutputOptions
    from ranktape.storage import Record, Records

RULE = "-" * 60
"""Below the line that says which tensor is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor that is to be swept, or the reason why it cannot be."""

    title: str
    """What people call it."""
    source: str
    """The source that it is of, as it was given."""
    folder_name: str = ""
    """What its directory is called, as far as a file system allows."""
    records: Records | None = None
    """A selection that holds its record."""
    index: int = 0
    """Where in that selection."""
    key: dict[str, Any] | None = None
    """The values of the fields that are grouped by."""
    path: Path | None = None
    """Where the file is that it is, if it is one."""
    keep: str = ""
    """What was kept of it; empty where there is no record."""
    error: RanktapeError | None = None
    """Why there is no record."""

    def record(self) -> Record:
        """The record; a file is read now.

        Raises:
            RanktapeError: there is none, or it cannot be read.
        """
        if self.error is not None:
            raise self.error
        assert self.records is not None
        return self.records[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A tensor that could not be swept."""

    title: str
    """What people call it."""
    error: RanktapeError
    """Why."""
    reason: str
    """Why, in words that are the same for all tensors that failed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of all tensors."""

    swept: tuple[Swept, ...]
    """Those that could be swept, in order."""
    failures: tuple[Failure, ...]
    """The others, in order."""

    def reasons(self) -> list[str]:
        """One line for each reason of failures: the tensor that failed for it, or the first of them and how many."""
        groups: dict[str, list[Failure]] = {}
        for failure in self.failures:
            groups.setdefault(failure.reason, []).append(failure)
        return [
            f"{printable(first.title)}: {first.error}"
            if not others
            else f"{len(others) + 1} tensors, the first of which is {printable(first.title)}: {first.error}"
            for first, *others in groups.values()
        ]


def list_tensors(selections: Sequence[Selection], *, by: Sequence[str]) -> list[Tensor]:
    """Every tensor of the sources; a source or a file that cannot be read is one that failed.

    Of several sources those in which nothing matches the filters are named on stderr, and left out. So are records of
    integers and bool.

    Raises:
        NoRecordsError: nothing matches anywhere, or only integers and bool do.
        UsageError: a filter, an expression or `by` is wrong.
    """
    tensors: list[Tensor] = []
    unmatched: list[NoRecordsError] = []
    for selection in selections:
        try:
            source = _opened(selection)
        except RanktapeError as error:
            tensors.append(Tensor(title=selection.run, source=selection.run, error=error))
            continue
        tensors += _unreadable(selection, source)
        try:
            tensors += _tensors(selection, source, by=by)
        except NoRecordsError as error:
            if source.iterations:
                unmatched.append(error)
            elif selection.skip_unreadable or not getattr(source, "unreadable", None):
                tensors.append(Tensor(title=selection.run, source=selection.run, error=error))
        except UsageError:
            raise
        except RanktapeError as error:
            tensors.append(Tensor(title=selection.run, source=selection.run, error=error))
    if unmatched and not tensors:
        raise unmatched[0]
    for reason in unmatched:
        say(f"left out: {reason}", err=True)
    return _told_apart(tensors)


def sweep_tensors(
    tensors: Sequence[Tensor],
    request: SweepRequest,
    *,
    outputs: OutputOptions | None,
    show: Callable[[str], object],
    on_record: Callable[[], object],
) -> Outcome:
    """Sweep one tensor after the other; with `outputs` files are written of each, and `show` gets every line.

    Whatever the user can cause to go wrong with a tensor ends that tensor alone.
    """
    names = FolderNames()
    swept: list[Swept] = []
    failures: list[Failure] = []
    said: set[str] = set()
    for number, tensor in enumerate(tensors, start=1):
        if outputs is not None:
            show("")
            show(f"[{number}/{len(tensors)}] Processing: {printable(tensor.title)}")
            show(RULE)
        try:
            swept.append(_sweep_tensor(tensor, request, outputs=outputs, names=names, show=show))
        except RanktapeError as error:
            failures.append(Failure(title=tensor.title, error=error, reason=_reason(tensor, error)))
            is_new = failures[-1].reason not in said
            said.add(failures[-1].reason)
            if outputs is not None or (is_new and len(tensors) > 1):
                show(f"Failed to process: {printable(tensor.title)}: {error}")
        else:
            if outputs is not None:
                show(f"Successfully processed: {printable(tensor.title)}")
        on_record()
    return Outcome(swept=tuple(swept), failures=tuple(failures))


def summary_lines(outcome: Outcome) -> list[str]:
    """How many tensors could be swept, and which could not."""
    failures = outcome.failures
    lines = [
        "",
        DOUBLE,
        "FINAL SUMMARY",
        DOUBLE,
        f"Total tensors: {len(outcome.swept) + len(failures)}",
        f"Successful: {len(outcome.swept)}",
        f"Failed: {len(failures)}",
        *(f"  {reason}" for reason in outcome.reasons()),
    ]
    return lines if failures else [*lines, "All tests completed successfully!"]


def _told_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, files of one name with folders before it in their titles."""
    titles = iter(titles_of([tensor.path for tensor in tensors if tensor.path is not None]))
    return [tensor if tensor.path is None else dataclasses.replace(tensor, title=next(titles)) for tensor in tensors]


def _reason(tensor: Tensor, error: RanktapeError) -> str:
    """The message without the tensor's own names."""
    names = [tensor.title]
    if tensor.records is not None and tensor.error is None:
        with contextlib.suppress(RanktapeError):
            names.insert(0, repr(tensor.record()))
    text = str(error)
    for name in names:
        text = text.replace(name, "")
    return text


def _sweep_tensor(
    tensor: Tensor,
    request: SweepRequest,
    *,
    outputs: OutputOptions | None,
    names: FolderNames,
    show: Callable[[str], object],
) -> Swept:
    watch = Stopwatch()
    record = tensor.record()
    if outputs is None:
        return sweep_record(record, request, source=tensor.source, key=tensor.key or {})
    with contextlib.ExitStack() as stack:
        folder_name = names.take(tensor.folder_name)
        subject = Subject(
            name=printable(tensor.title),
            source=printable(tensor.source),
            dtype=record.dtype,
            judged_as=viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=request.view),
            shape=record.shape,
        )
        reports = [
            stack.enter_context(
                TensorReport(
                    resolve(name, options=request.options)[0].name,
                    subject=subject,
                    folder_name=folder_name,
                    options=outputs,
                    watch=watch,
                    show=show,
                )
            )
            for name in request.formats
        ]
        found = sweep_record(record, request, source=tensor.source, key=tensor.key or {})
        for report, sweep in zip(reports, found.sweeps, strict=True):
            report.say_swept(sweep)
        for report, sweep in zip(reports, found.sweeps, strict=True):
            report.finish(sweep)
    return found


def _opened(selection: Selection) -> Source:
    if is_file(selection.run) and not Path(selection.run).exists():
        raise RunNotFoundError(f"there is no file at {printable(selection.run)}: check the path")
    return selection.source()


def is_file(source: str) -> bool:
    """Whether a source is one file, or a `.pt` file that is not there; everything else may be of many tensors."""
    try:
        return "://" not in source and (
            Path(source).is_file() or (source.endswith(".pt") and not Path(source).is_dir())
        )
    except (OSError, ValueError):  # no file system has such a path: opening it says so
        return False


def _unreadable(selection: Selection, source: Source) -> list[Tensor]:
    """The files of a folder that failed already, unless they are to be left out."""
    say_what_is_left_out(source, with_unreadable=selection.skip_unreadable)
    if selection.skip_unreadable:
        return []
    reasons: dict[str, str] = getattr(source, "unreadable", {})
    return [Tensor(title=name, source=selection.run, error=DataError(why)) for name, why in reasons.items()]


def _tensors(selection: Selection, source: Source, *, by: Sequence[str]) -> list[Tensor]:
    """One for each record of the selection, in the order of groups."""
    groups = selection.chosen(source).group_by(list(by))
    paths = {file.site: file.path for file in getattr(source, "files", ())}
    tensors = []
    others: Counter[str] = Counter()
    for key, members in groups:
        columns = (members.column(name).tolist() for name in ("site", "attempt", "iteration", "rank", "keep", "dtype"))
        for index, (site, attempt, iteration, rank, keep, dtype) in enumerate(zip(*columns, strict=True)):
            if not is_sweepable(dtype):
                others[dtype] += 1
                continue
            again = f"attempt{attempt}_" if attempt else ""
            # No two records of a run are called the same.
            path = paths.get(site)
            title = f"{again}iter{iteration:03d}_rank{rank:02d}_{site}" if path is None else path.name
            tensors.append(
                Tensor(
                    title=title,
                    source=selection.run,
                    folder_name=title if path is None else path.stem,
                    path=path,
                    records=members,
                    index=index,
                    key=key,
                    keep=keep,
                )
            )
    if others:
        counts = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(others.items()))
        what = f"records of integers or bool, for which no scale is sought: {counts}"
        if not tensors:
            raise NoRecordsError(f"{printable(selection.run)} has only {what}")
        say(f"left out: {what}", err=True)
    return tensors
