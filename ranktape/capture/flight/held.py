"""A held iteration: its tensors in the ring, or their histograms and statistics in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.capture.expected import MAX_PLACES
from ranktape.capture.staging.ring_file import Counter, Slot, SlotKind
from ranktape.capture.writing.committing import read_slots
from ranktape.capture.writing.counting import is_taken, reduce_to, staged_record
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    import numpy as np

    from ranktape.capture.flight.rules import Hit
    from ranktape.capture.staging.ring import RingConsumer
    from ranktape.capture.writing.committing import Committer
    from ranktape.storage.format.record_info import RecordInfo

ROOM_FOR_NEXT = 1.1
"""Room that is kept free for the next iteration, relative to the largest so far."""

_SMALL_NBYTES = 256
"""Largest size at which values are not reduced, in bytes."""

_WORTH_COUNTING = 4
"""A histogram replaces values that are at least this many times as large; statistics replace others."""


@dataclass(slots=True, kw_only=True)
class TensorInFlight:
    """A held tensor."""

    slot: Slot | None
    """Its slot in the ring; None once that has been freed."""
    judged: Future[list[Hit]]
    """The hits of the triggers."""
    reduced: tuple[np.ndarray[Any, Any], RecordInfo] | None = None
    """The array that replaces its values in memory, and its record; None while the slot is not freed."""

    @property
    def site(self) -> tuple[str, str]:
        """Path of the module and name of the tensor, such as `layers.0.up` and `output`."""
        if self.slot is not None:
            return self.slot.header["module"], self.slot.header["tensor_name"]
        assert self.reduced is not None
        return self.reduced[1].module, self.reduced[1].tensor_name

    def reduce(self, ring: RingConsumer, *, rank: int, attempt: int, room_nbytes: int) -> int:
        """Replace the values with a histogram, or with statistics if one is too large; returns the size in bytes."""
        assert self.slot is not None
        slot = self.slot
        array, info = staged_record(slot, rank=rank, attempt=attempt)
        keep = str(slot.header.get("keep", ""))
        reduced = None
        if is_taken(slot) or array.nbytes <= _SMALL_NBYTES:
            reduced = array.copy(), info
        elif keep != Keep.STATISTICS:
            reduced = reduce_to(Keep.HISTOGRAM.value, array, info=info)
            if reduced is not None and reduced[0].nbytes > min(array.nbytes // _WORTH_COUNTING, room_nbytes):
                reduced = None
        self.reduced = reduced or reduce_to(Keep.STATISTICS.value, array, info=info)
        assert self.reduced is not None, "everything has statistics"
        self.slot = None
        ring.free(slot)
        return self.reduced[0].nbytes


@dataclass(slots=True, kw_only=True)
class HeldIteration:
    """A held iteration."""

    iteration: int
    """Training step."""
    other_slots: list[Slot] = field(default_factory=list)
    """Slots of its start, and of its end or skip, in the ring."""
    tensors: list[TensorInFlight] = field(default_factory=list)
    """The tensors, in the order of their arrival."""
    notes: list[Slot] = field(default_factory=list)
    """Copies of the slots of `NOTES`, no longer in the ring."""
    end: Slot | None = None
    """The slot of its end; None if it has not finished or was skipped."""
    skip: str | None = None
    """Why the rank skipped it; None if it did not."""
    ended_at: float | None = None
    """Time of its end by `time.monotonic`; None before it."""
    nbytes: int = 0
    """Size of its tensors in the ring, in bytes."""
    reduced_nbytes: int = 0
    """Size of what replaces values in memory, in bytes."""

    @property
    def is_over(self) -> bool:
        """Whether it has finished or was skipped."""
        return self.ended_at is not None

    @property
    def is_judged(self) -> bool:
        """Whether all tensors are judged."""
        return all(tensor.judged.done() for tensor in self.tensors)

    @property
    def in_ring(self) -> list[TensorInFlight]:
        """The tensors that are still in the ring and are judged, so that their values may be reduced."""
        return [tensor for tensor in self.tensors if tensor.slot is not None and tensor.judged.done()]

    def close(self, slot: Slot, *, skip: str | None = None) -> None:
        """Take the slot of its end, with the reason if the rank skipped it."""
        self.other_slots.append(slot)
        self.end, self.skip, self.ended_at = (slot if skip is None else None), skip, time.monotonic()

    def free_other_slots(self, ring: RingConsumer) -> None:
        """Free the slots of its start, and of its end or skip; `end` and `skip` stay valid."""
        for slot in self.other_slots:
            ring.free(slot)
        self.other_slots.clear()

    def release(self, ring: RingConsumer) -> None:
        """Free all of its slots."""
        for slot in (*self.other_slots, *(tensor.slot for tensor in self.tensors)):
            if slot is not None:
                ring.free(slot)
        self.other_slots.clear()
        self.tensors.clear()


def take_over(
    ring: RingConsumer,
    *,
    committer: Committer,
    ends: Sequence[tuple[int, int, dict[str, Any]]],
    given_up: str | None = None,
) -> list[Slot]:
    """The slots that a killed writer held, in order. Iterations that it was storing are settled here.

    What it held only in memory is lost.

    Args:
        ring: The ring, of which no slot is taken yet.
        committer: Settles the iterations of which something is stored.
        ends: Slots of the ends of iterations, which may be free already: end, kind and header of each.
        given_up: Why the iteration that was being judged or stored is given up; None if it is not.
    """
    judging = ring.counter(Counter.JUDGING) - 1
    stored = committer.uncommitted()
    leftovers = read_slots(ring, ends=ends)
    at_work = {judging} if judging >= 0 else {min(stored & leftovers.keys(), default=-1)}
    held: list[Slot] = []
    for iteration, leftover in leftovers.items():
        has_end = any(slot.kind in {SlotKind.END, SlotKind.SKIP} for slot in leftover.other_slots)
        is_given_up = given_up is not None and iteration in at_work
        if given_up is not None and is_given_up and iteration in stored:
            committer.mark(iteration, Mark.FAILED, given_up)
        if leftover.is_over and iteration in stored and not is_given_up:
            committer.recover(iteration, leftover)
        elif is_given_up or (leftover.is_over and not has_end):
            for slot in (
                *leftover.other_slots,
                *leftover.tensors,
            ):  # without an end in the ring, its values were being reduced
                ring.free(slot)
        else:
            held += (*leftover.other_slots, *leftover.tensors)
    return sorted(held, key=lambda slot: slot.end)


def cut_off(held: HeldIteration, *, like: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The header for the commit of an iteration that did not finish, with the tensors that are missing.

    Args:
        held: The iteration.
        like: The header of the end of an earlier iteration; empty if none has finished.
        reason: Why the iteration did not finish.
    """
    sites = {tensor.site for tensor in held.tensors}
    missing: dict[str, list[str]] = {}
    num_expected = 0
    lines: Sequence[str] = like.get("expected", ())
    for line in lines:
        site, _, names = line.partition(": ")
        module = site.partition(" (")[0]
        for name in names.split(", "):
            num_expected += 1
            if (module, name) not in sites:
                missing.setdefault(site, []).append(name)
    num_missing = sum(map(len, missing.values()))
    silent = {f"{site} {', '.join(names)}": reason for site, names in list(missing.items())[:MAX_PLACES]}
    if len(missing) > MAX_PLACES:
        silent[f"and {len(missing) - MAX_PLACES} more"] = reason
    # If it is not known which tensors are missing, only the reason is recorded.
    silent = silent or {"the end of the iteration": reason}
    counts = {"num_expected": num_expected, "num_missing": num_missing} if lines else {}
    recorded = f"{num_expected - num_missing} of {num_expected} expected tensors" if lines else f"{len(sites)} tensors"
    # An iteration without tensors expects none: it was cut off before any was due.
    expected = list(lines) if held.tensors else []
    return {"expected": expected, "silent_sites": silent, "cut_off": f"{reason}, after {recorded}", **counts}
