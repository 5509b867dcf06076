"""What is held of an iteration: tensors in the ring, or in memory what they came to."""

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
"""Of what an iteration takes in the ring: the room that is kept free for the next one."""

_SMALL_NBYTES = 256
"""What takes no more is kept as it is."""

_WORTH_COUNTING = 4
"""A histogram takes the place of values that take so many times its room; statistics that of others."""


@dataclass(slots=True, kw_only=True)
class TensorInFlight:
    """One tensor."""

    slot: Slot | None
    """Where it lies in the ring; None once that was given back."""
    judged: Future[list[Hit]]
    """What it shows."""
    reduced: tuple[np.ndarray[Any, Any], RecordInfo] | None = None
    """What stands for its values, once they were given up."""

    @property
    def site(self) -> tuple[str, str]:
        """Of which module it is, and what: `layers.0.up`, `output`."""
        if self.slot is not None:
            return self.slot.header["module"], self.slot.header["tensor_name"]
        assert self.reduced is not None
        return self.reduced[1].module, self.reduced[1].tensor_name

    def reduce(self, ring: RingConsumer, *, rank: int, attempt: int, room_nbytes: int) -> int:
        """Keep a histogram, or statistics, in the place of the values; the bytes that takes."""
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
    """One iteration."""

    iteration: int
    """Training step."""
    words: list[Slot] = field(default_factory=list)
    """What the trainer said of it, in the ring."""
    tensors: list[TensorInFlight] = field(default_factory=list)
    """Its tensors, in the order in which they came."""
    notes: list[Slot] = field(default_factory=list)
    """What was said of it between its tensors, no longer in the ring."""
    end: Slot | None = None
    """What it said when it had ended it."""
    skip: str | None = None
    """Why the rank did not take it."""
    ended_at: float | None = None
    """When that was, by `time.monotonic`."""
    nbytes: int = 0
    """Bytes that it took in the ring."""
    reduced_nbytes: int = 0
    """Bytes of memory that stand for values that were given up."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it will come."""
        return self.ended_at is not None

    @property
    def is_judged(self) -> bool:
        """Whether all that it shows is known."""
        return all(one.judged.done() for one in self.tensors)

    @property
    def in_ring(self) -> list[TensorInFlight]:
        """Its tensors that lie in the ring still and may be given up."""
        return [one for one in self.tensors if one.slot is not None and one.judged.done()]

    def close(self, slot: Slot, *, skip: str | None = None) -> None:
        """It has ended."""
        self.words.append(slot)
        self.end, self.skip, self.ended_at = (slot if skip is None else None), skip, time.monotonic()

    def free_words(self, ring: RingConsumer) -> None:
        """Give back the room of what was said of it, which is remembered."""
        for slot in self.words:
            ring.free(slot)
        self.words.clear()

    def let_go(self, ring: RingConsumer) -> None:
        """Give back all that it takes."""
        for slot in (*self.words, *(one.slot for one in self.tensors)):
            if slot is not None:
                ring.free(slot)
        self.words.clear()
        self.tensors.clear()


def take_over(
    ring: RingConsumer,
    *,
    committer: Committer,
    ends: Sequence[tuple[int, int, dict[str, Any]]],
    given_up: str | None = None,
) -> list[Slot]:
    """What a writer held that was killed, in order; what it was storing is settled, what it had in memory is lost.

    Args:
        ring: Of which nothing is taken yet.
        committer: Settles what it had stored.
        ends: Slots that ended an iteration, and may be free already: end, kind and header of each.
        given_up: Why the iteration is given up that was being judged or stored; None where none is.
    """
    judging = ring.counter(Counter.JUDGING) - 1
    stored = committer.uncommitted()
    lefts = read_slots(ring, ends=ends)
    at_work = {judging} if judging >= 0 else {min(stored & lefts.keys(), default=-1)}
    held: list[Slot] = []
    for iteration, left in lefts.items():
        has_end = any(slot.kind in {SlotKind.END, SlotKind.SKIP} for slot in left.words)
        is_given_up = given_up is not None and iteration in at_work
        if given_up is not None and is_given_up and iteration in stored:
            committer.mark(iteration, Mark.FAILED, given_up)
        if left.is_over and iteration in stored and not is_given_up:
            committer.recover(iteration, left)
        elif is_given_up or (left.is_over and not has_end):
            for slot in (*left.words, *left.tensors):  # or its values were being given up
                ring.free(slot)
        else:
            held += (*left.words, *left.tensors)
    return sorted(held, key=lambda slot: slot.end)


def cut_off(held: HeldIteration, *, like: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """What the commit of an iteration that did not end says of the tensors that it should have had.

    Args:
        held: The iteration.
        like: What was said at the end of one before it; empty where none had ended.
        reason: Why it did not.
    """
    came = {one.site for one in held.tensors}
    missing: dict[str, list[str]] = {}
    num_expected = 0
    lines: Sequence[str] = like.get("expected", ())
    for line in lines:
        place, _, names = line.partition(": ")
        module = place.partition(" (")[0]
        for name in names.split(", "):
            num_expected += 1
            if (module, name) not in came:
                missing.setdefault(place, []).append(name)
    num_missing = sum(map(len, missing.values()))
    silent = {f"{place} {', '.join(names)}": reason for place, names in list(missing.items())[:MAX_PLACES]}
    if len(missing) > MAX_PLACES:
        silent[f"and {len(missing) - MAX_PLACES} more"] = reason
    # Where nothing is known of what should have come, the reason is all that can be said.
    silent = silent or {"the end of the iteration": reason}
    counts = {"num_expected": num_expected, "num_missing": num_missing} if lines else {}
    recorded = f"{num_expected - num_missing} of {num_expected} expected tensors" if lines else f"{len(came)} tensors"
    # What came of an iteration that was cut off may be nothing: nothing was due then.
    expected = list(lines) if held.tensors else []
    return {"expected": expected, "silent_sites": silent, "cut_off": f"{reason}, after {recorded}", **counts}
