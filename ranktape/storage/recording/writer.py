"""Writes the records of one rank: its tensors, and the commit of each iteration.

Large tensors are written on arrival. Small ones of one dtype, shape and layout are held without a copy and written
in one array, because each alone would cost the store as much as a large one. An iteration is committed when its group's
document is written, after everything else and after a flush; a marker then tells the coordinator. A reader sees the
whole iteration of a rank or nothing of it.

If the store fails in an iteration, the rest of the iteration is written to a directory of the host (`SpillDirectory`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.errors import CaptureError, DataError, RunLostError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import EncodedArray, check_form, checksum, encode_array, encode_stack, write_blob
from ranktape.storage.format.attempt import Attempt, check_attempt, is_attempt_there, read_run, run_attributes
from ranktape.storage.format.catalogue import CatalogueEntry, encode_catalogue
from ranktape.storage.format.documents import (
    CHECKSUM_KEY,
    chunk_key,
    document_checksum,
    encode_document,
    group_document,
    write_group,
)
from ranktape.storage.format.dtypes import dtype_name
from ranktape.storage.format.layout import site_path
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import Compression, Keep, RecordInfo
from ranktape.storage.places.backend import Backend, Result
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import RetryingBackend

if TYPE_CHECKING:
    import numpy as np


STACK_BELOW_NBYTES = 2 << 20
"""The default size below which tensors are stacked, in bytes."""

MAX_STACK_NBYTES = 32 << 20
"""The size at which a stack is written, in bytes."""

MAX_STACK_RECORDS = 8192
"""The number of tensors at which a stack is written."""

MAX_WAITING_NBYTES = 64 << 20
"""The total size of a writer's stacks at which all of them are written, in bytes."""

STORE_CONCURRENCY = 8
"""The default number of stacks and large tensors that a rank sends concurrently."""


class WaitingTensor(NamedTuple):
    """A small tensor that waits to be written."""

    array: np.ndarray[Any, Any]
    """Its values."""
    info: RecordInfo
    """Its metadata, with the checksum."""
    site: str
    """Its path below the iteration."""
    release: Callable[[], None]
    """Called when the values are no longer needed."""


@dataclass(slots=True)
class Pending:
    """The state of an iteration that is not committed yet: written tensors, and small ones that wait."""

    claimed: set[str] = field(default_factory=set)
    """The paths of tensors that are written or being written."""
    entries: list[CatalogueEntry] = field(default_factory=list)
    """The written tensors."""
    waiting: dict[tuple[Any, ...], list[WaitingTensor]] = field(default_factory=dict)
    """The waiting tensors, by the properties that tensors of one array share."""
    waiting_nbytes: int = 0
    """Size of the values of waiting tensors, in bytes."""
    num_stacks: int = 0
    """Number of stacks that are written or being written."""
    num_busy: int = 0
    """Number of threads that are writing stacks."""
    failure: Exception | None = None
    """Why a stack could not be written."""
    spill_reason: str | None = None
    """Why the iteration is written to the spill directory; None if it is written to the store."""

    def add(self, item: WaitingTensor) -> list[WaitingTensor] | None:
        """Add a tensor to its stack; returns the stack if it is full and must be written."""
        info = item.info
        # Statistics of all tensors share a stack, because the document of an array is much larger than they are.
        is_alike = info.keep == Keep.STATISTICS
        form = (info.dtype, info.shape, info.layout, item.array.dtype, info.nbytes)
        key = (info.keep,) if is_alike else (info.keep, *form)
        stack = self.waiting.setdefault(key, [])
        stack.append(item)
        self.waiting_nbytes += item.array.nbytes
        if len(stack) < MAX_STACK_RECORDS and len(stack) * item.array.nbytes < MAX_STACK_NBYTES:
            return None
        return self._take(key)

    def take_all(self) -> list[list[WaitingTensor]]:
        """Remove and return all stacks."""
        return [self._take(key) for key in list(self.waiting)]

    def _take(self, key: tuple[Any, ...]) -> list[WaitingTensor]:
        stack = self.waiting.pop(key)
        self.waiting_nbytes -= len(stack) * stack[0].array.nbytes
        return stack


