"""Writes the log, results and plots of each tensor that was swept into a folder of its own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from ranktape.analyze.console import write_whole, writing
from ranktape.analyze.legacy.text import (
    DOUBLE,
    Subject,
    analysis_lines,
    level_lines,
    limit_lines,
    number_of,
    parameter_lines,
    results_text,
    subject_lines,
)
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.analyze.questions.advice import Recommendation
from ranktape.errors import RanktapeError, StorageError

DEFAULT_OUTPUT_DIR = Path("draw/scaling_analysis")
"""The default parent of the tensors' directories, as in the legacy tool."""

MAX_NAME_NBYTES = 120
"""The longest name of a directory. File names contain it too, and file systems allow 255 bytes."""

_OPTION = "--output-dir"
_FOLDER, _LOG = {"what": "folder", "option": _OPTION}, {"what": "log", "option": _OPTION}
_HASH_LENGTH = 8
_PLAIN = "._-+=@"


class SweepFiles(NamedTuple):
    """The files of one tensor in one format: the metrics of every level, two plots, and the log."""

    results: Path
    panels: Path
    summary: Path
    log: Path


def files_of(folder: Path, *, format: str) -> SweepFiles:  # noqa: A002 - the option's name
    """The files of a format in the directory of a tensor."""
    return SweepFiles(
        results=folder / f"mxfp_scaling_results_{format}.txt",
        panels=folder / f"mxfp_scaling_test_{format}.png",
        summary=folder / f"mxfp_scaling_summary_{format}.png",
        log=folder / f"mxfp_scaling_test_{folder.name}_{format}.log",
    )


class FolderNames:
    """Unique names of directories."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, text: str) -> str:
        """A name from `text`, with a number appended if that name is taken."""
        plain = safe_name(text)
        names = (plain if number == 1 else f"{plain}_{number}" for number in itertools.count(1))
        name = next(name for name in names if _key(name) not in self._taken)
        self._taken.add(_key(name))
        return name


def titles_of(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with as many parent folders as needed to distinguish it, if the paths differ."""
    titles = [path.name for path in paths]
    for depth in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        counts = Counter(titles)
        titles = [
            title if counts[title] == 1 else str(Path(*path.parts[-depth:]))
            for title, path in zip(titles, paths, strict=True)
        ]
    return titles


def safe_name(text: str) -> str:
    """The text as the name of a directory: letters, digits and `._-+=@`; never empty, hidden, or `..`."""
    letters = unicodedata.normalize("NFC", text)
    kept = "".join(letter if letter.isalnum() or letter in _PLAIN else "_" for letter in letters)
    name = kept.lstrip(".-").rstrip(".") or "tensor"
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # the file system's encoding lacks some letters
        name = "".join(letter if letter.isascii() else "_" for letter in name)
        encoded = os.fsencode(name)
    if len(encoded) <= MAX_NAME_NBYTES:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    start = encoded[: MAX_NAME_NBYTES - _HASH_LENGTH - 1].decode(errors="ignore")
    return f"{start}_{digest}"


def make_folder(folder: Path) -> None:
    """Create a directory and its parents."""
    with writing(folder, **_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


class OutputOptions(NamedTuple):
    """The parent of the tensors' directories, and whether to draw plots."""

    output_dir: Path
    with_plots: bool = True


class TensorReport:
    """A context manager that writes the files of one tensor in one format, starting before the sweep.

    An error inside the context is logged, unless the report is finished. Each line is also shown, and is in the file
    before the next line is written, so an interrupted sweep leaves a complete log.
    """

    def __init__(
        self,
        scheme: str,
        *,
        subject: Subject,
        folder_name: str,
        options: OutputOptions,
        start: datetime,
        show: Callable[[str], object],
    ) -> None:
        """Start the log for a format with the description of the tensor.

        The log of an earlier sweep of the same format is replaced. `start` is when the work on the tensor started.
        """
        folder = options.output_dir / folder_name
        self.files = files_of(folder, format=scheme)
        """Paths of the files."""
        self._subject, self._start, self._with_plots = subject, start, options.with_plots
        self._show, self._is_finished = show, False
        make_folder(folder)
        with writing(self.files.log, **_LOG):
            self.files.log.write_bytes(b"")
        self._log(DOUBLE, "MXFP SCALING TEST", DOUBLE, f"Start: {start.isoformat(timespec='milliseconds')}")
        self._log(*subject_lines(subject), f"Sweeping: {scheme}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RanktapeError) and not self._is_finished:
            # If the log itself cannot be written, the console shows the reason.
            with contextlib.suppress(StorageError):
                self._log(f"Failed: {error}")

    def say_swept(self, sweep: ScaleSweep) -> None:
        """Log that the sweep has finished."""
        self._log(f"Swept: {number_of(len(sweep.levels), 'level')}, {self._elapsed(datetime.now().astimezone())}")

    def finish(self, sweep: ScaleSweep) -> None:
        """Write the results and the plots, and the rest of the log."""
        files, found = self.files, Recommendation(sweep)
        self._log(*parameter_lines(sweep), DOUBLE, *level_lines(sweep), *analysis_lines(found))
        if sweep.levels:
            self._log(*limit_lines(found))
        data = results_text(found, subject=self._subject).encode("utf-8", "backslashreplace")
        self._put(files.results, data, "Results", kind="results")
        if self._with_plots:
            from ranktape.analyze.legacy.plots import draw_panels, draw_summary
            from ranktape.analyze.views.plots.style import plot_bytes

            self._put(files.panels, plot_bytes(draw_panels(sweep, name=self._subject.name)), "Plots")
            self._put(files.summary, plot_bytes(draw_summary(sweep, name=self._subject.name)), "Summary plot")
        now = datetime.now().astimezone()
        self._log(f"Log saved to: {files.log}")
        self._log(f"End: {now.isoformat(timespec='milliseconds')}, {self._elapsed(now)}")
        self._is_finished = True

    def _put(self, path: Path, data: bytes, what: str, *, kind: str = "plot") -> None:
        write_whole(path, data, what=kind, option=_OPTION)
        self._log(f"{what} saved to: {path}")

    def _elapsed(self, now: datetime) -> str:
        return f"{(now - self._start).total_seconds():.3f} s after the start"

    def _log(self, *lines: str) -> None:
        """Add lines, each with the local time in milliseconds before it."""
        style: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        for text in lines:
            line = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3] + f"  {text}".rstrip()
            with writing(self.files.log, **_LOG), self.files.log.open("a", **style) as file:
                file.write(line + "\n")
            self._show(line)
