"""Commits or marks each iteration of this rank, and settles those that a killed writer left.

An iteration is committed once all of its tensors are stored; otherwise a marker gives the reason. A marker that cannot
be written, because the store does not answer, is owed, and written when the store answers again.

After a kill, the next writer of the rank combines the tensors in the ring with those that are stored without a commit.
It commits an iteration of which all tensors exist and match their checksums. For any other, it writes a marker that
says how much is lost. All of this can be repeated.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ranktape.capture.expected import MAX_PLACES
from ranktape.capture.flight.rules import site_text
from ranktape.capture.staging.ring import RingConsumer
from ranktape.capture.staging.ring_file import NOTES, Counter, Slot, SlotKind
from ranktape.capture.writing.counting import reduce_to, staged_record
from ranktape.capture.writing.storing import Staged, Storer
from ranktape.errors import CaptureError, DataError, RanktapeError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import parse_array, read_stored
from ranktape.storage.format.attempt import check_attempt
from ranktape.storage.format.catalogue import CatalogueEntry
from ranktape.storage.format.commit import mark_committed
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    read_attributes,
    read_document,
    write_group,
)
from ranktape.storage.format.layout import Mark, TensorSite, site_path
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.maintenance.copy import SPILLED_KEY
from ranktape.storage.places.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMark:
    """A marker that is still to be written."""

    iteration: int
    """Training step."""
    mark: Mark
    """Outcome of the iteration."""
    reason: str
    """Reason for the outcome."""
    lacks_space: bool = False
    """Whether the stored tensors of the iteration are deleted because the store is full."""
    waits_in: str | None = None
    """The place from which it has to be pushed; its stored tensors are then kept. None if it is not spilled."""


class Committer:
    """Commits iterations in order, in a separate thread."""

    def __init__(
        self, storer: Storer, *, report: Callable[..., None], on_settled: Callable[[int], None], num_committed: int = 0
    ) -> None:
        """Start; `on_settled` is called with each iteration that the rank has settled."""
        self._storer = storer
        self._rank_writer = storer.rank_writer
        self._ring = storer.ring
        self._backend = storer.backend
        # Without retries, except for a flight recorder, of which any held iteration may be wanted.
        self._recovery: Backend = storer.backend if storer.config.options.record_last is None else storer.retrying
        self._spill = storer.spill
        self._attempt = storer.attempt
        self._rank = storer.config.rank
        self._report = report
        self._on_settled = on_settled
        # Commits flush the disk. Meanwhile, the tensors of the next iteration are stored.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ranktape-commit")
        self._pending_marks: list[PendingMark] = []
        self._lock = threading.Lock()
        self.num_committed = num_committed
        """Number of iterations that the rank has committed."""

    def commit(self, staged: Staged, end: Slot | None) -> None:
        """Commit an iteration when all before it are settled, and free the slot of its end, if there is one."""
        if end is not None:
            # At once: it blocks the room of later slots, and a commit can take as long as an outage.
            self._ring.free(end)
        self._submit(self._commit, staged, end)

    def commit_cut_off(self, staged: Staged, header: dict[str, Any]) -> None:
        """Commit an iteration that did not finish, when all before it are settled. The header says what is missing."""
        self._submit(self._commit, staged, None, header)

    def pass_over(self) -> None:
        """Count a held iteration as settled that is dropped; nothing is written about it."""
        self._submit(self._ring.advance, Counter.SETTLED)

    def mark(self, iteration: int, mark: Mark, reason: str) -> None:
        """Write that an iteration is not recorded, when all before it are settled."""
        self._submit(self._mark, PendingMark(iteration=iteration, mark=mark, reason=reason))

    def recover(self, iteration: int, leftover: Leftover) -> None:
        """Settle an iteration that had finished before the previous writer was killed, and free its slots."""
        self._submit(self._recover, iteration, leftover)

    def close(self) -> None:
        """Wait for all submitted work, and try once more to write the owed markers."""
        self._pool.shutdown()
        self._settle()

    def stop(self) -> None:
        """Cancel the work that has not started."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[..., None], *args: Any) -> None:
        def guarded() -> None:
            try:
                work(*args)
            except Exception as error:  # noqa: BLE001  # a defect of ours is reported, and later work goes on
                self._report(problem=f"a commit failed: {type(error).__name__}: {error}")
                traceback.print_exc()

        self._pool.submit(guarded)

    def _commit(self, staged: Staged, end: Slot | None, cut_off_header: dict[str, Any] | None = None) -> None:
        header = cut_off_header or ({"expected": [], "silent_sites": {}} if end is None else end.header)
        num_tensors = header.get("num_tensors", staged.num_tensors)
        if num_tensors != staged.num_tensors:
            self._storer.fail(staged, f"{staged.num_tensors} of the {num_tensors} tensors were read from the ring")

        spill_reason: str | None = None

        def commit() -> None:
            nonlocal spill_reason
            spill_reason = self._rank_writer.commit(staged.iteration, **expectations(header, notes=staged.notes))

        failure, waits_in = self._storer.finish(staged, commit), None
        if failure is not None and staged.lacks_space and self._spill is None:
            failure = f"{failure}; with --spill-dir DIR, such iterations are written to DIR until 'ranktape push'"
        if failure is None and self._spill is not None and spill_reason is not None:
            waits_in = self._spill.place
            failure = f"it waits in {waits_in} for 'ranktape push', because the store failed ({spill_reason})"
        if failure is None:
            self.num_committed += 1
            if lost := lost_tensors(staged.notes):
                site, reason = next(iter(lost.items()))
                self._report(notice=f"iteration {staged.iteration}: {len(lost)} tensors are lost ({site}: {reason})")
            self._note_settled(staged.iteration)
            self._settle()
        else:
            lacks_space = staged.lacks_space and waits_in is None
            self._mark(
                PendingMark(
                    iteration=staged.iteration,
                    mark=Mark.FAILED,
                    reason=failure,
                    lacks_space=lacks_space,
                    waits_in=waits_in,
                )
            )

    def _recover(self, iteration: int, leftover: Leftover) -> None:
        try:
            with self._storer.trying():
                is_committed, reason = self._settle_leftover(iteration, leftover)
        except RanktapeError as error:
            self._rank_writer.abandon(iteration)
            self._mark(PendingMark(iteration=iteration, mark=Mark.FAILED, reason=str(error)))
        else:
            if reason is not None:
                self._report(problem=f"iteration {iteration} is not stored by rank {self._rank}: {reason}")
            self.num_committed += is_committed
            self._note_settled(iteration)
        finally:
            for slot in (*leftover.other_slots, *leftover.tensors):
                self._ring.free(slot)

    def uncommitted(self) -> set[int]:
        """The iterations with stored objects of this rank."""
        return layout.iterations_named(self._recovery.list_names(layout.rank_path(self._attempt.path, self._rank)))

    def adopt(self, iteration: int) -> set[str]:
        """Take over the undamaged stored tensors of an iteration, and delete the others; returns their sites."""
        group = layout.rank_iteration_path(self._attempt.path, self._rank, iteration)
        suffix = f"/{layout.DOCUMENT}"
        names = [key.removesuffix(suffix) for key in self._recovery.list_keys(group) if key.endswith(suffix)]
        sites: set[str] = set()
        # Stacks first: a tensor whose values were given up may be in a stack as a histogram, although its values are
        # stored too.
        for name in sorted(names, key=lambda name: (not name.startswith("stack_"), name)):
            if name == layout.CATALOGUE:
                continue
            key = layout.document_key(f"{group}/{name}")
            document = read_document(self._recovery, f"{group}/{name}", max_nbytes=MAX_COMMIT_NBYTES) or b""
            try:
                member = decode_document(document, place=f"{self._recovery.url}/{key}", key=key)
                entries = _entries_of(name, member)
                if member["node_type"] == "array":
                    read_stored(self._recovery, parse_array(member, path=f"{group}/{name}", place=f"{group}/{name}"))
                self._rank_writer.adopt(iteration, name=name, entries=entries)
            except StorageError:
                raise
            except (RanktapeError, KeyError, TypeError):
                # It was being written: it is still in the ring, or counts as lost.
                self._recovery.delete(f"{group}/{name}")
                continue
            sites |= {entry.site for entry in entries}
        return sites

    def _settle_leftover(self, iteration: int, leftover: Leftover) -> tuple[bool, str | None]:
        """Commit an iteration, or write why it is lost, unless the rank has settled it already.

        Returns:
            Whether it was committed, and why not; None as the reason if it was, or if it was settled already.
        """
        attempt, backend = self._attempt.path, self._recovery
        for mark in Mark:
            if read_attributes(backend, layout.marker_path(attempt, iteration, self._rank, mark)) is not None:
                return False, None
        if self._rank == self._attempt.launch.first_rank:
            open_iteration(backend, attempt=self._attempt, iteration=iteration)
        group = layout.rank_iteration_path(attempt, self._rank, iteration)
        commit = read_document(backend, group, max_nbytes=MAX_COMMIT_NBYTES)
        if commit is not None:
            mark_committed(backend, attempt, self._rank, iteration, commit=commit)
            return True, None
        if leftover.skip is not None:
            self._rank_writer.mark(iteration, mark=Mark.SKIPPED, attributes={"reason": leftover.skip})
            return False, None
        try:
            self._commit_leftover(iteration, leftover)
        except (CaptureError, DataError, KeyError, TypeError, ValueError) as error:
            is_ours = isinstance(error, RanktapeError)
            reason = str(error) if is_ours else f"what the ring says of it is damaged: {error!r}"
            self._rank_writer.abandon(iteration)
            self._rank_writer.mark(iteration, mark=Mark.FAILED, attributes={"reason": reason})
            return False, reason
        return True, None

    def _commit_leftover(self, iteration: int, leftover: Leftover) -> None:
        """Commit an iteration from its tensors in the store and in the ring.

        Raises:
            CaptureError: it did not finish, or tensors are missing.
        """
        if leftover.end is None:
            raise CaptureError(f"the processes of rank {self._rank} were ended in the middle of the iteration")
        header = leftover.end
        stored = self.adopt(iteration)
        missing = [slot for slot in leftover.tensors if site_of(slot) not in stored]
        num_lost = sum(slot.kind is SlotKind.LOST for slot in leftover.notes)
        num_found, num_tensors = len(stored) + len(missing) + num_lost, int(header["num_tensors"])
        if num_found != num_tensors:
            raise CaptureError(
                f"{num_tensors - num_found} of {num_tensors} tensors are neither stored nor in the ring: they were on "
                f"their way when the processes of rank {self._rank} were ended"
            )
        for slot in missing:
            array, info = staged_record(slot, rank=self._rank, attempt=self._attempt.number)
            stored_array, stored_info = reduce_to(slot.header.get("keep", ""), array, info=info) or (array, info)
            self._rank_writer.write(stored_array, info=stored_info)
        self._rank_writer.commit(iteration, **expectations(header, notes=leftover.notes))

    def _mark(self, pending: PendingMark) -> None:
        self._report(problem=f"iteration {pending.iteration} is not stored by rank {self._rank}: {pending.reason}")
        with self._lock:
            self._pending_marks.append(pending)
        self._settle()
        self._note_settled(pending.iteration)

    def _note_settled(self, iteration: int) -> None:
        self._ring.advance(Counter.SETTLED)
        self._report(num_committed=self.num_committed)
        self._on_settled(iteration)

    def _settle(self) -> None:
        """Write the owed markers until the store fails."""
        while self._pending_marks:
            pending = self._pending_marks[0]
            try:
                self._write(pending)
            except RanktapeError as error:
                self._report(
                    problem=f"iteration {pending.iteration}: {pending.reason}; "
                    f"this cannot be written to the store: {error}"
                )
                return
            with self._lock:
                self._pending_marks.pop(0)

    def _write(self, pending: PendingMark) -> None:
        attempt, iteration = self._attempt.path, pending.iteration
        check_attempt(self._backend, self._attempt)
        group = layout.rank_iteration_path(attempt, self._rank, iteration)
        is_failed = pending.mark is Mark.FAILED
        commit = read_document(self._backend, group, max_nbytes=MAX_COMMIT_NBYTES) if is_failed else None
        if commit is not None:
            # The response to the last request was lost, or its marker could not be written: it is complete anyway.
            self.num_committed += 1
            mark_committed(self._backend, attempt, self._rank, iteration, commit=commit)
            return
        if pending.lacks_space:
            # First, because it may be what fills the store.
            self._backend.delete(group)
        if self._storer.config.is_first:
            open_iteration(self._backend, attempt=self._attempt, iteration=iteration)
        attributes = {"reason": pending.reason} | ({} if pending.waits_in is None else {SPILLED_KEY: pending.waits_in})
        write_group(self._backend, layout.marker_path(attempt, iteration, self._rank, pending.mark), attributes)


