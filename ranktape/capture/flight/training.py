"""The flight recorder in the training process: signals, triggers of other ranks, and the room in the ring.

A signal handler only increments a counter, which the writer process reads. SIGUSR1 requests that the held iterations be
stored, and so does SIGTERM if the program handles it. Without a handler, SIGTERM ends the process, which its writer
notices.

Triggers are written into the run, where the writer processes of all ranks find them. Because the run's store may be
slow or unavailable, a thread of the trainer also exchanges their iterations through the launch's key-value store. It
has its handler_of_ours connection. A collective that hangs does not block it, and nothing waits for it.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from ranktape.capture.rendezvous import Bulletin
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Counter, iteration_of, noted

_Handler = Callable[[int, FrameType | None], Any]


class Signals:
    """The installed signal handlers."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """Install the handlers, if this is the main thread; Python allows no other thread to do it."""
        self._on_signal = on_signal
        self._replaced: list[tuple[signal.Signals, Any, _Handler]] = []
        if threading.current_thread() is not threading.main_thread():
            return
        self._wrap(signal.SIGUSR1)
        if callable(signal.getsignal(signal.SIGTERM)):
            self._wrap(signal.SIGTERM)

    def stop(self) -> None:
        """Restore the program's handlers, unless the program has replaced ours since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before, handler_of_ours in self._replaced:
            if signal.getsignal(number) is handler_of_ours:
                signal.signal(number, before)
        self._replaced.clear()

    def _wrap(self, number: signal.Signals) -> None:
        before, owner = signal.getsignal(number), os.getpid()
        if before is signal.SIG_IGN or (before is not signal.SIG_DFL and not callable(before)):
            return

        def handle(caught: int, frame: FrameType | None) -> None:
            if os.getpid() == owner:  # a forked child has the handler, too
                self._on_signal(caught)
            if callable(before):
                before(caught, frame)

        signal.signal(number, handle)
        self._replaced.append((number, before, handle))


_STOP_SECONDS = 2.0
"""Longest wait for the thread. A server that does not answer may block it; it ends with the process."""


class Peers:
    """A thread that exchanges the iterations of triggers with the other ranks."""

    def __init__(self, bulletin: Bulletin, *, ring: RingProducer, world_size: int) -> None:
        """Start the thread."""
        from ranktape.capture.flight.watch import poll_seconds

        self._bulletin = bulletin
        self._ring = ring
        self._seconds = poll_seconds(world_size)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranktape-peers", daemon=True)
        self._thread.start()
        # A thread inside torch would abort the process when the interpreter exits.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the thread."""
        atexit.unregister(self.stop)
        self._is_over.set()
        self._thread.join(_STOP_SECONDS)

    def _watch(self) -> None:
        reported = 0
        while not self._is_over.wait(self._seconds):
            try:
                if (value := self._ring.counter(Counter.HAPPENED)) != reported:
                    reported = value
                    self._bulletin.post(str(iteration_of(value)))
                messages = self._bulletin.new_messages()
                if self._is_over.is_set():
                    return
                for text in messages:
                    elsewhere = noted(self._ring.counter(Counter.ELSEWHERE), int(text))
                    self._ring.set_counter(Counter.ELSEWHERE, elsewhere)
            except dist.DistError:
                return  # the server is gone, as at the end of a training; triggers are still found in the run


_RETRY_SECONDS = 30.0
"""Time after which another iteration is tried although no more room has become free."""


class Room:
    """Tracks whether the ring had room for the last iterations; it has none if the store does not answer for long."""

    def __init__(self) -> None:
        self.owed: dict[str, Any] | None = None
        """The header of a skipped iteration that could not be sent for lack of room; None if there is none."""
        self._free_nbytes = self._too_little_nbytes = -1
        self._tries_again_at = 0.0

    def may_suffice(self, free_nbytes: int) -> bool:
        """Whether to try an iteration with so much free room: not if it was too little before, for a while."""
        if free_nbytes <= self._too_little_nbytes and time.monotonic() < self._tries_again_at:
            return False
        self._free_nbytes, self._too_little_nbytes = free_nbytes, -1
        return True

    def was_too_small(self, owed: dict[str, Any] | None = None) -> None:
        """Note that the room did not suffice; `owed` is the header that could not be sent, if any."""
        self.owed = owed
        self._too_little_nbytes, self._tries_again_at = self._free_nbytes, time.monotonic() + _RETRY_SECONDS
