"""Stores what a killed writer left in a ring.

A ring outlives its writer, and in a directory (`--ring-dir`) both of its processes. What is in it, and what they had
stored without a commit, is put together: an iteration of which every tensor is found, each compared with its checksum,
is committed as the writer would have; of any other a marker says how much is lost. Everything here can be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranktape.capture.expected import MAX_PLACES
from ranktape.capture.flight.rules import site_text
from ranktape.capture.staging.ring import RingConsumer
from ranktape.capture.staging.ring_file import NOTES, RING_SUFFIX, Counter, Slot, SlotKind, Words, boot_id, lock_ring
from ranktape.capture.writing.counting import reduce_to, staged_record
from ranktape.errors import CaptureError, DataError, RanktapeError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempt
from ranktape.storage.format.commit import entries_of, mark_committed
from ranktape.storage.format.decode import parse_array, read_stored
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    read_attributes,
    read_document,
)
from ranktape.storage.format.layout import Mark, TensorSite, site_path
from ranktape.storage.format.progress import finish_ready, judge_again, open_iteration, read_progress
from ranktape.storage.places.backend import Backend
from ranktape.storage.recording.writer import RankWriter

NEVER_CAME = "the device had not copied it when the capture ended"
"""The reason of a lost slot that has none."""


@dataclass(slots=True)
class RingReport:
    """What became of a ring."""

    path: Path
    """The file."""
    url: str = ""
    """The run that it belongs to."""
    rank: int = -1
    """The rank."""
    committed: list[int] = field(default_factory=list)
    """Iterations that the rank has committed since."""
    failed: dict[int, str] = field(default_factory=dict)
    """For each iteration that is lost: why."""
    finished: list[int] = field(default_factory=list)
    """Iterations that are complete, with all ranks, since then."""
    num_tensors: int = 0
    """Tensors that came out of the ring."""
    remains: str | None = None
    """Why the ring is still there; None where it is removed."""


@dataclass(slots=True)
class Left:
    """What a ring holds of an iteration."""

    tensors: list[Slot] = field(default_factory=list)
    """Those that the writer had not freed."""
    words: list[Slot] = field(default_factory=list)
    """What the trainer said of it."""
    end: Mapping[str, Any] | None = None
    """What it said when it had ended it."""
    skip: str | None = None
    """Why the rank did not take it."""

    @property
    def notes(self) -> list[Slot]:
        """What was said of it between its tensors."""
        return [slot for slot in self.words if slot.kind in NOTES]

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it will come."""
        return self.end is not None or self.skip is not None

    def learn(self, kind: SlotKind, header: Mapping[str, Any]) -> None:
        """Take over what the trainer said."""
        if kind is SlotKind.END:
            self.end = header
        elif kind is SlotKind.SKIP:
            self.skip = str(header["reason"])


def find_rings(directory: Path) -> list[Path]:
    """The rings in a directory, sorted by name.

    Raises:
        CaptureError: there is no such directory, or it cannot be read.
    """
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(RING_SUFFIX))
    except OSError as error:
        raise CaptureError(
            f"{directory} cannot be read ({error.strerror}): give the --ring-dir of a capture"
        ) from error


def recover_ring(path: Path, *, open_run: Callable[[str], Backend], trusts_other_boots: bool) -> RingReport:
    """Store what is left in a ring, and remove it.

    Args:
        path: The ring.
        open_run: Gives the backend for the URL of a run.
        trusts_other_boots: Take also what another host wrote, or an earlier start of this one.

    Raises:
        StorageError: the run cannot be read or written; the ring stays as it is.
    """
    report = RingReport(path=path)
    try:
        descriptor = lock_ring(path)
    except OSError as error:
        report.remains = f"it cannot be opened ({error.strerror})"
        return report
    if descriptor is None:
        report.remains = "its processes still run"
        return report
    try:
        ring = RingConsumer(descriptor)
    except CaptureError as error:
        os.close(descriptor)
        report.remains = str(error)
        return report
    try:
        report.remains = _recover(ring, report, open_run=open_run, trusts_other_boots=trusts_other_boots)
        if report.remains is None:
            path.unlink(missing_ok=True)
    finally:
        ring.close()
    return report


