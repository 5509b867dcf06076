"""Starts an attempt in a run, under a lease that one launch holds at a time.

Rank 0 claims the run, creates or continues it, and writes the attempt's document last. Every other rank waits for that
document. Its presence proves that all ranks write into the same store, and not each into a directory of its own node.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ranktape.errors import CaptureError, RanktapeError, RunExistsError, StorageError, UsageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import (
    Attempt,
    Launch,
    read_attempts,
    read_plan,
    read_run,
    run_attributes,
    whole_iterations,
)
from ranktape.storage.format.documents import (
    SCHEMA_KEY,
    SCHEMA_VERSION,
    encode_document,
    group_document,
    read_as,
    write_group,
)
from ranktape.storage.format.progress import finish_ready, read_verdict
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import RetryingBackend

MAX_OBJECT_KEY_NBYTES = 1024
"""The longest key in an object store, in bytes."""

MAX_FILE_PATH_NBYTES = 4096
"""The longest path on Linux, in bytes."""

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0


def claim_run(backend: RetryingBackend, *, launch: Launch, resume: bool, overwrite: bool) -> Lease:
    """The lease that rank 0 holds from before the attempt begins until its verdict is written.

    Raises:
        RunExistsError: the URL has another launch's run or something that is not a run, or another launch is recording
            into the run.
    """
    check_target(backend, resume=resume, overwrite=overwrite, launch_id=launch.launch_id)
    return Lease(backend, launch=launch)


def begin_attempt(
    backend: Backend,
    *,
    launch: Launch,
    options: Mapping[str, Any],
    environment: Mapping[str, Any],
    resume: bool,
    overwrite: bool,
    add: bool = False,
) -> Attempt:
    """Start and return a new attempt, called by its first rank. The run is created if it does not exist.

    A run of the same launch is always continued, so that a restart by torchrun resumes. Overwriting deletes the objects
    of the run and leaves others beside it. Objects that a late writer of a deleted run left are ignored. The caller
    holds the lease of `claim_run`, unless it adds to the run (`add`): the new records are then shown beside the
    existing ones and counted on their own, and only attempts of the same launch are continued.

    Raises:
        RunExistsError: the URL has another launch's run or something that is not a run.
        UsageError: the URL is too long for keys below it.
    """
    data = check_target(backend, resume=resume or add, overwrite=overwrite, launch_id=launch.launch_id)
    is_anothers = data is not None and run_attributes(data, place=backend.url).get("launch_id") != launch.launch_id
    if is_anothers and overwrite:
        delete_parts(backend)
        data = None
    if data is None:
        run = {"launch_id": launch.launch_id, "created": time.time(), "options": dict(options)}
        attributes = {SCHEMA_KEY: SCHEMA_VERSION, **run, "environment": dict(environment)}
        key = layout.document_key("")
        if not backend.create(key, encode_document(group_document(attributes), key=key)) and not add:
            raise RunExistsError(f"another launch made a run at {backend.url} just now: choose another URL")
    earlier = read_attempts(backend)
    for previous in earlier:
        # Commits that the coordinator could not write before it died.
        finish_ready(backend, previous)
    launch_start = (launch.launch_id, launch.first_rank)
    continued = [
        previous
        for previous in earlier
        if not add or (previous.launch.launch_id, previous.launch.first_rank) == launch_start
    ]
    completed = sorted({iteration for previous in continued for iteration in _planned_iterations(backend, previous)})
    # Ranks that record independently at the same time share a number.
    before = [
        previous.number for previous in earlier if not (add and previous.adds) or previous.launch.overlaps(launch)
    ]
    number = max(before, default=-1) + 1
    attempt = Attempt(
        number=number,
        path=layout.attempt_path(number, token=secrets.token_hex(4)),
        launch=launch,
        min_iterations=int(options["min_iterations"]),
        completed=tuple(completed),
        adds=add,
    )
    for group in layout.ATTEMPT_GROUPS:
        write_group(backend, f"{attempt.path}/{group}", {})
    write_group(backend, attempt.path, {**attempt.to_json(), "options": dict(options), "started": time.time()})
    return attempt


def _planned_iterations(backend: Backend, attempt: Attempt) -> set[int]:
    """The iterations that every rank of an attempt finished, without those requested while it ran."""
    plan = read_plan(backend, attempt=attempt)
    return set(whole_iterations(backend, attempt)) - (set() if plan is None else plan.requested_iterations)


def check_target(backend: Backend, *, resume: bool, overwrite: bool, launch_id: str | None = None) -> bytes | None:
    """Check, before anything is written, that a launch may record at a URL; the document of the run there, if any.

    Without `launch_id`, the launch is a new one. A run that has ended and in which nothing was stored may be replaced.

    Raises:
        RunExistsError: the URL has another launch's run or something that is not a run.
        UsageError: the URL is too long for keys below it.
    """
    _check_length(backend)
    data = read_run(backend)
    for name in backend.list_names("") if data is None else []:
        # Attempts without a document do not count.
        is_attempt = layout.parse_attempt(name) is not None
        if not layout.is_part_of_run(name) or (is_attempt and backend.exists(layout.document_key(name))):
            raise RunExistsError(f"{backend.url} is not empty and holds no run (there is {name!r}): choose another URL")
    is_anothers = data is not None and run_attributes(data, place=backend.url).get("launch_id") != launch_id
    if is_anothers and not (resume or overwrite or _has_ended_empty(backend)):
        raise RunExistsError(
            f"there is a run at {backend.url} already: add --resume to continue it, --overwrite to delete it, "
            f"or choose another URL"
        )
    return data


def _has_ended_empty(backend: Backend) -> bool:
    # A damaged run or one of another version is refused like any other.
    with contextlib.suppress(RanktapeError):
        judged = read_verdict(backend)
        return judged is not None and judged[0].final and not any(status.committed_ranks for status in judged[1])
    return False


def _check_length(backend: Backend) -> None:
    _, is_remote, place = backend.url.partition("://")
    prefix, limit = (
        (place.partition("/")[2], MAX_OBJECT_KEY_NBYTES) if is_remote else (backend.url, MAX_FILE_PATH_NBYTES)
    )
    excess = len(os.fsencode(prefix)) + 1 + layout.MAX_KEY_LENGTH - limit
    if excess > 0:
        raise UsageError(
            f"{backend.url[:80]!r}... is {excess} bytes too long for what lies below it, of which {limit} are allowed "
            f"in all: give a shorter URL"
        )


def join_attempt(backend: Backend, *, launch: Launch, timeout_seconds: float) -> Attempt:
    """The attempt that rank 0 started for this launch. Every other rank calls this and waits for it.

    Raises:
        CaptureError: it did not appear in time: rank 0 failed, or this rank uses another store.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        for attempt in reversed(read_attempts(backend)):
            if attempt.launch == launch:
                return attempt
        if time.monotonic() > deadline:
            raise CaptureError(
                f"this rank does not see in {backend.url} the run that rank 0 began {timeout_seconds:g} s ago: "
                f"give a URL that all nodes share"
            )
        # Random, so that a thousand ranks do not send their requests at the same time.
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311  # no secret
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def delete_parts(backend: Backend) -> None:
    """Delete the objects at the top of a run that belong to the layout, and no others. The caller holds the lease."""
    attempts = [name for name in backend.list_names("") if layout.parse_attempt(name) is not None]
    # Documents are deleted first: writers that are still running notice their absence and stop.
    for name in attempts:
        backend.delete(layout.document_key(name))
    for name in [*attempts, layout.ANALYSIS]:
        backend.delete(name)
    # The run's document is deleted last, so that an interrupted deletion leaves a run that can be overwritten.
    backend.delete(layout.document_key(""))