NEVER_CAME = "the device had not copied it when the capture ended"
"""The reason for a lost tensor whose slot has none."""


@dataclass(slots=True)
class Leftover:
    """The slots of an iteration in a ring."""

    tensors: list[Slot] = field(default_factory=list)
    """Slots of tensors that the writer had not freed."""
    other_slots: list[Slot] = field(default_factory=list)
    """All other slots."""
    end: Mapping[str, Any] | None = None
    """Header of its end; None if it has not finished or was skipped."""
    skip: str | None = None
    """Why the rank skipped it; None if it did not."""

    @property
    def notes(self) -> list[Slot]:
        """The slots of `NOTES`."""
        return [slot for slot in self.other_slots if slot.kind in NOTES]

    @property
    def is_over(self) -> bool:
        """Whether it has finished or was skipped."""
        return self.end is not None or self.skip is not None

    def add_header(self, kind: SlotKind, header: Mapping[str, Any]) -> None:
        """Take the header of an end or of a skip; others are ignored."""
        if kind is SlotKind.END:
            self.end = header
        elif kind is SlotKind.SKIP:
            self.skip = str(header["reason"])


def read_slots(ring: RingConsumer, *, ends: Iterable[tuple[int, int, Mapping[str, Any]]] = ()) -> dict[int, Leftover]:
    """The slots of a ring, by iteration; none is freed.

    Args:
        ring: The ring, of which no slot is taken yet.
        ends: Slots of ends that may be free already but still count: end, kind and header of each.
    """
    leftovers: dict[int, Leftover] = {}
    published = ring.counter(Counter.PUBLISHED)
    for end, kind, header in ends:
        if end <= published:
            leftovers.setdefault(int(header["iteration"]), Leftover()).add_header(SlotKind(kind), header)
    while (slot := ring.take(published)) is not None:
        leftover = leftovers.setdefault(int(slot.header["iteration"]), Leftover())
        if slot.kind is SlotKind.TENSOR:
            leftover.tensors.append(slot)
        else:
            leftover.other_slots.append(slot)
            leftover.add_header(slot.kind, slot.header)
    return leftovers


