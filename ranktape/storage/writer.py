"""How does one rank store what it captured, and say that an iteration is whole?

Tensors are written as they come. An iteration exists when its group's document, with the documents of all
its tensors, has been written after everything else and after a flush; a marker then tells the coordinator.
A reader sees the whole iteration of a rank, or nothing of it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.errors import CaptureError, DataError, StorageError
from ranktape.storage import layout
from ranktape.storage.attempt import check_attempt
from ranktape.storage.documents import chunk_key, encode_document, group_document
from ranktape.storage.encode import checksum, encode_array
from ranktape.storage.names import Site, site_path

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.attempt import Attempt
    from ranktape.storage.backend import Backend
    from ranktape.storage.record import RecordInfo

_CHECK_SECONDS = 1.0
"""While tensors are written, it is looked this often whether the run is still there."""

_SITE_FIELDS = tuple(site_field.name for site_field in dataclasses.fields(Site))


@dataclass(slots=True)
class _Open:
    """What was written of an iteration that is not committed yet."""

    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The documents of its arrays and groups, by their paths below the iteration."""
    taken: set[str] = field(default_factory=set)
    """The paths of tensors, from before they are written."""
    num_records: int = 0
    """Tensors written."""
    nbytes: int = 0
    """Bytes of their values."""


class RankWriter:
    """The writing end of one rank of an attempt; safe for several threads, for one process."""

    def __init__(self, backend: Backend, *, attempt: Attempt, rank: int, environment: Mapping[str, Any]) -> None:
        """Announce the rank in the store.

        Raises:
            StorageError: the store cannot be written.
        """
        self._backend = backend
        self._attempt = attempt
        self._next_check = 0.0
        self._rank = rank
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._put_group(layout.rank_path(attempt.path, rank), {"rank": rank, "environment": dict(environment)})

    def write(self, array: np.ndarray[Any, Any], *, info: RecordInfo) -> RecordInfo:
        """Store one tensor and return its identity with the checksum; it counts once its iteration is committed.

        Raises:
            CaptureError: another tensor of the iteration has the same name; nothing of this one is written.
            StorageError: the run was deleted or replaced, or cannot be written.
            UsageError: the site's name is too long.
        """
        path = site_path(Site(**{name: getattr(info, name) for name in _SITE_FIELDS}))
        self._take(path, info.iteration)
        self._check_now_and_then()
        stored = dataclasses.replace(info, checksum=checksum(array))
        encoded = encode_array(array, info=stored)
        folder = f"{layout.rank_iteration_path(self._attempt.path, self._rank, info.iteration)}/{path}"
        if encoded.parts is not None:
            self._backend.put(f"{folder}/{chunk_key(array.ndim)}", encoded.parts)
        self._backend.put(layout.document_key(folder), [encode_document(encoded.document)])
        parents = path.split("/")[:-1]
        with self._lock:
            pending = self._open.setdefault(info.iteration, _Open())
            new_parents = self._add_parents(pending, parents)
            pending.members[path] = encoded.document
            pending.num_records += 1
            pending.nbytes += stored.nbytes
        for parent in new_parents:
            self._put_group(
                f"{layout.rank_iteration_path(self._attempt.path, self._rank, info.iteration)}/{parent}", {}
            )
        return stored

    def commit(self, iteration: int, *, expected: list[str], silent_sites: Mapping[str, str]) -> None:
        """Make everything written of the iteration durable and visible. Atomic.

        Args:
            iteration: The training step.
            expected: The names of the tensors that should have been recorded.
            silent_sites: Those of them that were not, each with the reason.

        Raises:
            DataError: tensors were expected and not one was recorded; the iteration is not committed then.
            StorageError: the run was deleted or replaced, or cannot be written; not committed either.
        """
        with self._lock:
            pending = self._open.pop(iteration, _Open())
        if expected and not pending.num_records:
            raise DataError(f"nothing was recorded of {len(expected)} expected tensors")
        check_attempt(self._backend, self._attempt)
        attributes = {
            "complete": True,
            "iteration": iteration,
            "rank": self._rank,
            "num_records": pending.num_records,
            "nbytes": pending.nbytes,
            "expected": expected,
            "silent_sites": dict(silent_sites),
            "committed": time.time(),
        }
        members = dict(sorted(pending.members.items()))
        document = group_document(attributes, members=members)
        path = layout.rank_iteration_path(self._attempt.path, self._rank, iteration)
        self._backend.flush()
        self._backend.put(layout.document_key(path), [encode_document(document)])
        self._backend.flush()
        summary = {name: attributes[name] for name in ("num_records", "nbytes")}
        self.mark(iteration, mark=layout.Mark.COMMITTED, attributes=summary)

    def mark(self, iteration: int, *, mark: layout.Mark, attributes: Mapping[str, Any]) -> None:
        """Leave the rank's word on an iteration where the coordinator looks.

        Raises:
            StorageError: the run was deleted or replaced, or cannot be written.
        """
        check_attempt(self._backend, self._attempt)
        self._put_group(layout.marker_path(self._attempt.path, iteration, self._rank, mark), attributes)

    def close(self, *, reason: str) -> None:
        """Say that the rank will commit nothing more, and why.

        Raises:
            StorageError: the run was deleted or replaced, or cannot be written.
        """
        check_attempt(self._backend, self._attempt)
        self._put_group(layout.closed_path(self._attempt.path, self._rank), {"reason": reason, "closed": time.time()})

    def _take(self, path: str, iteration: int) -> None:
        with self._lock:
            taken = self._open.setdefault(iteration, _Open()).taken
            if path in taken:
                raise CaptureError(
                    f"two tensors of iteration {iteration} on rank {self._rank} have the name {path}: "
                    f"give one of them another module or tensor_name"
                )
            taken.add(path)

    def _check_now_and_then(self) -> None:
        """So that a late writer does not fill the place of a run that is gone, at the cost of few requests."""
        with self._lock:
            if time.monotonic() < self._next_check:
                return
            self._next_check = time.monotonic() + _CHECK_SECONDS
        try:
            check_attempt(self._backend, self._attempt)
        except StorageError:
            self._next_check = 0.0
            raise

    def _add_parents(self, pending: _Open, parents: list[str]) -> list[str]:
        paths = ["/".join(parents[: depth + 1]) for depth in range(len(parents))]
        new = [path for path in paths if path not in pending.members]
        pending.members.update({path: group_document({}) for path in new})
        return new

    def _put_group(self, path: str, attributes: Mapping[str, Any]) -> None:
        self._backend.put(layout.document_key(path), [encode_document(group_document(attributes))])