RENEW_SECONDS = 5.0
"""The interval at which a holder renews its lease, in seconds."""

EXPIRY_SECONDS = 20.0
"""The time after which an unchanged lease has expired, in seconds."""

ENDING_SECONDS = 45.0
"""The longest wait for a holder whose training has failed, in seconds."""

_REPLACED = (
    "this launch was replaced: another launch continues the run, as this one had not reached the store for more than "
    f"{EXPIRY_SECONDS:g} s"
)

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """The document of a lease."""

    launch_id: str = ""
    host: str = ""
    process: int | None = None
    renewed: float = 0.0
    is_ending: bool = False


class Lease:
    """The right to record into a run, held until `release` or the end of a `with` block."""

    def __init__(self, backend: RetryingBackend, *, launch: Launch) -> None:
        """Acquire the lease. The lease of an earlier start of the same launch is taken over at once.

        Raises:
            RunExistsError: another launch is recording into the run, or acquires the lease at the same time.
        """
        self._backend = backend
        self._launch_id = launch.launch_id
        self._is_ending = False
        self.lost: str | None = None
        """The reason why the launch must stop, if another one has taken over the run."""
        known = self._without_holders()
        self._number = max(known, default=-1) + 1
        key = layout.document_key(layout.lease_path(self._number))
        if not backend.create(key, encode_document(group_document(self._attributes()), key=key)):
            raise self._refusal(self._number)
        if rivals := _numbers(backend) - known - {self._number}:
            self._remove({self._number})
            raise self._refusal(max(rivals))
        self._remove(known)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ranktape-lease", daemon=True)
        self._thread.start()

    def announce_end(self) -> None:
        """Announce, once, that the training has failed, so that a successor may wait for the lease."""
        if not self._is_ending:
            self._is_ending = True
            with contextlib.suppress(StorageError):  # the next renewal announces it
                write_group(self._backend, layout.lease_path(self._number), self._attributes())

    def release(self) -> None:
        """Release the lease, so that another launch may record at once."""
        self._is_over.set()
        self._thread.join()
        self._remove({self._number})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _without_holders(self) -> set[int]:
        """The numbers of the existing leases, after those of other launches have been unchanged until they expired.

        If a holder's training has failed and it still stores records, this waits for it.
        """
        first: dict[int, _Holder | None] | None = None
        num_still = -1
        for num_polls in itertools.count():
            leases = {number: self._read(number) for number in _numbers(self._backend)}
            # A lease without a document is being written or deleted: a directory exists before its file.
            others = {number: holder for number, holder in leases.items() if not self._is_own(holder)}
            first = others if first is None else first
            changed = {number for number, holder in others.items() if holder != first.get(number)}
            is_ending = all((holder := others[number]) is not None and holder.is_ending for number in changed)
            if changed and not (is_ending and num_polls * _LOOK_SECONDS < ENDING_SECONDS):
                raise self._refusal(max(changed))
            first, num_still = (others, 0) if changed else (first, num_still + 1)
            # Polls are counted instead of seconds: if this machine stalls, so does a holder on it.
            if not others or num_still * _LOOK_SECONDS > EXPIRY_SECONDS:
                return set(leases)
            time.sleep(_LOOK_SECONDS)
        raise AssertionError("there is no last look")

    def look(self, attempt: Attempt) -> str | None:
        """Check whether another launch has taken over the run since this attempt began, and return `lost`.

        The other launch may have ended and released its lease.
        """
        # If the store does not answer, the writers report it.
        with contextlib.suppress(StorageError):
            later = (
                other for other in read_attempts(self._backend) if other.number > attempt.number and not other.adds
            )
            if any(other.launch.launch_id != self._launch_id for other in later):
                self.lost = _REPLACED
        return self.lost

    def _renew(self) -> None:
        backend = self._backend.with_deadline(timeout_seconds=RENEW_SECONDS)
        while not self._is_over.wait(RENEW_SECONDS):
            # If the store does not answer, the writers report it. The lease is renewed when the store answers again.
            with contextlib.suppress(StorageError):
                latest = max(_numbers(backend), default=self._number)
                if latest > self._number:
                    if not self._is_own(self._read(latest)):
                        self.lost = _REPLACED
                    return
                write_group(backend, layout.lease_path(self._number), self._attributes())

    def _attributes(self) -> dict[str, Any]:
        holder = {"launch_id": self._launch_id, "host": socket.gethostname(), "process": os.getpid()}
        return {**holder, "renewed": time.time(), "is_ending": self._is_ending}

    def _read(self, number: int) -> _Holder | None:
        return read_as(self._backend, layout.lease_path(number), _Holder)

    def _is_own(self, holder: _Holder | None) -> bool:
        return holder is not None and holder.launch_id == self._launch_id

    def _remove(self, numbers: set[int]) -> None:
        # A lease that cannot be deleted expires. An unreachable store must not block the writer.
        backend = self._backend.with_deadline(timeout_seconds=RENEW_SECONDS)
        with contextlib.suppress(StorageError):
            backend.delete_keys([layout.document_key(layout.lease_path(number)) for number in sorted(numbers)])

    def _refusal(self, number: int) -> RunExistsError:
        holder = self._read(number)
        description = "which has just ended"
        if holder is not None:
            process = "a process" if holder.process is None else f"process {holder.process}"
            description = f"{process} on {holder.host or 'an unknown host'}"
        return RunExistsError(
            f"another launch records into the run at {self._backend.url} ({description}): wait until it has ended, "
            f"end it, or choose another URL; once its processes are gone, the run is free after {EXPIRY_SECONDS:g} s"
        )


def _numbers(backend: RetryingBackend) -> set[int]:
    """The numbers of the existing leases."""
    numbers = (layout.parse_lease(name) for name in backend.list_names(""))
    return {number for number in numbers if number is not None}
