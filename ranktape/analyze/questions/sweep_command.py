"""Answers `ranktape analyze sweep`: a table of the tensors of several sources, files about each of them, or both.

A source is a run, a folder of `.pt` files, or one such file. A tensor that fails does not end the others. With files,
tensors are swept one after the other, and the files of each are written before the next is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ranktape.analyze.console import say
from ranktape.analyze.engine.engine import Engine, progress
from ranktape.analyze.engine.sweep_measure import Job
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import SAMPLE, with_stacks
from ranktape.analyze.legacy.open import RecordSource
from ranktape.analyze.legacy.text import DOUBLE, Subject
from ranktape.analyze.legacy.write import (
    DEFAULT_OUTPUT_DIR,
    FolderNames,
    OutputOptions,
    TensorReport,
    make_folder,
    titles_of,
)
from ranktape.analyze.metrics.target import is_sweepable, sweepable
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.options import Output, Selection, say_what_is_left_out
from ranktape.analyze.questions.sweep import check_shape, table_of
from ranktape.analyze.questions.swept import Swept, answerable, num_readings, parse_jobs, sweep_selection, with_samples
from ranktape.analyze.questions.swept_cells import can_be_kept
from ranktape.analyze.sources import Sources
from ranktape.errors import DataError, NoRecordsError, RanktapeError, RunNotFoundError, UsageError, WorkersError
from ranktape.storage import Records
from ranktape.storage.places.failures import printable
from ranktape.storage.records.union import short_names

MAX_NAMED_FAILURES = 4
"""Reasons that the last message names."""


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
    """Find the scale with which each tensor loses least in a format.

    SOURCE is a run, a folder of .pt files under any name, or one such file. Values are divided by a scale, rounded to
    the format and multiplied again. In mx mode blocks have scales of their own and a level is an offset to the
    exponents of all; in tensor mode a level is the exponent of the one scale; legacy computes as the legacy tool.
    The recommended level has the best score: 30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error.

    The answer is a table. Of .pt files, and with `output_dir` of anything, it is a directory for each tensor instead,
    unless `by`, `levels`, --json, --csv or `output` asks for the table too.

    Args:
        format (NAME): mxfp8_e4m3, mxfp4_e2m1, nvfp4, fp8_e4m3, fp8_e5m2, int8, hif8, ...; several with commas between.
        sweep_mode: What a level is; mx for formats with blocks, tensor for others, unless given.
        scale_rule: How a block's scale follows from its largest value; floor unless given. Not of nvfp4.
        rounding: Which neighbour a value becomes; by default the format's own: away for hif8, even for others.
        block_size (N): Elements that share a scale; 32, for nvfp4 16.
        axis: Where blocks lie, or channels are told apart.
        scale_bits (N): Width of the exponent of a block's scale; 8 unless given.
        num_levels (N): Scales that are tried; 21 by default.
        max_scale_exp (E): First exponent; where the largest value is aligned by default. In mx mode first offset, +10.
        min_scale_exp (E): Last exponent; where the smallest value is aligned by default. In mx mode last offset, -10.
        levels: One row for each level instead of the recommended one.
        target_sqnr (DB): What the best format has to keep of each tensor; narrower ones are preferred.
        output_dir (DIR): Write metrics, plots and a log into DIR/TENSOR/; for .pt files draw/scaling_analysis by
            default.
        no_plots: Draw no plots.

    Raises:
        DataError: some tensor could not be swept; the others have been. Of a single one its own error is raised.
        NoRecordsError: nothing matches.
        StorageError: the output directory cannot be made.
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
    has_table = asks_for_table or not (output_dir or all(_is_file(selection.run) for selection in selections))
    outputs = None
    if output_dir is not None or not has_table:
        outputs = OutputOptions(output_dir=output_dir or DEFAULT_OUTPUT_DIR, with_plots=not no_plots)
    tensors = _list_tensors(selections, by=by)
    fields = with_stacks(by, *{id(one.records): one.records for one in tensors if one.records is not None}.values())
    jobs, left_out = answerable(jobs, keeps={tensor.keep for tensor in tensors})
    if left_out:
        say(left_out, err=True)
    # One bar is enough.
    quiet, seen = dataclasses.replace(engine, show_progress=False), view or View.COMPUTE
    # What goes to stdout is the answer: with a table, the log is not it.
    show = functools.partial(say, err=has_table)
    is_kept = not (levels or fields or outputs) and can_be_kept(jobs)
    sweeps = functools.partial(
        sweep_selection, jobs=jobs, view=seen, by=fields, is_kept=is_kept, engine=engine if is_kept else quiet
    )
    run = _SweepOfAll(sweeps, jobs, view=seen, outputs=outputs, show=show)
    table = None
    total = len(tensors) * num_readings(jobs, by=fields) if outputs is None and not is_kept else 0
    with progress(total, description="sweeping") as on_record:
        run.sweep(tensors, on_record=on_record)
        if has_table and run.swept:
            shape: dict[str, Any] = {"by": fields, "with_levels": levels, "target_sqnr": target_sqnr}
            table = table_of(run.swept, view=seen, **shape, engine=quiet, on_record=on_record)
    run.show_summary()
    if table is not None:
        output.write(table)
    if run.failures and outputs is None and len(tensors) == 1:
        raise next(iter(run.failures.values()))[0][1]
    if reasons := run.reasons():
        rest = len(reasons) - MAX_NAMED_FAILURES
        named = "; ".join(reasons[:MAX_NAMED_FAILURES]) + (f"; and for {rest} more reasons" if rest > 0 else "")
        num_failed = sum(map(len, run.failures.values()))
        raise DataError(f"{num_failed} of {len(tensors)} tensors could not be swept: {named}")


