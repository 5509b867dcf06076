"""The file through which the trainer and its writer process speak: what lies where, and who holds it.

    page 0      counters, each written by one side only: bytes published, bytes freed, ...
    256 pages   what the writer says (JSON), as many what the trainer says beside its slots, and as many what the
                ring is about: the run, the attempt, the rank
    the rest    slots: 16 bytes of sizes, a JSON header, the payload; each part begins at a multiple of 64

In memory the file has no name and ends with the two processes. In a directory it outlives them, and whoever
holds its lock may take from it: the processes do, as long as one of them lives.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ranktape.errors import CaptureError

PREFIX_NBYTES = 16
"""Of a slot: its kind, the sizes of its header and of its payload."""

_PAGE = 4096
_WORDS_NBYTES = 256 * _PAGE
SLOTS = _PAGE + 2 * _WORDS_NBYTES
"""Where the slots begin in the file."""

ALIGNMENT = 64
"""Slots and payloads begin at multiples of so many bytes."""

_FORMAT = int.from_bytes(b"rtring4\0", "little")


class Counter(IntEnum):
    """The unsigned 64-bit numbers at the start of the file."""

    PUBLISHED = 0
    """Bytes of slots ever published; written by the trainer."""
    FREED = 1
    """Bytes of slots ever freed; written by the writer."""
    FINISHED = 2
    """1 when the trainer will publish nothing more; written by the trainer."""
    STEP = 3
    """The iteration that the trainer is in; written by the trainer."""
    NEWS = 4
    """How many times the writer's words about the plan have changed; written by the writer."""
    ASLEEP = 5
    """1 while the writer waits to be woken; written by the writer."""
    WAITING = 6
    """1 while the trainer waits for room; written by the trainer."""
    FORMAT = 7
    """Says that the file is a ring, and of which form; written when it is made."""
    SETTLED = 8
    """Of the iterations that the trainer ended or did not take, in this order, how many are settled; by the writer."""
    SIGNALS = 9
    """The number of the last signal that asks a flight recorder to store, plus 256 for each; by the trainer."""
    HAPPENED = 10
    """The last iteration in which something happened on this rank, as `noted`; by the writer."""
    ELSEWHERE = 11
    """The same of the other ranks, as far as the launch's store told of it; by the trainer."""
    JUDGING = 12
    """The oldest iteration that a flight recorder has not judged, plus 1; 0 where it has judged all; by the writer."""
    ENDED = 13
    """Bytes of slots ever published up to the last end of an iteration; by the trainer."""


_COUNT_BITS = 16
"""A counter of what happened holds an iteration, and below it how many came before."""


def noted(value: int, iteration: int) -> int:
    """The next value of a counter that holds the last iteration in which something happened; never 0."""
    return iteration << _COUNT_BITS | ((value + 1) % (1 << _COUNT_BITS) or 1)


def iteration_of(value: int) -> int:
    """The iteration that such a counter holds."""
    return value >> _COUNT_BITS


class Words(IntEnum):
    """Where something is said beside the slots."""

    WRITER = _PAGE
    """By the writer."""
    TRAINER = _PAGE + _WORDS_NBYTES
    """By the trainer."""


class SlotKind(IntEnum):
    """What a slot says."""

    GAP = 0
    """Nothing: the rest of the file up to its end, too small for the next slot."""
    TENSOR = 1
    """One tensor: its identity and its values."""
    BEGIN = 2
    """An iteration begins."""
    END = 3
    """An iteration ended: everything of it has been published."""
    SKIP = 4
    """The rank does not take an iteration."""
    TRIGGER = 5
    """Something happened: what a flight recorder holds is to be stored."""
    LOST = 6
    """A tensor whose values did not come off its device; its identity, and `lost`, the reason where it is known."""
    FOUND_INF = 7
    """Whether a fused optimizer skipped its step: the number of the gradient scaler, which is known on the device."""


NOTES = frozenset({SlotKind.LOST, SlotKind.FOUND_INF})
"""What is said of an iteration between its tensors, for its commit."""


@dataclass(slots=True)
class Slot:
    """A part of the ring that is being filled or read."""

    kind: SlotKind
    """What it says."""
    header: dict[str, Any]
    """Its JSON; empty on the trainer's side."""
    payload: memoryview
    """Its values."""
    end: int
    """Bytes ever published or freed once this slot is."""
    nbytes: int = 0
    """Bytes that it takes in the file; 0 on the writer's side."""
    address: int = 0
    """Where its values are in memory; 0 on the writer's side."""
    is_done: bool = False
    """The trainer has filled it, or the writer has stored it."""

    def copy(self) -> Slot:
        """What it says, outside of the ring: its payload, unless that is the room of values that did not come."""
        payload = b"" if self.kind is SlotKind.LOST else bytes(self.payload)
        return Slot(kind=self.kind, header=self.header, payload=memoryview(payload), end=self.end)