_CHECK_SECONDS = 1.0
"""The interval at which a writer checks that the run still exists, in seconds. It is longer with many ranks."""

_CHECKS_PER_SECOND = 200
"""The largest rate of these checks of all ranks together, because all of them read one object."""

_PROBE_SECONDS = 5.0


class SpillDirectory:
    """A directory of the host for iterations that cannot be written to the store.

    In a subdirectory with the attempt's name it has a run with the same keys as the run in the store: the documents of
    the run and the attempt, and the part of each spilled iteration that is not in the store. The subdirectory is
    created when it is needed. Safe for several threads and several ranks.
    """

    def __init__(self, store: RetryingBackend, *, directory: Path, attempt: Attempt) -> None:
        """Read the documents from the store that the run in the directory needs."""
        self.place = f"{socket.gethostname()}:{directory.absolute()}"
        """The host and the directory, for messages."""
        self.backend = LocalBackend(str(directory / attempt.path))
        """The run in the directory."""
        run = {**run_attributes(read_run(store), place=store.url), "spilled_from": store.url}
        run.pop(CHECKSUM_KEY, None)
        self._documents = {"": run, attempt.path: attempt.to_json()}
        self._attempt = attempt
        self._probing = store.with_deadline(timeout_seconds=_PROBE_SECONDS, give_up=lambda: True)  # one try
        self._lock = threading.Lock()
        self._is_store_down = False

    def announce(self) -> None:
        """Write the documents of the run; `ranktape push` may have removed them meanwhile."""
        for path, attributes in self._documents.items():
            write_group(self.backend, path, attributes)

    def reason(self, error: StorageError | None = None) -> str | None:
        """Why the directory is used: `error`, or why the store still does not answer; None if it answers."""
        with self._lock:
            if error is None and self._is_store_down:
                try:
                    is_attempt_there(self._probing, self._attempt)
                except StorageError as failure:
                    error = failure
            self._is_store_down = error is not None
            if error is not None:
                self.announce()
            return None if error is None else str(error)


