"""Lists the runs below a URL, with the state of each."""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ranktape.errors import DataError, RanktapeError, RunFormatError, RunNotFoundError, UsageError, expect_least
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import read_attempts, read_run, run_attributes
from ranktape.storage.format.documents import for_each, read_document
from ranktape.storage.format.progress import IterationState, read_verdict
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend

MAX_DEPTH = 4
"""The default number of levels below the URL that are searched."""

MAX_NAMES = 10_000
"""The number of names after which the search ends with an error."""

MAX_NAMED = 6
"""The number of runs that an error names."""

_LAST_SECOND = 253_402_300_800
"""The end of the year 9999, which bounds times in documents that are not trusted."""


class RunState(enum.StrEnum):
    """The state of a run."""

    MET = "met"
    """It is closed, and the guaranteed minimum is stored complete."""
    UNMET = "unmet"
    """It is closed, and the guaranteed minimum is not stored complete."""
    OPEN = "open"
    """It is not closed: it is being recorded, or its processes died."""
    EMPTY = "empty"
    """It has no attempt."""
    UNREADABLE = "unreadable"
    """It cannot be read; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in a list of runs."""

    path: str
    """Path below the searched URL; empty for the run at that URL."""
    url: str
    """URL of the run, without credentials."""
    state: RunState
    """State of the run."""
    message: str
    """The verdict in one line, or the reason why the run cannot be read."""
    created: float | None = None
    """Time of creation, in seconds since 1970 UTC; None if its document does not give it."""
    num_attempts: int = 0
    """Number of starts of the worker group."""
    world_size: int = 0
    """Number of ranks of the latest attempt."""
    iterations: tuple[int, ...] = ()
    """The iterations that are stored complete, in ascending order."""
    num_records: int = 0
    """Number of records in the complete iterations of all attempts."""
    nbytes: int = 0
    """Size of their values, in bytes."""


def find_runs(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, max_depth: int = MAX_DEPTH
) -> list[RunSummary]:
    """The runs at and below a URL, sorted by their paths. Runs are not searched for further runs.

    Args:
        url: A directory, or the URL of a prefix.
        storage_options: See `open_run`.
        max_depth: Number of levels below the URL that are searched.

    Raises:
        RunNotFoundError: there is nothing at the URL.
        UsageError: the URL or the options are not valid, `max_depth` is negative, or there are too many names.
    """
    expect_least(0, depth=max_depth)
    backend = open_backend(url, storage_options=storage_options)
    summarize_level = functools.partial(_summarize_level, backend, url=os.fspath(url), storage_options=storage_options)
    summary, names = summarize_level("")
    if summary is None and not names:
        raise RunNotFoundError(f"there is nothing at {backend.url}: check the URL")
    summaries = [] if summary is None else [summary]
    num_seen = 0
    for _ in range(max_depth):
        num_seen += len(names)
        if num_seen > MAX_NAMES:
            raise UsageError(
                f"there are more than {MAX_NAMES} names below {backend.url}: give a URL nearer to the runs, or search "
                f"fewer levels (--depth)"
            )
        level = for_each(summarize_level, names)
        summaries += [summary for summary, _ in level if summary is not None]
        names = [name for _, below in level for name in below]
    return sorted(summaries, key=lambda summary: summary.path)


@contextlib.contextmanager
def suggest_nearest(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """A context that adds to a `RunNotFoundError` the run with the most similar name beside the URL, or all runs."""
    try:
        yield
    except RunNotFoundError as error:
        parent, slash, name = str(url).rstrip("/").rpartition("/")
        near: list[str] = []
        parent_url = parent or slash or "."
        with contextlib.suppress(RanktapeError):  # the first error is the one to report
            names = open_backend(parent_url, storage_options=storage_options).list_names("")
            near = difflib.get_close_matches(name, [other for other in names if other != name], n=1)
            near = near or [run.path for run in find_runs(parent_url, storage_options=storage_options, max_depth=1)]
        shown = ", ".join(near[:MAX_NAMED])
        raise (RunNotFoundError(f"{error}; beside it there is {shown}") if shown else error) from error


def summarize(backend: Backend, *, path: str = "") -> RunSummary:
    """The summary of the run in a backend.

    Raises:
        RunNotFoundError: there is no run.
    """
    attributes = run_attributes(read_run(backend), place=backend.url)
    value = attributes.get("created")
    created = float(value) if isinstance(value, int | float) and 0 <= value < _LAST_SECOND else None
    attempts = read_attempts(backend)
    judged = read_verdict(backend, attempts=attempts)
    if judged is None:
        state, message = RunState.EMPTY, "no attempt has begun in it"
        return RunSummary(path=path, url=backend.url, state=state, message=message, created=created)
    verdict, statuses = judged
    closed = RunState.MET if verdict.met else RunState.UNMET
    complete = [status for status in statuses if status.state is IterationState.COMPLETE]
    return RunSummary(
        path=path,
        url=backend.url,
        state=closed if verdict.final else RunState.OPEN,
        message=verdict.message(),
        created=created,
        num_attempts=len(attempts),
        world_size=attempts[-1].launch.world_size,
        iterations=tuple(sorted({status.iteration for status in complete})),
        num_records=sum(status.num_records for status in complete),
        nbytes=sum(status.nbytes for status in complete),
    )


def _summarize_level(
    backend: Backend, place: str, *, url: str, storage_options: Mapping[str, Any] | None
) -> tuple[RunSummary | None, list[str]]:
    """The run at a path below the backend, or the paths below it if there is no run."""
    where = f"{backend.url}/{place}".rstrip("/")
    names: list[str] | None = None
    try:
        data = read_document(backend, place)
        if data is None or b"ranktape" not in data:
            names = backend.list_names(place)
            if not any(layout.parse_attempt(name) is not None for name in names):
                # A foreign Zarr group is not searched.
                return None, [f"{place}/{name}" if place else name for name in names if data is None]
            raise RunFormatError(f"{where} has attempts, but no document of a run: restore its zarr.json")
        run_attributes(data, place=where)
        return summarize(open_backend(_join(url, place), storage_options=storage_options), path=place), []
    except RanktapeError as error:
        if not place and names is None and not isinstance(error, DataError | RunFormatError):
            raise
        # It may not be a run, but the error must be reported.
        return RunSummary(path=place, url=where, state=RunState.UNREADABLE, message=str(error)), []


def _join(url: str, place: str) -> str:
    """The URL of a path below another URL."""
    if not place:
        return url
    # Only URLs of files are percent-encoded.
    is_file = url.partition("://")[0].lower() in {"file", "local"}
    return f"{url.rstrip('/')}/{quote(place) if is_file else place}"
