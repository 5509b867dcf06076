"""Sweeps the tensors of several sources, where one that fails does not end the others.

A source is a run, a folder of `.pt` files, or one such file. Tensors are swept one after the other; files are written
of each, if they are asked for, before the next is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ranktape.analyze.console import say
from ranktape.analyze.engine.values import viewed_dtype
from ranktape.analyze.identity import SAMPLE
from ranktape.analyze.legacy.outputs.text import DOUBLE, Subject
from ranktape.analyze.legacy.outputs.write import FolderNames, Stopwatch, TensorReport, titles_of
from ranktape.analyze.metrics.target import is_sweepable, sweepable
from ranktape.analyze.numerics.sweeps.options import resolve
from ranktape.analyze.options import say_what_is_left_out
from ranktape.analyze.questions.swept import sweep_selection, with_samples
from ranktape.errors import DataError, NoRecordsError, RanktapeError, RunNotFoundError, UsageError, WorkersError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.legacy.open import RecordSource
    from ranktape.analyze.legacy.outputs.write import OutputOptions
    from ranktape.analyze.options import Selection
    from ranktape.analyze.questions.swept import SweepRequest, Swept
    from ranktape.storage import Record, Records

RULE = "-" * 60
"""Below the line that says which tensor is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
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
class FailedTensor:
    """A tensor that could not be swept."""

    title: str
    """What people call it."""
    error: RanktapeError
    """Why."""
    reason: str
    """Why, in words that are the same for all tensors that failed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """What became of all tensors."""

    swept: tuple[Swept, ...]
    """Those that could be swept, in order."""
    failures: tuple[FailedTensor, ...]
    """The others, in order."""

    def reasons(self) -> list[str]:
        """One line for each reason of failures: the tensor that failed for it, or the first of them and how many."""
        groups: dict[str, list[FailedTensor]] = {}
        for failure in self.failures:
            groups.setdefault(failure.reason, []).append(failure)
        return [
            f"{printable(first.title)}: {first.error}"
            if not others
            else f"{len(others) + 1} tensors, the first of which is {printable(first.title)}: {first.error}"
            for first, *others in groups.values()
        ]


def list_tensors(selections: Sequence[Selection], *, by: Sequence[str]) -> list[ListedTensor]:
    """Every tensor of the sources; a source or a file that cannot be read is one that failed.

    Of several sources those in which nothing matches the filters are named on stderr, and left out. So are records of
    integers and bool.

    Raises:
        NoRecordsError: nothing matches anywhere, or only integers and bool do.
        UsageError: a filter, an expression or `by` is wrong.
    """
    tensors: list[ListedTensor] = []
    unmatched: list[NoRecordsError] = []
    for selection in selections:
        try:
            source = _opened(selection)
        except RanktapeError as error:
            tensors.append(ListedTensor(title=selection.run, source=selection.run, error=error))
            continue
        tensors += _unreadable(selection, source)
        try:
            tensors += _tensors(selection, source, by=by)
        except NoRecordsError as error:
            if source.iterations:
                unmatched.append(error)
            elif selection.skip_unreadable or not getattr(source, "unreadable", None):
                tensors.append(ListedTensor(title=selection.run, source=selection.run, error=error))
        except UsageError:
            raise
        except RanktapeError as error:
            tensors.append(ListedTensor(title=selection.run, source=selection.run, error=error))
    if unmatched and not tensors:
        raise unmatched[0]
    for reason in unmatched:
        say(f"left out: {reason}", err=True)
    return _told_apart(tensors)


def sweep_tensors(
    tensors: Sequence[ListedTensor],
    request: SweepRequest,
    *,
    outputs: OutputOptions | None,
    show: Callable[[str], object],
    on_record: Callable[[], object],
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> SweepOutcome:
    """Sweep every tensor; with `outputs`, one after the other, files are written of each, and `show` gets every line.

    Whatever the user can cause to go wrong with a tensor ends that tensor alone.
    """
    names = FolderNames()
    source = _SweptTensors(request=request, by=by, engine=engine, is_ahead=outputs is None)
    swept: list[Swept] = []
    failures: list[FailedTensor] = []
    said: set[str] = set()
    for number, tensor in enumerate(tensors, start=1):
        if outputs is not None:
            show("")
            show(f"[{number}/{len(tensors)}] Processing: {printable(tensor.title)}")
            show(RULE)
        found = _attempt(tensor, request, source, outputs=outputs, names=names, show=show)
        if isinstance(found, RanktapeError):
            failures.append(FailedTensor(title=tensor.title, error=found, reason=_reason(tensor, found)))
            is_new = failures[-1].reason not in said
            said.add(failures[-1].reason)
            if outputs is not None or (is_new and len(tensors) > 1):
                show(f"Failed to process: {printable(tensor.title)}: {found}")
        else:
            swept += found
            if outputs is not None:
                show(f"Successfully processed: {printable(tensor.title)}")
        on_record()
    return SweepOutcome(swept=tuple(swept), failures=tuple(failures))


def summary_lines(outcome: SweepOutcome) -> list[str]:
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


def _told_apart(tensors: Sequence[ListedTensor]) -> list[ListedTensor]:
    """The tensors, files of one name with folders before it in their titles."""
    titles = iter(titles_of([tensor.path for tensor in tensors if tensor.path is not None]))
    return [tensor if tensor.path is None else dataclasses.replace(tensor, title=next(titles)) for tensor in tensors]


def _reason(tensor: ListedTensor, error: RanktapeError) -> str:
    """The message without the tensor's own names."""
    names = [tensor.title]
    if tensor.records is not None and tensor.error is None:
        with contextlib.suppress(RanktapeError):
            names.insert(0, repr(tensor.record()))
    text = str(error)
    for name in names:
        text = text.replace(name, "")
    return text


