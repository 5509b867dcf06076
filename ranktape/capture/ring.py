"""How do tensors and words pass from the trainer to its writer process, and survive the trainer?

A memory file, mapped by both. The trainer reserves a slot, fills it and publishes it; the writer takes
published slots in order and frees them. What is published is the writer's, whatever becomes of the trainer.

    page 0      counters, each written by one side only: bytes published, bytes freed, ...
    256 pages   what the writer says (JSON), and as many what the trainer says beside its slots
    the rest    slots: 16 bytes of sizes, a JSON header, the payload; each part begins at a multiple of 64
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ranktape.errors import CaptureError

_PAGE = 4096
_WORDS_NBYTES = 256 * _PAGE
_WRITER_WORDS = _PAGE
_TRAINER_WORDS = _WRITER_WORDS + _WORDS_NBYTES
_SLOTS = _TRAINER_WORDS + _WORDS_NBYTES
_ALIGNMENT = 64
_PREFIX_NBYTES = 16
_WAIT_SECONDS = 0.0005
_LIVENESS_SECONDS = 0.1


class _Counter(IntEnum):
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
    is_done: bool = False
    """The trainer has filled it, or the writer has stored it."""


def _nothing() -> None:
    pass


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class RingFile:
    """The mapped file, as both sides see it."""

    def __init__(self, descriptor: int, *, populate: bool) -> None:
        self.descriptor = descriptor
        size = os.fstat(descriptor).st_size
        # The first touch of a page costs the training thread twenty times the copy: touch all of them now.
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        self._map = mmap.mmap(descriptor, size, flags=flags)
        self.view = memoryview(self._map)
        self._counters = self.view[:_PAGE].cast("Q")
        self.capacity = size - _SLOTS

    def counter(self, counter: _Counter) -> int:
        """The current value of a counter."""
        return int(self._counters[counter])

    def set_counter(self, counter: _Counter, value: int) -> None:
        """Set a counter; eight aligned bytes are written at once."""
        self._counters[counter] = value

    def slots(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of the slots from an offset on."""
        return self.view[_SLOTS + offset : _SLOTS + offset + nbytes]

    def say(self, place: int, words: dict[str, Any]) -> None:
        """Replace the words at a place; a reader meets the old or the new ones, or knows that it met neither."""
        text = json.dumps(words).encode()
        if len(text) > _WORDS_NBYTES - 8:
            short = {key: value for key, value in words.items() if len(json.dumps(value)) < _PAGE}
            text = json.dumps({**short, "cut": True}).encode()
        self.view[place : place + 8] = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        self.view[place + 8 : place + 8 + len(text)] = text

    def hear(self, place: int) -> dict[str, Any] | None:
        """The words at a place; None where there are none, or while they are being replaced."""
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
        # What still looks into the file keeps it mapped, and unmaps it when it goes.
        with contextlib.suppress(BufferError):
            self._counters.release()
            self.view.release()
            self._map.close()


def create_ring_file(capacity_nbytes: int) -> int:
    """The descriptor of a new, zeroed memory file with room for that many bytes of slots.

    Raises:
        CaptureError: the system gives no such file.
    """
    size = _SLOTS + _aligned(capacity_nbytes)
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ranktape-ring")
        else:
            descriptor, path = tempfile.mkstemp(prefix="ranktape-ring-")
            Path(path).unlink()
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise CaptureError(
            f"cannot make a ring of {capacity_nbytes} bytes in memory ({error}): lower --host-budget-nbytes"
        ) from error
    return descriptor