def _recover(
    ring: RingConsumer, report: RingReport, *, open_run: Callable[[str], Backend], trusts_other_boots: bool
) -> str | None:
    """Store what is left in a ring; why the ring is to stay."""
    about = ring.hear(Words.ABOUT)
    if about is None:
        return None  # it is described before the first tensor: nothing is lost with it
    try:
        report.url, report.rank = str(about["url"]), int(about["rank"])
        if about["boot_id"] != boot_id() and not trusts_other_boots:
            return (
                f"host {about['host']} wrote it, or an earlier start of this one, and what it wrote last may never "
                f"have reached the file: give --trust-other-boots if it went down in order"
            )
        backend = open_run(report.url)
        attempt = read_attempt(backend, str(about["attempt"]))
        if attempt is None or report.rank not in attempt.launch.ranks:
            return f"{report.url} has no {about['attempt']} with a rank {report.rank}: remove it if the run is gone"
        environment, compression = dict(about["environment"]), str(about["compression"])
        left = read_slots(ring)
    except (KeyError, TypeError, ValueError, CaptureError) as error:
        return f"it is damaged ({error})"
    rank_writer = RankWriter(
        backend, attempt=attempt, rank=report.rank, environment=environment, compression=compression
    )
    recovery = Recovery(backend, attempt=attempt, rank=report.rank, rank_writer=rank_writer)
    for iteration in sorted({*left, *recovery.uncommitted()}):
        recovery.settle(iteration, left.get(iteration, Left()))
    report.finished = recovery.close()
    report.committed, report.failed, report.num_tensors = recovery.committed, recovery.failed, recovery.num_tensors
    return None


def read_slots(ring: RingConsumer, *, ends: Iterable[tuple[int, int, Mapping[str, Any]]] = ()) -> dict[int, Left]:
    """What a ring holds now, by iteration; nothing is freed.

    Args:
        ring: Of which nothing is taken yet.
        ends: Slots that may be free already, and whose words still count: end, kind and header of each.

    Raises:
        CaptureError: the ring is damaged.
    """
    left: dict[int, Left] = {}
    published = ring.counter(Counter.PUBLISHED)
    for end, kind, header in ends:
        if end <= published:
            left.setdefault(int(header["iteration"]), Left()).learn(SlotKind(kind), header)
    while (slot := ring.take(published)) is not None:
        one = left.setdefault(int(slot.header["iteration"]), Left())
        if slot.kind is SlotKind.TENSOR:
            one.tensors.append(slot)
        else:
            one.words.append(slot)
            one.learn(slot.kind, slot.header)
    return left


