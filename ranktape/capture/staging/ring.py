"""The way of tensors and words from the trainer to its writer process, which survives either of them.

A file, mapped by both (`ring_file.py`). The trainer reserves a slot, fills it and publishes it; the writer takes
published slots in order and frees them in any order. What is published is the writer's, whatever becomes of the
trainer; what a killed writer has not freed is that of the next one.
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
"""The beginning of a slot: its kind, the length of its header, the bytes of its payload."""

_WAIT_SECONDS = 0.0005
_LIVENESS_SECONDS = 0.1

_ENDS_OF_HELD = 64
"""Ends of iterations that are remembered where the writer holds what comes: it settles them in no order."""

_STALL_SECONDS = 3.0
"""Longest wait for a writer that holds what comes and frees nothing: its store may be dead."""

_SHARE_THAT_WAKES = 4
"""The writer is woken once one in so many bytes of the ring is pending."""

_LOCKED_NBYTES = 1 << 20
"""A copy of at most so many bytes is made while other threads cannot reserve room."""

_URGENT = frozenset({SlotKind.END, SlotKind.SKIP})
"""What the writer is woken for, unless it only holds what comes."""

_PUBLISHED, _ASLEEP = int(Counter.PUBLISHED), int(Counter.ASLEEP)

LONG_WAIT_SECONDS = 5.0
"""A wait for room of this length is reported."""


class NoRoomError(CaptureError):
    """The writer freed no room in time, or holds what it cannot free."""


_INTERRUPTED = "a signal handler has interrupted the recording of a tensor"


class InterruptedSlotError(CaptureError):
    """A signal handler asks for a slot, and has interrupted its thread in the middle of another one."""


class RingProducer(RingFile):
    """The trainer's side: reserve, fill, publish. Safe for several threads."""

    def __init__(self, capacity_nbytes: int, *, keep_alive: Callable[[], None]) -> None:
        """Make the ring.

        Args:
            capacity_nbytes: Room for slots.
            keep_alive: Sees to it that the writer runs, or raises; called while waiting for room.

        Raises:
            CaptureError: there is no room for it.
        """
        descriptor = create_ring_file(capacity_nbytes)
        super().__init__(descriptor, own=Words.TRAINER, other=Words.WRITER, populate=True)
        self.wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._keep_alive = keep_alive
        self.on_long_wait: Callable[[], None] = lambda: None
        """Called once in a wait that is long."""
        self.is_patient = False
        """Whether the writer only holds what comes: it need not be woken for each slot, and looks by itself."""
        self._reserved = 0
        self._limit = self.capacity
        """Up to where there was room when the writer's counter was read last; there may be more by now."""
        self._address = np.frombuffer(self.slots(0, 1), np.uint8).ctypes.data
        """Where the slots begin in memory."""
        self._slots: deque[Slot] = deque()
        self._ends: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._num_forgotten = 0
        # Waiting for room must not keep another thread from publishing what it has filled: two locks. A thread that
        # holds one asks for no slot but in a signal handler; `threading` does not say in public who holds a lock.
        reserve, publish = (threading.RLock() for _ in range(2))
        self._reserve_lock, self._publish_lock = reserve, publish
        self._is_reserving: Callable[[], bool] = reserve._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self._is_publishing: Callable[[], bool] = publish._is_owned  # type: ignore[attr-defined]  # noqa: SLF001

    @property
    def free_nbytes(self) -> int:
        """Room that is free now."""
        return self.capacity - (self._reserved - self.counter(Counter.FREED))

    def reserve(self, kind: SlotKind, header: bytes, payload_nbytes: int, *, timeout_seconds: float) -> Slot:
        """A slot to fill, waited for until there is room.

        Raises:
            NoRoomError: no room in time, or no hope of it.
            InterruptedSlotError: this is a signal handler, which has interrupted its thread in here.
            CaptureError: no room ever, or the writer is gone.
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
        """Publish a slot with a copy of bytes, or of what lies at an address: `reserve` to `publish` in one.

        Raises:
            CaptureError: as `reserve`.
        """
        if nbytes > _LOCKED_NBYTES:  # meanwhile other threads can reserve
            slot = self.reserve(kind, header, nbytes, timeout_seconds=timeout_seconds)
            try:
                ctypes.memmove(slot.address, payload, nbytes)
            except BaseException:
                # A signal that came during the copy raises after it: slots after this one would never be published.
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
                if self._slots:  # of another thread, which publishes this one too, once its own is filled
                    self._slots.append(Slot(kind=kind, header={}, payload=self.view[:0], end=end, is_done=True))
                    return
                self._counters[_PUBLISHED] = end
        if self._counters[_ASLEEP]:
            self._wake_where_due(kind)

    def publish(self, slot: Slot) -> None:
        """Give a filled slot to the writer, once all slots before it are filled too."""
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
        """Give a slot that could not be filled back: the writer passes over it."""
        prefix = self.slots((slot.end - slot.nbytes) % self.capacity, PREFIX_NBYTES)
        prefix[:] = _PREFIX.pack(SlotKind.GAP, 0, slot.nbytes)
        self.publish(slot)

    def lose(self, slot: Slot, reason: str | None = None) -> None:
        """Publish a slot without its values: the iteration goes on without that tensor, and its commit says so.

        Without a reason the payload stays as it is: a copy into it may be under way.
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
            CaptureError: as `reserve`.
        """
        slot = self.reserve(kind, json.dumps(header).encode(), 0, timeout_seconds=timeout_seconds)
        if kind in {SlotKind.END, SlotKind.SKIP}:
            # Its slot is free before the iteration is settled; a writer that follows a killed one must know it then.
            while self._ends and self._may_forget:
                self._ends.popleft()
                self._num_forgotten += 1
            self._ends.append((slot.end, int(kind), header))
            self.set_counter(Counter.ENDED, slot.end)
        self.publish(slot)

    def signal(self, number: int) -> None:
        """Count a signal that asks for what is held; for a handler: takes no lock, and waits for nothing."""
        count = self.counter(Counter.SIGNALS) >> 8
        self.set_counter(Counter.SIGNALS, (count + 1) << 8 | number)

    def unsettled(self) -> list[tuple[int, int, dict[str, Any]]]:
        """The slots that ended an iteration on which the rank has not had its word: end, kind and header of each.

        Where the writer holds what comes, those of the last iterations, be they settled or not.
        """
        return (
            list(self._ends)
            if self.is_patient
            else list(self._ends)[self.counter(Counter.SETTLED) - self._num_forgotten :]
        )

    def finish(self, words: dict[str, Any]) -> None:
        """Say that nothing more will be published, and why."""
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
        """Wait until so many bytes are free in one piece."""
        if nbytes > self.capacity:
            raise CaptureError(
                f"a tensor of {payload_nbytes} bytes does not fit into the host budget of {self.capacity} "
                f"bytes: raise --host-budget-nbytes"
            )
        gap = self.capacity - self._reserved % self.capacity
        if gap < nbytes:
            self._wait_for_room(gap, timeout_seconds=timeout_seconds)
            # A gap has no header: its payload is the whole of it, its prefix included.
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
        # The writer may hold small tensors back, to write them together: it learns that they are in the way.
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
        self._slots.append(slot)  # in one step: who publishes meanwhile takes from the other end
        return slot

    def _wake_where_due(self, kind: SlotKind) -> None:
        # A writer that is busy looks again before it sleeps, and now and then by itself. What an iteration brings may
        # wait for its end, as long as there is room: to wake the writer costs more than to stage a tensor.
        is_urgent = kind in _URGENT and not self.is_patient
        if is_urgent or self.pending_nbytes > self.capacity // _SHARE_THAT_WAKES:
            self._wake()

    def _wake(self) -> None:
        # One call wakes it, however many slots are published until it runs: what comes now need not call again.
        self.set_counter(Counter.ASLEEP, 0)
        # It may have more wake-up calls waiting than it needs; or be gone, and whoever waits for it finds out.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Close the wake-up pipe and the file; nothing can be reserved after it.

        Where a signal handler closes it in the middle of a slot, it stays open: the slot is filled after that.
        """
        if self._slots or self._is_reserving():
            return
        os.close(self._wake_write)
        os.close(self.wake_read)
        self.on_long_wait = lambda: None
        super().close()