class RingProducer:
    """The trainer's side: reserve, fill, publish. Safe for several threads."""

    def __init__(self, capacity_nbytes: int, *, is_alive: Callable[[], bool]) -> None:
        """Make the ring.

        Args:
            capacity_nbytes: Room for slots.
            is_alive: Says whether the writer still runs; asked while waiting for room.
        """
        self.file = RingFile(create_ring_file(capacity_nbytes), populate=True)
        wake_read, self._wake_write = os.pipe()
        self.wake_read = wake_read
        os.set_blocking(self._wake_write, False)
        self._is_alive = is_alive
        self.on_wait: Callable[[], None] = _nothing
        """Called again and again while somebody waits for room."""
        self._reserved = 0
        self._slots: deque[Slot] = deque()
        # Waiting for room must not keep another thread from publishing what it has filled: two locks.
        self._reserve_lock = threading.Lock()
        self._publish_lock = threading.Lock()

    @property
    def free_nbytes(self) -> int:
        """Room that is free now."""
        return self.file.capacity - (self._reserved - self.file.counter(_Counter.FREED))

    @property
    def pending_nbytes(self) -> int:
        """Bytes that are published and that the writer has not freed."""
        return self.file.counter(_Counter.PUBLISHED) - self.file.counter(_Counter.FREED)

    def reserve(self, kind: SlotKind, header: bytes, payload_nbytes: int, *, timeout_seconds: float) -> Slot:
        """A slot to fill, waited for until there is room.

        Raises:
            CaptureError: no room in time, no room ever, or the writer is gone.
        """
        header_nbytes = _aligned(_PREFIX_NBYTES + len(header))
        total = header_nbytes + _aligned(payload_nbytes)
        if total > self.file.capacity:
            raise CaptureError(
                f"a tensor of {payload_nbytes} bytes does not fit into the host budget of {self.file.capacity} "
                f"bytes: raise --host-budget-nbytes"
            )
        with self._reserve_lock:
            gap = self.file.capacity - self._reserved % self.file.capacity
            if gap < total:
                self._wait_for_room(gap, timeout_seconds=timeout_seconds)
                self.publish(self._append(SlotKind.GAP, b"", header_nbytes=0, payload_nbytes=gap))
            self._wait_for_room(total, timeout_seconds=timeout_seconds)
            return self._append(kind, header, header_nbytes=header_nbytes, payload_nbytes=payload_nbytes)

    def publish(self, slot: Slot) -> None:
        """Give a filled slot to the writer, once all slots before it are filled too."""
        with self._publish_lock:
            slot.is_done = True
            published = None
            while self._slots and self._slots[0].is_done:
                published = self._slots.popleft().end
            if published is not None:
                self.file.set_counter(_Counter.PUBLISHED, published)
        if published is not None:
            self._wake()

    def put(self, kind: SlotKind, header: dict[str, Any], *, timeout_seconds: float) -> None:
        """Publish a slot without a payload.

        Raises:
            CaptureError: as `reserve`.
        """
        self.publish(self.reserve(kind, json.dumps(header).encode(), 0, timeout_seconds=timeout_seconds))

    def set_step(self, iteration: int) -> None:
        """Tell the writer which iteration the training is in."""
        self.file.set_counter(_Counter.STEP, iteration)

    def finish(self, words: dict[str, Any]) -> None:
        """Say that nothing more will be published, and why."""
        self.say(words)
        self.file.set_counter(_Counter.FINISHED, 1)
        self._wake()

    def say(self, words: dict[str, Any]) -> None:
        """Say something beside the slots, which may be full."""
        self.file.say(_TRAINER_WORDS, words)

    @property
    def news(self) -> int:
        """Grows when the writer has something to say about the plan; costs the training thread nothing."""
        return self.file.counter(_Counter.NEWS)

    def hear(self) -> dict[str, Any] | None:
        """What the writer said last; None while it is speaking or has not spoken."""
        return self.file.hear(_WRITER_WORDS)

    def _wait_for_room(self, nbytes: int, *, timeout_seconds: float) -> None:
        if self.free_nbytes >= nbytes:
            return
        start = time.monotonic()
        next_check = start + _LIVENESS_SECONDS
        while self.free_nbytes < nbytes:
            time.sleep(_WAIT_SECONDS)
            self.on_wait()
            now = time.monotonic()
            if now > next_check:
                next_check = now + _LIVENESS_SECONDS
                if not self._is_alive():
                    raise CaptureError("the writer process ended: its last words are in the run's status")
            if now - start > timeout_seconds:
                raise CaptureError(
                    f"the writer freed no room for {nbytes} bytes within --block-timeout-seconds {timeout_seconds:g}: "
                    f"raise it or --host-budget-nbytes, or capture less"
                )

    def _append(self, kind: SlotKind, header: bytes, *, header_nbytes: int, payload_nbytes: int) -> Slot:
        offset = self._reserved % self.file.capacity
        prefix = int(kind).to_bytes(4, "little") + len(header).to_bytes(4, "little")
        start = self.file.slots(offset, _PREFIX_NBYTES + len(header))
        start[:] = prefix + payload_nbytes.to_bytes(8, "little") + header
        # A gap has no header: its payload is the whole of it, its prefix included.
        self._reserved += payload_nbytes if kind is SlotKind.GAP else header_nbytes + _aligned(payload_nbytes)
        payload = self.file.slots(offset + header_nbytes, payload_nbytes)
        slot = Slot(kind=kind, header={}, payload=payload, end=self._reserved)
        with self._publish_lock:
            self._slots.append(slot)
        return slot

    def _wake(self) -> None:
        # A writer that is busy looks again before it sleeps. Should the two miss each other, it looks by itself soon.
        if not self.file.counter(_Counter.ASLEEP):
            return
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the writer has more wake-up calls waiting than it needs
        except BrokenPipeError:
            return  # the writer is gone; whoever waits for it finds out

    def close(self) -> None:
        """Close the wake-up pipe and the file; nothing can be reserved after it."""
        os.close(self._wake_write)
        os.close(self.wake_read)
        self.on_wait = _nothing
        self.file.close()


