"""Removes complete iterations of a run, or a whole run, so that no reader takes the rest for complete."""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass

import numpy as np

from ranktape.errors import UsageError, expect_least
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import (
    Attempt,
    Launch,
    check_attempt,
    complete_iterations,
    dropped_iterations,
    read_attempts,
    read_run,
    run_attributes,
    whole_iterations,
)
from ranktape.storage.format.documents import for_each, read_attributes, write_group
from ranktape.storage.maintenance import OnProgress, Work
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import RetryingBackend
from ranktape.storage.query.filters import parse_filter
from ranktape.storage.recording.start import Lease, delete_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """The result of pruning a run."""

    url: str
    """URL of the run, without credentials."""
    dry_run: bool
    """Whether nothing was changed."""
    removed: tuple[int, ...]
    """The iterations that were removed, or would be, in ascending order."""
    kept: tuple[int, ...]
    """The complete iterations that remain, in ascending order."""


def prune_run(
    backend: RetryingBackend,
    *,
    keep_last: int | None = None,
    iteration: str | None = None,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> PruneReport:
    """Remove complete iterations in all attempts. Their state is then `dropped`.

    Args:
        backend: The store of the run.
        keep_last: Remove all but this number of the latest iterations. Iterations that were cut off remain.
        iteration: Remove the iterations that match a filter such as `"10:20:2"`, `"0-3"` or `"0,2"`.
        dry_run: Change nothing and return what would be removed.
        on_progress: Called with the number of removed iterations and the number of all iterations to remove.

    Raises:
        RunExistsError: a launch is recording into the run.
        RunNotFoundError: there is no run.
        UsageError: neither or both of `keep_last` and `iteration` are given, or no complete iteration matches.
    """
    if (keep_last is None) == (iteration is None):
        raise UsageError("give what to remove in one way: --keep-last N, or --iteration with a filter such as 0-3")
    expect_least(0, keep_last=keep_last)
    run_attributes(read_run(backend), place=backend.url)
    with contextlib.nullcontext() if dry_run else _lease(backend):
        attempts = read_attempts(backend)
        # An iteration that was cut off is partial. It does not count, and is removed only if it is named.
        among = complete_iterations if keep_last is None else whole_iterations
        candidates = [(attempt, number) for attempt in attempts for number in among(backend, attempt)]
        complete = sorted({number for _, number in candidates})
        removed = _chosen(complete, keep_last=keep_last, iteration=iteration)
        due = [candidate for candidate in candidates if candidate[1] in removed]
        if not dry_run:
            for attempt in attempts:
                finish_drops(backend, attempt=attempt)
            work = Work(on_progress, len(due))
            for attempt, number in due:
                drop_iteration(backend, attempt=attempt, iteration=number)
                work.step()
            backend.flush()
    return PruneReport(
        url=backend.url,
        dry_run=dry_run,
        removed=tuple(sorted(removed)),
        kept=tuple(number for number in complete if number not in removed),
    )


def delete_run(backend: RetryingBackend) -> None:
    """Delete a run, even a damaged one. Objects beside it that are not part of a run remain.

    Raises:
        RunExistsError: a launch is recording into the run.
        RunNotFoundError: there is no run.
    """
    expect_run(backend)
    with _lease(backend):
        delete_parts(backend)


def expect_run(backend: RetryingBackend) -> None:
    """Check that the store has a run or the rest of one.

    Raises:
        RunNotFoundError: it has neither.
    """
    if not any(layout.parse_attempt(name) is not None for name in backend.list_names("")):
        run_attributes(read_run(backend), place=backend.url)


def _chosen(complete: list[int], *, keep_last: int | None, iteration: str | None) -> set[int]:
    """The complete iterations to remove."""
    if keep_last is not None:
        return set(complete[: max(0, len(complete) - keep_last)])
    wanted = parse_filter("iteration", iteration or "")
    mask = wanted.mask(lambda _: np.array(complete, dtype=np.int64), len(complete))
    removed = {number for number, is_wanted in zip(complete, mask, strict=True) if is_wanted}
    if not removed:
        raise UsageError(f"--iteration {iteration} matches none of the complete iterations of the run: {complete}")
    return removed


def _lease(backend: RetryingBackend) -> Lease:
    """The lease on the run, which no recording launch can hold at the same time."""
    return Lease(backend, launch=Launch(launch_id=f"maintenance-{uuid.uuid4().hex}", restart=0, world_size=1))


def drop_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Remove a complete iteration. Its state is then `dropped`. Can be repeated."""
    check_attempt(backend, attempt)
    path = layout.dropped_path(attempt.path, iteration)
    fields = {"dropped": time.time(), "removed": False}
    write_group(backend, path, fields)
    backend.flush()
    commit = layout.iteration_path(attempt.path, iteration)
    backend.delete_keys([layout.document_key(commit)])
    groups = [layout.rank_iteration_path(attempt.path, rank, iteration) for rank in attempt.launch.ranks]
    for_each(backend.delete, groups)
    backend.delete(commit)
    backend.delete(layout.opened_path(attempt.path, iteration))
    write_group(backend, path, {**fields, "removed": True})


def finish_drops(backend: Backend, *, attempt: Attempt) -> None:
    """Remove the rest of iterations whose removal was interrupted."""
    for iteration in sorted(dropped_iterations(backend, attempt)):
        fields = read_attributes(backend, layout.dropped_path(attempt.path, iteration))
        if fields is not None and not fields.get("removed"):
            drop_iteration(backend, attempt=attempt, iteration=iteration)
