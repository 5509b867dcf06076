"""Writes what one rank records: its tensors, and the commit that says that an iteration is whole.

Large tensors are written as they come, small ones together. An iteration exists when its group's document has been
written after everything else and after a flush; a marker then tells the coordinator. A reader sees the whole
iteration of a rank, or nothing of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from ranktape.errors import CaptureError, DataError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, check_attempt
from ranktape.storage.format.blob import blob_checksum, write_blob
from ranktape.storage.format.catalogue import CatalogueEntry, encode_catalogue
from ranktape.storage.format.documents import chunk_key, document_checksum, encode_document, group_document, write_group
from ranktape.storage.format.encode import (
    EncodedArray,
    check_form,
    checksum,
    checksums,
    encode_array,
    encode_stack,
    stored_dtype,
    stored_shape,
)
from ranktape.storage.format.layout import site_path
from ranktape.storage.format.record_info import Compression, Keep, RecordInfo
from ranktape.storage.recording import stack
from ranktape.storage.recording.stack import HeldTensor, Pending

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.places.backend import Backend

_CHECK_SECONDS = 1.0
"""While tensors are written, it is looked this often whether the run is still there; less often by many ranks."""

_CHECKS_PER_SECOND = 200
"""By all ranks together: all of them look at one object."""


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
        stack_below_nbytes: int = stack.STACK_BELOW_NBYTES,
        store_concurrency: int = stack.STORE_CONCURRENCY,
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
        """
        self._backend = backend
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

    def write(
        self, array: np.ndarray[Any, Any], *, info: RecordInfo, on_release: Callable[[], None] | None = None
    ) -> RecordInfo:
        """Store one tensor and return its identity with the checksum; it counts once its iteration is committed.

        A small tensor is kept, not copied, and stored with others later: `on_release` is called, exactly once,
        when the array is not needed any more, whether it was stored or not.

        Raises:
            CaptureError: another tensor of the iteration has the same name, or the iteration was committed already;
                nothing of this one is written.
            DataError: the array is not what its identity says.
            StorageError: the run was deleted or replaced, or cannot be written.
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
            whole, sample_crcs = (checksum(array), None) if is_held else checksums(array, info=info)
            stored = info.with_checksum(whole)
            if not is_held:
                # Not before a tensor is kept: that needs no answer from the store.
                self._check_now_and_then()
                self._write_alone(pending, array, info=stored, site=site, sample_crcs=sample_crcs)
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
    ) -> None:
        """Make everything written of the iteration durable and visible. Atomic.

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
            DataError: tensors were expected and not one was recorded; the iteration is not committed then.
            StorageError: the run was deleted or replaced, or cannot be written; it may be committed again then.
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
        check_attempt(self._backend, self._attempt)
        summary: dict[str, Any] = self._write_catalogue(iteration, pending)
        if num_expected is not None and num_missing is not None:
            summary |= {"num_expected": num_expected, "num_missing": num_missing}
        if compiled:
            summary["compiled"] = compiled
        if step_skipped:
            summary["step_skipped"] = True
        if cut_off:
            summary["cut_off"] = cut_off
        attributes = {
            "complete": True,
            "iteration": iteration,
            "rank": self._rank,
            **summary,
            "expected": expected,
            "silent_sites": dict(silent_sites),
            "committed": time.time(),
        }
        key = layout.document_key(layout.rank_iteration_path(self._attempt.path, self._rank, iteration))
        document = encode_document(group_document(attributes), key=key)
        self._backend.flush()
        self._backend.put(key, [document])
        self._backend.flush()
        self.mark(iteration, mark=layout.Mark.COMMITTED, attributes={"commit": document_checksum(document)})
        with self._changed:
            self._settle(iteration)

    def _write_catalogue(self, iteration: int, pending: Pending) -> dict[str, Any]:
        """Write what was recorded as columns; how many records those are, their bytes, and the catalogue's checksum."""
        entries = sorted(pending.entries, key=lambda entry: (entry.info.counter, entry.site))
        number = {"num_records": len(entries)}
        path = layout.catalogue_path(self._attempt.path, self._rank, iteration)
        data = encode_catalogue(entries)
        write_blob(self._backend, path, data, attributes=number)
        nbytes = sum(entry.info.nbytes for entry in entries)
        return {**number, "nbytes": nbytes, "catalogue": blob_checksum(data)}

    def abandon(self, iteration: int) -> None:
        """Give back what is kept of an iteration that will not be committed."""
        with self._changed:
            work = self._settle(iteration).take_all()
        for held in work:
            for item in held:
                item.release()

    def mark(self, iteration: int, *, mark: layout.Mark, attributes: Mapping[str, Any]) -> None:
        """Leave a marker of the rank on an iteration where the coordinator looks.

        Raises:
            StorageError: the run was deleted or replaced, or cannot be written.
        """
        check_attempt(self._backend, self._attempt)
        write_group(self._backend, layout.marker_path(self._attempt.path, iteration, self._rank, mark), attributes)

    def close(self, *, reason: str) -> None:
        """Say that the rank will commit nothing more, and why.

        Raises:
            StorageError: the run was deleted or replaced, or cannot be written.
        """
        check_attempt(self._backend, self._attempt)
        write_group(
            self._backend, layout.closed_path(self._attempt.path, self._rank), {"reason": reason, "closed": time.time()}
        )

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

    def _check_now_and_then(self) -> None:
        """So that a late writer does not fill the place of a run that is gone, at the cost of few requests."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + max(_CHECK_SECONDS, self._attempt.launch.world_size / _CHECKS_PER_SECOND)
        try:
            check_attempt(self._backend, self._attempt)
        except StorageError:
            self._next_check = 0.0
            raise

    def _hold(self, pending: Pending, item: HeldTensor) -> None:
        with self._changed:
            full = pending.hold(item)
            if full is not None:
                pending.num_busy += 1
            is_much = sum(one.held_nbytes for one in self._open.values()) > stack.MAX_HELD_NBYTES
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
        self._check_now_and_then()
        info = held[0].info
        with self._changed:
            number = pending.num_stacks
            pending.num_stacks += 1
        dtype = stored_dtype(info).name
        letters = "" if info.keep == Keep.STATISTICS else info.layout
        name = layout.stack_name(number, dtype=dtype, shape=stored_shape(info), layout=letters)
        if len(held) == 1 or name is None:
            for item in held:
                self._write_alone(pending, item.array, info=item.info, site=item.site)
            return
        encoded = encode_stack(
            [item.array for item in held], infos=[item.info for item in held], compression=self._compression
        )
        self._put_array(info.iteration, name, encoded)
        entries = [
            CatalogueEntry(site=item.site, stack=name, index=index, info=item.info) for index, item in enumerate(held)
        ]
        with self._changed:
            pending.entries += entries

    def _write_alone(
        self,
        pending: Pending,
        array: np.ndarray[Any, Any],
        *,
        info: RecordInfo,
        site: str,
        sample_crcs: Sequence[int] | None = None,
    ) -> None:
        encoded = encode_array(array, info=info, compression=self._compression, sample_crcs=sample_crcs)
        self._put_array(info.iteration, site, encoded)
        group = layout.rank_iteration_path(self._attempt.path, self._rank, info.iteration)
        for parent in layout.parents_of(site):
            write_group(self._backend, f"{group}/{parent}", {})
        with self._changed:
            pending.entries.append(CatalogueEntry(site=site, stack="", index=-1, info=info))

    def _put_array(self, iteration: int, name: str, encoded: EncodedArray) -> None:
        folder = f"{layout.rank_iteration_path(self._attempt.path, self._rank, iteration)}/{name}"
        if encoded.parts is not None:
            self._backend.put(f"{folder}/{chunk_key(len(encoded.document['shape']))}", encoded.parts)
        key = layout.document_key(folder)
        self._backend.put(key, [encode_document(encoded.document, key=key)])
