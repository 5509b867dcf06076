"""Writes what one rank records: its tensors, and the commit that says that an iteration is whole.

Large tensors are written as they come. Small ones of one dtype, shape and layout wait, uncopied, and share an array:
alone each would cost the store as much as a large one. An iteration exists when its group's document has been
written after everything else and after a flush; a marker then tells the coordinator. A reader sees the whole
iteration of a rank, or nothing of it.

What the store does not take of an iteration goes into a directory of the host (`SpillDirectory`), with all that follows
of that iteration.
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
from ranktape.storage.format.arrays import (
    EncodedArray,
    check_form,
    checksum,
    encode_array,
    encode_stack,
    write_blob,
)
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
"""Tensors smaller than this are stacked, where nobody says otherwise."""

MAX_STACK_NBYTES = 32 << 20
"""A stack is written once it is that large."""

MAX_STACK_RECORDS = 8192
"""And once it has that many tensors."""

MAX_HELD_NBYTES = 64 << 20
"""All stacks of a writer are written once they are that large together."""

STORE_CONCURRENCY = 8
"""Stacks, and tensors with an object of their own, that a rank sends at the same time, where nobody says otherwise."""


class HeldTensor(NamedTuple):
    """A small tensor that waits."""

    array: np.ndarray[Any, Any]
    """Its values."""
    info: RecordInfo
    """Its identity, with its checksum."""
    site: str
    """Its path below the iteration."""
    release: Callable[[], None]
    """To be called when the values are not needed any more."""


@dataclass(slots=True)
class Pending:
    """What was written of an iteration that is not committed yet, and the small tensors of it that wait."""

    taken: set[str] = field(default_factory=set)
    """The paths of tensors, from before they are written."""
    entries: list[CatalogueEntry] = field(default_factory=list)
    """The tensors that are written."""
    held: dict[tuple[Any, ...], list[HeldTensor]] = field(default_factory=dict)
    """The tensors that wait, by what those of one array must have in common."""
    held_nbytes: int = 0
    """Bytes of their values."""
    num_stacks: int = 0
    """Stacks that were begun to be written."""
    num_busy: int = 0
    """Threads that are writing stacks."""
    failure: Exception | None = None
    """Why a stack could not be written."""
    why_spilled: str | None = None
    """Why the spill directory takes what is written of it; None where the store does."""

    def hold(self, item: HeldTensor) -> list[HeldTensor] | None:
        """Keep a tensor; its stack, when it is full and to be written."""
        info = item.info
        # The statistics of all tensors are alike, and far smaller than the documents of arrays of their own.
        is_alike = info.keep == Keep.STATISTICS
        form = (info.dtype, info.shape, info.layout, item.array.dtype, info.nbytes)
        key = (info.keep,) if is_alike else (info.keep, *form)
        stack = self.held.setdefault(key, [])
        stack.append(item)
        self.held_nbytes += item.array.nbytes
        if len(stack) < MAX_STACK_RECORDS and len(stack) * item.array.nbytes < MAX_STACK_NBYTES:
            return None
        return self._take(key)

    def take_all(self) -> list[list[HeldTensor]]:
        """All stacks, to be written."""
        return [self._take(key) for key in list(self.held)]

    def _take(self, key: tuple[Any, ...]) -> list[HeldTensor]:
        stack = self.held.pop(key)
        self.held_nbytes -= len(stack) * stack[0].array.nbytes
        return stack


_CHECK_SECONDS = 1.0
"""While tensors are written, it is looked this often whether the run is still there; less often by many ranks."""

_CHECKS_PER_SECOND = 200
"""By all ranks together: all of them look at one object."""

_PROBE_SECONDS = 5.0


class SpillDirectory:
    """A directory of the host for the iterations that the store does not take.

    Below it, in a folder with the attempt's name, is a run with the keys of the one in the store: the documents of the
    run and of the attempt, and of each spilled iteration all that the store has not taken. The folder is made when it
    is needed. Safe for several threads, and for several ranks.
    """

    def __init__(self, store: RetryingBackend, *, directory: Path, attempt: Attempt) -> None:
        """Read from the store what the run in the directory needs."""
        self.place = f"{socket.gethostname()}:{directory.absolute()}"
        """The host and the directory, for people."""
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
        """Why the directory is used: `error`, or why the store still does not answer; None where it does."""
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
    """The writing end of one rank of an attempt; safe for several threads, for one process."""

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
            backend: Where the run is.
            attempt: The attempt that the rank belongs to.
            rank: Global rank.
            environment: Of the process, for the rank's document.
            trouble: What befell those that wrote for the rank before; for the document, too.
            compression: How values are packed.
            stack_below_nbytes: Tensors smaller than this are kept, and written together.
            store_concurrency: How many stacks are sent at the same time.
            spill: Where iterations go that the store does not take; without it they fail.
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
    def held_nbytes(self) -> int:
        """Bytes of small tensors that are kept and not being written."""
        with self._changed:
            return sum(pending.held_nbytes for pending in self._open.values())

    def holds(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether a tensor is kept when it is written, to be stored with others."""
        return 0 < array.nbytes < self._stack_below_nbytes

    def open(self, iteration: int) -> None:
        """Say in the store that an iteration was begun."""
        with self._changed:
            pending = self._begun(iteration)
        self._put_through(pending, lambda backend: open_iteration(backend, attempt=self._attempt, iteration=iteration))

    def write(
        self, array: np.ndarray[Any, Any], *, info: RecordInfo, on_release: Callable[[], None] | None = None
    ) -> RecordInfo:
        """Store one tensor and return its identity with the checksum; it counts once its iteration is committed.

        A small tensor is kept, not copied, and stored with others later: `on_release` is called, exactly once,
        when the array is not needed any more, whether it was stored or not.

        Raises:
            CaptureError: another tensor of the iteration has the same name, or the iteration was committed already;
                nothing of this one is written.
            UsageError: its metadata have no form in JSON.
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
                    # Nothing of it counts: its histogram may be written in its place.
                    pending.taken.discard(site)
            release()
            raise
        if is_held:
            self._hold(pending, HeldTensor(array=array, info=stored, site=site, release=release))
        else:
            release()
        return stored

    def adopt(self, iteration: int, *, name: str, entries: Sequence[CatalogueEntry]) -> None:
        """Take what lies below the iteration already, under a name, for something that was written now.

        Raises:
            CaptureError: another tensor of the iteration has the name of one of its tensors.
        """
        with self._changed:
            pending = self._begun(iteration)
            if twice := pending.taken & {entry.site for entry in entries}:
                raise CaptureError(
                    f"two tensors of iteration {iteration} on rank {self._rank} have the name {min(twice)}"
                )
            pending.taken |= {entry.site for entry in entries}
            pending.entries += entries
            if any(entry.stack for entry in entries):
                # The stacks that come are named by numbers that none has yet.
                pending.num_stacks = max(pending.num_stacks, int(name.rpartition("_")[2]) + 1)

    def flush_stacks(self, iteration: int | None = None) -> None:
        """Write every small tensor that is kept, or those of one iteration.

        One that fails is reported by the commit of its iteration.
        """
        with self._changed:
            chosen = [pending for number, pending in self._open.items() if iteration in {None, number}]
            work = [(pending, held) for pending in chosen for held in pending.take_all()]
            for pending, _ in work:
                pending.num_busy += 1
        # Side by side: each of them waits for the store, and by the caller's deadline.
        wait([self._pool.submit(copy_context().run, self._write_stack, pending, held) for pending, held in work])

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
        """Make everything written of the iteration durable and visible. Atomic.

        Returns why the iteration is in the spill directory; None where it is in the store.

        Args:
            iteration: The training step.
            expected: The names of the tensors that should have been recorded, by module.
            silent_sites: Those of them that were not, by module, each with the reason.
            num_expected: How many tensors of modules should have been, whatever the number of passes and calls; None
                where nobody counted.
            num_missing: How many of them were not recorded at all.
            compiled: How compiled code was recorded; empty where none ran.
            step_skipped: Whether a gradient scaler skipped the step of the optimizer.
            cut_off: Why the rank did not end the iteration, which is partial then; empty where it did.

        Raises:
            CaptureError: it was committed or given up already.
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
        words: dict[str, Any] = {"expected": expected, "silent_sites": dict(silent_sites)}
        if num_expected is not None and num_missing is not None:
            words |= {"num_expected": num_expected, "num_missing": num_missing}
        others = {"compiled": compiled, "step_skipped": step_skipped, "cut_off": cut_off}
        words |= {name: value for name, value in others.items() if value}
        self._put_through(pending, lambda backend: self._commit(backend, iteration, pending, words))
        with self._changed:
            self._settle(iteration)
        return pending.why_spilled

    def _commit(self, backend: Backend, iteration: int, pending: Pending, words: Mapping[str, Any]) -> None:
        check_attempt(backend, self._attempt)
        attributes = {
            "complete": True,
            "iteration": iteration,
            "rank": self._rank,
            **self._write_catalogue(backend, iteration, pending),
            **words,
            "committed": time.time(),
        }
        key = layout.document_key(layout.rank_iteration_path(self._attempt.path, self._rank, iteration))
        document = encode_document(group_document(attributes), key=key)
        backend.flush()
        if self._spill is not None and pending.why_spilled is not None:
            self._spill.announce()
        backend.put(key, [document])
        backend.flush()
        self._mark(backend, iteration, mark=layout.Mark.COMMITTED, attributes={"commit": document_checksum(document)})

    def _write_catalogue(self, backend: Backend, iteration: int, pending: Pending) -> dict[str, Any]:
        """Write what was recorded as columns; how many records those are, their bytes, and the catalogue's checksum."""
        entries = sorted(pending.entries, key=lambda entry: (entry.info.counter, entry.site))
        number = {"num_records": len(entries)}
        path = layout.catalogue_path(self._attempt.path, self._rank, iteration)
        data = encode_catalogue(entries)
        write_blob(backend, path, data, attributes=number)
        nbytes = sum(entry.info.nbytes for entry in entries)
        return {**number, "nbytes": nbytes, "catalogue": checksum(data)}

    def abandon(self, iteration: int) -> None:
        """Give back what is kept of an iteration that will not be committed, and what the spill directory has of it."""
        with self._changed:
            pending = self._settle(iteration)
            work = pending.take_all()
        for held in work:
            for item in held:
                item.release()
        if self._spill is not None and pending.why_spilled is not None:
            self._spill.backend.delete(layout.rank_iteration_path(self._attempt.path, self._rank, iteration))

    def mark(self, iteration: int, *, mark: layout.Mark, attributes: Mapping[str, Any]) -> None:
        """Leave a marker of the rank on an iteration where the coordinator looks."""
        self._mark(self._backend, iteration, mark=mark, attributes=attributes)

    def _mark(self, backend: Backend, iteration: int, *, mark: layout.Mark, attributes: Mapping[str, Any]) -> None:
        check_attempt(backend, self._attempt)
        write_group(backend, layout.marker_path(self._attempt.path, iteration, self._rank, mark), attributes)

    def close(self, *, reason: str) -> None:
        """Say that the rank will commit nothing more, and why."""
        words = {"reason": reason, "closed": time.time()}

        def close(backend: Backend) -> None:
            check_attempt(backend, self._attempt)
            write_group(backend, layout.closed_path(self._attempt.path, self._rank), words)

        self._put_through(Pending(), close)

    def _put_through(self, pending: Pending, work: Callable[[Backend], Result]) -> Result:
        """What `work` makes of the store, or else of the spill directory, where all that follows of it goes as well.

        `work` may be done twice, and in part.
        """
        if self._spill is None:
            return work(self._backend)
        if pending.why_spilled is None:
            pending.why_spilled = self._spill.reason()
        if pending.why_spilled is None:
            try:
                return work(self._backend)
            except RunLostError:
                raise
            except StorageError as error:
                pending.why_spilled = self._spill.reason(error)
        return work(self._spill.backend)

    def _begun(self, iteration: int) -> Pending:
        """What there is of an iteration; with the lock held."""
        if iteration in self._settled:
            raise CaptureError(
                f"iteration {iteration} was committed or given up by rank {self._rank} already: record a later one"
            )
        return self._open.setdefault(iteration, Pending())

    def _settle(self, iteration: int) -> Pending:
        """Nothing more is taken of an iteration; with the lock held."""
        self._settled.add(iteration)
        return self._open.pop(iteration, Pending())

    def _take(self, site: str, iteration: int) -> Pending:
        with self._changed:
            pending = self._begun(iteration)
            if site in pending.taken:
                raise CaptureError(
                    f"two tensors of iteration {iteration} on rank {self._rank} have the name {site}: "
                    f"give one of them another module or tensor_name"
                )
            pending.taken.add(site)
            return pending

    def _check_now_and_then(self, backend: Backend) -> None:
        """So that a late writer does not fill the place of a run that is gone, at the cost of few requests."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + max(_CHECK_SECONDS, self._attempt.launch.world_size / _CHECKS_PER_SECOND)
        try:
            check_attempt(backend, self._attempt)
        except StorageError:
            self._next_check = 0.0
            raise

    def _hold(self, pending: Pending, item: HeldTensor) -> None:
        with self._changed:
            full = pending.hold(item)
            if full is not None:
                pending.num_busy += 1
            is_much = sum(one.held_nbytes for one in self._open.values()) > MAX_HELD_NBYTES
        if full is not None:
            self._write_stack(pending, full)
        if is_much:
            self.flush_stacks()

    def _write_stack(self, pending: Pending, held: list[HeldTensor]) -> None:
        try:
            self._store_stack(pending, held)
        except Exception as error:  # noqa: BLE001  # it is the iteration's, and raised by its commit
            with self._changed:
                pending.failure = pending.failure or error
        finally:
            with self._changed:
                pending.num_busy -= 1
                self._changed.notify_all()
            for item in held:
                try:
                    item.release()
                except Exception as error:  # noqa: BLE001  # the others must be given back all the same
                    with self._changed:
                        pending.failure = pending.failure or error

    def _store_stack(self, pending: Pending, held: list[HeldTensor]) -> None:
        info = held[0].info
        with self._changed:
            number = pending.num_stacks
            pending.num_stacks += 1
        array, letters = held[0].array, "" if info.keep == Keep.STATISTICS else info.layout
        name = layout.stack_name(number, dtype=dtype_name(array.dtype), shape=array.shape, layout=letters)
        if len(held) == 1 or name is None:
            for item in held:
                self._write_alone(pending, item.array, info=item.info, site=item.site)
            return
        encoded = encode_stack(
            [item.array for item in held], infos=[item.info for item in held], compression=self._compression
        )
        self._put_through(pending, lambda backend: self._put_array(backend, info.iteration, name, encoded))
        entries = [
            CatalogueEntry(site=item.site, stack=name, index=index, info=item.info) for index, item in enumerate(held)
        ]
        with self._changed:
            pending.entries += entries

    def _write_alone(self, pending: Pending, array: np.ndarray[Any, Any], *, info: RecordInfo, site: str) -> RecordInfo:
        """Write a tensor as an array of its own; its identity with the checksum."""
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