class RingConsumer:
    """The writer's side: take published slots in order, free them in any order. One thread takes."""

    def __init__(self, descriptor: int) -> None:
        self.file = RingFile(descriptor, populate=False)
        self._taken = 0
        self._slots: deque[Slot] = deque()
        self._lock = threading.Lock()

    @property
    def is_finished(self) -> bool:
        """Whether the trainer said that it will publish nothing more."""
        return self.file.counter(_Counter.FINISHED) == 1

    @property
    def step(self) -> int:
        """The iteration that the training is in."""
        return self.file.counter(_Counter.STEP)

    def sleep(self, descriptor: int, *, seconds: float) -> None:
        """Wait until the trainer wakes us through the pipe, or the time is over; not at all where slots are waiting."""
        self.file.set_counter(_Counter.ASLEEP, 1)
        if self.file.counter(_Counter.PUBLISHED) == self._taken:
            select.select([descriptor], [], [], seconds)
        self.file.set_counter(_Counter.ASLEEP, 0)

    def take(self) -> Slot | None:
        """The next published slot; None where there is none yet."""
        published = self.file.counter(_Counter.PUBLISHED)
        while self._taken < published:
            offset = self._taken % self.file.capacity
            prefix = self.file.slots(offset, _PREFIX_NBYTES)
            kind = SlotKind(int.from_bytes(prefix[:4], "little"))
            header_size = int.from_bytes(prefix[4:8], "little")
            payload_nbytes = int.from_bytes(prefix[8:16], "little")
            if kind is SlotKind.GAP:
                self._taken += payload_nbytes
                gap = Slot(kind=kind, header={}, payload=prefix, end=self._taken)
                self._append(gap)
                self.free(gap)
                continue
            header_nbytes = _aligned(_PREFIX_NBYTES + header_size)
            header = json.loads(bytes(self.file.slots(offset + _PREFIX_NBYTES, header_size)))
            self._taken += header_nbytes + _aligned(payload_nbytes)
            payload = self.file.slots(offset + header_nbytes, payload_nbytes)
            slot = Slot(kind=kind, header=header, payload=payload, end=self._taken)
            self._append(slot)
            return slot
        return None

    def free(self, slot: Slot) -> None:
        """Give a slot's room back, once all slots before it are free too; its payload is void from now on."""
        slot.is_done = True
        with self._lock:
            freed = None
            while self._slots and self._slots[0].is_done:
                freed = self._slots.popleft().end
            if freed is not None:
                self.file.set_counter(_Counter.FREED, freed)

    def say(self, words: dict[str, Any]) -> None:
        """Say something to the trainer."""
        self.file.say(_WRITER_WORDS, words)

    def announce(self) -> None:
        """Ask the trainer to listen."""
        self.file.set_counter(_Counter.NEWS, self.file.counter(_Counter.NEWS) + 1)

    def hear(self) -> dict[str, Any] | None:
        """What the trainer said beside its slots; None where it said nothing."""
        return self.file.hear(_TRAINER_WORDS)

    def _append(self, slot: Slot) -> None:
        with self._lock:
            self._slots.append(slot)
