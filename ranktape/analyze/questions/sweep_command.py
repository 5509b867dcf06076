"""Answers `ranktape analyze sweep`: a table of the tensors of several sources, files about each of them, or both.

A source is a run, a folder of `.pt` files, or one such file. A tensor that fails does not end the others. With files,
tensors are swept one after the other, and the files of each are written before the next is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ranktape.analyze.console import say
from ranktape.analyze.engine.engine import Engine, progress
from ranktape.analyze.engine.memo import KeptAnswer
from ranktape.analyze.engine.sweep_measure import Job
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import sample_names, with_stacks
from ranktape.analyze.legacy.text import DOUBLE, Subject
from ranktape.analyze.legacy.write import (
    DEFAULT_OUTPUT_DIR,
    FolderNames,
    OutputOptions,
    TensorReport,
    make_folder,
)
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.options import Output, Selection
from ranktape.analyze.questions.listed_tensors import ListedTensor, is_file, list_tensors, selections_of
from ranktape.analyze.questions.sweep import check_shape, table_of
from ranktape.analyze.questions.swept import (
    KEPT_VERSION,
    Swept,
    answerable,
    can_be_kept,
    num_readings,
    parse_jobs,
    sweep_selection,
)
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import DataError, RanktapeError, UsageError, WorkersError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.places.failures import printable

MAX_NAMED_FAILURES = 4
"""Reasons that the last message names."""


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

    SOURCE is a run, a folder of .pt files, or one such file. A level is a scale: in tensor mode its exponent, in mx
    mode an offset to the exponents of all blocks. The recommended level has the best score of MSE, cosine, PSNR, MAE
    and relative error.

    Args:
        format (NAME): mxfp8_e4m3, nvfp4, fp8_e5m2, int8, hif8, ...; commas between.
        sweep_mode (MODE): mx, tensor, channel or legacy; by default mx for formats with blocks, tensor for others.
        scale_rule (RULE): floor, ceil, even or rceil: a block's scale from its largest value [floor].
        rounding (NAME): even, away, floor, stochastic or hybrid.
        block_size (N): Elements with one scale [32; nvfp4: 16].
        axis: Of blocks and channels.
        scale_bits (N): Width of a block scale's exponent [8].
        num_levels (N): Scales that are tried [21].
        max_scale_exp (E): First exponent, or offset in mx mode.
        min_scale_exp (E): Last exponent, or offset in mx mode.
        levels: One row for each level, not only the best.
        target_sqnr (DB): What the best format keeps.
        output_dir (DIR): Write metrics, plots and a log per tensor.
        no_plots: Draw no plots.

    Note:
        Values are divided by a scale, rounded to the format and multiplied again. The score is 30 % MSE, 30 % cosine,
        20 % PSNR, 10 % MAE, 10 % relative error. `rounding` is the format's own by default. Mode legacy computes as the
        legacy tool. By default the first and the last exponent align the format with the largest and the smallest
        value; in mx mode the offsets go from +10 to -10. The narrowest format that keeps `target_sqnr` of a tensor is
        preferred.

        The answer is a table. Of .pt files, and with `output_dir` of anything, it is a directory for each tensor
        instead, unless `by`, `levels`, --json, --csv or `output` asks for the table too. For .pt files the default of
        `output_dir` is draw/scaling_analysis.

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
    has_table = asks_for_table or not (output_dir or all(is_file(selection.run) for selection in selections))
    outputs = None
    if output_dir is not None or not has_table:
        outputs = OutputOptions(output_dir=output_dir or DEFAULT_OUTPUT_DIR, with_plots=not no_plots)
    tensors = list_tensors(selections, by=by)
    jobs, left_out = answerable(jobs, keeps={tensor.keep for tensor in tensors})
    if left_out:
        say(left_out, err=True)
    fields = with_stacks(by, *selections_of(tensors))
    shape: dict[str, Any] = {"by": fields, "with_levels": levels, "target_sqnr": target_sqnr}
    run = _SweepOfAll(tensors, jobs, view=view or View.COMPUTE, outputs=outputs, has_table=has_table, engine=engine)
    table = run.table(shape)
    run.show_summary()
    try:
        if table is not None:
            output.write(table)
    finally:
        run.raise_failures()


class _SweepOfAll:
    """The sweeps of all tensors; whatever the user can cause to go wrong with one of them ends that one alone."""

    def __init__(
        self,
        tensors: Sequence[ListedTensor],
        jobs: Sequence[Job],
        *,
        view: View,
        outputs: OutputOptions | None,
        has_table: bool,
        engine: Engine,
    ) -> None:
        self._tensors, self._jobs, self._view, self._outputs = tensors, jobs, view, outputs
        self._has_table, self._engine = has_table, engine
        # What goes to stdout is the answer: with a table, the log is not it.
        self._show = functools.partial(say, err=has_table)
        self._sweeps: Callable[..., Iterator[list[Swept] | RanktapeError]] = sweep_selection
        self._ahead: dict[int, Iterator[list[Swept] | RanktapeError]] = {}
        self._names = FolderNames()
        self.swept: list[Swept] = []
        """Of the tensors that could be swept, in order."""
        self.failures: dict[str, list[tuple[ListedTensor, RanktapeError]]] = {}
        """The others, by the reason in words that are the same for all tensors that failed for it."""

    def table(self, shape: dict[str, Any]) -> Table | None:
        """Sweep every tensor, and make the table that is asked for; one of groups that was kept is not made again."""
        by, selected = shape["by"], selections_of(self._tensors)
        about = [repr((self._jobs, self._view, shape["target_sqnr"], by)), *map(repr, _keys_of(selected, by))]
        is_asked = self._engine.use_cache and by and not self._outputs and selected
        kept = KeptAnswer(selected, about, name=f"sweep_groups_v{KEPT_VERSION}") if is_asked else None
        if kept is not None and (found := kept.find()) is not None:
            columns = tuple(Column(**{**one, "kind": Kind(one["kind"])}) for one in found["columns"])
            return Table(title=found["title"], columns=columns, rows=found["rows"], notes=tuple(found["notes"]))
        # One bar is enough.
        quiet = dataclasses.replace(self._engine, show_progress=False)
        is_kept = not (shape["with_levels"] or by or self._outputs) and can_be_kept(self._jobs)
        engine = self._engine if is_kept else quiet
        options: dict[str, Any] = {"jobs": self._jobs, "view": self._view, "by": by, "is_kept": is_kept}
        self._sweeps = functools.partial(sweep_selection, **options, engine=engine)
        num_steps = len(self._tensors) * num_readings(self._jobs, by=by)
        table = None
        with progress(0 if self._outputs or is_kept else num_steps, description="sweeping") as on_record:
            self._sweep(on_record=on_record)
            if self._has_table and self.swept:
                table = table_of(self.swept, view=self._view, **shape, engine=quiet, on_record=on_record)
        if kept is not None and table is not None and not self.failures:
            words = [dataclasses.asdict(column) for column in table.columns]
            kept.keep({"title": table.title, "columns": words, "rows": list(table.rows), "notes": table.notes})
        return table

    def raise_failures(self) -> None:
        """Say what could not be swept.

        Raises:
            DataError: some tensor could not be; of a single one its own error is raised.
        """
        if self.failures and self._outputs is None and len(self._tensors) == 1:
            raise next(iter(self.failures.values()))[0][1]
        if reasons := self.reasons():
            rest = len(reasons) - MAX_NAMED_FAILURES
            named = "; ".join(reasons[:MAX_NAMED_FAILURES]) + (f"; and for {rest} more reasons" if rest > 0 else "")
            num_failed = sum(map(len, self.failures.values()))
            raise DataError(f"{num_failed} of {len(self._tensors)} tensors could not be swept: {named}")

    def _sweep(self, *, on_record: Callable[[], object]) -> None:
        """Sweep every tensor; with outputs, one after the other, and every line is shown."""
        tensors, outputs, show = self._tensors, self._outputs, self._show
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


def _keys_of(selected: Sequence[Records], by: Sequence[str]) -> Iterator[Any]:
    """What tells the groups of records: the values of the fields that they are made by."""
    for records in selected:
        yield [sample_names(records) if field == SAMPLE else records.column(field).tolist() for field in by]
