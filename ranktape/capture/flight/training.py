"""The flight recorder in the training process: signals, word from other ranks, and whether there is room.

A signal handler only counts: the writer process looks. SIGUSR1 asks for what is held to be stored, and so does SIGTERM
where the program handles it; a process that SIGTERM simply ends needs no handler, as its writer sees that.

What happened is written into the run, where every writer process looks for it. A run's store may be slow or dead just
then; the launch's own key-value store is not. A thread of the trainer, which a collective that hangs does not stop,
tells what its writer found and hears of the others': the iteration alone. It has a connection of its own; nobody waits
for it.
"""

from __future__ import annotations

import atexit
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
    """The handlers that are in place."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """Put handlers in place, if this is the main thread; no other one may."""
        self._on_signal = on_signal
        self._replaced: list[tuple[signal.Signals, Any, _Handler]] = []
        if threading.current_thread() is not threading.main_thread():
            return
        self._wrap(signal.SIGUSR1)
        if callable(signal.getsignal(signal.SIGTERM)):
            self._wrap(signal.SIGTERM)

    def stop(self) -> None:
        """Put the program's own handlers back, where it has not put others there since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before, own in self._replaced:
            if signal.getsignal(number) is own:
                signal.signal(number, before)
        self._replaced.clear()

    def _wrap(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if before is signal.SIG_IGN or (before is not signal.SIG_DFL and not callable(before)):
            return

        def handle(caught: int, frame: FrameType | None) -> None:
            self._on_signal(caught)
            if callable(before):
                before(caught, frame)

        signal.signal(number, handle)
        self._replaced.append((number, before, handle))


_STOP_SECONDS = 2.0
"""Longest wait for the thread: a server that does not answer may hold it, and it ends with the process."""


class Peers:
    """Tells the other ranks what happened on this one, and hears of them, in a thread."""

    def __init__(self, bulletin: Bulletin, *, ring: RingProducer, world_size: int) -> None:
        """Begin."""
        from ranktape.capture.flight.watch import look_seconds

        self._bulletin = bulletin
        self._ring = ring
        self._seconds = look_seconds(world_size)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranktape-peers", daemon=True)
        self._thread.start()
        # A thread that is inside of torch when the interpreter ends would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        self._is_over.set()
        self._thread.join(_STOP_SECONDS)

    def _watch(self) -> None:
        told = 0
        while not self._is_over.wait(self._seconds):
            try:
                if (value := self._ring.counter(Counter.HAPPENED)) != told:
                    told = value
                    self._bulletin.post(str(iteration_of(value)))
                news = self._bulletin.news()
                if self._is_over.is_set():
                    return
                for text in news:
                    elsewhere = noted(self._ring.counter(Counter.ELSEWHERE), int(text))
                    self._ring.set_counter(Counter.ELSEWHERE, elsewhere)
            except dist.DistError:
                return  # the server has gone, as at the end of a training: what is in the run is found all the same


_RETRY_SECONDS = 30.0
"""After which one that had no room for an iteration tries another one, should no room have come."""


class Room:
    """What the trainer knows of the room that the last iterations found; a store that is dead leaves none."""

    def __init__(self) -> None:
        self.owed: dict[str, Any] | None = None
        """A word on an iteration for which there was no room, either."""
        self._free_nbytes = self._too_little_nbytes = -1
        self._tries_again_at = 0.0

    def may_suffice(self, free_nbytes: int) -> bool:
        """Whether so much may do for an iteration: it is more than what was too little."""
        if free_nbytes <= self._too_little_nbytes and time.monotonic() < self._tries_again_at:
            return False
        self._free_nbytes, self._too_little_nbytes = free_nbytes, -1
        return True

    def was_too_small(self, owed: dict[str, Any] | None = None) -> None:
        """It did not do; a word may be owed."""
        self.owed = owed
        self._too_little_nbytes, self._tries_again_at = self._free_nbytes, time.monotonic() + _RETRY_SECONDS
