"""The command `ranktape analyze sweep`: a table of the tensors of several sources, files about each, or both.

A source is a run, a folder of `.pt` files, or one such file. If a tensor fails, the others are still swept. If files
are written, tensors are swept one after another, and the files of each are written before the next is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ranktape.analyze.console import say
from ranktape.analyze.engine.engine import Engine, cached_joint_value
from ranktape.analyze.engine.sweep_measure import Job
from ranktape.analyze.engine.target import is_sweepable, sweepable
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import sample_names, with_stacks
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.options import Output, Selection, say_what_is_left_out
from ranktape.analyze.questions.sweep import (
    CACHE_VERSION,
    SweptTensor,
    answerable_jobs,
    check_shape,
    is_cacheable,
    parse_jobs,
    records_with_samples,
    sweep_selection,
    sweep_table,
)
from ranktape.analyze.sources import Sources, short_names
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import DataError, NoRecordsError, RanktapeError, RunNotFoundError, UsageError, WorkersError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.legacy.open import RecordSource
    from ranktape.analyze.legacy.write import OutputOptions

MAX_NAMED_FAILURES = 4
"""Maximum number of reasons in the final message."""


def sweep(
    selections: Sequence[Selection],
    *,
    format: Sequence[str] = ("fp8_e4m3",),  # noqa: A002 - the option's name
    sweep_mode: Literal["mx", "tensor", "channel", "legacy"] | None = None,
    scale_rule: Literal["floor", "ceil", "even", "rceil"] | None = None,
    rounding: Literal["even", "away", "floor", "stochastic", "hybrid"] | None = None,
    block_size: int | None = None,
    axis: int = -1,
    scale_bits: int | None = None,
    num_levels: int | None = None,
    max_scale_exp: float | None = None,
    min_scale_exp: float | None = None,
    levels: bool = False,
    target_sqnr: float = 25.0,
    output_dir: Path | None = None,
    no_plots: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine,
    output: Output,
) -> None:
    """Find the best scale of each tensor in a format.

    SOURCE is a run, a folder of .pt files, or one such file. A level is a scale: its exponent in tensor mode, an offset
    to the exponents of all blocks in mx mode. The recommended level has the best score of MSE, cosine, PSNR, MAE and
    relative error.

    Args:
        format (NAME): mxfp8_e4m3, nvfp4, fp8_e5m2, int8, hif8, ...; separated by commas.
        sweep_mode (MODE): mx, tensor, channel or legacy. Default: mx for formats with blocks, tensor for others.
        scale_rule (RULE): Rule for the scale of a block: floor, ceil, even or rceil [floor].
        rounding (NAME): even, away, floor, stochastic or hybrid.
        block_size (N): Elements that share a scale [32; nvfp4: 16].
        axis: Axis of blocks and channels.
        scale_bits (N): Exponent bits of a block's scale [8].
        num_levels (N): Number of scales to try [21].
        max_scale_exp (E): First exponent, or first offset in mx mode.
        min_scale_exp (E): Last exponent, or last offset in mx mode.
        levels: Show one row for each level.
        target_sqnr (DB): SQNR to reach, in dB.
        output_dir (DIR): Write metrics, plots and a log per tensor.
        no_plots: Draw no plots.

    Note:
        Values are divided by a scale, rounded to the format and multiplied again. The score is 30 % MSE, 30 % cosine,
        20 % PSNR, 10 % MAE, 10 % relative error. By default, `rounding` is that of the format. Mode legacy computes
        like the legacy tool. By default, the first and the last exponent align the format with the largest and the
        smallest value; in mx mode, the offsets go from +10 to -10. The best format is the narrowest one that reaches
        `target_sqnr`.

        The result is a table. For .pt files, and with `output_dir` for any source, it is a directory for each tensor
        instead, unless `by`, `levels`, --json, --csv or `output` also requests the table. For .pt files, the default of
        `output_dir` is draw/scaling_analysis.

    Raises:
        DataError: some tensors could not be swept; the others have been. For a single tensor, its own error is raised.
        NoRecordsError: no record matches.
        StorageError: the output directory cannot be created.
        UsageError: an option is not allowed.
    """
    given: dict[str, Any] = {"mode": sweep_mode, "scale_rule": scale_rule, "rounding": rounding, "axis": axis}
    given |= {"block_size": block_size, "scale_bits": scale_bits, "num_levels": num_levels}
    options = SweepOptions(**given, max_scale_exp=max_scale_exp, min_scale_exp=min_scale_exp)
    jobs: Sequence[Job] = parse_jobs(format, options=options)
    check_shape(by=by, with_levels=levels, target_sqnr=target_sqnr)
    if SAMPLE in by and output_dir is not None:
        raise UsageError("--by sample and --output-dir exclude each other: files are written about whole tensors")
    asks_for_table = bool(by) or levels or output.is_asked_for
    has_table = asks_for_table or not (output_dir or all(is_file(selection.run) for selection in selections))
    outputs: OutputOptions | None = None
    if output_dir is not None or not has_table:
        from ranktape.analyze.legacy.write import DEFAULT_OUTPUT_DIR, OutputOptions

        outputs = OutputOptions(output_dir=output_dir or DEFAULT_OUTPUT_DIR, with_plots=not no_plots)
    tensors = _listed(selections, by=by)
    selected = list({id(one.records): one.records for one in tensors if one.records is not None}.values())
    jobs, left_out = answerable_jobs(jobs, keeps={keep for one in selected for keep in one.column("keep").tolist()})
    if left_out:
        say(left_out, err=True)
    fields, look = with_stacks(by, *selected), view or View.COMPUTE
    # With a table, stdout is for the answer and the log goes to stderr.
    failures = _Failures(len(tensors), show=functools.partial(say, err=has_table))
    is_kept = outputs is None and is_cacheable(jobs, by=by, with_levels=levels)
    # If files are written, a log shows the progress.
    used = engine if outputs is None else dataclasses.replace(engine, show_progress=False)
    ask = functools.partial(sweep_selection, jobs=jobs, view=look, by=fields, is_kept=is_kept, engine=used)

    make = functools.partial(
        _table,
        *(tensors, ask, failures, jobs),
        outputs=outputs,
        has_table=has_table,
        shape={"view": look, "by": fields, "with_levels": levels, "target_sqnr": target_sqnr, "engine": used},
    )
    if engine.use_cache and fields and not outputs and selected:
        about = [repr((jobs, look, target_sqnr, fields)), *(_keys_of(records, fields) for records in selected)]
        answer = _kept_or_made(selected, about, make, failures)
    else:
        answer = make()
    try:
        if answer is not None:
            output.write(answer)
    finally:
        failures.raise_all(is_alone=outputs is None and len(tensors) == 1)


def _keys_of(records: Records, fields: Sequence[str]) -> str:
    """The values that determine the groups of records, as a text."""
    return repr([sample_names(records) if one == SAMPLE else records.column(one).tolist() for one in fields])


def _kept_or_made(
    selected: Sequence[Records], about: Sequence[str], make: Callable[[], Table | None], failures: _Failures
) -> Table | None:
    """The table of groups, from the cache if possible. It is cached only if no tensor failed."""
    made: list[Table | None] = []

    def make_value() -> Any:
        table = make()
        made.append(table)
        if table is None or failures.alike:
            return DataError("a tensor failed")  # errors are not cached
        columns = [dataclasses.asdict(column) for column in table.columns]
        return {"title": table.title, "columns": columns, "rows": list(table.rows), "notes": table.notes}

    known = cached_joint_value(selected, about, make_value, name=f"sweep_groups_v{CACHE_VERSION}")
    if made:
        return made[0]
    columns = tuple(Column(**{**one, "kind": Kind(one["kind"])}) for one in known["columns"])
    return Table(title=known["title"], columns=columns, rows=known["rows"], notes=tuple(known["notes"]))


_Asked = Callable[..., Iterator[list[SweptTensor] | RanktapeError]]


def _table(
    tensors: Sequence[ListedTensor],
    ask: _Asked,
    failures: _Failures,
    jobs: Sequence[Job],
    *,
    outputs: OutputOptions | None,
    has_table: bool,
    shape: dict[str, Any],
) -> Table | None:
    """Sweep every tensor, and create the table if it is requested."""
    found = _swept(tensors, ask)
    if outputs is not None:
        found = _with_files(tensors, ask, jobs, view=shape["view"], outputs=outputs, show=failures.show)
    swept: list[SweptTensor] = []
    for tensor, one in zip(tensors, found, strict=True):
        if isinstance(one, RanktapeError):
            failures.add(tensor, one, is_shown=outputs is not None)
        else:
            swept += one
    table = sweep_table(swept, **shape) if has_table and swept else None
    if outputs is not None:
        failures.show_summary(num_swept=len(swept))
    return table


def _swept(tensors: Sequence[ListedTensor], ask: _Asked) -> Iterator[list[SweptTensor] | RanktapeError]:
    """The sweeps of each tensor, or of its samples if requested. The tensors of a selection are swept in parallel."""
    for _, group in itertools.groupby(tensors, key=lambda tensor: id(tensor.records)):
        first, *rest = group
        if first.records is not None:
            yield from ask(first.records, source=first.source)
        else:
            yield from (one.error for one in (first, *rest) if one.error is not None)


def _with_files(
    tensors: Sequence[ListedTensor],
    ask: _Asked,
    jobs: Sequence[Job],
    *,
    view: View,
    outputs: OutputOptions,
    show: Callable[[str], object],
) -> Iterator[list[SweptTensor] | RanktapeError]:
    """The sweeps of each tensor, one after another. Files about each are written, and every line is shown."""
    from ranktape.analyze.legacy.text import DOUBLE, Subject
    from ranktape.analyze.legacy.write import FolderNames, TensorReport, make_folder

    names = FolderNames()
    make_folder(outputs.output_dir)
    show(f"Processing {len(tensors)} tensor(s)...")
    show(DOUBLE)
    for number, tensor in enumerate(tensors, start=1):
        show(f"\n[{number}/{len(tensors)}] Processing: {printable(tensor.title)}\n{'-' * 60}")
        start = datetime.now().astimezone()
        if tensor.records is None:
            assert tensor.error is not None
            yield tensor.error
            continue
        try:
            record = tensor.records[tensor.index]
            subject = Subject(
                name=printable(tensor.title),
                source=printable(tensor.source),
                dtype=record.dtype,
                judged_as=viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=view),
                shape=record.shape,
            )
            about: dict[str, Any] = {"subject": subject, "folder_name": names.take(tensor.folder_name)}
            about |= {"options": outputs, "start": start, "show": show}
            with contextlib.ExitStack() as stack:
                reports = [stack.enter_context(TensorReport(job.scheme.name, **about)) for job in jobs]
                swept = next(ask(tensor.records[tensor.index : tensor.index + 1], source=tensor.source))
                if isinstance(swept, RanktapeError):
                    raise swept
                for report, sweep in zip(reports, swept[0].sweeps, strict=True):
                    report.say_swept(sweep)
                for report, sweep in zip(reports, swept[0].sweeps, strict=True):
                    report.finish(sweep)
        except WorkersError:
            raise  # not caused by the tensor
        except RanktapeError as error:
            yield error
        else:
            show(f"Successfully processed: {printable(tensor.title)}")
            yield [dataclasses.replace(one, records=tensor.records, index=tensor.index) for one in swept]


class _Failures:
    """The tensors that could not be swept, grouped by reason."""

    def __init__(self, num_tensors: int, *, show: Callable[[str], object]) -> None:
        self.show = show
        """Shows a line."""
        self.alike: dict[str, list[tuple[ListedTensor, RanktapeError]]] = {}
        """The tensors and their errors by reason. Names of tensors are removed from the reason."""
        self._num_tensors = num_tensors

    def add(self, tensor: ListedTensor, error: RanktapeError, *, is_shown: bool) -> None:
        """Add a tensor and show its error. Without `is_shown`, only the first of several for each reason is shown."""
        reason = str(error)
        if tensor.records is not None:
            with contextlib.suppress(RanktapeError):
                reason = reason.replace(repr(tensor.records[tensor.index]), "")
        alike = self.alike.setdefault(reason.replace(tensor.title, ""), [])
        alike.append((tensor, error))
        if is_shown or (len(alike) == 1 and self._num_tensors > 1):
            self.show(f"Failed to process: {printable(tensor.title)}: {error}")

    def reasons(self) -> list[str]:
        """One line for each reason: the tensor, or the first of several tensors and their number."""
        return [
            f"{f'{len(alike)} tensors, the first of which is ' if len(alike) > 1 else ''}"
            f"{printable(alike[0][0].title)}: {alike[0][1]}"
            for alike in self.alike.values()
        ]

    def show_summary(self, *, num_swept: int) -> None:
        """Show how many tensors were swept, and the reasons of failures."""
        from ranktape.analyze.legacy.text import DOUBLE

        num_failed = sum(map(len, self.alike.values()))
        counts = {"Total tensors": num_swept + num_failed, "Successful": num_swept, "Failed": num_failed}
        lines = ["", DOUBLE, "FINAL SUMMARY", DOUBLE, *(f"{what}: {count}" for what, count in counts.items())]
        lines += [f"  {reason}" for reason in self.reasons()] or ["All tests completed successfully!"]
        self.show("\n".join(lines))

    def raise_all(self, *, is_alone: bool) -> None:
        """Raise an error if tensors could not be swept.

        Raises:
            DataError: some tensors could not be swept. With `is_alone`, the error of the only tensor is raised.
        """
        if self.alike and is_alone:
            raise next(iter(self.alike.values()))[0][1]
        if reasons := self.reasons():
            rest = len(reasons) - MAX_NAMED_FAILURES
            named = "; ".join(reasons[:MAX_NAMED_FAILURES]) + (f"; and for {rest} more reasons" if rest > 0 else "")
            num_failed = sum(map(len, self.alike.values()))
            raise DataError(f"{num_failed} of {self._num_tensors} tensors could not be swept: {named}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """A tensor to sweep, or the reason why it cannot be swept."""

    title: str
    """Its name in output."""
    source: str
    """Short name of its source, or the source as it was given if it cannot be read."""
    folder_name: str = ""
    """Name of its directory, before it is adapted to the file system."""
    records: Records | None = None
    """The selection with its record."""
    index: int = 0
    """Its index in the selection."""
    path: Path | None = None
    """Path of its file, if it is a file."""
    error: RanktapeError | None = None
    """The reason why there is no record."""


def _listed(selections: Sequence[Selection], *, by: Sequence[str]) -> list[ListedTensor]:
    """All tensors of the sources. A source or a file that cannot be read is listed as a failed tensor.

    If several sources are given, those without a matching record are named on stderr and left out. Records of integers
    and bool are left out, too.
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
            # Unreadable files of a folder have failed already, unless they are to be left out.
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
    return _with_titles(tensors)


