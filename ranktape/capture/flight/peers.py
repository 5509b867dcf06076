"""Carries the word that something happened from rank to rank through the key-value store of the launch.

What happened is written into the run, where every writer process looks for it. A run's store may be slow or dead just
then; the launch's own store is not. A thread of the trainer, which a collective that hangs does not stop, tells what
its writer found and hears of the others': the iteration alone. It has a connection of its own; nobody waits for it.
"""

from __future__ import annotations

import atexit
import threading

import torch.distributed as dist

from ranktape.capture.flight.watch import look_seconds
from ranktape.capture.rendezvous import Bulletin
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Counter, iteration_of, noted

_STOP_SECONDS = 2.0
"""Longest wait for the thread: a server that does not answer may hold it, and it ends with the process."""


class Peers:
    """Tells the other ranks what happened on this one, and hears of them, in a thread."""

    def __init__(self, bulletin: Bulletin, *, ring: RingProducer, world_size: int) -> None:
        """Begin."""
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
