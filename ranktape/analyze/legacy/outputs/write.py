"""Which files are written of one tensor, and what is said meanwhile?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ranktape.analyze.advice.recommendation import recommend
from ranktape.analyze.legacy.outputs.files import SweepFiles, make_folder, write_file
from ranktape.analyze.legacy.outputs.log import SweepLog
from ranktape.analyze.legacy.outputs.text import (
    DOUBLE,
    analysis_lines,
    level_lines,
    limit_lines,
    parameter_lines,
    results_text,
    subject_lines,
)
from ranktape.analyze.legacy.outputs.words import number_of
from ranktape.errors import RanktapeError, StorageError

if TYPE_CHECKING:
    from ranktape.analyze.legacy.outputs.text import Subject
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where the files go, and which are written."""

    output_dir: Path
    """The directory in which each tensor has one of its own."""
    with_plots: bool = True
    """Whether plots are drawn."""


class Stopwatch:
    """When the work on a tensor began, and how long ago that is."""

    def __init__(self) -> None:
        self.start = datetime.now().astimezone()
        """Local time."""
        self._seconds = time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._seconds


class TensorReport:
    """The files about one tensor in one format, from before it is swept.

    A context: an error inside it is the last line of the log, unless the report is finished.
    """

    def __init__(
        self,
        scheme: str,
        *,
        subject: Subject,
        folder_name: str,
        options: OutputOptions,
        watch: Stopwatch,
        show: Callable[[str], object],
    ) -> None:
        """Begin the log of a format and its scaling, by name, with what is known so far; each line of it is shown too.

        What was there of an earlier sweep of the same format is replaced.

        Raises:
            StorageError: the log cannot be written; the kind says why.
        """
        self.files = SweepFiles(folder=options.output_dir / folder_name, tensor_name=folder_name, format=scheme)
        """Where they are."""
        self._subject, self._watch, self._with_plots = subject, watch, options.with_plots
        self._is_finished = False
        make_folder(self.files.folder)
        self._log = SweepLog(self.files.log, show=show)
        start = f"Start: {watch.start.isoformat(timespec='milliseconds')}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._log)
            self._log.write([DOUBLE, "MXFP SCALING TEST", DOUBLE, start])
            self._log.write([*subject_lines(subject), f"Sweeping: {scheme}"])
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._log:
            if isinstance(error, RanktapeError) and not self._is_finished:
                # Where the log itself cannot be written, the console has the reason.
                with contextlib.suppress(StorageError):
                    self._log.write([f"Failed: {error}"])

    def say_swept(self, sweep: ScaleSweep) -> None:
        """Say in the log that the sweep has just come to its end.

        Raises:
            StorageError: the log cannot be written; the kind says why.
        """
        seconds = self._watch.elapsed_seconds
        self._log.write([f"Swept: {number_of(len(sweep.levels), 'level')}, {seconds:.3f} s after the start"])

    def finish(self, sweep: ScaleSweep) -> None:
        """Write the results and the plots, and the rest of the log.

        Raises:
            StorageError: a file cannot be written; the kind says why.
        """
        log, files, watch = self._log, self.files, self._watch
        found = recommend(sweep)
        log.write(parameter_lines(sweep))
        log.write([DOUBLE])
        log.write(level_lines(sweep))
        log.write(analysis_lines(sweep, found))
        if sweep.levels:
            log.write(limit_lines(sweep, found))
        results = results_text(sweep, found, subject=self._subject)
        write_file(files.results, results.encode("utf-8", "backslashreplace"))
        log.write([f"Results saved to: {files.results}"])
        if self._with_plots:
            _draw(sweep, files=files, name=self._subject.name, log=log)
        log.write([f"Log saved to: {files.log}"])
        end = datetime.now().astimezone().isoformat(timespec="milliseconds")
        log.write([f"End: {end}, {watch.elapsed_seconds:.3f} s after the start"])
        self._is_finished = True


def _draw(sweep: ScaleSweep, *, files: SweepFiles, name: str, log: SweepLog) -> None:
    from ranktape.analyze.legacy.outputs.plots import draw_panels, draw_summary, png_of

    for path, draw, what in ((files.panels, draw_panels, "Plots"), (files.summary, draw_summary, "Summary plot")):
        write_file(path, png_of(draw(sweep, name=name)))
        log.write([f"{what} saved to: {path}"])
