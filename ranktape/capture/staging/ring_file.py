"""The layout of the file through which the trainer and its writer process communicate.

    page 0      counters, each written by one side only: bytes published, bytes freed, ...
    256 pages   words of the writer: its state as a JSON object
    256 pages   words of the trainer: what it sends outside its slots, as a JSON object
    the rest    slots: 16 bytes of sizes, a JSON header, the payload; each part starts at a multiple of 64

The file has no name, and is freed when both processes have closed it. It is in memory if the system allows it.
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
"""Size of a slot's prefix, in bytes: its kind, and the sizes of its header and of its payload."""

_PAGE = 4096
_WORDS_NBYTES = 256 * _PAGE
SLOTS = _PAGE + 2 * _WORDS_NBYTES
"""Offset of the slots in the file."""

ALIGNMENT = 64
"""Alignment of slots and payloads, in bytes."""

_FORMAT = int.from_bytes(b"rtring4\0", "little")


class Counter(IntEnum):
    """The unsigned 64-bit numbers at the start of the file."""

    PUBLISHED = 0
    """Total bytes of slots published so far; written by the trainer."""
    FREED = 1
    """Total bytes of slots freed so far; written by the writer."""
    FINISHED = 2
    """1 once the trainer publishes nothing more; written by the trainer."""
    STEP = 3
    """The current iteration of the training; written by the trainer."""
    NEWS = 4
    """How many times the plan in the writer's words has changed; written by the writer."""
    ASLEEP = 5
    """1 while the writer waits to be woken; written by the writer."""
    WAITING = 6
    """1 while the trainer waits for room; written by the trainer."""
    FORMAT = 7
    """Identifies the file as a ring of a certain format; written when it is created."""
    SETTLED = 8
    """Number of finished or skipped iterations that are settled, in the trainer's order; written by the writer."""
    SIGNALS = 9
    """Number of the last signal that triggers a flight recorder, plus 256 times their count; written by the trainer."""
    HAPPENED = 10
    """The last iteration with a trigger on this rank, in the form of `noted`; written by the writer."""
    ELSEWHERE = 11
    """The last iteration with a trigger on another rank, in the form of `noted`; written by the trainer."""
    JUDGING = 12
    """The oldest iteration that a flight recorder has not judged, plus 1; 0 if there is none; written by the writer."""
    ENDED = 13
    """Total bytes of slots published up to the last end of an iteration; written by the trainer."""


_COUNT_BITS = 16
"""Number of low bits of a counter of `noted` that count its changes; the higher bits are an iteration."""


def noted(value: int, iteration: int) -> int:
    """The next value of a counter of the last iteration with a trigger; never 0."""
    return iteration << _COUNT_BITS | ((value + 1) % (1 << _COUNT_BITS) or 1)


def iteration_of(value: int) -> int:
    """The iteration in a value of `noted`."""
    return value >> _COUNT_BITS


class Words(IntEnum):
    """Offsets of the words, which are JSON objects outside the slots."""

    WRITER = _PAGE
    """Words of the writer."""
    TRAINER = _PAGE + _WORDS_NBYTES
    """Words of the trainer."""


class SlotKind(IntEnum):
    """The kind of a slot."""

    GAP = 0
    """Unused room, such as the end of the file if it is too small for the next slot."""
    TENSOR = 1
    """A tensor: its identity and its values."""
    BEGIN = 2
    """The start of an iteration."""
    END = 3
    """The end of an iteration, of which everything has been published."""
    SKIP = 4
    """An iteration that the rank skips."""
    TRIGGER = 5
    """A trigger, at which a flight recorder stores what it holds."""
    LOST = 6
    """A tensor that could not be copied from its device: its identity, and the reason as `lost` if it is known."""
    FOUND_INF = 7
    """The gradient scaler's `found_inf` of a fused optimizer, copied from the device: not 0 if it skipped its step."""


NOTES = frozenset({SlotKind.LOST, SlotKind.FOUND_INF})
"""The kinds of slots between an iteration's tensors that matter only for its commit."""


@dataclass(slots=True)
class Slot:
    """A part of the ring that is being filled or read."""

    kind: SlotKind
    """Kind of the slot."""
    header: dict[str, Any]
    """Its JSON header; on the trainer's side empty, except for a slot without values."""
    payload: memoryview
    """Its payload."""
    end: int
    """Total bytes published or freed so far when this slot is."""
    nbytes: int = 0
    """Size of the slot in the file, in bytes; 0 on the writer's side."""
    address: int = 0
    """Address of its payload in memory; 0 on the writer's side."""
    is_done: bool = False
    """Whether the trainer has filled it, or the writer has stored it."""

    def copy(self) -> Slot:
        """A copy outside the ring, without the payload of a lost tensor."""
        payload = b"" if self.kind is SlotKind.LOST else bytes(self.payload)
        return Slot(kind=self.kind, header=self.header, payload=memoryview(payload), end=self.end)


def aligned(nbytes: int) -> int:
    """The number of bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RingFile:
    """The mapped file of a ring. Each side writes its own words and reads those of the other."""

    def __init__(self, descriptor: int, *, own: Words, other: Words, populate: bool) -> None:
        """Map a ring, and take over its descriptor.

        Raises:
            CaptureError: the file is not a ring, or cannot be mapped.
        """
        self.descriptor = descriptor
        self._own, self._other = own, other
        size = os.fstat(descriptor).st_size
        if size <= SLOTS:
            raise CaptureError(f"the file has {size} bytes, and a ring has more than {SLOTS}")
        # All pages are accessed now, because the first access to a page takes twenty times as long as the copy.
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
        """Set a counter, in one write of eight aligned bytes."""
        self._counters[counter] = value

    @property
    def pending_nbytes(self) -> int:
        """Size of the slots that are published and not freed, in bytes."""
        return self.counter(Counter.PUBLISHED) - self.counter(Counter.FREED)

    def slots(self, offset: int, nbytes: int) -> memoryview:
        """The bytes from an offset in the slots."""
        return self.view[SLOTS + offset : SLOTS + offset + nbytes]

    def say(self, words: dict[str, Any], place: Words | None = None) -> None:
        """Replace the words of this side, or those at `place`. A checksum lets a reader detect a partial write.

        If they are too long, long values are left out, and `cut` is true.
        """
        place = self._own if place is None else place
        text = json.dumps(words).encode()
        if len(text) > _WORDS_NBYTES - 8:
            short = {key: value for key, value in words.items() if len(json.dumps(value)) < _PAGE}
            text = json.dumps({**short, "cut": True}).encode()
        self.view[place : place + 8] = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        self.view[place + 8 : place + 8 + len(text)] = text

    def hear(self, place: Words | None = None) -> dict[str, Any] | None:
        """The words of the other side, or those at `place`; None if there are none or they are being replaced."""
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
        """Close the file, and unmap it unless a view of it is still in use."""
        os.close(self.descriptor)
        self._unmap()

    def _unmap(self) -> None:
        # A view that is still in use keeps the file mapped until it is deleted.
        with contextlib.suppress(BufferError):
            self._counters.release()
            self.view.release()
            self._map.close()


def create_ring_file(capacity_nbytes: int) -> int:
    """The descriptor of a new ring with room for that many bytes of slots.

    Raises:
        CaptureError: the system cannot create such a file.
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
    """The descriptor of a new file without a name, in memory if the system can. System tools show `name`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=name)
    Path(path).unlink()
    return descriptor
