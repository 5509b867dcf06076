"""Writes the files about each tensor that was swept: a log, results and plots, in a folder of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from ranktape.analyze.advice.recommendation import recommend
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
from ranktape.analyze.views.whole_file import write_whole, writing
from ranktape.errors import RanktapeError, StorageError

if TYPE_CHECKING:
    from ranktape.analyze.legacy.outputs.text import Subject
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

DEFAULT_OUTPUT_DIR = Path("draw/scaling_analysis")
"""Where the directories of tensors go if nobody says where: the place that the legacy tool used."""

MAX_NAME_NBYTES = 120
"""Longest name of a directory; names of files hold it too, and a file system allows 255 bytes."""

_OPTION = "--output-dir"
_FOLDER, _LOG = {"what": "folder", "option": _OPTION}, {"what": "log", "option": _OPTION}
_HASH_LENGTH = 8
_PLAIN = "._-+=@"


class SweepFiles(NamedTuple):
    """The files about one tensor in one format."""

    results: Path
    """The metrics of every level."""
    panels: Path
    """The plot of six panels."""
    summary: Path
    """The plot of what matters most."""
    log: Path
    """What was done, said and saved."""


def files_of(folder: Path, *, format: str) -> SweepFiles:  # noqa: A002 - the option's name
    """The files about a format in the directory of a tensor."""
    return SweepFiles(
        results=folder / f"mxfp_scaling_results_{format}.txt",
        panels=folder / f"mxfp_scaling_test_{format}.png",
        summary=folder / f"mxfp_scaling_summary_{format}.png",
        log=folder / f"mxfp_scaling_test_{folder.name}_{format}.log",
    )


class FolderNames:
    """Names of directories, none of which was given before."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, text: str) -> str:
        """A name that says `text`; with a number behind it where others have taken that name."""
        plain = safe_name(text)
        name, number = plain, 1
        while _key(name) in self._taken:
            number += 1
            name = f"{plain}_{number}"
        self._taken.add(_key(name))
        return name


def titles_of(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with as many folders before it as tell it from the others, if its path does."""
    titles = [path.name for path in paths]
    for depth in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        counts = Counter(titles)
        titles = [
            title if counts[title] == 1 else str(Path(*path.parts[-depth:]))
            for title, path in zip(titles, paths, strict=True)
        ]
    return titles


def safe_name(text: str) -> str:
    """The text as the name of a directory: letters, digits and `._-+=@`; never empty, hidden, or a way up."""
    letters = unicodedata.normalize("NFC", text)
    kept = "".join(letter if letter.isalnum() or letter in _PLAIN else "_" for letter in letters)
    name = kept.lstrip(".-").rstrip(".") or "tensor"
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a file system that has letters of one language only
        name = "".join(letter if letter.isascii() else "_" for letter in name)
        encoded = os.fsencode(name)
    if len(encoded) <= MAX_NAME_NBYTES:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    start = encoded[: MAX_NAME_NBYTES - _HASH_LENGTH - 1].decode(errors="ignore")
    return f"{start}_{digest}"


def make_folder(folder: Path) -> None:
    """Make a directory and those above it.

    Raises:
        StorageError: it cannot be made; the kind says why.
    """
    with writing(folder, **_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def stamped(text: str) -> str:
    """A line with the time now before it: local, to the millisecond."""
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3] + f"  {text}".rstrip()


class SweepLog:
    """A file of lines with time stamps, each of which is shown as well.

    A line is in the file before the next one is written: whoever is interrupted has all that was said.
    """

    def __init__(self, path: Path, *, show: Callable[[str], object]) -> None:
        """Begin a log, in place of the one that is there.

        Raises:
            StorageError: the file cannot be written.
        """
        self._path, self._show = path, show
        with writing(path, **_LOG):
            self._file = path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with writing(self._path, **_LOG):
            self._file.close()

    def write(self, lines: Iterable[str]) -> None:
        """Add lines, each with the time now.

        Raises:
            StorageError: the file cannot be written.
        """
        for text in lines:
            line = stamped(text)
            with writing(self._path, **_LOG):
                self._file.write(line + "\n")
            self._show(line)


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
        folder = options.output_dir / folder_name
        self.files = files_of(folder, format=scheme)
        """Where they are."""
        self._subject, self._watch, self._with_plots = subject, watch, options.with_plots
        self._is_finished = False
        make_folder(folder)
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
        data = results.encode("utf-8", "backslashreplace")
        write_whole(files.results, data, what="results", option=_OPTION)
        log.write([f"Results saved to: {files.results}"])
        if self._with_plots:
            _draw(sweep, files=files, name=self._subject.name, log=log)
        log.write([f"Log saved to: {files.log}"])
        end = datetime.now().astimezone().isoformat(timespec="milliseconds")
        log.write([f"End: {end}, {watch.elapsed_seconds:.3f} s after the start"])
        self._is_finished = True


def _draw(sweep: ScaleSweep, *, files: SweepFiles, name: str, log: SweepLog) -> None:
    from ranktape.analyze.legacy.outputs.plots import draw_panels, draw_summary
    from ranktape.analyze.views.plots.style import plot_bytes

    for path, draw, what in ((files.panels, draw_panels, "Plots"), (files.summary, draw_summary, "Summary plot")):
        write_whole(path, plot_bytes(draw(sweep, name=name)), option=_OPTION)
        log.write([f"{what} saved to: {path}"])
