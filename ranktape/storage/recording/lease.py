"""Gives one launch the right to record into a run, so that no two record into it at once.

A lease is the document of an empty group at the top of the run, which its holder writes anew every few seconds. Whoever
wants the run looks at the leases of others for a while: one that changes has a holder that lives; one that does not is
passed over. The new lease has the next number and is created only if it is not there, so that one of several who want
the run gets it. No clocks are compared, and of the store no more is asked than commits ask of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from ranktape.errors import RunExistsError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.documents import encode_document, group_document, read_attributes, write_group

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Launch
    from ranktape.storage.places.retry import RetryingBackend

RENEW_SECONDS = 5.0
"""How often a holder writes its lease anew."""

EXPIRY_SECONDS = 20.0
"""A lease that has not changed for so long has no holder any more."""

_LOOK_SECONDS = 0.5


class Lease:
    """A lease on a run, held until `release` or the end of a `with` block."""

    def __init__(self, backend: RetryingBackend, *, launch: Launch) -> None:
        """Get the lease. That of an earlier start of the same launch is taken over at once.

        Raises:
            DataError: the lease of another launch is damaged.
            RunExistsError: another launch records into the run, or gets the lease at the same time.
        """
        self._backend = backend
        self._launch_id = launch.launch_id
        self.lost: str | None = None
        """Why the launch must not go on: another one has taken over the run."""
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

    def release(self) -> None:
        """Give it back: another launch may have the run at once."""
        self._is_over.set()
        self._thread.join()
        self._remove({self._number})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _without_holders(self) -> set[int]:
        """The leases that are there, once those of other launches have been seen not to change."""
        until = time.monotonic() + EXPIRY_SECONDS
        first: dict[int, dict[str, Any]] | None = None
        while True:
            leases = {number: self._read(number) for number in _numbers(self._backend)}
            # One without a document is being written, or half of it was removed: a directory comes before its file.
            others = {number: said for number, said in leases.items() if said.get("launch_id") != self._launch_id}
            first = others if first is None else first
            if changed := {number for number, said in others.items() if said != first.get(number)}:
                raise self._refusal(max(changed))
            if not others or time.monotonic() > until:
                return set(leases)
            time.sleep(_LOOK_SECONDS)

    def _renew(self) -> None:
        backend = self._backend.with_deadline(timeout_seconds=RENEW_SECONDS)
        while not self._is_over.wait(RENEW_SECONDS):
            # Where the store does not answer, the writers say so; the lease is written when it answers again.
            with contextlib.suppress(StorageError):
                latest = max(_numbers(backend), default=self._number)
                if latest > self._number:
                    if self._read(latest).get("launch_id") != self._launch_id:
                        self.lost = (
                            "another launch continues the run, as this one had not reached the store for more than "
                            f"{EXPIRY_SECONDS:g} s"
                        )
                    return
                write_group(backend, layout.lease_path(self._number), self._attributes())

    def _attributes(self) -> dict[str, Any]:
        about = {"launch_id": self._launch_id, "host": socket.gethostname(), "process": os.getpid()}
        return {**about, "renewed": time.time()}

    def _read(self, number: int) -> dict[str, Any]:
        return read_attributes(self._backend, layout.lease_path(number)) or {}

    def _remove(self, numbers: set[int]) -> None:
        # One that stays is nobody's, and passed over: a store that is away must not keep the writer.
        backend = self._backend.with_deadline(timeout_seconds=RENEW_SECONDS)
        with contextlib.suppress(StorageError):
            backend.delete_keys([layout.document_key(layout.lease_path(number)) for number in sorted(numbers)])

    def _refusal(self, number: int) -> RunExistsError:
        said = self._read(number)
        holder = f"process {said['process']} on {said['host']}" if said else "which has just ended"
        return RunExistsError(
            f"another launch records into the run at {self._backend.url} ({holder}): wait until it has ended, end it, "
            f"or choose another URL; once its processes are gone, the run is free after {EXPIRY_SECONDS:g} s"
        )


def _numbers(backend: RetryingBackend) -> set[int]:
    """Of the leases that are there."""
    found = (layout.parse_lease(name) for name in backend.list_names(""))
    return {number for number in found if number is not None}