def _with_titles(tensors: list[ListedTensor]) -> list[ListedTensor]:
    """The tensors, with folders in the titles of files that have the same name."""
    paths = [tensor.path for tensor in tensors if tensor.path is not None]
    if not paths:
        return tensors
    from ranktape.analyze.legacy.write import titles_of

    titles = iter(titles_of(paths))
    return [tensor if tensor.path is None else dataclasses.replace(tensor, title=next(titles)) for tensor in tensors]


def is_file(source: str) -> bool:
    """Whether a source is one file, or would be a `.pt` file if it existed. All others may have many tensors."""
    try:
        return "://" not in source and (
            Path(source).is_file() or (source.endswith(".pt") and not Path(source).is_dir())
        )
    except (OSError, ValueError):  # an invalid path, which is reported when it is opened
        return False


def _tensors(selection: Selection, source: RecordSource, *, name: str, by: Sequence[str]) -> list[ListedTensor]:
    """The tensors of a selection, in order. `name` is the short name of the source."""
    chosen = selection.chosen(Sources({name: source}))
    for field in by:
        if field != SAMPLE:
            chosen.column(field)  # raises an error for an unknown field before anything is read
    others = Counter(dtype for dtype in chosen.column("dtype").tolist() if not is_sweepable(dtype))
    members = sweepable(chosen)
    counts = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(others.items()))
    what = f"records of integers or bool, which are not swept: {counts}"
    if not len(members):
        raise NoRecordsError(f"{printable(selection.run)} has only {what}")
    if others:
        say(f"left out: {what}", err=True)
    if SAMPLE in by:
        members, left_out = records_with_samples(members)
        if left_out:
            say(left_out, err=True)
    paths = {file.site: file.path for file in getattr(source, "files", ())}
    columns = (members.column(name).tolist() for name in ("site", "attempt", "iteration", "rank"))
    tensors = []
    for index, (site, attempt, iteration, rank) in enumerate(zip(*columns, strict=True)):
        path = paths.get(site)
        # The title is unique within a run.
        title = f"{f'attempt{attempt}_' if attempt else ''}iter{iteration:03d}_rank{rank:02d}_{site}"
        tensors.append(
            ListedTensor(
                title=title if path is None else path.name,
                source=name,
                folder_name=title if path is None else path.stem,
                path=path,
                records=members,
                index=index,
            )
        )
    return tensors