class RingConsumer(RingFile):
    """The writer's side: take published slots in order, free them in any order. One thread takes."""

    def __init__(self, descriptor: int) -> None:
        """Map the ring that a producer made; begin with the first slot that is not free.

        Raises:
            CaptureError: the file is not a ring.
        """
        super().__init__(descriptor, own=Words.WRITER, other=Words.TRAINER, populate=False)
        self._taken = self.counter(Counter.FREED)
        self._slots: deque[Slot] = deque()
        self._lock = threading.Lock()
        self.waits_for_ends = False
        """Whether slots are left until their iteration has ended: a training that is being captured computes faster."""
        self._is_quiet = False
        """Whether no slot came while we slept."""

    @property
    def is_due(self) -> bool:
        """Whether slots are to be taken now: also where the ring fills up, or where no more come."""
        is_over = self._is_quiet or self.counter(Counter.ENDED) > self._taken
        is_needed = self.counter(Counter.WAITING) or self.pending_nbytes > self.capacity // _SHARE_THAT_WAKES
        return bool(not self.waits_for_ends or is_over or is_needed)

    def sleep(self, *descriptors: int, seconds: float) -> None:
        """Wait until the trainer wakes us through the pipe, or the time is over; not at all where slots are due."""
        self.set_counter(Counter.ASLEEP, 1)
        published, self._is_quiet = self.counter(Counter.PUBLISHED), False
        if published == self._taken or not self.is_due:
            select.select(descriptors, [], [], seconds)
            self._is_quiet = self.counter(Counter.PUBLISHED) == published
        self.set_counter(Counter.ASLEEP, 0)

    def take(self, before: int | None = None) -> Slot | None:
        """The next published slot; None where there is none yet, or none before that many bytes.

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
        # A gap has no header: its payload is the whole of it, its prefix included.
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
        """Give a slot's room back, once all slots before it are free too; its payload is void from now on."""
        slot.is_done = True
        with self._lock:
            freed = None
            while self._slots and self._slots[0].is_done:
                freed = self._slots.popleft().end
            if freed is not None:
                self.set_counter(Counter.FREED, freed)

    def advance(self, counter: Counter) -> None:
        """Add one to a counter that this side alone writes."""
        self.set_counter(counter, self.counter(counter) + 1)
