"""The ring through which tensors get from the trainer to its writer process; it survives the end of either.

It is a file that both map (`ring_file.py`). The trainer reserves a slot, fills it and publishes it. The writer takes
published slots in order and frees them in any order. Published slots are stored even if the trainer dies, and slots
that a killed writer has not freed are taken by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ranktape.capture.staging.ring_file import (
    ALIGNMENT,
    PREFIX_NBYTES,
    SLOTS,
    Counter,
    RingFile,
    Slot,
    SlotKind,
    Words,
    aligned,
    create_ring_file,
)
from ranktape.errors import CaptureError

_PREFIX = struct.Struct("<IIQ")
"""The prefix of a slot: its kind, and the sizes of its header and of its payload, in bytes."""

_WAIT_SECONDS = 0.0005
_LIVENESS_SECONDS = 0.1

_ENDS_OF_HELD = 64
"""Number of last ends that the trainer remembers if the writer is a flight recorder, which settles in any order."""

_STALL_SECONDS = 3.0
"""Longest wait for a flight recorder that frees nothing: its store may not answer."""

_SHARE_THAT_WAKES = 4
"""The writer is woken once the pending slots exceed the capacity of the ring divided by this number."""

_LOCKED_NBYTES = 1 << 20
"""Largest copy, in bytes, that is made while other threads cannot reserve room."""

_URGENT = frozenset({SlotKind.END, SlotKind.SKIP})
"""The kinds of slots that wake the writer, unless it is a flight recorder."""

_PUBLISHED, _ASLEEP = int(Counter.PUBLISHED), int(Counter.ASLEEP)

LONG_WAIT_SECONDS = 5.0
"""Time after which a wait for room is reported."""


class NoRoomError(CaptureError):
    """The writer freed no room in time, or has none that it can free."""


_INTERRUPTED = "a signal handler has interrupted the recording of a tensor"


class InterruptedSlotError(CaptureError):
    """A signal handler requested a slot, but has interrupted its own thread inside the ring."""


class RingProducer(RingFile):
    """The trainer's side of a ring: reserve, fill, publish. It is thread-safe."""

    def __init__(self, capacity_nbytes: int, *, keep_alive: Callable[[], None]) -> None:
        """Create the ring.

        Args:
            capacity_nbytes: Room for slots, in bytes.
            keep_alive: Called while waiting for room; makes sure that the writer runs, or raises.

        Raises:
            CaptureError: the system cannot create or map the file.
        """
        descriptor = create_ring_file(capacity_nbytes)
        super().__init__(descriptor, own=Words.TRAINER, other=Words.WRITER, populate=True)
        self.wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._keep_alive = keep_alive
        self.on_long_wait: Callable[[], None] = lambda: None
        """Called once in each long wait for room."""
        self.is_patient = False
        """Whether the writer is a flight recorder, which polls and is not woken for each end of an iteration."""
        self._reserved = 0
        self._limit = self.capacity
        """The end of the free room when the writer's counter was last read; there may be more now."""
        self._address = np.frombuffer(self.slots(0, 1), np.uint8).ctypes.data
        """Address of the slots in memory."""
        self._slots: deque[Slot] = deque()
        self._ends: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._num_forgotten = 0
        # Two locks, so that other threads can publish while one waits for room. If a thread that holds one requests a
        # slot, it is in a signal handler. `threading` has no public function for whether a thread holds a lock.
        reserve, publish = (threading.RLock() for _ in range(2))
        self._reserve_lock, self._publish_lock = reserve, publish
        self._is_reserving: Callable[[], bool] = reserve._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self._is_publishing: Callable[[], bool] = publish._is_owned  # type: ignore[attr-defined]  # noqa: SLF001

    @property
    def free_nbytes(self) -> int:
        """Free room, in bytes."""
        return self.capacity - (self._reserved - self.counter(Counter.FREED))

    def reserve(self, kind: SlotKind, header: bytes, payload_nbytes: int, *, timeout_seconds: float) -> Slot:
        """A slot to fill. If there is no room, this waits.

        Raises:
            NoRoomError: there was no room in time, or a flight recorder freed none for a while.
            InterruptedSlotError: this is a signal handler that has interrupted its thread inside the ring.
            CaptureError: the slot is larger than the ring, or the writer is gone.
        """
        if self._is_reserving() or self._is_publishing():
            raise InterruptedSlotError(_INTERRUPTED)
        header_nbytes = aligned(PREFIX_NBYTES + len(header))
        total = header_nbytes + aligned(payload_nbytes)
        with self._reserve_lock:
            self._find_room(total, payload_nbytes=payload_nbytes, timeout_seconds=timeout_seconds)
            return self._append(kind, header, header_nbytes=header_nbytes, payload_nbytes=payload_nbytes, nbytes=total)

    def put_copy(
        self, kind: SlotKind, header: bytes, payload: bytes | int, nbytes: int, *, timeout_seconds: float
    ) -> None:
        """Publish a slot with a copy of bytes, or of the memory at an address: `reserve` and `publish` in one call.

        Raises:
            CaptureError: as in `reserve`.
        """
        if nbytes > _LOCKED_NBYTES:  # other threads can reserve during the copy
            slot = self.reserve(kind, header, nbytes, timeout_seconds=timeout_seconds)
            try:
                ctypes.memmove(slot.address, payload, nbytes)
            except BaseException:
                # A signal handler may raise after the copy. Without this, later slots would never be published.
                self.cancel(slot)
                raise
            self.publish(slot)
            return
        if self._is_reserving() or self._is_publishing():
            raise InterruptedSlotError(_INTERRUPTED)
        begin = _PREFIX.pack(kind, len(header), nbytes) + header
        header_nbytes = -(-len(begin) // ALIGNMENT) * ALIGNMENT
        total = header_nbytes + -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._reserve_lock:
            start = self._reserved % self.capacity
            if self._reserved + total > self._limit or start + total > self.capacity:
                self._find_room(total, payload_nbytes=nbytes, timeout_seconds=timeout_seconds)
                start = self._reserved % self.capacity
            self.view[SLOTS + start : SLOTS + start + len(begin)] = begin
            if nbytes:
                ctypes.memmove(self._address + start + header_nbytes, payload, nbytes)
            end = self._reserved = self._reserved + total
            with self._publish_lock:
                if self._slots:  # another thread is filling an earlier slot, and publishes this one with it
                    self._slots.append(Slot(kind=kind, header={}, payload=self.view[:0], end=end, is_done=True))
                    return
                self._counters[_PUBLISHED] = end
        if self._counters[_ASLEEP]:
            self._wake_where_due(kind)

    def publish(self, slot: Slot) -> None:
        """Publish a filled slot to the writer, once all slots before it are filled too."""
        with self._publish_lock:
            slot.is_done = True
            published, slots = None, self._slots
            while slots and slots[0].is_done:
                published = slots.popleft().end
            if published is None:
                return
            self.set_counter(Counter.PUBLISHED, published)
        if self.counter(Counter.ASLEEP):
            self._wake_where_due(slot.kind)

    def cancel(self, slot: Slot) -> None:
        """Return a slot that could not be filled; the writer ignores it."""
        prefix = self.slots((slot.end - slot.nbytes) % self.capacity, PREFIX_NBYTES)
        prefix[:] = _PREFIX.pack(SlotKind.GAP, 0, slot.nbytes)
        self.publish(slot)

    def lose(self, slot: Slot, reason: str | None = None) -> None:
        """Publish a tensor's slot as lost. The iteration continues without it, and its commit reports it.

        Without a reason, the payload remains, because a copy into it may be in progress.
        """
        start = (slot.end - slot.nbytes) % self.capacity
        _, header_nbytes, payload_nbytes = _PREFIX.unpack(self.slots(start, PREFIX_NBYTES))
        header = bytes(self.slots(start + PREFIX_NBYTES, header_nbytes)) if reason is not None else b""
        if reason is not None:
            text = reason.encode("ascii", "replace").replace(b"\\", b"/").replace(b'"', b"'")
            room = slot.nbytes - PREFIX_NBYTES - header_nbytes - len(b',"lost":""')
            header = header[:-1] + b',"lost":"' + text[:room] + b'"}'
            header_nbytes, payload_nbytes = len(header), 0
            rest = slot.nbytes - aligned(PREFIX_NBYTES + header_nbytes)
            if rest:
                gap = self.slots(start + slot.nbytes - rest, PREFIX_NBYTES)
                gap[:] = _PREFIX.pack(SlotKind.GAP, 0, rest)
        words = _PREFIX.pack(SlotKind.LOST, header_nbytes, payload_nbytes) + header
        self.slots(start, len(words))[:] = words
        self.publish(slot)

    def put(self, kind: SlotKind, header: dict[str, Any], *, timeout_seconds: float) -> None:
        """Publish a slot without a payload.

        Raises:
            CaptureError: as in `reserve`.
        """
        slot = self.reserve(kind, json.dumps(header).encode(), 0, timeout_seconds=timeout_seconds)
        slot.header = header
        if kind in {SlotKind.END, SlotKind.SKIP}:
            # Its slot is freed before the iteration is settled, but the successor of a killed writer needs it.
            while self._ends and self._may_forget:
                self._ends.popleft()
                self._num_forgotten += 1
            self._ends.append((slot.end, int(kind), header))
            self.set_counter(Counter.ENDED, slot.end)
        self.publish(slot)

    def signal(self, number: int) -> None:
        """Count a signal that triggers the flight recorder. For signal handlers: it takes no lock and never waits."""
        count = self.counter(Counter.SIGNALS) >> 8
        self.set_counter(Counter.SIGNALS, (count + 1) << 8 | number)

    def unsettled(self) -> list[tuple[int, int, dict[str, Any]]]:
        """The slots of the ends of iterations that are not settled: end, kind and header of each.

        For a flight recorder, those of the last iterations, whether they are settled or not.
        """
        return (
            list(self._ends)
            if self.is_patient
            else list(self._ends)[self.counter(Counter.SETTLED) - self._num_forgotten :]
        )

    def held_up(self, kind: SlotKind) -> list[dict[str, Any]]:
        """The headers of the slots of a kind that wait for an earlier slot to be filled."""
        return [slot.header for slot in list(self._slots) if slot.kind is kind]

    def finish(self, words: dict[str, Any]) -> None:
        """Tell the writer, with these last words, that nothing more is published."""
        self.say(words)
        self.set_counter(Counter.FINISHED, 1)
        self._wake()

    @property
    def _may_forget(self) -> bool:
        if self.is_patient:
            return len(self._ends) >= _ENDS_OF_HELD
        return self._num_forgotten < self.counter(Counter.SETTLED)

    def _has_room(self, nbytes: int) -> bool:
        self._limit = self.counter(Counter.FREED) + self.capacity
        return self._reserved + nbytes <= self._limit

    def _find_room(self, nbytes: int, *, payload_nbytes: int, timeout_seconds: float) -> None:
        """Wait until `nbytes` are free in one piece."""
        if nbytes > self.capacity:
            raise CaptureError(
                f"a tensor of {payload_nbytes} bytes does not fit into the host budget of {self.capacity} "
                f"bytes: raise --host-budget-nbytes"
            )
        gap = self.capacity - self._reserved % self.capacity
        if gap < nbytes:
            self._wait_for_room(gap, timeout_seconds=timeout_seconds)
            # A gap has no header; the size of its payload includes its prefix.
            self.publish(self._append(SlotKind.GAP, b"", header_nbytes=0, payload_nbytes=gap, nbytes=gap))
        if self._reserved + nbytes > self._limit:
            self._wait_for_room(nbytes, timeout_seconds=timeout_seconds)

    def _wait_for_room(self, nbytes: int, *, timeout_seconds: float) -> None:
        if self._has_room(nbytes):
            return
        start = freed_at = time.monotonic()
        next_check, is_told = start + _LIVENESS_SECONDS, False
        freed = self.counter(Counter.FREED)
        self.set_counter(Counter.WAITING, 1)
        # The writer may hold small tensors, to write them together. It writes them now, to make room.
        if self.counter(Counter.ASLEEP):
            self._wake()
        try:
            while not self._has_room(nbytes):
                time.sleep(_WAIT_SECONDS)
                now = time.monotonic()
                if now - start > LONG_WAIT_SECONDS and not is_told:
                    is_told = True
                    self.on_long_wait()
                if now > next_check:
                    next_check = now + _LIVENESS_SECONDS
                    self._keep_alive()
                if (newly_freed := self.counter(Counter.FREED)) != freed:
                    freed, freed_at = newly_freed, now
                if now - start > timeout_seconds:
                    raise NoRoomError(
                        f"the writer freed no room for {nbytes} bytes within --block-timeout-seconds "
                        f"{timeout_seconds:g}: raise it or --host-budget-nbytes, or capture less"
                    )
                if self.is_patient and now - freed_at > _STALL_SECONDS:
                    raise NoRoomError(
                        f"the writer holds all of the {self.capacity} bytes of the host budget, and freed none of them "
                        f"for {_STALL_SECONDS:g} s: raise --host-budget-nbytes, or capture less"
                    )
        finally:
            self.set_counter(Counter.WAITING, 0)

    def _append(self, kind: SlotKind, header: bytes, *, header_nbytes: int, payload_nbytes: int, nbytes: int) -> Slot:
        room = self.slots(self._reserved % self.capacity, nbytes)
        room[: PREFIX_NBYTES + len(header)] = _PREFIX.pack(kind, len(header), payload_nbytes) + header
        self._reserved += nbytes
        payload = room[header_nbytes : header_nbytes + payload_nbytes]
        address = self._address + (self._reserved - nbytes) % self.capacity + header_nbytes
        slot = Slot(kind=kind, header={}, payload=payload, end=self._reserved, nbytes=nbytes, address=address)
        self._slots.append(slot)  # atomic: a thread that publishes takes from the other end
        return slot

    def _wake_where_due(self, kind: SlotKind) -> None:
        # A busy writer checks again before it sleeps, and it polls. Tensors may wait for the end of their iteration if
        # there is room, because waking the writer takes longer than staging a tensor.
        is_urgent = kind in _URGENT and not self.is_patient
        if is_urgent or self.pending_nbytes > self.capacity // _SHARE_THAT_WAKES:
            self._wake()

    def _wake(self) -> None:
        # One call suffices, however many slots are published until the writer runs.
        self.set_counter(Counter.ASLEEP, 0)
        # The pipe may be full of such calls. If the writer is gone, the next wait for it notices.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Close the wake-up pipe and the file; nothing can be reserved after that.

        If a slot is not published yet, as in a signal handler, the ring stays open so that the slot can be filled.
        """
        if self._slots or self._is_reserving():
            return
        os.close(self._wake_write)
        os.close(self.wake_read)
        self.on_long_wait = lambda: None
        super().close()


class RingConsumer(RingFile):
    """The writer's side of a ring: take published slots in order, free them in any order. Only one thread may take."""

    def __init__(self, descriptor: int) -> None:
        """Map the ring of a producer, and start with the first slot that is not free.

        Raises:
            CaptureError: the file is not a ring.
        """
        super().__init__(descriptor, own=Words.WRITER, other=Words.TRAINER, populate=False)
        self._taken = self.counter(Counter.FREED)
        self._slots: deque[Slot] = deque()
        self._lock = threading.Lock()
        self.waits_for_ends = False
        """Whether slots wait for the end of their iteration, because the captured training then computes faster."""
        self._is_quiet = False
        """Whether no slot was published during the last sleep."""

    @property
    def is_due(self) -> bool:
        """Whether slots are to be taken now: an iteration has ended, the ring fills up, or no more slots come."""
        is_over = self._is_quiet or self.counter(Counter.ENDED) > self._taken
        is_needed = self.counter(Counter.WAITING) or self.pending_nbytes > self.capacity // _SHARE_THAT_WAKES
        return bool(not self.waits_for_ends or is_over or is_needed)

    def sleep(self, *descriptors: int, seconds: float) -> None:
        """Wait until a descriptor is readable or the time is over; return at once if slots are due."""
        self.set_counter(Counter.ASLEEP, 1)
        published, self._is_quiet = self.counter(Counter.PUBLISHED), False
        if published == self._taken or not self.is_due:
            select.select(descriptors, [], [], seconds)
            self._is_quiet = self.counter(Counter.PUBLISHED) == published
        self.set_counter(Counter.ASLEEP, 0)

    def take(self, before: int | None = None) -> Slot | None:
        """The next published slot, or, if `before` is given, the next one up to that many total bytes; None if none.

        Raises:
            CaptureError: the ring is damaged.
        """
        published = self.counter(Counter.PUBLISHED) if before is None else before
        while self._taken < published:
            slot = self._read(published)
            self._taken = slot.end
            with self._lock:
                self._slots.append(slot)
            if slot.kind is not SlotKind.GAP:
                return slot
            self.free(slot)
        return None

    def _read(self, published: int) -> Slot:
        offset = self._taken % self.capacity
        prefix = self.slots(offset, PREFIX_NBYTES)
        kind, header_size, payload_nbytes = _PREFIX.unpack(prefix)
        header_nbytes = aligned(PREFIX_NBYTES + header_size)
        # A gap has no header; the size of its payload includes its prefix.
        total = payload_nbytes if kind == SlotKind.GAP else header_nbytes + aligned(payload_nbytes)
        if kind not in set(SlotKind) or not 0 < total <= min(published - self._taken, self.capacity - offset):
            raise CaptureError(f"the ring is damaged at byte {offset} of its slots: what it held from there on is lost")
        end = self._taken + total
        if kind == SlotKind.GAP:
            return Slot(kind=SlotKind.GAP, header={}, payload=prefix, end=end)
        try:
            header = json.loads(bytes(self.slots(offset + PREFIX_NBYTES, header_size)))
        except ValueError as error:
            raise CaptureError(f"the ring is damaged at byte {offset} of its slots: {error}") from error
        payload = self.slots(offset + header_nbytes, payload_nbytes)
        return Slot(kind=SlotKind(kind), header=header, payload=payload, end=end)

    def free(self, slot: Slot) -> None:
        """Free a slot; its payload is invalid after that. Its room is reused once all slots before it are free too."""
        slot.is_done = True
        with self._lock:
            freed = None
            while self._slots and self._slots[0].is_done:
                freed = self._slots.popleft().end
            if freed is not None:
                self.set_counter(Counter.FREED, freed)

    def advance(self, counter: Counter) -> None:
        """Add one to a counter that only this side writes."""
        self.set_counter(counter, self.counter(counter) + 1)