class RankWriter:
    """Writes the records of one rank of an attempt. Safe for several threads of one process."""

    def __init__(
        self,
        backend: Backend,
        *,
        attempt: Attempt,
        rank: int,
        environment: Mapping[str, Any],
        trouble: str = "",
        compression: str = Compression.NONE.value,
        stack_below_nbytes: int = STACK_BELOW_NBYTES,
        store_concurrency: int = STORE_CONCURRENCY,
        spill: SpillDirectory | None = None,
    ) -> None:
        """Announce the rank in the store.

        Args:
            backend: The store of the run.
            attempt: The attempt of the rank.
            rank: Global rank.
            environment: Environment of the process, for the rank's document.
            trouble: The error that ended earlier writers of the rank, for the rank's document.
            compression: Compression of the values.
            stack_below_nbytes: Size below which tensors are stacked, in bytes.
            store_concurrency: Number of stacks that are sent concurrently.
            spill: The directory for iterations that cannot be written to the store; without it, they fail.
        """
        self._backend = backend
        self._spill = spill
        self._attempt = attempt
        self._next_check = 0.0
        self._rank = rank
        self._compression = Compression(compression)
        self._stack_below_nbytes = stack_below_nbytes
        self._open: dict[int, Pending] = {}
        self._settled: set[int] = set()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(store_concurrency, thread_name_prefix="ranktape-stack")
        attributes = {"rank": rank, "environment": dict(environment), "trouble": trouble}
        write_group(self._backend, layout.rank_path(attempt.path, rank), attributes)

    @property
    def waiting_nbytes(self) -> int:
        """Size of the small tensors that wait to be written, in bytes."""
        with self._changed:
            return sum(pending.waiting_nbytes for pending in self._open.values())

    def holds(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether `write` holds a tensor, to store it with others."""
        return 0 < array.nbytes < self._stack_below_nbytes

    def open(self, iteration: int) -> None:
        """Note in the store that an iteration has started."""
        with self._changed:
            pending = self._begun(iteration)
        self._put_through(pending, lambda backend: open_iteration(backend, attempt=self._attempt, iteration=iteration))

    def write(
        self, array: np.ndarray[Any, Any], *, info: RecordInfo, on_release: Callable[[], None] | None = None
    ) -> RecordInfo:
        """Store one tensor and return its metadata with the checksum. It becomes visible with the iteration's commit.

        A small tensor is held without a copy and stored with others later. `on_release` is called exactly once, when
        the array is no longer needed, whether it was stored or not.

        Raises:
            CaptureError: another tensor of the iteration has the same name, or the iteration has been committed. The
                tensor is not written.
            UsageError: the metadata cannot be written as JSON.
        """
        release = on_release or (lambda: None)
        pending, site = None, ""
        try:
            check_form(array, info=info)
            info = info.spelled()
            site = site_path(info)
            pending = self._take(site, info.iteration)
            is_held = self.holds(array)
            if is_held:
                stored = info.with_checksum(checksum(array))
            else:
                stored = self._write_alone(pending, array, info=info, site=site)
        except BaseException:
            if pending is not None:
                with self._changed:
                    # The tensor was not written; its histogram may be written under the same name.
                    pending.claimed.discard(site)
            release()
            raise
        if is_held:
            self._add_to_stack(pending, WaitingTensor(array=array, info=stored, site=site, release=release))
        else:
            release()
        return stored

    def adopt(self, iteration: int, *, name: str, entries: Sequence[CatalogueEntry]) -> None:
        """Add the entries of an array that an earlier writer of the rank has stored in the iteration.

        Raises:
            CaptureError: another tensor of the iteration has the name of one of them.
        """
        with self._changed:
            pending = self._begun(iteration)
            if twice := pending.claimed & {entry.site for entry in entries}:
                raise CaptureError(
                    f"two tensors of iteration {iteration} on rank {self._rank} have the name {min(twice)}"
                )
            pending.claimed |= {entry.site for entry in entries}
            pending.entries += entries
            if any(entry.stack for entry in entries):
                # New stacks get numbers that are not in use.
                pending.num_stacks = max(pending.num_stacks, int(name.rpartition("_")[2]) + 1)

    def flush_stacks(self, iteration: int | None = None) -> None:
        """Write all small tensors that wait, or those of one iteration.

        An error is raised by the commit of the iteration.
        """
        with self._changed:
            chosen = [pending for number, pending in self._open.items() if iteration in {None, number}]
            work = [(pending, stack) for pending in chosen for stack in pending.take_all()]
            for pending, _ in work:
                pending.num_busy += 1
        # Concurrently, because each waits for the store; with the caller's deadline.
        wait([self._pool.submit(copy_context().run, self._write_stack, pending, stack) for pending, stack in work])

    def commit(
        self,
        iteration: int,
        *,
        expected: list[str],
        silent_sites: Mapping[str, str],
        num_expected: int | None = None,
        num_missing: int | None = None,
        compiled: str = "",
        step_skipped: bool = False,
        cut_off: str = "",
    ) -> str | None:
        """Make all records of the iteration durable and visible. Atomic: readers see all of them or none.

        Returns the reason why the iteration is in the spill directory; None if it is in the store.

        Args:
            iteration: The training step.
            expected: The names of the expected tensors, by module.
            silent_sites: The expected tensors that were not recorded, by module, each with the reason.
            num_expected: Number of expected tensors, whatever the number of passes and calls; None if the recorder
                does not count.
            num_missing: Number of expected tensors that were not recorded.
            compiled: How compiled code was recorded; empty if none ran.
            step_skipped: Whether a gradient scaler skipped the optimizer's step.
            cut_off: Why the rank did not finish the iteration, which is then partial; empty if it did.

        Raises:
            CaptureError: the iteration has been committed or abandoned.
        """
        with self._changed:
            pending = self._begun(iteration)
        self.flush_stacks(iteration)
        with self._changed:
            self._changed.wait_for(lambda: not pending.num_busy)
        if pending.failure is not None:
            raise pending.failure
        if expected and not pending.entries:
            raise DataError(f"nothing was recorded of {len(expected)} expected tensors")
        summary: dict[str, Any] = {"expected": expected, "silent_sites": dict(silent_sites)}
        if num_expected is not None and num_missing is not None:
            summary |= {"num_expected": num_expected, "num_missing": num_missing}
        optional = {"compiled": compiled, "step_skipped": step_skipped, "cut_off": cut_off}
        summary |= {name: value for name, value in optional.items() if value}
        self._put_through(pending, lambda backend: self._commit(backend, iteration, pending, summary))
        with self._changed:
            self._settle(iteration)
        return pending.spill_reason

    def _commit(self, backend: Backend, iteration: int, pending: Pending, summary: Mapping[str, Any]) -> None:
        check_attempt(backend, self._attempt)
        attributes = {
            "complete": True,
            "iteration": iteration,
            "rank": self._rank,
            **self._write_catalogue(backend, iteration, pending),
            **summary,
            "committed": time.time(),
        }
        key = layout.document_key(layout.rank_iteration_path(self._attempt.path, self._rank, iteration))
        document = encode_document(group_document(attributes), key=key)
        backend.flush()
        if self._spill is not None and pending.spill_reason is not None:
            self._spill.announce()
        backend.put(key, [document])
        backend.flush()
        self._mark(backend, iteration, mark=layout.Mark.COMMITTED, attributes={"commit": document_checksum(document)})

    def _write_catalogue(self, backend: Backend, iteration: int, pending: Pending) -> dict[str, Any]:
        """Write the catalogue; returns the number of records, their size in bytes, and the catalogue's checksum."""
        entries = sorted(pending.entries, key=lambda entry: (entry.info.counter, entry.site))
        number = {"num_records": len(entries)}
        path = layout.catalogue_path(self._attempt.path, self._rank, iteration)
        data = encode_catalogue(entries)
        write_blob(backend, path, data, attributes=number)
        nbytes = sum(entry.info.nbytes for entry in entries)
        return {**number, "nbytes": nbytes, "catalogue": checksum(data)}

    def abandon(self, iteration: int) -> None:
        """Release the tensors of an iteration that will not be committed, and delete what was spilled of it."""
        with self._changed:
            pending = self._settle(iteration)
            work = pending.take_all()
        for stack in work:
            for item in stack:
                item.release()
        if self._spill is not None and pending.spill_reason is not None:
            self._spill.backend.delete(layout.rank_iteration_path(self._attempt.path, self._rank, iteration))

    def mark(self, iteration: int, *, mark: layout.Mark, attributes: Mapping[str, Any]) -> None:
        """Write the rank's marker of an iteration, which the coordinator reads."""
        self._mark(self._backend, iteration, mark=mark, attributes=attributes)

    def _mark(self, backend: Backend, iteration: int, *, mark: layout.Mark, attributes: Mapping[str, Any]) -> None:
        check_attempt(backend, self._attempt)
        write_group(backend, layout.marker_path(self._attempt.path, iteration, self._rank, mark), attributes)

    def close(self, *, reason: str) -> None:
        """Note in the store that the rank will commit nothing more, and why."""
        attributes = {"reason": reason, "closed": time.time()}

        def close(backend: Backend) -> None:
            check_attempt(backend, self._attempt)
            write_group(backend, layout.closed_path(self._attempt.path, self._rank), attributes)

        self._put_through(Pending(), close)

    def _put_through(self, pending: Pending, work: Callable[[Backend], Result]) -> Result:
        """The result of `work` on the store or, if the store fails, on the spill directory.

        After a failure, the rest of the iteration goes to the spill directory. `work` may run twice, the first time
        only in part.
        """
        if self._spill is None:
            return work(self._backend)
        if pending.spill_reason is None:
            pending.spill_reason = self._spill.reason()
        if pending.spill_reason is None:
            try:
                return work(self._backend)
            except RunLostError:
                raise
            except StorageError as error:
                pending.spill_reason = self._spill.reason(error)
        return work(self._spill.backend)

    def _begun(self, iteration: int) -> Pending:
        """The state of an iteration. The caller must hold the lock."""
        if iteration in self._settled:
            raise CaptureError(
                f"iteration {iteration} was committed or given up by rank {self._rank} already: record a later one"
            )
        return self._open.setdefault(iteration, Pending())

    def _settle(self, iteration: int) -> Pending:
        """Refuse further tensors of an iteration, and return its state. The caller holds the lock."""
        self._settled.add(iteration)
        return self._open.pop(iteration, Pending())

    def _take(self, site: str, iteration: int) -> Pending:
        with self._changed:
            pending = self._begun(iteration)
            if site in pending.claimed:
                raise CaptureError(
                    f"two tensors of iteration {iteration} on rank {self._rank} have the name {site}: "
                    f"give one of them another module or tensor_name"
                )
            pending.claimed.add(site)
            return pending

    def _check_now_and_then(self, backend: Backend) -> None:
        """Check from time to time that the run still exists, so that a late writer does not write to a deleted run."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + max(_CHECK_SECONDS, self._attempt.launch.world_size / _CHECKS_PER_SECOND)
        try:
            check_attempt(backend, self._attempt)
        except StorageError:
            self._next_check = 0.0
            raise

    def _add_to_stack(self, pending: Pending, item: WaitingTensor) -> None:
        with self._changed:
            full_stack = pending.add(item)
            if full_stack is not None:
                pending.num_busy += 1
            is_much = sum(open_pending.waiting_nbytes for open_pending in self._open.values()) > MAX_WAITING_NBYTES
        if full_stack is not None:
            self._write_stack(pending, full_stack)
        if is_much:
            self.flush_stacks()

    def _write_stack(self, pending: Pending, stack: list[WaitingTensor]) -> None:
        try:
            self._store_stack(pending, stack)
        except Exception as error:  # noqa: BLE001  # it is the iteration's, and raised by its commit
            with self._changed:
                pending.failure = pending.failure or error
        finally:
            with self._changed:
                pending.num_busy -= 1
                self._changed.notify_all()
            for item in stack:
                try:
                    item.release()
                except Exception as error:  # noqa: BLE001  # the others must be given back all the same
                    with self._changed:
                        pending.failure = pending.failure or error

    def _store_stack(self, pending: Pending, stack: list[WaitingTensor]) -> None:
        info = stack[0].info
        with self._changed:
            number = pending.num_stacks
            pending.num_stacks += 1
        array, letters = stack[0].array, "" if info.keep == Keep.STATISTICS else info.layout
        name = layout.stack_name(number, dtype=dtype_name(array.dtype), shape=array.shape, layout=letters)
        if len(stack) == 1 or name is None:
            for item in stack:
                self._write_alone(pending, item.array, info=item.info, site=item.site)
            return
        encoded = encode_stack(
            [item.array for item in stack], infos=[item.info for item in stack], compression=self._compression
        )
        self._put_through(pending, lambda backend: self._put_array(backend, info.iteration, name, encoded))
        entries = [
            CatalogueEntry(site=item.site, stack=name, index=index, info=item.info) for index, item in enumerate(stack)
        ]
        with self._changed:
            pending.entries += entries

    def _write_alone(self, pending: Pending, array: np.ndarray[Any, Any], *, info: RecordInfo, site: str) -> RecordInfo:
        """Write a tensor as its own array, and return its metadata with the checksum."""
        encoded = encode_array(array, info=info, compression=self._compression)
        group = layout.rank_iteration_path(self._attempt.path, self._rank, info.iteration)

        def put(backend: Backend) -> None:
            self._put_array(backend, info.iteration, site, encoded)
            for parent in layout.parents_of(site):
                write_group(backend, f"{group}/{parent}", {})

        self._put_through(pending, put)
        stored = info.with_checksum(encoded.document["attributes"]["checksum"])
        with self._changed:
            pending.entries.append(CatalogueEntry(site=site, stack="", index=-1, info=stored))
        return stored

    def _put_array(self, backend: Backend, iteration: int, name: str, encoded: EncodedArray) -> None:
        self._check_now_and_then(backend)
        folder = f"{layout.rank_iteration_path(self._attempt.path, self._rank, iteration)}/{name}"
        if encoded.parts is not None:
            backend.put(f"{folder}/{chunk_key(len(encoded.document['shape']))}", encoded.parts)
        key = layout.document_key(folder)
        backend.put(key, [encode_document(encoded.document, key=key)])