class _SweepOfAll:
    """The sweeps of all tensors; whatever the user can cause to go wrong with one of them ends that one alone."""

    def __init__(
        self,
        sweeps: Callable[..., Iterator[list[Swept] | RanktapeError]],
        jobs: Sequence[Job],
        *,
        view: View,
        outputs: OutputOptions | None,
        show: Callable[[str], object],
    ) -> None:
        self._sweeps, self._jobs, self._view, self._outputs, self._show = sweeps, jobs, view, outputs, show
        self._ahead: dict[int, Iterator[list[Swept] | RanktapeError]] = {}
        self._names = FolderNames()
        self.swept: list[Swept] = []
        """Of the tensors that could be swept, in order."""
        self.failures: dict[str, list[tuple[ListedTensor, RanktapeError]]] = {}
        """The others, by the reason in words that are the same for all tensors that failed for it."""

    def sweep(self, tensors: Sequence[ListedTensor], *, on_record: Callable[[], object]) -> None:
        """Sweep every tensor; with outputs, one after the other, and every line is shown."""
        outputs, show = self._outputs, self._show
        if outputs is not None:
            make_folder(outputs.output_dir)
            show(f"Processing {len(tensors)} tensor(s)...")
            show(DOUBLE)
        for number, tensor in enumerate(tensors, start=1):
            if outputs is None:
                found = self._take(tensor)
            else:
                show(f"\n[{number}/{len(tensors)}] Processing: {printable(tensor.title)}\n{'-' * 60}")
                try:
                    found = self._write(tensor, outputs)
                except WorkersError:
                    raise  # no tensor's fault
                except RanktapeError as error:
                    found = error
            if isinstance(found, RanktapeError):
                reason = str(found)
                if tensor.records is not None and tensor.error is None:
                    with contextlib.suppress(RanktapeError):
                        reason = reason.replace(repr(tensor.records[tensor.index]), "")
                alike = self.failures.setdefault(reason.replace(tensor.title, ""), [])
                alike.append((tensor, found))
                if outputs is not None or (len(alike) == 1 and len(tensors) > 1):
                    show(f"Failed to process: {printable(tensor.title)}: {found}")
            else:
                self.swept += found
                if outputs is not None:
                    show(f"Successfully processed: {printable(tensor.title)}")
            on_record()

    def show_summary(self) -> None:
        """Say how many tensors could be swept, and which could not, where files are written."""
        if self._outputs is None:
            return
        num_swept, num_failed = len(self.swept), sum(map(len, self.failures.values()))
        counts = {"Total tensors": num_swept + num_failed, "Successful": num_swept, "Failed": num_failed}
        lines = ["", DOUBLE, "FINAL SUMMARY", DOUBLE, *(f"{what}: {count}" for what, count in counts.items())]
        lines += [f"  {reason}" for reason in self.reasons()] or ["All tests completed successfully!"]
        self._show("\n".join(lines))

    def reasons(self) -> list[str]:
        """One line for each reason of failures: the tensor that failed for it, or the first of them and how many."""
        return [
            f"{f'{len(alike)} tensors, the first of which is ' if len(alike) > 1 else ''}"
            f"{printable(alike[0][0].title)}: {alike[0][1]}"
            for alike in self.failures.values()
        ]

    def _take(self, tensor: ListedTensor) -> list[Swept] | RanktapeError:
        """The sweeps of the next tensor of its selection, or of its samples where these are asked for."""
        if tensor.error is not None:
            return tensor.error
        assert tensor.records is not None
        if self._outputs is None:
            sweeps = self._ahead.get(id(tensor.records)) or self._sweeps(tensor.records, source=tensor.source)
            self._ahead[id(tensor.records)] = sweeps
        else:
            sweeps = self._sweeps(tensor.records[tensor.index : tensor.index + 1], source=tensor.source)
        found = next(sweeps)
        if isinstance(found, RanktapeError):
            return found
        return [dataclasses.replace(one, records=tensor.records, index=tensor.index) for one in found]

    def _write(self, tensor: ListedTensor, outputs: OutputOptions) -> list[Swept] | RanktapeError:
        """The sweeps of a tensor, about which files are written."""
        start = datetime.now().astimezone()
        if tensor.error is not None:
            return tensor.error
        assert tensor.records is not None
        record = tensor.records[tensor.index]
        folder_name = self._names.take(tensor.folder_name)
        subject = Subject(
            name=printable(tensor.title),
            source=printable(tensor.source),
            dtype=record.dtype,
            judged_as=viewed_dtype(dtype=record.dtype, compute_dtype=record.compute_dtype, view=self._view),
            shape=record.shape,
        )
        with contextlib.ExitStack() as stack:
            reports = [
                stack.enter_context(
                    TensorReport(
                        job.scheme.name,
                        subject=subject,
                        folder_name=folder_name,
                        options=outputs,
                        start=start,
                        show=self._show,
                    )
                )
                for job in self._jobs
            ]
            swept = self._take(tensor)
            if isinstance(swept, RanktapeError):
                raise swept
            for report, sweep in zip(reports, swept[0].sweeps, strict=True):
                report.say_swept(sweep)
            for report, sweep in zip(reports, swept[0].sweeps, strict=True):
                report.finish(sweep)
        return swept


def _list_tensors(selections: Sequence[Selection], *, by: Sequence[str]) -> list[ListedTensor]:
    """Every tensor of the sources; a source or a file that cannot be read is one that failed.

    Of several sources those in which nothing matches the filters are named on stderr, and left out. So are records of
    integers and bool.
    """
    tensors: list[ListedTensor] = []
    unmatched: list[RanktapeError] = []
    for selection, called in zip(selections, short_names([one.run for one in selections]), strict=True):
        source, unreadable = None, dict[str, str]()
        try:
            if _is_file(selection.run) and not Path(selection.run).exists():
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


def _is_file(source: str) -> bool:
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