class Recovery:
    """One rank's share of an attempt, being put in order."""

    def __init__(self, backend: Backend, *, attempt: Attempt, rank: int, rank_writer: RankWriter) -> None:
        self._backend = backend
        self._attempt = attempt
        self._rank = rank
        self._rank_writer = rank_writer
        self.committed: list[int] = []
        """Iterations that the rank has committed."""
        self.failed: dict[int, str] = {}
        """For each iteration that is lost: why."""
        self.num_tensors = 0
        """Tensors that came out of the ring."""

    def uncommitted(self) -> set[int]:
        """Iterations of which something is stored."""
        return layout.iterations_named(self._backend.list_names(layout.rank_path(self._attempt.path, self._rank)))

    def settle(self, iteration: int, left: Left) -> None:
        """Commit an iteration, or say why it is lost; nothing where the rank has had its word on it."""
        attempt = self._attempt.path
        for mark in Mark:
            if read_attributes(self._backend, layout.marker_path(attempt, iteration, self._rank, mark)) is not None:
                return
        if self._rank == self._attempt.launch.first_rank:
            open_iteration(self._backend, attempt=self._attempt, iteration=iteration)
        group = layout.rank_iteration_path(attempt, self._rank, iteration)
        commit = read_document(self._backend, group, max_nbytes=MAX_COMMIT_NBYTES)
        if commit is not None:
            mark_committed(self._backend, attempt, self._rank, iteration, commit=commit)
            self.committed.append(iteration)
            return
        if left.skip is not None:
            self._rank_writer.mark(iteration, mark=Mark.SKIPPED, attributes={"reason": left.skip})
            return
        try:
            self._commit(iteration, left)
            self.committed.append(iteration)
        except (CaptureError, DataError, KeyError, TypeError, ValueError) as error:
            is_ours = isinstance(error, RanktapeError)
            reason = str(error) if is_ours else f"what the ring says of it is damaged: {error!r}"
            self._rank_writer.abandon(iteration)
            self._rank_writer.mark(iteration, mark=Mark.FAILED, attributes={"reason": reason})
            self.failed[iteration] = reason

    def close(self) -> list[int]:
        """Say that the rank will commit nothing more, judge the run; the iterations that have all ranks since then."""
        closed = layout.closed_path(self._attempt.path, self._rank)
        if read_attributes(self._backend, closed) is None:
            self._rank_writer.close(reason="its processes were ended; 'ranktape recover' stored what they left")
        finished = finish_ready(self._backend, self._attempt)
        if len(read_progress(self._backend, self._attempt).closed) == self._attempt.launch.world_size:
            judge_again(self._backend, self._attempt)
        return finished

    def _commit(self, iteration: int, left: Left) -> None:
        """Commit an iteration.

        Raises:
            CaptureError: some of it is lost.
        """
        if left.end is None:
            raise CaptureError(f"the processes of rank {self._rank} were ended in the middle of the iteration")
        header = left.end
        stored = self.adopt(iteration)
        missing = [slot for slot in left.tensors if site_of(slot) not in stored]
        num_lost = sum(slot.kind is SlotKind.LOST for slot in left.notes)
        num_found, num_tensors = len(stored) + len(missing) + num_lost, int(header["num_tensors"])
        if num_found != num_tensors:
            raise CaptureError(
                f"{num_tensors - num_found} of {num_tensors} tensors are neither stored nor in the ring: they were on "
                f"their way when the processes of rank {self._rank} were ended"
            )
        for slot in missing:
            array, info = staged_record(slot, rank=self._rank, attempt=self._attempt.number)
            kept, kept_info = reduce_to(slot.header.get("keep", ""), array, info=info) or (array, info)
            self._rank_writer.write(kept, info=kept_info)
        self._rank_writer.commit(iteration, **expectations(header, notes=left.notes))
        self.num_tensors += len(missing)

    def adopt(self, iteration: int) -> set[str]:
        """Take over what is stored of an iteration and whole; the sites of its tensors.

        Raises:
            StorageError: the store cannot be read.
        """
        group = layout.rank_iteration_path(self._attempt.path, self._rank, iteration)
        suffix = f"/{layout.DOCUMENT}"
        names = [key.removesuffix(suffix) for key in self._backend.list_keys(group) if key.endswith(suffix)]
        sites: set[str] = set()
        # Stacks first: a tensor that was given up as values, and whose values are there all the same, may be in one as
        # a histogram.
        for name in sorted(names, key=lambda name: (not name.startswith("stack_"), name)):
            if name == layout.CATALOGUE:
                continue
            key = layout.document_key(f"{group}/{name}")
            document = read_document(self._backend, f"{group}/{name}", max_nbytes=MAX_COMMIT_NBYTES) or b""
            try:
                member = decode_document(document, place=f"{self._backend.url}/{key}", key=key)
                entries = entries_of(name, member)
                if member["node_type"] == "array":
                    read_stored(self._backend, parse_array(member, path=f"{group}/{name}", place=f"{group}/{name}"))
                self._rank_writer.adopt(iteration, name=name, document=document, entries=entries)
            except StorageError:
                raise
            except (RanktapeError, KeyError, TypeError):
                # It was being written: the ring still has it, or it is counted as lost.
                self._backend.delete(f"{group}/{name}")
                continue
            sites |= {entry.site for entry in entries}
        return sites


def site_of(slot: Slot) -> str:
    """The path at which the tensor in a slot is stored."""
    header: dict[str, Any] = slot.header
    return site_path(TensorSite(**{name: header[name] for name in TensorSite.__dataclass_fields__ if name in header}))


def lost_tensors(notes: Sequence[Slot]) -> dict[str, str]:
    """The tensors whose values did not come off their device, each with the reason."""
    lost = [note.header for note in notes if note.kind is SlotKind.LOST]
    return {site_text(header): str(header.get("lost", NEVER_CAME)) for header in lost}


def expectations(header: Mapping[str, Any], *, notes: Sequence[Slot] = ()) -> dict[str, Any]:
    """What the end of an iteration and the notes before it say of its tensors; arguments of `RankWriter.commit`."""
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