def aligned(nbytes: int) -> int:
    """The room that so many bytes take: what comes after them begins at a multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RingFile:
    """The mapped file, as both sides see it; each says its words at one place, and hears those at another."""

    def __init__(self, descriptor: int, *, own: Words, other: Words, populate: bool) -> None:
        """Map a ring; its descriptor is ours to close from then on.

        Raises:
            CaptureError: the file is not one.
        """
        self.descriptor = descriptor
        self._own, self._other = own, other
        size = os.fstat(descriptor).st_size
        if size <= SLOTS:
            raise CaptureError(f"the file has {size} bytes, and a ring has more than {SLOTS}")
        # The first touch of a page costs the training thread twenty times the copy: touch all of them now.
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        try:
            self._map = mmap.mmap(descriptor, size, flags=flags)
        except OSError as error:
            raise CaptureError(
                f"cannot map a ring of {size} bytes ({error.strerror}): lower --host-budget-nbytes, or raise the "
                f"limit of address space (ulimit -v)"
            ) from error
        self.view = memoryview(self._map)
        self._counters = self.view[:_PAGE].cast("Q")
        self.capacity = size - SLOTS
        if self.counter(Counter.FORMAT) != _FORMAT:
            self._unmap()
            raise CaptureError("the file is not a ring, or one of another version of ranktape")

    def counter(self, counter: Counter) -> int:
        """The current value of a counter."""
        return int(self._counters[counter])

    def set_counter(self, counter: Counter, value: int) -> None:
        """Set a counter; eight aligned bytes are written at once."""
        self._counters[counter] = value

    @property
    def pending_nbytes(self) -> int:
        """Bytes of slots that are published and not freed."""
        return self.counter(Counter.PUBLISHED) - self.counter(Counter.FREED)

    def slots(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of the slots from an offset on."""
        return self.view[SLOTS + offset : SLOTS + offset + nbytes]

    def say(self, words: dict[str, Any], place: Words | None = None) -> None:
        """Replace our words, or those at a place; a reader meets the old or the new ones, or knows that it did not."""
        place = self._own if place is None else place
        text = json.dumps(words).encode()
        if len(text) > _WORDS_NBYTES - 8:
            short = {key: value for key, value in words.items() if len(json.dumps(value)) < _PAGE}
            text = json.dumps({**short, "cut": True}).encode()
        self.view[place : place + 8] = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        self.view[place + 8 : place + 8 + len(text)] = text

    def hear(self, place: Words | None = None) -> dict[str, Any] | None:
        """The other side's words, or those at a place; None where there are none, or while they are being replaced."""
        place = self._other if place is None else place
        size = int.from_bytes(self.view[place : place + 4], "little")
        if not 0 < size <= _WORDS_NBYTES - 8:
            return None
        text = bytes(self.view[place + 8 : place + 8 + size])
        if zlib.crc32(text) != int.from_bytes(self.view[place + 4 : place + 8], "little"):
            return None
        words: dict[str, Any] = json.loads(text)
        return words

    def close(self) -> None:
        """Unmap the file where nothing looks into it any more, and close it."""
        os.close(self.descriptor)
        self._unmap()

    def _unmap(self) -> None:
        # What still looks into the file keeps it mapped, and unmaps it when it goes.
        with contextlib.suppress(BufferError):
            self._counters.release()
            self.view.release()
            self._map.close()


def create_ring_file(capacity_nbytes: int) -> int:
    """The descriptor of a new, zeroed file in memory with room for that many bytes of slots.

    Raises:
        CaptureError: the system gives no such file.
    """
    try:
        descriptor = unnamed_file("ranktape-ring")
        os.ftruncate(descriptor, SLOTS + aligned(capacity_nbytes))
    except OSError as error:
        raise CaptureError(
            f"cannot make a ring of {capacity_nbytes} bytes in memory ({error}): lower --host-budget-nbytes"
        ) from error
    os.pwrite(descriptor, _FORMAT.to_bytes(8, "little"), 8 * Counter.FORMAT)
    return descriptor


def unnamed_file(name: str) -> int:
    """The descriptor of a new file without a name, in memory where the system can; `name` is what tools show."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=name)
    Path(path).unlink()
    return descriptor