class _SweptTensors:
    """Finds the sweeps of tensors that are asked for in their order."""

    def __init__(self, *, request: SweepRequest, by: Sequence[str], engine: Engine | None, is_ahead: bool) -> None:
        self._request, self._by, self._engine = request, by, engine
        self._is_ahead = is_ahead
        self._found: dict[int, Iterator[list[Swept] | RanktapeError]] = {}

    def take(self, tensor: ListedTensor) -> list[Swept] | RanktapeError:
        """The sweeps of the next tensor of its selection, or why it has none; of its samples where these are asked for.

        Raises:
            UsageError: of the engine itself.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        if tensor.error is not None:
            return tensor.error
        assert tensor.records is not None
        if self._is_ahead:
            if id(tensor.records) not in self._found:
                self._found[id(tensor.records)] = self._sweeps(tensor.records, tensor.source)
            found = next(self._found[id(tensor.records)])
        else:
            found = next(self._sweeps(tensor.records[tensor.index : tensor.index + 1], tensor.source))
        if isinstance(found, RanktapeError):
            return found
        return [dataclasses.replace(one, records=tensor.records, index=tensor.index) for one in found]

    def _sweeps(self, records: Records, source: str) -> Iterator[list[Swept] | RanktapeError]:
        return sweep_selection(records, self._request, source=source, by=self._by, engine=self._engine)


def _attempt(
    tensor: ListedTensor,
    request: SweepRequest,
    source: _SweptTensors,
    *,
    outputs: OutputOptions | None,
    names: FolderNames,
    show: Callable[[str], object],
) -> list[Swept] | RanktapeError:
    """The sweeps of a tensor, with its files where there are some, or why it has none."""
    if outputs is None:
        return source.take(tensor)
    try:
        return _sweep_tensor(tensor, request, source, outputs=outputs, names=names, show=show)
    except WorkersError:
        raise  # no tensor's fault
    except RanktapeError as error:
        return error


def _sweep_tensor(
    tensor: ListedTensor,
    request: SweepRequest,
    source: _SweptTensors,
    *,
    outputs: OutputOptions,
    names: FolderNames,
    show: Callable[[str], object],
) -> list[Swept]:
    watch = Stopwatch()
    record = tensor.record()
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
        swept = source.take(tensor)
        if isinstance(swept, RanktapeError):
            raise swept
        (found,) = swept
        for report, sweep in zip(reports, found.sweeps, strict=True):
            report.say_swept(sweep)
        for report, sweep in zip(reports, found.sweeps, strict=True):
            report.finish(sweep)
    return [found]


def _opened(selection: Selection) -> RecordSource:
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


def _unreadable(selection: Selection, source: RecordSource) -> list[ListedTensor]:
    """The files of a folder that failed already, unless they are to be left out."""
    say_what_is_left_out(source, with_unreadable=selection.skip_unreadable)
    if selection.skip_unreadable:
        return []
    reasons: dict[str, str] = getattr(source, "unreadable", {})
    return [ListedTensor(title=name, source=selection.run, error=DataError(why)) for name, why in reasons.items()]


def _tensors(selection: Selection, source: RecordSource, *, by: Sequence[str]) -> list[ListedTensor]:
    """One for each record of the selection, in its order."""
    chosen = selection.chosen(source)
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
        again = f"attempt{attempt}_" if attempt else ""
        # No two records of a run are called the same.
        path = paths.get(site)
        title = f"{again}iter{iteration:03d}_rank{rank:02d}_{site}" if path is None else path.name
        tensors.append(
            ListedTensor(
                title=title,
                source=selection.run,
                folder_name=title if path is None else path.stem,
                path=path,
                records=members,
                index=index,
                keep=keep,
            )
        )
    return tensors