def _entries_of(name: str, member: Mapping[str, Any]) -> list[CatalogueEntry]:
    """The records in a stored array."""
    if member["node_type"] != "array":
        return []
    attributes = member["attributes"]
    if "captures" not in attributes:
        return [CatalogueEntry(site=name, stack="", index=-1, info=RecordInfo.from_json(attributes))]
    infos = [RecordInfo.from_json({**attributes["common"], **capture}) for capture in attributes["captures"]]
    return [
        CatalogueEntry(site=site_path(TensorSite.of(info)), stack=name, index=index, info=info)
        for index, info in enumerate(infos)
    ]


def site_of(slot: Slot) -> str:
    """The path of the tensor in a slot."""
    header: dict[str, Any] = slot.header
    return site_path(TensorSite(**{name: header[name] for name in TensorSite.__dataclass_fields__ if name in header}))


def lost_tensors(notes: Sequence[Slot]) -> dict[str, str]:
    """The tensors that could not be copied from their device, each with the reason."""
    lost = [note.header for note in notes if note.kind is SlotKind.LOST]
    return {site_text(header): str(header.get("lost", NEVER_CAME)) for header in lost}


def expectations(header: Mapping[str, Any], *, notes: Sequence[Slot] = ()) -> dict[str, Any]:
    """The arguments of `RankWriter.commit` from the header of an iteration's end and the notes before it."""
    names = ("expected", "silent_sites", "num_expected", "num_missing", "compiled", "step_skipped", "cut_off")
    known = {name: header[name] for name in names if name in header}
    silent = header.get("silent_sites", {})
    new = {place: reason for place, reason in lost_tensors(notes).items() if place not in silent}
    if new:
        shown = dict(list(new.items())[:MAX_PLACES])
        if len(new) > MAX_PLACES:
            shown[f"and {len(new) - MAX_PLACES} more"] = next(iter(new.values()))
        known |= {"silent_sites": {**silent, **shown}, "num_missing": header.get("num_missing", 0) + len(new)}
    if any(bytes(note.payload).strip(b"\0") for note in notes if note.kind is SlotKind.FOUND_INF):
        known["step_skipped"] = True
    return known
