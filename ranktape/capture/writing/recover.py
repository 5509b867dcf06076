"""Stores what a killed writer left in its ring.

The next writer of the rank puts together what is in the ring and what was stored without a commit: an iteration of
which every tensor is found, each compared with its checksum, is committed; of any other a marker says how much is lost.
Everything here can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ranktape.capture.expected import MAX_PLACES
from ranktape.capture.flight.rules import site_text
from ranktape.capture.staging.ring import RingConsumer
from ranktape.capture.staging.ring_file import NOTES, Counter, Slot, SlotKind
from ranktape.capture.writing.counting import reduce_to, staged_record
from ranktape.errors import CaptureError, DataError, RanktapeError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import parse_array, read_stored
from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.catalogue import CatalogueEntry
from ranktape.storage.format.commit import mark_committed
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    read_attributes,
    read_document,
)
from ranktape.storage.format.layout import Mark, TensorSite, site_path
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.places.backend import Backend
from ranktape.storage.recording.writer import RankWriter

NEVER_CAME = "the device had not copied it when the capture ended"
"""The reason of a lost slot that has none."""


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


def read_slots(ring: RingConsumer, *, ends: Iterable[tuple[int, int, Mapping[str, Any]]] = ()) -> dict[int, Left]:
    """What a ring holds now, by iteration; nothing is freed.

    Args:
        ring: Of which nothing is taken yet.
        ends: Slots that may be free already, and whose words still count: end, kind and header of each.
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

    def _commit(self, iteration: int, left: Left) -> None:
        """Commit an iteration."""
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

    def adopt(self, iteration: int) -> set[str]:
        """Take over what is stored of an iteration and whole; the sites of its tensors."""
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
                entries = _entries_of(name, member)
                if member["node_type"] == "array":
                    read_stored(self._backend, parse_array(member, path=f"{group}/{name}", place=f"{group}/{name}"))
                self._rank_writer.adopt(iteration, name=name, entries=entries)
            except StorageError:
                raise
            except (RanktapeError, KeyError, TypeError):
                # It was being written: the ring still has it, or it is counted as lost.
                self._backend.delete(f"{group}/{name}")
                continue
            sites |= {entry.site for entry in entries}
        return sites


def _entries_of(name: str, member: Mapping[str, Any]) -> list[CatalogueEntry]:
    """The records that a stored array holds."""
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
